"""Family igemm_wgmma: implicit-GEMM convolution on sm_90a, operands brought by the tensor copy engine."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

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

_MAX_SMEM = 226 * 1024  # of 227 KiB, one is left for the alignment of what follows static shared memory
_CLOCK_HZ = 1.75e9
# fitted on H200, 2026-11-30
_L2_BYTES = 64.0  # a clock from the second-level cache, for each of all multiprocessors
_COPY_BYTES = 110.0  # a clock into one multiprocessor, where the others leave it room
_CLUSTER_SLOWER = 1.4  # blocks that wait for each other; the traffic that they save is not what bounds them
_ROW_CLOCKS = 2.0  # of a copied row of at most 64 bytes
_LATENCY_CLOCKS = 1500.0  # of a copy, shared by the stages in flight
_REGISTERS = {1: 240, 2: 240, 3: 160}  # of a consumer's thread, by the number of consumers


class _Tile(NamedTuple):
    """The knobs by name."""

    rows: int
    cta_n: int
    chunk_bytes: int
    consumers: int
    pingpong: int
    stages: int
    split_k: int
    cluster: int
    even: int
    resident: int

    @property
    def cta_m(self) -> int:
        return 64 * self.rows * (1 if self.pingpong else self.consumers)


class IgemmWgmma(Family):
    """Hopper's warpgroup products on any dense layer whose channels fill 16 bytes."""

    name = "igemm_wgmma"
    kind = "cuda"
    knobs = (
        Knob(name="rows", candidates=(1, 2), meaning="times 64 output pixels of a warpgroup"),
        Knob(name="cta_n", candidates=tuple(range(8, 257, 8)), meaning="filters of a thread block's tile"),
        Knob(name="chunk_bytes", candidates=(32, 64, 128), meaning="bytes of channels in a slice"),
        Knob(name="consumers", candidates=(1, 2, 3), meaning="warpgroups that multiply"),
        Knob(name="pingpong", candidates=(0, 1), meaning="1: warpgroups take tiles in turn, 0: they share a tile"),
        Knob(name="stages", candidates=(2, 3, 4, 5, 6, 7, 8, 10), meaning="slices in shared memory", pipeline=True),
        Knob(name="split_k", candidates=(1, 2, 3, 4, 6, 8), meaning="items that share one tile's r*s*c"),
        Knob(name="cluster", candidates=(1, 2), meaning="thread blocks that share copies of filters", pipeline=True),
        Knob(name="even", candidates=(0, 1), meaning="1: as small tiles as keep all blocks busy", pipeline=True),
        Knob(name="resident", candidates=(0, 1), meaning="1: all filters stay in shared memory", pipeline=True),
    )

    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        p = problem
        reason = tensor_cores.unsupported(self.name, p, device, hopper=True)
        reason = reason or tensor_cores.ungrouped(self.name, p, chunk_bytes=16)
        if reason is not None:
            return reason
        if max(p.stride) > 8:
            return f"{self.name} has strides of at most 8"
        lower, upper = _corners(p)
        if min(*lower, *upper) < -128 or max(*lower, *upper) > 127:
            return f"padding or filter reach beyond what {self.name} can describe (127 pixels)"
        if max((p.R - 1) * p.dilation[0], (p.S - 1) * p.dilation[1]) > 255:
            return f"{self.name} has filters that reach at most 255 pixels"
        return None

    def illegal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        tile = _Tile(*(value for _, value in config.knobs))
        return self._illegal_tile(tile, problem) or self._illegal_pipeline(tile, problem, device)

    def choices(self, problem: ConvProblem, device: DeviceSpec) -> Iterator[tuple[int, ...]]:
        """All combinations, whole groups skipped by the same rules that ``illegal`` states."""
        shape, pipeline = self.knobs[:5], self.knobs[5:]
        for tile in itertools.product(*(knob.candidates for knob in shape)):
            if self._illegal_tile(_Tile(*(*tile, 2, 1, 1, 0, 0)), problem) is None:
                yield from ((*tile, *rest) for rest in itertools.product(*(knob.candidates for knob in pipeline)))

    def _illegal_tile(self, t: _Tile, p: ConvProblem) -> str | None:
        filters = -(-p.K // 8) * 8
        if t.cta_n > filters or (t.cta_n < filters and t.cta_n not in (32, 64, 96, 128, 192, 256)):
            return f"cta_n={t.cta_n} does not divide {p.K} filters well"
        if not is_legal_n(t.cta_n, p.dtype):
            return f"a product of {t.cta_n} columns does not exist for {p.dtype}"
        if t.pingpong and t.consumers != 2:
            return "two warpgroups play ping-pong"
        # with what belongs to a thread's filters of one block, and of the next one
        held = 2 * lane_filters(t.cta_n, p) * (p.epilogue.bias + (p.epilogue.scale == "channel"))
        if t.rows * t.cta_n // 2 + max(56, held + 24) > _REGISTERS[t.consumers]:
            return f"{t.rows * t.cta_n // 2} accumulators are too many for {t.consumers} consumers"
        # one product's registers must be there from the beginning
        launched = launched_registers(t.consumers)
        if t.cta_n // 2 + 26 > launched:
            return f"a product of {t.cta_n} columns needs more than {launched} registers a thread"
        channel_bytes = p.C * p.dtype.bytes
        if t.chunk_bytes > 32 and t.chunk_bytes >= 2 * channel_bytes:
            return f"half of chunk_bytes={t.chunk_bytes} covers all {channel_bytes} bytes of channels"
        if t.chunk_bytes < 128 and channel_bytes % (2 * t.chunk_bytes) == 0:
            return f"chunk_bytes={t.chunk_bytes} is needlessly small for {channel_bytes} bytes of channels"
        pixels = p.N * p.P * p.Q
        if t.cta_m > 64 and t.cta_m >= 2 * pixels:
            return f"half of a tile covers all {pixels} output pixels"
        return None

    def _illegal_pipeline(self, t: _Tile, p: ConvProblem, device: DeviceSpec) -> str | None:
        if t.cluster > 1 and (device.sm_count < t.cluster or t.cta_m >= p.N * p.P * p.Q):
            return f"there is one block, not a cluster of {t.cluster}"
        slices, tiles = _slices(t, p), _tiles(t, p, device)
        if slices % t.split_k:
            return f"split_k={t.split_k} does not divide {slices} slices"
        if t.split_k > 1 and slices // t.split_k < 2:
            return f"{slices} slices are too few for split_k={t.split_k}"
        if t.split_k > 1 and tiles >= 2 * device.sm_count:
            return f"{tiles} tiles need no split_k on {device.sm_count} multiprocessors"
        if t.cluster > 1 and 2 * t.cta_n < t.cta_m:
            return f"{t.cta_n} filters are not worth sharing by tiles of {t.cta_m} pixels"
        if t.even and not t.cta_m - 64 < _tile_m(t, p, device) < t.cta_m:
            return f"even tiles would have {_tile_m(t, p, device)} of {t.cta_m} pixels"
        if t.resident and (t.split_k > 1 or t.cluster > 1 or t.cta_n < p.K or tiles <= device.sm_count):
            return "filters stay where a block has several tiles of all filters, unsplit and without a cluster"
        if _smem_bytes(t, p) > _MAX_SMEM:
            return f"{_smem_bytes(t, p)} bytes of shared memory are more than {_MAX_SMEM}"
        if tiles * t.split_k >= 2**30:
            return f"{tiles} tiles are too many"
        return None

    def source(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Source:
        p, t = problem, _Tile(*(value for _, value in config.knobs))
        derived = {
            "permuted": is_permuted(p),
            "lane_filters": lane_filters(t.cta_n, p),
            "consumer_registers": _REGISTERS[t.consumers],
            "tile_m": _tile_m(t, p, device),
        }
        cluster = f" __cluster_dims__({t.cluster}, 1, 1)" if t.cluster > 1 else ""
        text = f"""#include "igemm_wgmma.cuh"
{wgmma_text(p.dtype, [t.cta_n])}
{constants("Config", dict(config.knobs))}
{constants("Problem", tensor_cores.members(p) | derived)}
using Kernel = IgemmWgmma<Config, Problem>;
extern "C" __global__ void __launch_bounds__(Kernel::threads, 1){cluster}
igemm_wgmma(const __grid_constant__ ptx::TensorMap activation, const __grid_constant__ ptx::TensorMap filter,
            Kernel::Output* output, void* workspace{epilogue.parameters(p)}) {{
  extern __shared__ __align__(1024) char shared[];
  Kernel::run(&activation, &filter, output, workspace, {epilogue.value(p)}, shared);
}}
"""
        return Source(language="cuda", stem=self.name, text=text, entry=self.name)

    def launch(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Launch:
        t = _Tile(*(value for _, value in config.knobs))
        tiles = _tiles(t, problem, device)
        counters = -(-tiles * (1 if t.pingpong else t.consumers) * 4 // 256) * 256
        partial = tiles * t.split_k * t.cta_m * t.cta_n * 4
        return Launch(
            grid=min(_blocks(t, device), tiles * t.split_k),
            block=t.consumers * 128 + 128,
            smem_bytes=_smem_bytes(t, problem),
            workspace_bytes=counters + partial if t.split_k > 1 else 0,
            arguments=(
                _activation_map(t, problem),
                filter_map(problem, t.cta_n, t.chunk_bytes),
                "output",
                "workspace",
                *problem.epilogue.operands,
            ),
        )

    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """Rounds of items on each multiprocessor: a slice takes the longest of its products (max(n/2, 16 + n/4) clocks
        for 64 rows), and its copies at the second-level cache's rate; stores are hidden only by ping-pong."""
        t = _Tile(*(value for _, value in config.knobs))
        items = _tiles(t, problem, device) * t.split_k
        blocks = min(_blocks(t, device), items)
        product = t.cta_m / 64 * t.chunk_bytes / 32 * max(t.cta_n / 2, 16 + t.cta_n / 4)
        filters = t.cta_n * (blocks / items if t.resident else 1)  # copied with a slice
        read = (t.cta_m + filters / t.cluster) * t.chunk_bytes * blocks / device.sm_count / _L2_BYTES
        copies = (t.cta_m + filters) * max(t.chunk_bytes / _COPY_BYTES, _ROW_CLOCKS if t.chunk_bytes < 128 else 0)
        # few stages do not hide how much the copies' latency varies
        per_slice = max(product, read, copies, _LATENCY_CLOCKS / (t.stages - 0.5)) * (1 + 0.3 / t.stages) + 10
        outputs = _tile_m(t, problem, device) * t.cta_n * problem.out_dtype.bytes
        # a thread stores its adjacent filters at once, or one by one; collected pixels take as long as 12 bytes would
        width = problem.out_dtype.bytes * (lane_filters(t.cta_n, problem) if is_permuted(problem) else 1)
        width = 12 if collected_bytes(t.consumers, t.cta_n, problem) else min(16, width)
        store = outputs / (1.5 * width) + 300 + (outputs / 4 if t.split_k > 1 else 0)
        # reading what belongs to the filters
        store += 500 if problem.epilogue.bias or problem.epilogue.scale == "channel" else 0
        work = _slices(t, problem) // t.split_k * per_slice
        rounds = -(-items // blocks) * 0.7 + items / blocks * 0.3
        per_item = max(work, (work + store) / 2) + 0.2 * store if t.pingpong else work + store
        clocks = rounds * per_item + 1500 + (store if t.pingpong else 0)
        clocks *= 1.0 if t.cluster == 1 else _CLUSTER_SLOWER
        compute, memory = clocks / _CLOCK_HZ, problem.min_bytes / device.bytes_per_s
        return 1.5 + 1e6 * (max(compute, memory) + 0.2 * min(compute, memory)) + 1.0 * (t.split_k > 1)


def _slices(t: _Tile, p: ConvProblem) -> int:
    return p.R * p.S * -(-p.C * p.dtype.bytes // t.chunk_bytes)


def _blocks(t: _Tile, device: DeviceSpec) -> int:
    """Thread blocks that run at once."""
    return device.sm_count // t.cluster * t.cluster


def _tile_m(t: _Tile, p: ConvProblem, device: DeviceSpec) -> int:
    """Pixels from a tile to the next: ``cta_m``, or about as few as leave the blocks as many rounds of tiles."""
    if not t.even:
        return t.cta_m
    pixels, columns = p.N * p.P * p.Q, -(-p.K // t.cta_n) * t.split_k
    blocks = _blocks(t, device)
    rounds = -(-(-(-pixels // (t.cluster * t.cta_m)) * t.cluster * columns) // blocks)
    tiles = max(1, rounds * blocks // columns // t.cluster) * t.cluster
    return min(t.cta_m, -(-pixels // tiles // 8) * 8)


def _tiles(t: _Tile, p: ConvProblem, device: DeviceSpec) -> int:
    return -(-p.N * p.P * p.Q // (t.cluster * _tile_m(t, p, device))) * t.cluster * -(-p.K // t.cta_n)


def _smem_bytes(t: _Tile, p: ConvProblem) -> int:
    filters = -(-t.cta_n * t.chunk_bytes // 1024) * 1024
    operands = t.stages * t.cta_m * t.chunk_bytes + (_slices(t, p) if t.resident else t.stages) * filters
    return operands + collected_bytes(t.consumers, t.cta_n, p) + 8 * (2 * t.stages + t.consumers)


def _corners(p: ConvProblem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Where the first taps of the first and last output pixels lie, from the image's first and last pixel: (w, h)."""
    lower = (-p.padding[2], -p.padding[0])
    upper = (p.padding[3] - (p.S - 1) * p.dilation[1], p.padding[1] - (p.R - 1) * p.dilation[0])
    return lower, upper


def _activation_map(t: _Tile, p: ConvProblem) -> TensorMap:
    e = p.dtype.bytes
    lower, upper = _corners(p)
    return TensorMap(
        operand="activation",
        element_bytes=e,
        extents=(p.C, p.W, p.H, p.N),
        strides=(p.C * e, p.W * p.C * e, p.H * p.W * p.C * e),
        box=(t.chunk_bytes // e, t.cta_m),
        swizzle=t.chunk_bytes,
        corners=(lower, upper),
        steps=(1, p.stride[1], p.stride[0], 1),
    )
