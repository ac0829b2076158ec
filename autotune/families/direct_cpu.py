"""Family direct_cpu: direct convolution in float32 NHWC on a CPU's vector units, kernels/direct_cpu.c."""

from __future__ import annotations

from autotune.device import DeviceSpec
from autotune.families.family import Family, Knob, Launch, Source
from autotune.problem import SCALES, ConvProblem, DType, Epilogue, Layout
from autotune.trial import Config

_STAGED_LIMIT = 8 << 20  # bytes of staged input a thread: beyond it a task has left every private cache


class DirectCpu(Family):
    """Register tiles of ``pixels`` outputs of a row by ``k_vectors`` vectors of ``lanes`` filters.

    Each launch packs the filter into the workspace. In a depthwise layer (one filter a channel) lanes are channels.
    A pointwise layer without stride and padding is one row of N * H * W pixels, of which a task takes ``rows`` * Q.
    """

    name = "direct_cpu"
    kind = "cpu"
    knobs = (
        Knob(
            name="pixels",
            candidates=(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 28),
            meaning="outputs of a row in a register tile",
        ),
        Knob(name="k_vectors", candidates=(1, 2, 3, 4), meaning="vectors of filters in a register tile"),
        Knob(name="lanes", candidates=(4, 8, 16), meaning="float32 elements of a vector"),
        Knob(name="c_block", candidates=(0, 64, 256), meaning="channels summed before the output is stored; 0: all"),
        Knob(
            name="rows", candidates=(1, 2, 4, 8, 16), meaning="output rows of a task, the whole image if it has fewer"
        ),
        Knob(name="k_tiles", candidates=(0, 1, 2, 4), meaning="register tiles of filters of a task; 0: all"),
    )

    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        if problem.dtype is not DType.F32:
            return f"direct_cpu computes f32 (--dtype f32), not {problem.dtype}"
        if problem.layout is not Layout.NHWC:
            return f"direct_cpu computes nhwc (--layout nhwc), not {problem.layout}"
        if problem.out_dtype is not DType.F32:
            return f"direct_cpu stores f32, not {problem.out_dtype}"
        return None

    def illegal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        pixels, k_vectors, lanes, c_block, rows, k_tiles = (value for _, value in config.knobs)
        registers = 32 if device.vector_bytes == 64 or device.arch.startswith("aarch64") else 16
        # compilers hold the pixels that depthwise taps share in registers too, and without room spill the sums
        held = pixels * k_vectors * (2 if _is_depthwise(problem) else 1)
        if held + k_vectors + 1 > registers:
            return f"a tile of {pixels} pixels by {k_vectors} vectors needs more than {registers} vector registers"
        widest = device.vector_bytes // 4
        if lanes > widest:
            return f"a vector of this CPU has {widest} lanes, not {lanes}"
        filters = _group_k(problem)
        if lanes < widest and _round_up(filters, lanes) >= _round_up(filters, 2 * lanes):
            return f"{lanes} lanes pad {filters} filters no less than {2 * lanes} do"
        if (k_vectors - 1) * lanes >= filters:
            return f"{filters} filters of a group fill fewer than {k_vectors} vectors of {lanes}"
        if pixels > _row_outputs(problem):
            return f"a row has {_row_outputs(problem)} outputs, fewer than {pixels}"
        if c_block and c_block >= problem.C // problem.groups:
            return f"a group has {problem.C // problem.groups} channels: one block of {c_block} is all of them"
        if rows > 1 and _same_tasks(problem, pixels, rows):
            return f"{rows} rows make the same tasks as {rows // 2}"
        if k_tiles >= max(2, _k_groups(problem) * _tiles(problem, k_vectors * lanes)):
            return f"{k_tiles} tiles of filters are all of them"
        if rows > 1 and _staged_bytes(problem, rows) > _STAGED_LIMIT:
            return f"{rows} rows stage {_staged_bytes(problem, rows)} bytes a thread, more than {_STAGED_LIMIT}"
        return None

    def source(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Source:
        batch, height, width = problem.N, problem.P, problem.Q
        values = {name: getattr(problem, name) for name in ("C", "K", "R", "S", "groups")}
        if _is_flat(problem):
            width = batch * height * width
            values |= {"N": 1, "H": 1, "W": width, "P": 1, "Q": width}
        else:
            values |= {"N": batch, "H": problem.H, "W": problem.W, "P": height, "Q": width}
        values |= dict(zip(("stride_h", "stride_w"), problem.stride, strict=True))
        values |= {"padding_top": problem.padding[0], "padding_left": problem.padding[2]}
        values |= dict(zip(("dilation_h", "dilation_w"), problem.dilation, strict=True))
        values |= dict(config.knobs)
        values |= _epilogue(problem.epilogue)
        values |= {"threads": device.sm_count, "row_pixels": _task_outputs(problem, config["pixels"], config["rows"])}
        defines = "".join(f"#define {name} {value}\n" for name, value in values.items())
        return Source(language="c", stem="direct_cpu", text=f'{defines}#include "direct_cpu.c"\n', entry="direct_cpu")

    def launch(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Launch:
        staged = _staged_bytes(problem, config["rows"]) * device.sm_count
        return Launch(
            grid=1,
            block=1,
            workspace_bytes=_packed_bytes(config, problem) + staged,
            arguments=("activation", "filter", "output", "workspace", *problem.epilogue.operands),
        )

    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """Slots of the tiles, staging, and what a core reads again from outside its own caches."""
        _, k_vectors, lanes, _, rows, k_tiles = (value for _, value in config.knobs)
        cores = device.sm_count
        tiles = _k_groups(problem) * _tiles(problem, k_vectors * lanes)
        k_tasks = -(-tiles // k_tiles) if k_tiles else 1
        row_tasks, task_rows, task_bytes = _row_tasks(config, problem)
        tasks = max(1, row_tasks * k_tasks)
        # seconds of one vector multiply-add of one core, and of a byte that comes from outside its caches
        slot_s = device.vector_bytes / 2 / device.rate(DType.F32) * cores
        seconds = row_tasks * task_rows * _row_slots(config, problem) * slot_s
        seconds += tasks * _staged_bytes(problem, rows) / _STAGE_BYTES_PER_S
        filter_bytes = _packed_bytes(config, problem)
        if task_bytes > _PRIVATE_BYTES:
            seconds += row_tasks * (tiles - k_tasks) * task_bytes / _FAR_BYTES_PER_S
        if filter_bytes / k_tasks > _PRIVATE_BYTES:
            seconds += row_tasks * filter_bytes / _FAR_BYTES_PER_S
        seconds *= -(-tasks // cores) / tasks
        return 1e6 * seconds + _TASK_US * tasks / cores


# Fitted on AMD Zen 5 (AVX-512, one core, 28 layers): the config predicted to be the best is within 5 % of the best of
# 70 random ones as a geometric mean. A slot is half a clock: a core begins two vector multiply-adds a clock.
_LEAST_SLOTS = 8  # between two multiply-adds into one sum: their latency
_LOOP_SLOTS = 4  # to enter the loop over channels once
_TILE_SLOTS = 32  # to begin and end a tile
_PARTIAL_SLOTS = 4  # to store a vector of which not all lanes are filters
_NEAR_BYTES = 32 << 10  # first-level cache
_PRIVATE_BYTES = 1 << 20  # second-level cache
_NEAR_BYTES_PER_SLOT, _FAR_BYTES_PER_SLOT = 20, 8  # of filters from the second level, and from beyond
_STAGE_BYTES_PER_S, _FAR_BYTES_PER_S = 30e9, 60e9  # a core
_TASK_US = 0.3


def _epilogue(e: Epilogue) -> dict[str, object]:
    """What the kernel's text needs to know about the epilogue."""
    operands = e.operands
    return {
        "scale_mode": SCALES.index(e.scale),
        "has_bias": int(e.bias),
        "has_residual": int(e.residual),
        "activated": f"activated_{e.activation}",
        "has_epilogue": int(not e.is_identity),
        "epilogue_parameters": "".join(f", const float *{name}" for name in operands),
        "epilogue_operands": f"{{{', '.join(f'.{name} = {name}' for name in operands) or '0'}}}",
    }


def _row_slots(config: Config, problem: ConvProblem) -> float:
    """Slots of one row of a task over all tiles of filters."""
    pixels, k_vectors, lanes, c_block, rows, _ = (value for _, value in config.knobs)
    whole, rest = divmod(min(_task_outputs(problem, pixels, rows), _row_outputs(problem)), pixels)
    full, tail = divmod(-(-_group_k(problem) // lanes), k_vectors)

    def row(vectors: int) -> float:
        slots = whole * _tile_slots(problem, pixels, vectors, lanes, c_block)
        return slots + (_tile_slots(problem, rest, vectors, lanes, c_block) if rest else 0)

    slots = full * row(k_vectors) + (row(tail) if tail else 0)
    if _group_k(problem) % lanes:
        slots += (whole * pixels + rest) * _PARTIAL_SLOTS
    return _k_groups(problem) * slots


def _tile_slots(problem: ConvProblem, pixels: int, vectors: int, lanes: int, c_block: int) -> float:
    taps, sums = _taps(problem), pixels * vectors
    if _is_depthwise(problem):
        return taps * max(sums + 4 + 1.5 * vectors**2, _LEAST_SLOTS) + _TILE_SLOTS + 2 * sums
    blocks = -(-problem.C // problem.groups // c_block) if c_block else 1
    # a multiply-add, or a load of a pixel or of a vector of filters
    slots: float = max(sums, pixels + vectors, _LEAST_SLOTS)
    tile_bytes = taps * vectors * lanes * 4 / blocks
    if tile_bytes > _NEAR_BYTES:
        rate = _NEAR_BYTES_PER_SLOT if tile_bytes <= _PRIVATE_BYTES else _FAR_BYTES_PER_SLOT
        slots = max(slots, vectors * lanes * 4 / rate)
    folded = c_block == 0 and problem.dilation[1] == 1 and problem.groups == 1
    loops = problem.R * (1 if folded else problem.S) * blocks
    return taps * slots + loops * _LOOP_SLOTS + blocks * (_TILE_SLOTS + (2 if blocks == 1 else 3) * sums)


def _row_tasks(config: Config, problem: ConvProblem) -> tuple[int, int, int]:
    """Tasks along the rows of all images, rows of each, bytes of input that each reads."""
    if _is_flat(problem):
        outputs = _task_outputs(problem, config["pixels"], config["rows"])
        return -(-_row_outputs(problem) // outputs), 1, outputs * problem.C * 4
    rows = min(config["rows"], problem.P)
    read = _staged_bytes(problem, rows) or _input_rows(problem, rows) * problem.W * problem.C * 4
    return problem.N * -(-problem.P // rows), rows, read


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _is_depthwise(problem: ConvProblem) -> bool:
    return problem.groups > 1 and problem.groups == problem.C == problem.K


def _k_groups(problem: ConvProblem) -> int:
    """Groups whose filters are tiled apart."""
    return 1 if _is_depthwise(problem) else problem.groups


def _group_k(problem: ConvProblem) -> int:
    return problem.K // _k_groups(problem)


def _taps(problem: ConvProblem) -> int:
    return problem.R * problem.S * (problem.C // problem.groups)


def _tiles(problem: ConvProblem, tile_k: int) -> int:
    return -(-_group_k(problem) // tile_k)


def _is_flat(problem: ConvProblem) -> bool:
    """Pointwise without stride and padding: the whole batch is one row."""
    return problem.R == problem.S == 1 and problem.stride == (1, 1) and not any(problem.padding)


def _row_outputs(problem: ConvProblem) -> int:
    """Outputs that tiles can follow one another on; 1 for an empty batch, which is legal and launches nothing."""
    return max(1, problem.N * problem.P * problem.Q) if _is_flat(problem) else problem.Q


def _task_outputs(problem: ConvProblem, pixels: int, rows: int) -> int:
    """Outputs of one row that a task computes: all, or of a flat layer as many whole tiles as ``rows`` rows fill."""
    return _round_up(rows * problem.Q, pixels) if _is_flat(problem) else problem.Q


def _same_tasks(problem: ConvProblem, pixels: int, rows: int) -> bool:
    """True when half the rows give the same tasks."""
    if not _is_flat(problem):
        return rows // 2 >= problem.P
    half = _task_outputs(problem, pixels, rows // 2)
    return half >= _row_outputs(problem) or half == _task_outputs(problem, pixels, rows)


def _packed_bytes(config: Config, problem: ConvProblem) -> int:
    """The filter in the workspace, padded to whole vectors."""
    return _k_groups(problem) * _round_up(_group_k(problem), config["lanes"]) * _taps(problem) * 4


def _input_rows(problem: ConvProblem, rows: int) -> int:
    """Input rows from the first to the last that a task reads."""
    return (min(rows, problem.P) - 1) * problem.stride[0] + (problem.R - 1) * problem.dilation[0] + 1


def _staged_bytes(problem: ConvProblem, rows: int) -> int:
    """Padded copies of a task's input rows; 0 where no row reaches beyond the sides of the image."""
    width = (problem.Q - 1) * problem.stride[1] + (problem.S - 1) * problem.dilation[1] + 1
    if problem.padding[2] == 0 and width <= problem.W:
        return 0
    return _input_rows(problem, rows) * width * problem.C * 4
