"""Where a layer runs: the facts about a device that search, legality and cost models need, as values."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.problem import ConvProblem, DType


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """A device model. kind: ``cuda`` or ``cpu``. name: the model's name as its driver states it.

    arch: what the compiler is told (``sm_90a``, ``x86-64-avx512``). compute_capability: (major, minor), (0, 0) on cpu.
    sm_count: multiprocessors, or cores that this process may use. smem_per_cta, smem_per_sm: bytes of shared memory
    that one thread block may ask for and that a multiprocessor has (0 on cpu). l2_bytes: last-level cache.
    vector_bytes: bytes of one SIMD register (0 on cuda). bytes_per_s: sustained memory rate, read plus write.
    rates: sustained operations per second by dtype, a multiply-add counted as two.
    """

    kind: str
    name: str
    arch: str
    compute_capability: tuple[int, int] = (0, 0)
    sm_count: int
    smem_per_cta: int = 0
    smem_per_sm: int = 0
    l2_bytes: int
    vector_bytes: int = 0
    bytes_per_s: float
    rates: tuple[tuple[DType, float], ...]

    @property
    def key(self) -> str:
        """What a stored time is valid for: the model and its multiprocessor count."""
        return f"{self.name} x{self.sm_count}"

    @property
    def sm(self) -> int:
        """Compute capability as one number: 90 for (9, 0); 0 on cpu."""
        return self.compute_capability[0] * 10 + self.compute_capability[1]

    def rate(self, dtype: DType) -> float:
        """Sustained operations per second in ``dtype``; that of f32 where the table has none."""
        table = dict(self.rates)
        return table.get(dtype, table[DType.F32])


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An entry of ``devices()``: ``id`` as the command line takes it, and its spec or why it cannot be used.

    driver: name and version of what runs the device, empty where that is not known.
    """

    id: str
    spec: DeviceSpec | None = None
    driver: str = ""
    reason: str | None = None


def roofline_us(problem: ConvProblem, device: DeviceSpec) -> float:
    """Sustained roofline in microseconds: the larger of operations over rate and compulsory bytes over bandwidth.

    Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009; rates are sustained ones, so that a burst may pass it.
    """
    return 1e6 * max(problem.flops / device.rate(problem.dtype), problem.min_bytes / device.bytes_per_s)
