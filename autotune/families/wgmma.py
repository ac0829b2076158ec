"""The warpgroup matrix instructions of sm_90a as C++ text: their register lists cannot be written as a template."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.problem import DType

_SHAPES = {
    DType.F16: ("f32", "k16.f32.f16.f16", "f", ", 1, 1, 0, 0"),
    DType.BF16: ("f32", "k16.f32.bf16.bf16", "f", ", 1, 1, 0, 0"),
    DType.S8: ("s32", "k32.s32.s8.s8", "r", ""),
}


def is_legal_n(n: int, dtype: DType) -> bool:
    """Whether a wgmma can have n columns (PTX ISA, "Asynchronous warpgroup level matrix instructions", shapes)."""
    step = 16 if dtype is DType.S8 and n > 32 else 8
    return 0 < n <= 256 and n % step == 0


def wgmma_text(dtype: DType, columns: Iterable[int]) -> str:
    """Specialisations of ``ptx::Wgmma`` for these numbers of columns; nothing for a compiler that is not NVRTC."""
    parts = [_one(dtype, n) for n in sorted(set(columns))]
    return "\n".join(["#ifdef __CUDACC_RTC__", *parts, "#endif"])


def _one(dtype: DType, n: int) -> str:
    accumulator, shape, constraint, tail = _SHAPES[dtype]
    count = n // 2
    registers = ", ".join(f"%{i}" for i in range(count))
    body = f"wgmma.mma_async.sync.aligned.m64n{n}{shape} {{{registers}}}, %{count}, %{count + 1}, keep{tail};"

    def statement(prefix: str, keep: int) -> str:
        outputs = ", ".join(f'"{prefix}{constraint}"(d[{i}])' for i in range(count))
        return f'asm volatile("{{.reg .pred keep; setp.eq.u32 keep, {keep}, 1; {body}}}" : {outputs} : "l"(a), "l"(b));'

    return f"""template <> struct ptx::Wgmma<{dtype}, {n}> {{
  template <bool accumulate> __device__ static __forceinline__ void run({accumulator}* d, u64 a, u64 b) {{
    if constexpr (accumulate) {statement("+", 1)}
    else {statement("=", 0)}
  }}
}};"""
