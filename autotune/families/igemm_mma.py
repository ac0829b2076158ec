"""Family igemm_mma: implicit-GEMM convolution in NHWC with mma.sync, for every NVIDIA GPU from sm_75."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from math import ceil

from autotune.device import DeviceSpec
from autotune.families.family import Family, Knob, Launch, Source, constants
from autotune.problem import ConvProblem, DType, Layout
from autotune.trial import Config

REGISTERS, CP_ASYNC = 0, 1

_OUTPUTS = {
    DType.F16: (DType.F16, DType.F32),
    DType.BF16: (DType.BF16, DType.F32),
    DType.S8: (DType.S32, DType.F32),
}
_MAX_THREADS = 512
_STATIC_SMEM = 16  # bytes beside the dynamic shared memory
_CLOCK_HZ = 1.7e9  # only ratios of predictions matter


@dataclass(frozen=True, slots=True)
class _Tile:
    """The knobs by name."""

    cta_m: int
    cta_n: int
    cta_k: int
    warp_m: int
    warp_n: int
    stages: int
    staging: int
    ahead: int
    split_k: int
    raster_group: int

    @classmethod
    def of(cls, config: Config) -> _Tile:
        return cls(*(config[f.name] for f in fields(cls)))

    @property
    def threads(self) -> int:
        return 32 * (self.cta_m // self.warp_m) * (self.cta_n // self.warp_n)


class IgemmMma(Family):
    """Tensor cores of every NVIDIA GPU from sm_75; any stride, dilation, padding, groups and channel counts."""

    name = "igemm_mma"
    kind = "cuda"
    knobs = (
        Knob(name="cta_m", candidates=(16, 32, 64, 128, 256), meaning="output pixels of a thread block's tile"),
        Knob(name="cta_n", candidates=(8, 16, 32, 64, 128, 256), meaning="filters of a thread block's tile"),
        Knob(name="cta_k", candidates=(16, 32, 64, 128), meaning="elements of r*s*c that pass shared memory at once"),
        Knob(name="warp_m", candidates=(16, 32, 64, 128), meaning="output pixels of a warp's tile"),
        Knob(name="warp_n", candidates=(8, 16, 32, 64, 128), meaning="filters of a warp's tile"),
        Knob(name="stages", candidates=(2, 3, 4, 6), meaning="slices of r*s*c in shared memory"),
        Knob(name="staging", candidates=(REGISTERS, CP_ASYNC), meaning="0: to shared memory by registers, 1: by cp.async"),
        Knob(name="ahead", candidates=(0, 1), meaning="1: a slice's first fragments are read during the slice before"),
        Knob(name="split_k", candidates=(1, 2, 4, 8), meaning="blocks that share one tile's r*s*c"),
        Knob(name="raster_group", candidates=(1, 8), meaning="rows of tiles walked column by column"),
    )

    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        outputs = _OUTPUTS.get(problem.dtype)
        if outputs is None:
            return f"{self.name} computes f16, bf16 and s8 (--dtype f16), not {problem.dtype}"
        if problem.dtype is DType.BF16 and device.sm < 80:
            return f"{self.name} needs sm_80 for bf16 (--dtype f16)"
        if device.sm < 75:
            return f"{self.name} needs sm_75 or newer"
        if problem.layout is not Layout.NHWC:
            return f"{self.name} works in the layout nhwc, not {problem.layout}"
        if not problem.epilogue.is_identity:
            return f"{self.name} has no epilogue {problem.epilogue} yet, only identity"
        if problem.out_dtype not in outputs:
            return f"{self.name} writes {' or '.join(outputs)} from {problem.dtype}, not {problem.out_dtype}"
        if problem.N == 0:
            return "the batch is empty"
        taps = problem.C // problem.groups * problem.R * problem.S
        if problem.dtype is DType.S8 and taps >= 131072:
            return f"C/groups*R*S is {taps}: from 131072 on an s32 sum can overflow"
        # coordinates and the reduction are counted in 31 bits
        if max(taps, problem.H * problem.W, problem.P * problem.Q) >= 2**30:
            return "an image or a filter has 2**30 pixels or taps, or more"
        return None

    def illegal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        tile = _Tile.of(config)
        return (
            self._illegal_tile(tile, problem)
            or self._illegal_pipeline(tile, problem, device)
            or self._illegal_grid(tile, problem, device)
        )

    def choices(self, problem: ConvProblem, device: DeviceSpec) -> Iterator[tuple[int, ...]]:
        """All combinations, whole groups skipped by the same rules that ``illegal`` states."""
        m, n, k, wm, wn, stages, staging, ahead, split, raster = (knob.candidates for knob in self.knobs)
        tiles = ((a, b, c, d, e) for a in m for b in n for d in wm for e in wn for c in k)
        for shape in tiles:
            if self._illegal_tile(_Tile(*shape, 2, 0, 0, 1, 1), problem):
                continue
            grids = [g for g in itertools.product(split, raster) if not self._illegal_grid(_Tile(*shape, 2, 0, 0, *g), problem, device)]
            for pipe in itertools.product(stages, staging, ahead):
                if grids and not self._illegal_pipeline(_Tile(*shape, *pipe, 1, 1), problem, device):
                    yield from ((*shape, *pipe, *grid) for grid in grids)

    def _illegal_tile(self, t: _Tile, problem: ConvProblem) -> str | None:
        if t.cta_m % t.warp_m or t.cta_n % t.warp_n:
            return f"a {t.cta_m}x{t.cta_n} tile is not made of {t.warp_m}x{t.warp_n} warps"
        if t.threads > _MAX_THREADS:
            return f"{t.threads} threads are more than {_MAX_THREADS}"
        accumulators = t.warp_m * t.warp_n // 32
        if accumulators > 128:
            return f"{accumulators} accumulators a thread are more than 128"
        row_bytes = t.cta_k * problem.dtype.bytes
        if not 32 <= row_bytes <= 128:
            return f"cta_k={t.cta_k} is {row_bytes} bytes of {problem.dtype}: 32 to 128 are possible"
        channel_bytes = problem.C // problem.groups * problem.dtype.bytes
        if row_bytes == 32 and channel_bytes % 64 == 0:
            return f"cta_k={t.cta_k} uses half of a sector pair where {channel_bytes} bytes of channels allow more"
        filters = problem.K // problem.groups
        if t.cta_n > 8 and t.cta_n >= 2 * _ceil_to(filters, 8):
            return f"half of cta_n={t.cta_n} covers all {filters} filters of a group"
        pixels = problem.N * problem.P * problem.Q
        if t.cta_m > 16 and t.cta_m >= 2 * _ceil_to(pixels, 16):
            return f"half of cta_m={t.cta_m} covers all {pixels} output pixels"
        columns = row_bytes // _load_bytes(problem)
        if t.threads % columns:
            return f"{t.threads} threads do not divide into the {columns} vectors of a slice's row"
        return None

    def _illegal_pipeline(self, t: _Tile, problem: ConvProblem, device: DeviceSpec) -> str | None:
        if t.staging == CP_ASYNC and device.sm < 80:
            return "cp.async needs sm_80"
        if t.staging == CP_ASYNC and _load_bytes(problem) < 4:
            return "cp.async copies at least 4 bytes, and the channels of a pixel do not divide into them"
        if t.staging == REGISTERS and t.stages != 2:
            return "staging through registers has 2 stages"
        registers = self._registers(t, problem) + (self._held(t, problem) if t.staging == REGISTERS else 0)
        if registers > min(255, 65536 // t.threads // 8 * 8):
            return f"about {registers} registers a thread are too many for {t.threads} threads"
        smem = self._smem_bytes(t, problem)
        if smem + _STATIC_SMEM > device.smem_per_cta:
            return f"{smem} bytes of shared memory are more than {device.smem_per_cta}"
        return None

    def _illegal_grid(self, t: _Tile, problem: ConvProblem, device: DeviceSpec) -> str | None:
        tiles_m, tiles_n, slices = self._tiles(t, problem)
        if t.raster_group > 1 and tiles_n == 1:
            return "raster_group changes nothing with one column of tiles"
        if t.raster_group > 1 and t.raster_group >= 2 * tiles_m:
            return f"half of raster_group={t.raster_group} covers all {tiles_m} rows of tiles"
        blocks = tiles_m * tiles_n * problem.groups
        per_split = ceil(slices / t.split_k)
        if t.stages > 2 and t.stages - 1 > per_split:
            return f"{per_split} slices do not fill {t.stages} stages"
        if t.split_k > 1:
            if per_split < 2 or (t.split_k - 1) * per_split >= slices:
                return f"{slices} slices are too few for split_k={t.split_k}"
            if blocks * t.split_k > 8 * device.sm_count:
                return f"{blocks} tiles need no split_k={t.split_k} on {device.sm_count} multiprocessors"
        if blocks * t.split_k >= 2**31:
            return f"{blocks * t.split_k} blocks are more than a grid has"
        return None

    def source(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Source:
        p = problem
        extents = {name: getattr(p, name) for name in ("N", "C", "H", "W", "K", "R", "S", "P", "Q", "groups")}
        geometry = dict(zip(("stride_h", "stride_w"), p.stride, strict=True))
        geometry |= dict(zip(("pad_top", "pad_bottom", "pad_left", "pad_right"), p.padding, strict=True))
        geometry |= dict(zip(("dilation_h", "dilation_w"), p.dilation, strict=True))
        # offsets run from the first tap of the first pixel to the last slice's end, in elements
        reach = 2**31 - 1 - 2**24
        wide = max(p.N * p.H * p.W * p.C, p.N * p.P * p.Q * p.K, p.K * (p.C // p.groups) * p.R * p.S) > reach
        problem_struct = constants(
            "Problem", {**extents, **geometry, "wide": wide, "Element": p.dtype.value, "Output": p.out_dtype.value}
        )
        text = f"""#include "igemm_mma.cuh"
{constants("Config", dict(config.knobs))}
{problem_struct}
using Kernel = IgemmMma<Config, Problem>;
extern "C" __global__ void __launch_bounds__(Kernel::threads)
igemm_mma(const Kernel::Element* activation, const Kernel::Element* filter, Kernel::Output* output, void* workspace) {{
  extern __shared__ __align__(128) char shared[];
  Kernel::run(activation, filter, output, workspace, shared);
}}
"""
        return Source(language="cuda", stem=self.name, text=text, entry=self.name)

    def launch(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Launch:
        t = _Tile.of(config)
        tiles_m, tiles_n, _ = self._tiles(t, problem)
        blocks = tiles_m * tiles_n * problem.groups
        partial = blocks * t.split_k * t.cta_m * t.cta_n * 4
        return Launch(
            grid=blocks * t.split_k,
            block=t.threads,
            smem_bytes=self._smem_bytes(t, problem),
            workspace_bytes=_ceil_to(blocks * 4, 256) + partial if t.split_k > 1 else 0,
        )

    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """The longest of tensor math, shared-memory port, L2 and load issue for the blocks of one multiprocessor, in
        whole waves, plus what a launch costs; never below the memory traffic of the layer."""
        t = _Tile.of(config)
        tiles_m, tiles_n, slices = self._tiles(t, problem)
        blocks = tiles_m * tiles_n * problem.groups * t.split_k
        warps = t.threads // 32
        row_bytes = t.cta_k * problem.dtype.bytes
        registers = self._registers(t, problem) + (self._held(t, problem) if t.staging == REGISTERS else 0)
        resident = min(
            device.smem_per_sm // (self._smem_bytes(t, problem) + 1024),
            65536 // (_ceil_to(registers, 8) * t.threads),
            2048 // t.threads,
        )
        resident = max(1, min(resident, ceil(blocks / device.sm_count)))
        # operations a clock of one multiprocessor: mma.sync reaches about 0.62 of wgmma's rate where that exists
        peak = device.rate(problem.dtype) / device.sm_count / _CLOCK_HZ * (0.66 if device.sm >= 90 else 0.95)
        narrow = min(1.0, warps * resident / 4)
        math = 2 * t.cta_m * t.cta_n * t.cta_k / (peak * narrow)
        port = (warps * (t.warp_m + t.warp_n) + t.cta_m + t.cta_n) * row_bytes / 128
        l2 = (t.cta_m + t.cta_n) * row_bytes / 38
        vectors = (t.cta_m + t.cta_n) * row_bytes / _load_bytes(problem) / 32
        issue = (vectors * (18 if t.staging == REGISTERS else 14) + warps * 24 + math * 0.3) / 4
        slice_clocks = max(math, port, l2, issue) + 0.15 * (math + port + l2)
        # a slice that is not yet there is waited for
        in_flight = resident * (1 if t.staging == REGISTERS else t.stages - 1)
        slice_clocks = max(slice_clocks, 900 / in_flight)
        per_block = ceil(slices / t.split_k) * slice_clocks + 600 / resident
        per_block += t.cta_m * t.cta_n * (problem.out_dtype.bytes * 3 / 64 + (0.25 * t.split_k if t.split_k > 1 else 0))
        waves = ceil(blocks / (device.sm_count * resident))
        compute = waves * resident * per_block / _CLOCK_HZ
        return 1e6 * max(compute, problem.min_bytes / device.bytes_per_s) + 2.0 + 1.5 * (t.split_k > 1)

    @staticmethod
    def _tiles(t: _Tile, problem: ConvProblem) -> tuple[int, int, int]:
        """Rows and columns of tiles in a group, and slices of the reduction."""
        pixels = problem.N * problem.P * problem.Q
        filters, reduction = problem.K // problem.groups, problem.C // problem.groups * problem.R * problem.S
        return -(-pixels // t.cta_m), -(-filters // t.cta_n), -(-reduction // t.cta_k)

    @staticmethod
    def _smem_bytes(t: _Tile, problem: ConvProblem) -> int:
        """Dynamic shared memory: the ring of slices, or the tile on its way out, whichever is larger."""
        ring = t.stages * (t.cta_m + t.cta_n) * t.cta_k * problem.dtype.bytes
        return max(ring, t.cta_m * (t.cta_n * problem.out_dtype.bytes + 16))

    @staticmethod
    def _held(t: _Tile, problem: ConvProblem) -> int:
        """Registers that hold a slice on its way through a thread (a vector takes at least one)."""
        load_bytes = _load_bytes(problem)
        return _passes(t, problem) * max(1, load_bytes // 4)

    @staticmethod
    def _registers(t: _Tile, problem: ConvProblem) -> int:
        """Registers of a thread that does not spill: accumulators, two steps of fragments, three for each row of pixels
        it loads, and the rest. The compiler takes more where it may."""
        fragments = 2 * (t.warp_m // 16 * 4 + t.warp_n // 8 * 2)
        rows = -(-t.cta_m // _rows_per_pass(t, problem))
        return t.warp_m * t.warp_n // 32 + fragments + 3 * rows + (48 if t.ahead else 28)


def _load_bytes(problem: ConvProblem) -> int:
    """The widest vector, at most 16 bytes, whose size divides a pixel's channels of one group."""
    size = problem.C // problem.groups * problem.dtype.bytes
    return next(v for v in (16, 8, 4, 2, 1) if size % v == 0)


def _passes(t: _Tile, problem: ConvProblem) -> int:
    """Vectors that each thread brings for one slice."""
    rows = _rows_per_pass(t, problem)
    return -(-t.cta_m // rows) + -(-t.cta_n // rows)


def _rows_per_pass(t: _Tile, problem: ConvProblem) -> int:
    """Rows of a slice that the block's threads bring at once."""
    return max(1, t.threads * _load_bytes(problem) // (t.cta_k * problem.dtype.bytes))


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
