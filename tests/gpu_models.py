"""GPU models of every architecture that kernels are compiled for, as values."""

from __future__ import annotations

from autotune.device import DeviceSpec
from autotune.problem import DType

# compute capability, what the compiler is told, multiprocessors, KiB of shared memory of a block, of a multiprocessor
_MODELS = (
    ((7, 5), "sm_75", 40, 64, 64),
    ((8, 0), "sm_80", 108, 163, 164),
    ((8, 6), "sm_86", 84, 99, 100),
    ((8, 9), "sm_89", 58, 99, 100),
    ((9, 0), "sm_90a", 132, 227, 228),
    ((10, 0), "sm_100a", 148, 227, 228),
    ((12, 0), "sm_120a", 170, 99, 100),
)

GPU_MODELS = {
    arch: DeviceSpec(
        kind="cuda",
        name=f"a GPU of {arch}",
        arch=arch,
        compute_capability=capability,
        sm_count=sms,
        smem_per_cta=block_kib * 1024,
        smem_per_sm=sm_kib * 1024,
        l2_bytes=40 << 20,
        bytes_per_s=1.5e12,
        rates=((DType.F16, 300e12), (DType.BF16, 300e12), (DType.S8, 600e12), (DType.F32, 30e12)),
    )
    for capability, arch, sms, block_kib, sm_kib in _MODELS
}
