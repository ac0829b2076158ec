"""Family halo_mma: convolution with few filters with mma.sync from sm_75 on, the input halo staged once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from autotune.device import DeviceSpec
from autotune.families import epilogue, tensor_cores
from autotune.families.family import Family, Knob, Launch, Source, constants
from autotune.problem import ConvProblem
from autotune.trial import Config

_CLOCK_HZ = 1.7e9  # only ratios of predictions matter
_LATENCY_CLOCKS = 1500.0  # of the first halo of a block


class _Tile(NamedTuple):
    """The knobs by name."""

    rows: int
    warps_p: int
    warps_q: int
    cta_n: int
    chunk_bytes: int
    stages: int
    staging: int

    @property
    def threads(self) -> int:
        return 32 * self.warps_p * self.warps_q

    @property
    def tile_p(self) -> int:
        return self.warps_p * self.rows

    @property
    def tile_q(self) -> int:
        return self.warps_q * 16


class HaloMma(Family):
    """Tensor cores of every NVIDIA GPU from sm_75 on layers with few filters; no groups."""

    name = "halo_mma"
    kind = "cuda"
    knobs = (
        Knob(name="rows", candidates=(1, 2, 4, 6, 8), meaning="output rows of a warp, each of 16 pixels"),
        Knob(name="warps_p", candidates=(1, 2, 4), meaning="warps along H"),
        Knob(name="warps_q", candidates=(1, 2, 4), meaning="warps along W"),
        Knob(name="cta_n", candidates=(8, 16, 24, 32, 48, 64), meaning="filters of a thread block"),
        Knob(name="chunk_bytes", candidates=(32, 64, 128), meaning="bytes of channels in shared memory at once"),
        Knob(name="stages", candidates=(1, 2), meaning="chunks in shared memory", pipeline=True),
        Knob(
            name="staging", candidates=(0, 1), meaning="0: to shared memory by registers, 1: by cp.async", pipeline=True
        ),
    )

    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        reason = tensor_cores.unsupported(self.name, problem, device)
        reason = reason or tensor_cores.ungrouped(self.name, problem)
        if reason is None and max(problem.R, problem.S) > 7:
            return f"{self.name} has filters of at most 7 taps an axis"
        return reason

    def illegal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        tile = _Tile(*(value for _, value in config.knobs))
        return self._illegal_tile(tile, problem, device) or self._illegal_pipeline(tile, problem, device)

    def choices(self, problem: ConvProblem, device: DeviceSpec) -> Iterator[tuple[int, ...]]:
        """All combinations, whole groups skipped by the same rules that ``illegal`` states."""
        shape, pipeline = self.knobs[:5], self.knobs[5:]
        for tile in itertools.product(*(knob.candidates for knob in shape)):
            if self._illegal_tile(_Tile(*(*tile, 1, 0)), problem, device) is None:
                yield from ((*tile, *rest) for rest in itertools.product(*(knob.candidates for knob in pipeline)))

    def _illegal_tile(self, t: _Tile, p: ConvProblem, device: DeviceSpec) -> str | None:
        filters = -(-p.K // 8) * 8
        if t.cta_n > 8 and t.cta_n >= filters + 8:
            return f"cta_n={t.cta_n} is more than {p.K} filters need"
        if t.tile_p > 1 and t.tile_p >= 2 * p.P:
            return f"half of a tile of {t.tile_p} rows covers all {p.P}"
        if t.warps_q > 1 and t.tile_q >= 2 * (-(-p.Q // 16) * 16):
            return f"half of a tile of {t.tile_q} columns covers all {p.Q}"
        channel_bytes = p.C * p.dtype.bytes
        if t.chunk_bytes > 32 and t.chunk_bytes >= 2 * channel_bytes:
            return f"half of chunk_bytes={t.chunk_bytes} covers all {channel_bytes} bytes of channels"
        registers = _registers(t, p, device)
        if registers > min(255, 65536 // t.threads // 8 * 8):
            return f"about {registers} registers a thread are too many"
        blocks = _blocks(t, p)
        if blocks >= 2**31:
            return f"{blocks} blocks are more than a grid has"
        return None

    def _illegal_pipeline(self, t: _Tile, p: ConvProblem, device: DeviceSpec) -> str | None:
        if t.staging and device.sm < 80:
            return "cp.async needs sm_80"
        if t.staging and _load_bytes(p) < 4:
            return "cp.async copies at least 4 bytes, and the channels of a pixel do not divide into them"
        if t.stages == 2 and not t.staging:
            return "two stages overlap only by cp.async"
        if t.stages > _chunks(t, p):
            return "one chunk has no second stage"
        smem = _smem_bytes(t, p)
        if smem > device.smem_per_cta:
            return f"{smem} bytes of shared memory are more than {device.smem_per_cta}"
        return None

    def source(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Source:
        p = problem
        # offsets within an image, with what a halo reaches beyond it
        wide = max(p.H * p.W * p.C, p.P * p.Q * p.K, p.K * p.C * p.R * p.S) > tensor_cores.OFFSET_LIMIT
        text = f"""#include "halo_mma.cuh"
{constants("Config", dict(config.knobs))}
{constants("Problem", tensor_cores.members(p) | {"wide": wide})}
using Kernel = HaloMma<Config, Problem>;
extern "C" __global__ void __launch_bounds__(Kernel::threads)
halo_mma(const Kernel::Element* activation, const Kernel::Element* filter,
         Kernel::Output* output{epilogue.parameters(p)}) {{
  extern __shared__ __align__(128) char shared[];
  Kernel::run(activation, filter, output, {epilogue.value(p)}, shared);
}}
"""
        return Source(language="cuda", stem=self.name, text=text, entry=self.name)

    def launch(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Launch:
        t = _Tile(*(value for _, value in config.knobs))
        return Launch(
            grid=_blocks(t, problem),
            block=t.threads,
            smem_bytes=_smem_bytes(t, problem),
            arguments=("activation", "filter", "output", *problem.epilogue.operands),
        )

    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """For the blocks that a multiprocessor holds at once, in waves: the longer of tensor math and shared-memory
        port, a part of the shorter, the loads' issue, and the wait for a block's first halo."""
        p = problem
        t = _Tile(*(value for _, value in config.knobs))
        chunks, steps = _chunks(t, p), t.chunk_bytes / 32
        warps = t.threads // 32
        rate = device.rate(p.dtype) / device.sm_count / _CLOCK_HZ * (0.62 if device.sm >= 90 else 0.95)
        outputs = t.tile_p * t.tile_q * t.cta_n
        math = 2 * outputs * p.R * p.S * (t.chunk_bytes / p.dtype.bytes) / rate * max(1.0, 4 / warps)
        input_rows = (t.rows - 1) * p.stride[0] + (p.R - 1) * p.dilation[0] + 1
        reads = warps * steps * p.S * (p.R * t.cta_n + 16 * min(input_rows, t.rows * p.R)) * 32
        height, width = _halo(t, p)
        writes = (height * width + p.R * p.S * t.cta_n) * t.chunk_bytes
        port = (reads + writes) / 128
        issue = writes / _load_bytes(p) / 32 * (24 if t.staging else 32) / 4
        fill = writes / 40
        busy = max(math, port) + 0.3 * min(math, port) + 0.5 * max(issue, fill)
        registers = 8 * -(-_registers(t, p, device) // 8)
        fitting = device.smem_per_sm // (_smem_bytes(t, p) + 1024)
        resident = min(fitting, 65536 // (registers * t.threads), 2048 // t.threads)
        blocks = _blocks(t, p)
        resident = max(1, min(resident, -(-blocks // device.sm_count)))
        waiting = _LATENCY_CLOCKS * (1 if t.stages == 2 else chunks) + outputs * p.out_dtype.bytes / 24
        per_wave = max(resident * chunks * busy, chunks * busy + waiting)
        waves = blocks / (device.sm_count * resident)
        waves = 1.0 if waves <= 1 else waves + 0.5 * (-(-waves // 1) - waves)
        memory = p.min_bytes / device.bytes_per_s
        compute = waves * per_wave / _CLOCK_HZ
        return 2.5 + 1e6 * (max(compute, memory) + 0.25 * min(compute, memory))


def _chunks(t: _Tile, p: ConvProblem) -> int:
    return -(-p.C * p.dtype.bytes // t.chunk_bytes)


def _blocks(t: _Tile, p: ConvProblem) -> int:
    return p.N * -(-p.P // t.tile_p) * -(-p.Q // t.tile_q) * -(-p.K // t.cta_n)


def _halo(t: _Tile, p: ConvProblem) -> tuple[int, int]:
    """Height and width of a tile's halo in pixels."""
    height = (t.tile_p - 1) * p.stride[0] + (p.R - 1) * p.dilation[0] + 1
    return height, (t.tile_q - 1) * p.stride[1] + (p.S - 1) * p.dilation[1] + 1


def _smem_bytes(t: _Tile, p: ConvProblem) -> int:
    """Dynamic shared memory: halos and weights of the chunks at hand, or the tile on its way out if that is larger."""
    height, width = _halo(t, p)
    stage = (height * (-(-width // 8) * 8) + p.R * p.S * t.cta_n) * t.chunk_bytes
    return max(t.stages * stage, t.tile_p * t.tile_q * (t.cta_n * p.out_dtype.bytes + 16))


def _registers(t: _Tile, p: ConvProblem, device: DeviceSpec) -> int:
    """Registers of a thread that does not spill: accumulators, the weights of the taps that share an input row, and the
    rest, fitted to 250 compilations by NVRTC 13."""
    taps = min(p.R, (t.rows - 1) * p.stride[0] // p.dilation[0] + 1)
    return t.rows * t.cta_n // 2 + taps * t.cta_n // 4 + (48 if device.sm >= 80 else 64)


def _load_bytes(p: ConvProblem) -> int:
    return tensor_cores.vector_bytes(p.C * p.dtype.bytes)
