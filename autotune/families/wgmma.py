"""What kernels with warpgroup products (sm_90a) share: the instructions as C++ text, and how filters are copied."""

from __future__ import annotations

from collections.abc import Iterable

from autotune.families.family import TensorMap
from autotune.problem import ConvProblem, DType

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
    """Specialisations of ``ptx::Wgmma`` for these numbers of columns; nothing for a compiler that is not NVRTC.

    Text, because the register lists of the instruction cannot be written as a template.
    """
    parts = [_one(dtype, n) for n in sorted(set(columns))]
    return "\n".join(["#ifdef __CUDACC_RTC__", *parts, "#endif"])


def launched_registers(consumers: int) -> int:
    """Registers of every thread at launch, of so many consumer warpgroups and a producer's."""
    return min(255, 65536 // ((consumers + 1) * 128) // 8 * 8)


def is_permuted(problem: ConvProblem) -> bool:
    """Whether filters divide into blocks of eight, so that a copy can hand adjacent ones to each thread."""
    return problem.K % 8 == 0


def collected_bytes(consumers: int, cta_n: int, problem: ConvProblem) -> int:
    """Shared memory in which each warp collects eight pixels before it writes them, 0 where it does not.

    Warps do so for many filters that are not permuted, in rows as ``Collected`` in epilogue.cuh states them.
    """
    if is_permuted(problem) or cta_n < 64:
        return 0
    return consumers * 4 * 8 * ((-(-cta_n * problem.out_dtype.bytes // 16) + 1) | 1) * 16


def lane_filters(cta_n: int, problem: ConvProblem) -> int:
    """Adjacent filters of a thread in each block of four times as many: as many as 16 bytes of input type hold."""
    p = problem
    if not is_permuted(p):
        return 2
    return max(n for n in (2, 4, 8, 16) if p.K % (4 * n) == 0 == cta_n % (4 * n) and n * p.dtype.bytes <= 16)


def filter_map(problem: ConvProblem, cta_n: int, chunk_bytes: int) -> TensorMap:
    """KRSC as (c, filter, tap); permuted, as (c, odd, lane, pair, tap) with filter = lane * n + 2 * pair + odd."""
    p, e = problem, problem.dtype.bytes
    tap, each, elements = p.C * e, p.R * p.S * p.C * e, chunk_bytes // e
    n = lane_filters(cta_n, p)
    plain = not is_permuted(p)
    return TensorMap(
        operand="filter",
        element_bytes=e,
        extents=(p.C, p.K, p.R * p.S) if plain else (p.C, 2, p.K // n, n // 2, p.R * p.S),
        strides=(each, tap) if plain else (each, n * each, 2 * each, tap),
        box=(elements, cta_n, 1) if plain else (elements, 2, cta_n // n, n // 2, 1),
        swizzle=chunk_bytes,
    )


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
