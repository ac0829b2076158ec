"""Family halo_wgmma: convolution with few filters on sm_90a, each halo staged once, taps as shifted descriptors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import lru_cache

from autotune.device import DeviceSpec
from autotune.families import epilogue, tensor_cores
from autotune.families.family import Family, Knob, Launch, Source, TensorMap, constants
from autotune.families.wgmma import (
    collected_bytes,
    filter_map,
    is_legal_n,
    is_permuted,
    lane_filters,
    launched_registers,
    wgmma_text,
)
from autotune.problem import ConvProblem
from autotune.trial import Config

_MAX_SMEM = 227 * 1024
_CLOCK_HZ = 1.8e9
# fitted on H200, 2026-11-30
_ROW_CLOCKS = 2.3  # of a copied row of at most 64 bytes
_FINISH_CLOCKS = 50.0  # from the last product of a tile to its stores
_OUTPUT_CLOCKS = 0.1  # for each output more
_TAP_CLOCKS = 0.25  # and for each further tap where adjacent pixels add them up
_ELEMENT_CLOCKS = 1.2  # of an output stored by itself
_STREAM_BYTES = 40.0  # a clock and multiprocessor, of tiles and streamed weights
_STREAM_CLOCKS = 1900.0  # until a copy of both begins to arrive
_FIRST_BYTES = 5.4e12  # a second, until all blocks have their first tile
_DEPTH_BYTES = 65536  # of tiles in shared memory: with fewer a block waits, with more all first tiles are late


@dataclass(frozen=True, slots=True)
class _Tile:
    """The knobs by name."""

    orient: int
    stack: int
    cta_n: int
    chunk_bytes: int
    consumers: int
    stages: int
    grouped: int
    turns: int
    reassign: int
    streamed: int
    stack_fast: int
    slabs: int

    @classmethod
    def of(cls, config: Config) -> _Tile:
        return cls(*(config[f.name] for f in fields(cls)))


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial axis: input and output extent, taps, stride, padding before, dilation."""

    size: int
    out: int
    taps: int
    stride: int
    pad: int
    dilation: int


@dataclass(frozen=True, slots=True)
class _Geometry:
    """What follows from the knobs that shape a tile."""

    fast: _Axis
    slow: _Axis
    width: int  # of eight adjacent pixels, those that are outputs
    pitch: int  # pixels of a halo row, of each parity where the fast stride is 2
    paired: bool  # an even and an odd pixel share a row of shared memory
    halo_slow: int
    slabs: int  # copies that bring one chunk of a tile's lines
    slab_lines: int
    chunks: int
    plane_bytes: int  # one chunk of a halo tile in shared memory
    weight_bytes: int
    tiles: int
    blocks_n: int
    windows: tuple[tuple[int, int], ...]  # first output and count of outputs of each input row
    columns_per_output: int

    @property
    def columns(self) -> tuple[int, ...]:
        """Of each input row's products, where it meets an output."""
        return tuple(count * self.columns_per_output for _, count in self.windows if count)

    @property
    def accumulators(self) -> int:
        """Columns of accumulators: those of the distinct windows."""
        return sum(count for _, count in set(self.windows)) * self.columns_per_output


class HaloWgmma(Family):
    """Hopper's warpgroup products for layers with few filters; strides 1 and 2, no groups."""

    name = "halo_wgmma"
    kind = "cuda"
    knobs = (
        Knob(name="orient", candidates=(0, 1), meaning="axis of adjacent pixels: 0: W, 1: H"),
        Knob(name="stack", candidates=(1, 2, 3, 4), meaning="output rows that share the products of an input row"),
        Knob(name="cta_n", candidates=tuple(range(8, 257, 8)), meaning="filters of a thread block"),
        Knob(name="chunk_bytes", candidates=(32, 64, 128), meaning="bytes of channels in a row of shared memory"),
        Knob(name="consumers", candidates=(1, 2, 3, 4), meaning="warpgroups that multiply", pipeline=True),
        Knob(name="stages", candidates=(2, 3, 4, 5, 6, 8), meaning="halo tiles in shared memory", pipeline=True),
        Knob(name="grouped", candidates=(0, 1), meaning="1: products of one shape follow each other", pipeline=True),
        Knob(name="turns", candidates=(0, 1), meaning="1: warpgroups issue their products in turn", pipeline=True),
        Knob(
            name="reassign", candidates=(0, 1), meaning="1: the producer's registers go to the consumers", pipeline=True
        ),
        Knob(name="streamed", candidates=(0, 1), meaning="1: weights come with each chunk of channels, 0: they stay"),
        Knob(name="stack_fast", candidates=(0, 1), meaning="1: taps of the fast axis share products too"),
        Knob(name="slabs", candidates=(0, 1), meaning="1: a tile's lines come in several copies", pipeline=True),
    )

    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        reason = tensor_cores.unsupported(self.name, problem, device, hopper=True)
        reason = reason or tensor_cores.ungrouped(self.name, problem, chunk_bytes=16)
        if reason is None and max(problem.R, problem.S) > 7:
            return f"{self.name} has filters of at most 7 taps an axis"
        if reason is None and max(problem.stride) > 2:
            return f"{self.name} has strides of 1 and 2"
        return reason

    def illegal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        tile = _Tile.of(config)
        return self._illegal_tile(tile, problem, device) or self._illegal_pipeline(tile, problem)

    def choices(self, problem: ConvProblem, device: DeviceSpec) -> Iterator[tuple[int, ...]]:
        """All combinations, whole groups skipped by the same rules that ``illegal`` states."""
        pipeline = tuple(itertools.product(*(knob.candidates for knob in self.knobs[4:9])))
        for values in itertools.product(*(knob.candidates for knob in (*self.knobs[:4], *self.knobs[9:]))):
            tile, ways = values[:4], values[4:]
            if self._illegal_tile(_Tile(*(*tile, 1, 2, 0, 0, 0, *ways)), problem, device) is None:
                yield from ((*tile, *rest, *ways) for rest in pipeline)

    def _illegal_tile(self, t: _Tile, p: ConvProblem, device: DeviceSpec) -> str | None:
        filters = -(-p.K // 8) * 8
        if t.cta_n > filters or (t.cta_n < filters and t.cta_n not in (16, 32, 64, 128)):
            return f"cta_n={t.cta_n} does not divide {p.K} filters well"
        fast, slow = _axes(t.orient, p)
        if fast.stride == 2 and fast.size % 2:
            return f"stride 2 on the fast axis needs an even extent, not {fast.size}"
        if slow.dilation > 1 and t.stack > 1:
            return "outputs that a dilation separates cannot be stacked"
        channel_bytes = p.C * p.dtype.bytes
        if t.chunk_bytes > 32 and t.chunk_bytes >= 2 * channel_bytes:
            return f"half of chunk_bytes={t.chunk_bytes} covers all {channel_bytes} bytes of channels"
        if t.chunk_bytes < 128 and channel_bytes % (2 * t.chunk_bytes) == 0:
            return f"chunk_bytes={t.chunk_bytes} is needlessly small for {channel_bytes} bytes of channels"
        if t.stack > 1 and t.stack > -(-slow.out // 8):
            return f"stack={t.stack} covers {slow.out} output rows more than once"
        if t.stack_fast and (fast.stride == 2 or fast.taps == 1):
            return "taps of the fast axis share products only where there are several, at stride 1"
        g = _geometry(t, p)
        if g.width < 4:
            return f"of eight pixels {g.width} would be outputs"
        if t.slabs and (g.slabs == 1 or slow.dilation > 1 or slow.taps < slow.stride):
            return "slabs are of groups that lie several lines apart and need them all"
        if g.pitch > 256 or g.halo_slow > 256:
            return f"a halo of {g.pitch} x {g.halo_slow} pixels is more than a copy brings"
        for columns in g.columns:
            if not is_legal_n(columns, p.dtype):
                return f"a product of {columns} columns does not exist for {p.dtype}"
        resident = _smem_bytes(replace(t, consumers=1, stages=2, streamed=0), g, p) <= _MAX_SMEM
        if not resident and not t.streamed:
            return f"{g.weight_bytes} bytes of weights and two halo tiles are more than shared memory holds"
        if t.streamed and resident:
            return "weights that stay in shared memory need not be streamed"
        if t.streamed and g.chunks == 1:
            return "one chunk is no stream"
        if g.blocks_n > device.sm_count:
            return f"{g.blocks_n} blocks of filters are more than {device.sm_count} multiprocessors"
        if g.tiles >= 2**31:
            return f"{g.tiles} tiles are too many"
        return None

    def _illegal_pipeline(self, t: _Tile, p: ConvProblem) -> str | None:
        if t.stages < t.consumers:
            return f"{t.stages} stages are fewer than {t.consumers} consumers"
        if t.turns and t.consumers == 1:
            return "one consumer has no turns"
        if t.turns and t.streamed:
            return "streamed tiles come in turn by themselves"
        g = _geometry(t, p)
        if _full_barriers(t, g) > 64:
            return f"{_full_barriers(t, g)} barriers are too many"
        if t.grouped and len(set(g.columns)) == 1:
            return "grouped changes nothing with products of one shape"
        smem = _smem_bytes(t, g, p)
        if smem > _MAX_SMEM:
            return f"{smem} bytes of shared memory are more than {_MAX_SMEM}"
        launched = launched_registers(t.consumers)
        per_thread = _consumer_registers(t) if t.reassign else launched
        # a thread keeps what belongs to its quarter of the filters
        kept = (p.epilogue.bias + (p.epilogue.scale == "channel")) * t.cta_n // 4
        needed = g.accumulators // 2 + kept + 40
        if needed > per_thread:
            return f"about {needed} registers a thread are more than {per_thread}"
        # one product's registers must be there from the beginning
        if max(g.columns) // 2 + 28 > launched:
            return f"a product of {max(g.columns)} columns needs more than {launched} registers a thread"
        return None

    def source(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Source:
        p, t = problem, _Tile.of(config)
        g = _geometry(t, p)
        derived = {
            "halo_fast": g.pitch,
            "paired": g.paired,
            "permuted": is_permuted(p),
            "lane_filters": lane_filters(t.cta_n, p),
            "consumer_registers": _consumer_registers(t),
        }
        text = f"""#include "halo_wgmma.cuh"
{wgmma_text(p.dtype, g.columns)}
{constants("Config", dict(config.knobs))}
{constants("Problem", tensor_cores.members(p) | derived)}
using Kernel = HaloWgmma<Config, Problem>;
extern "C" __global__ void __launch_bounds__(Kernel::threads, 1)
halo_wgmma(const __grid_constant__ ptx::TensorMap activation, const __grid_constant__ ptx::TensorMap filter,
           Kernel::Output* output{epilogue.parameters(p)}) {{
  extern __shared__ __align__(1024) char shared[];
  Kernel::run(&activation, &filter, output, {epilogue.value(p)}, shared);
}}
"""
        return Source(language="cuda", stem=self.name, text=text, entry=self.name)

    def launch(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Launch:
        t = _Tile.of(config)
        g = _geometry(t, problem)
        return Launch(
            grid=_blocks(g, device),
            block=t.consumers * 128 + (128 if t.reassign else 32),
            smem_bytes=_smem_bytes(t, g, problem),
            arguments=(
                _activation_map(t, g, problem),
                filter_map(problem, t.cta_n, t.chunk_bytes),
                "output",
                *problem.epilogue.operands,
            ),
        )

    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """Clocks of one block's tiles: products take max(n/2, 16 + n/4) clocks of the shared-memory port and the tensor
        cores, a tile's copy its bytes at 128 a clock, or what its rows take the copy engine if that is longer; with a
        part of the layer's memory traffic that is not hidden, or the other way round."""
        t = _Tile.of(config)
        g = _geometry(t, problem)
        per_step = sum(max(n / 2, 16 + n / 4) for n in g.columns) * (1 if t.stack_fast else g.fast.taps)
        clocks = per_step * g.chunks * t.chunk_bytes / 32 + g.chunks * g.plane_bytes / 128
        if t.streamed:
            copies = (g.plane_bytes + g.weight_bytes / g.chunks) / _STREAM_BYTES
            clocks = max(clocks, g.chunks * max(copies, (copies + _STREAM_CLOCKS) / (t.stages - 0.5)))
        rows = (1 if g.paired else g.fast.stride) * g.pitch * g.slabs * g.slab_lines
        clocks = max(clocks, g.chunks * rows * _ROW_CLOCKS)
        if not is_permuted(problem) and not collected_bytes(t.consumers, t.cta_n, problem):
            clocks = max(clocks, 64 * t.stack * min(t.cta_n, problem.K) * _ELEMENT_CLOCKS)
        # a consumer does not multiply while it stores
        outputs = 64 * t.stack * t.cta_n
        finish = _FINISH_CLOCKS + outputs * (_OUTPUT_CLOCKS + _TAP_CLOCKS * (g.fast.taps - 1) * t.stack_fast)
        depth = t.stages * g.chunks * g.plane_bytes / _DEPTH_BYTES
        waits = 0.1 / (t.stages - 1) ** 2 + 0.01 * max(0.0, depth - 1) + 0.05 * max(0.0, 1 / depth - 1)
        clocks = max(clocks, (clocks + finish) / t.consumers) * (1.0 + waits)
        clocks *= 1.0 + 0.02 * (t.turns == 0) + 0.01 * (t.grouped == 1) + 0.03 * t.orient
        rounds = -(-g.tiles * g.blocks_n // _blocks(g, device))
        compute, memory = rounds * clocks / _CLOCK_HZ, problem.min_bytes / device.bytes_per_s
        # with slabs, products do not wait for all of the blocks' first tiles
        first = _blocks(g, device) * g.chunks // _parts(t, g) * g.plane_bytes / _FIRST_BYTES
        compute = max(0.0, compute - first * max(0.0, 1 - 1.5 / g.slabs))
        return 2.5 + 0.2 * t.slabs + 1e6 * (max(compute, memory) + 0.25 * min(compute, memory))


def _axes(orient: int, p: ConvProblem) -> tuple[_Axis, _Axis]:
    """The fast and the slow axis."""
    h = _Axis(p.H, p.P, p.R, p.stride[0], p.padding[0], p.dilation[0])
    w = _Axis(p.W, p.Q, p.S, p.stride[1], p.padding[2], p.dilation[1])
    return (h, w) if orient else (w, h)


def _geometry(t: _Tile, p: ConvProblem) -> _Geometry:
    return _shape(t.orient, t.stack, t.cta_n, t.chunk_bytes, t.stack_fast, t.slabs, p)


@lru_cache(maxsize=1024)
def _shape(
    orient: int, stack: int, cta_n: int, chunk_bytes: int, stack_fast: int, slabs: int, p: ConvProblem
) -> _Geometry:
    fast, slow = _axes(orient, p)
    width = 8 - (fast.taps - 1) * fast.dilation * stack_fast
    if stack_fast:
        pitch = 8
    elif fast.stride == 1:
        pitch = 8 + (fast.taps - 1) * fast.dilation
    else:
        pitch = 8 + ((fast.taps - 1) * fast.dilation - fast.pad) // 2 - (-fast.pad) // 2
    halo_slow = (8 * stack - 1) * slow.stride + (slow.taps - 1) * slow.dilation + 1
    chunks = -(-p.C * p.dtype.bytes // chunk_bytes)
    paired = fast.stride == 2 and not orient and p.C * p.dtype.bytes == chunk_bytes <= 64
    # with slabs, a group's input row i lies in slab i % spread, of which all eight groups need adjacent lines
    spread, input_rows = stack * slow.stride, halo_slow - 7 * stack * slow.stride
    slab_lines = 7 + -(-input_rows // spread) if slabs else halo_slow
    copies = min(spread, input_rows) if slabs else 1
    slab_bytes = -(-fast.stride * pitch * slab_lines * chunk_bytes // 128) * 128
    plane_bytes = -(-copies * slab_bytes // 1024) * 1024
    return _Geometry(
        fast=fast,
        slow=slow,
        width=width,
        pitch=pitch,
        paired=paired,
        halo_slow=halo_slow,
        slabs=copies,
        slab_lines=slab_lines,
        chunks=chunks,
        plane_bytes=plane_bytes,
        weight_bytes=chunks * p.R * p.S * cta_n * chunk_bytes,
        tiles=-(-fast.out // max(width, 1)) * -(-slow.out // (8 * stack)) * p.N,
        blocks_n=-(-p.K // cta_n),
        windows=_windows(stack, slow),
        columns_per_output=cta_n * (fast.taps if stack_fast else 1),
    )


def _windows(stack: int, slow: _Axis) -> tuple[tuple[int, int], ...]:
    """For each input row of a group: the first output that it meets, and how many."""
    rows = (stack - 1) * slow.stride + (slow.taps - 1) * slow.dilation + 1
    found = []
    for i in range(rows):
        met = [
            o
            for o in range(stack)
            if 0 <= i - o * slow.stride <= (slow.taps - 1) * slow.dilation
            and (i - o * slow.stride) % slow.dilation == 0
        ]
        found.append((met[0] if met else stack, len(met)))
    return tuple(found)


def _blocks(g: _Geometry, device: DeviceSpec) -> int:
    """Thread blocks: as many for each block of filters."""
    return g.blocks_n * min(device.sm_count // g.blocks_n, g.tiles)


def _parts(t: _Tile, g: _Geometry) -> int:
    """Entries of the ring that a tile takes."""
    return g.chunks if t.streamed else 1


def _full_barriers(t: _Tile, g: _Geometry) -> int:
    """On which consumers wait for copies: one of each belongs to one slab, and to one consumer."""
    return math.lcm(t.stages, t.consumers * _parts(t, g)) * g.slabs


def _smem_bytes(t: _Tile, g: _Geometry, p: ConvProblem) -> int:
    rest = 8 * (_full_barriers(t, g) + t.stages + 1 + t.consumers) + collected_bytes(t.consumers, t.cta_n, p)
    if t.streamed:
        return t.stages * (g.plane_bytes + -(-g.weight_bytes // g.chunks // 1024) * 1024) + rest
    return -(-g.weight_bytes // 1024) * 1024 + t.stages * g.chunks * g.plane_bytes + rest


def _consumer_registers(t: _Tile) -> int:
    """Registers of a consumer's thread when the producer warpgroup keeps 24 (PTX ISA, setmaxnreg: multiples of 8)."""
    return min(240, ((t.consumers + 1) * launched_registers(t.consumers) - 24) // t.consumers // 8 * 8)


def _activation_map(t: _Tile, g: _Geometry, p: ConvProblem) -> TensorMap:
    e = p.dtype.bytes
    column, row, image = p.C * e, p.W * p.C * e, p.H * p.W * p.C * e
    fast_stride, slow_stride = (row, column) if t.orient else (column, row)
    fast, slow, elements = g.fast, g.slow, t.chunk_bytes // e
    step = t.stack * slow.stride if t.slabs else 1
    lines = (g.slab_lines - 1) * step + 1
    if fast.stride == 1:
        return TensorMap(
            operand="activation",
            element_bytes=e,
            extents=(p.C, fast.size, slow.size, p.N),
            strides=(fast_stride, slow_stride, image),
            box=(elements, g.pitch, lines, 1),
            swizzle=t.chunk_bytes,
            steps=(1, 1, step, 1) if t.slabs else None,
        )
    if g.paired:
        return TensorMap(
            operand="activation",
            element_bytes=e,
            extents=(2 * p.C, fast.size // 2, slow.size, p.N),
            strides=(2 * fast_stride, slow_stride, image),
            box=(2 * elements, g.pitch, lines, 1),
            swizzle=2 * t.chunk_bytes,
            steps=(1, 1, step, 1) if t.slabs else None,
        )
    return TensorMap(
        operand="activation",
        element_bytes=e,
        extents=(p.C, fast.size // 2, 2, slow.size, p.N),
        strides=(2 * fast_stride, fast_stride, slow_stride, image),
        box=(elements, g.pitch, 2, lines, 1),
        swizzle=t.chunk_bytes,
        steps=(1, 1, 1, step, 1) if t.slabs else None,
    )
