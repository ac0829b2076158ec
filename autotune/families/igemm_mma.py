"""Family igemm_mma: implicit-GEMM convolution in NHWC with mma.sync, for every NVIDIA GPU from sm_75."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from math import ceil, hypot
from typing import NamedTuple

from autotune.device import DeviceSpec
from autotune.families import epilogue, tensor_cores
from autotune.families.family import Family, Knob, Launch, Source, constants
from autotune.problem import ConvProblem
from autotune.trial import Config

REGISTERS, CP_ASYNC = 0, 1

_MAX_THREADS = 512
_STATIC_SMEM = 16  # bytes beside the dynamic shared memory

# What predict_us reckons with, fitted to 4591 trials of 23 layers in f16 on an H200, 2026-11-30. Clocks are a
# multiprocessor's; only ratios of predictions matter.
_CLOCK_HZ = 1.9e9
_MMA_SHARE = 0.66  # of the table's rate, where that is wgmma's
_PORT_BYTES = 128  # through the shared-memory port in a clock
_FILL_BYTES = 51  # from L2 into a multiprocessor in a clock
_ROW_CLOCKS = 1.6  # to look up one row of a slice, however short it is
_VECTOR_CLOCKS = 3.5  # to issue a warp's loads of one vector a thread
_DEPOSIT_CLOCKS = 5.2  # more, when the vector passes through registers
_LATENCY_CLOCKS = 870  # from a load to its data
_BARRIER_CLOCKS = 160  # of a slice's wait, barrier and first fragments
_EXPOSED = 0.38  # share of a block's work on a slice that its own warps do not overlap
_AHEAD_COST = 1.03  # fragments read ahead are no slower in most trials, and no faster
_STORE_CLOCKS = 0.26  # to store one element, or vector of adjacent elements
_REDUCE_CLOCKS = 0.37  # to write an element of a split's partial sum
_REDUCE_WAIT_CLOCKS = 2270  # until all splits of a tile have arrived
_BLOCK_CLOCKS = 1480  # to start a block, set up its loads and end it
_OUTPUT_CLOCKS = 21  # that each of a thread's outputs adds to the end of its block
_TAIL = 0.53  # share of the last wave's idle places that other blocks do not fill
_MEMORY_SHARE = 0.51  # of the compulsory memory traffic that computing does not hide
_LAUNCH_US = 2.0


class _Tile(NamedTuple):
    """The knobs by name, in the family's order."""

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
        return cls._make([value for _, value in config.knobs])

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
        Knob(name="stages", candidates=(2, 3, 4, 6), meaning="slices of r*s*c in shared memory", pipeline=True),
        Knob(
            name="staging",
            candidates=(REGISTERS, CP_ASYNC),
            meaning="0: to shared memory by registers, 1: by cp.async",
            pipeline=True,
        ),
        Knob(
            name="ahead",
            candidates=(0, 1),
            meaning="1: a slice's first fragments are read during the slice before",
            pipeline=True,
        ),
        Knob(name="split_k", candidates=(1, 2, 4, 8), meaning="blocks that share one tile's r*s*c"),
        Knob(name="raster_group", candidates=(1, 8), meaning="rows of tiles walked column by column", pipeline=True),
    )

    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        return tensor_cores.unsupported(self.name, problem, device)

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
            grids = [
                g
                for g in itertools.product(split, raster)
                if not self._illegal_grid(_Tile(*shape, 2, 0, 0, *g), problem, device)
            ]
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
        filters, pixels = _layer(problem).filters, _layer(problem).pixels
        if t.cta_n > 8 and t.cta_n >= 2 * _ceil_to(filters, 8):
            return f"half of cta_n={t.cta_n} covers all {filters} filters of a group"
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
        if t.ahead and per_split < 2:
            return "ahead needs a slice before another"
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
        # offsets run from the first tap of the first pixel to the last slice's end, in elements
        largest = max(p.N * p.H * p.W * p.C, p.N * p.P * p.Q * p.K, p.K * (p.C // p.groups) * p.R * p.S)
        wide = largest > tensor_cores.OFFSET_LIMIT
        text = f"""#include "igemm_mma.cuh"
{constants("Config", dict(config.knobs))}
{constants("Problem", tensor_cores.members(p) | {"wide": wide})}
using Kernel = IgemmMma<Config, Problem>;
extern "C" __global__ void __launch_bounds__(Kernel::threads)
igemm_mma(const Kernel::Element* activation, const Kernel::Element* filter, Kernel::Output* output,
          void* workspace{epilogue.parameters(p)}) {{
  extern __shared__ __align__(128) char shared[];
  Kernel::run(activation, filter, output, workspace, {epilogue.value(p)}, shared);
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
            arguments=("activation", "filter", "output", "workspace", *problem.epilogue.operands),
        )

    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """For all waves of blocks: what limits a multiprocessor's blocks together (tensor math, shared-memory port or
        loads of each slice) and what each waits for alone (barrier, its own work, latency), added like sides at a right
        angle; plus the memory traffic that is not hidden, and a launch. Never below the layer's memory traffic."""
        t = _Tile.of(config)
        layer = _layer(problem)
        tiles_m, tiles_n, slices = self._tiles(t, problem)
        warps, rows, outputs = t.threads // 32, t.cta_m + t.cta_n, t.cta_m * t.cta_n
        row_bytes = t.cta_k * layer.bytes
        share = tiles_m * tiles_n * layer.groups * t.split_k / device.sm_count
        resident = min(self._resident(t, problem, device), ceil(share))
        rate = device.rate(problem.dtype) / device.sm_count / _CLOCK_HZ * (_MMA_SHARE if device.sm >= 90 else 0.95)
        math = 2 * outputs * t.cta_k / rate
        port = (warps * (t.warp_m + t.warp_n) + rows) * row_bytes / _PORT_BYTES
        vectors = rows * row_bytes / (32 * layer.load_bytes)
        load = max(rows * row_bytes / _FILL_BYTES, rows * _ROW_CLOCKS, vectors * _VECTOR_CLOCKS)
        if t.staging == REGISTERS:
            load += vectors * _DEPOSIT_CLOCKS
        busy = max(math, port, load) * (_AHEAD_COST if t.ahead else 1)
        # a block of few warps leaves schedulers idle
        alone = _BARRIER_CLOCKS + _EXPOSED * (math + port + load) * max(1, 4 / warps)
        alone = max(alone, _LATENCY_CLOCKS / (t.stages - 1))

        store = outputs * _STORE_CLOCKS * layer.out_bytes / min(layer.store_bytes, t.cta_n * layer.out_bytes)
        end = _BLOCK_CLOCKS + _OUTPUT_CLOCKS * outputs / t.threads
        if t.split_k > 1:
            store += outputs * _REDUCE_CLOCKS
            end += _REDUCE_WAIT_CLOCKS
        waves = share / resident
        waves = waves + _TAIL * (ceil(waves) - waves) if waves > 1 else 1
        per_split = -(-slices // t.split_k)
        clocks = waves * hypot(resident * (per_split * busy + store), per_split * alone + end)
        memory_us = 1e6 * layer.min_bytes / device.bytes_per_s
        return max(memory_us, 1e6 * clocks / _CLOCK_HZ + _MEMORY_SHARE * memory_us) + _LAUNCH_US

    def _resident(self, t: _Tile, problem: ConvProblem, device: DeviceSpec) -> int:
        """Blocks that one multiprocessor should hold at once, at least 1."""
        registers = -(-self._expected_registers(t, problem) // 8) * 8
        smem = self._smem_bytes(t, problem) + 1024
        return max(1, min(device.smem_per_sm // smem, 65536 // (registers * t.threads), 2048 // t.threads, 32))

    @classmethod
    def _expected_registers(cls, t: _Tile, problem: ConvProblem) -> int:
        """Registers that the compiler gives a thread, on average 11 off; ``_registers`` is the least it needs."""
        rows_per_pass = _rows_per_pass(t, problem)
        rows_m, rows_n = -(-t.cta_m // rows_per_pass), -(-t.cta_n // rows_per_pass)
        # a second step's fragments, where a slice has one or it belongs to the next slice
        one_step = t.cta_k * _layer(problem).bytes == 32
        fragments = (t.warp_m + t.warp_n) / 4 * (1.4 - one_step + t.ahead)
        rows = (2 if problem.R * problem.S == 1 else 5) * rows_m + 1.5 * rows_n
        held = cls._held(t, problem) if t.staging == REGISTERS else 0
        expected = ceil(1.2 * t.warp_m * t.warp_n / 32 + fragments + rows + held + 16)
        return min(expected, 255, 65536 // t.threads // 8 * 8)

    @staticmethod
    def _tiles(t: _Tile, problem: ConvProblem) -> tuple[int, int, int]:
        """Rows and columns of tiles in a group, and slices of the reduction."""
        layer = _layer(problem)
        return -(-layer.pixels // t.cta_m), -(-layer.filters // t.cta_n), -(-layer.reduction // t.cta_k)

    @staticmethod
    def _smem_bytes(t: _Tile, problem: ConvProblem) -> int:
        """Dynamic shared memory: the ring of slices, or the tile on its way out, whichever is larger."""
        layer = _layer(problem)
        ring = t.stages * (t.cta_m + t.cta_n) * t.cta_k * layer.bytes
        return max(ring, t.cta_m * (t.cta_n * layer.out_bytes + 16))

    @staticmethod
    def _held(t: _Tile, problem: ConvProblem) -> int:
        """Registers that hold a slice on its way through a thread (a vector takes at least one)."""
        load_bytes = _load_bytes(problem)
        return _passes(t, problem) * max(1, load_bytes // 4)

    @staticmethod
    def _registers(t: _Tile, problem: ConvProblem) -> int:
        """Registers of a thread that does not spill: accumulators, two steps of fragments, three for each row of pixels
        it loads, and the rest, more with a ragged last column. The compiler takes more where it may."""
        fragments = 2 * (t.warp_m // 16 * 4 + t.warp_n // 8 * 2)
        rows = -(-t.cta_m // _rows_per_pass(t, problem))
        rest = (48 if t.ahead else 28) + (12 if _layer(problem).filters % t.cta_n else 0)
        return t.warp_m * t.warp_n // 32 + fragments + 3 * rows + rest


class _Layer(NamedTuple):
    """What every config of a layer shares; filters and reduction are those of a group."""

    groups: int
    pixels: int
    filters: int
    reduction: int
    bytes: int  # of an input element
    out_bytes: int  # of an output element
    load_bytes: int  # of the widest vector, at most 16 bytes, whose size divides a pixel's channels of one group
    store_bytes: int  # likewise of its filters
    min_bytes: int


@lru_cache(maxsize=256)
def _layer(p: ConvProblem) -> _Layer:
    channels, filters = p.C // p.groups, p.K // p.groups
    return _Layer(
        groups=p.groups,
        pixels=p.N * p.P * p.Q,
        filters=filters,
        reduction=channels * p.R * p.S,
        bytes=p.dtype.bytes,
        out_bytes=p.out_dtype.bytes,
        load_bytes=tensor_cores.vector_bytes(channels * p.dtype.bytes),
        store_bytes=tensor_cores.vector_bytes(filters * p.out_dtype.bytes),
        min_bytes=p.min_bytes,
    )


def _load_bytes(problem: ConvProblem) -> int:
    return _layer(problem).load_bytes


def _passes(t: _Tile, problem: ConvProblem) -> int:
    """Vectors that each thread brings for one slice."""
    rows = _rows_per_pass(t, problem)
    return -(-t.cta_m // rows) + -(-t.cta_n // rows)


def _rows_per_pass(t: _Tile, problem: ConvProblem) -> int:
    """Rows of a slice that the block's threads bring at once."""
    layer = _layer(problem)
    return max(1, t.threads * layer.load_bytes // (t.cta_k * layer.bytes))


def _ceil_to(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
