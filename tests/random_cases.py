"""Random layers and legal configs of every CUDA family, for the suites on host and GPU, and what those have covered."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from host_execution import Case
from hypothesis import assume, reject
from hypothesis import strategies as st

from autotune.device import DeviceSpec
from autotune.families import FAMILIES, Family
from autotune.problem import ACTIVATIONS, INPUT_DTYPES, SCALES, ConvProblem, DType, Epilogue

CUDA_FAMILIES = [family for family in FAMILIES if family.kind == "cuda"]
SEED = int(os.environ.get("AUTOTUNE_TEST_SEED", "20"))
# a layer that a family refuses only for its dtype or its device
FRIENDLY = {"N": 1, "C": 64, "H": 8, "W": 8, "K": 64, "R": 3, "S": 3, "padding": 1}
_PROPERTY = "kernel coverage"


@dataclass(frozen=True, slots=True)
class Sizes:
    """The largest layers to draw. extent: of an image's axes. multiplications: of a layer."""

    batch: int
    channels: int
    extent: int
    filters: int
    multiplications: int


HOST = Sizes(batch=3, channels=96, extent=40, filters=136, multiplications=4_000_000)  # some 20 ms
GPU = Sizes(batch=8, channels=512, extent=160, filters=512, multiplications=400_000_000)


class Coverage:
    """What a test runs, and the knob values that it and the tests before it have run.

    title: of the suite. values: shared by the tests of a module. item: the test, whose report carries the rows to the
    end of pytest's, from another process too.
    """

    def __init__(self, title: str, values: Counter[tuple[str, str, int]], item: pytest.Item) -> None:
        self.ran: set[Case] = set()
        self._values = values
        self._rows: list[list[Any]] = []
        item.user_properties.append((_PROPERTY, [title, self._rows]))

    def note(self, case: Case) -> None:
        self.ran.add(case)
        self._rows.append([case.family.name, list(case.config.knobs), str(case.problem), case.spec.arch])
        self._values.update((case.family.name, knob, value) for knob, value in case.config.knobs)

    def missing(self, family: Family) -> list[tuple[str, int]]:
        every = [(knob.name, value) for knob in family.knobs for value in knob.candidates]
        return [(knob, value) for knob, value in every if not self._values[family.name, knob, value]]


def report(reporter: pytest.TerminalReporter) -> None:
    """Print what the tests that ran have covered."""
    suites: dict[str, list[list[Any]]] = {}
    for reports in reporter.stats.values():
        for one in reports:
            for name, value in getattr(one, "user_properties", ()) if getattr(one, "when", "") == "call" else ():
                if name == _PROPERTY:
                    suites.setdefault(value[0], []).extend(value[1])
    for title, rows in suites.items():
        reporter.section(title)
        for family in CUDA_FAMILIES:
            _report_family(reporter, family, [row[1:] for row in rows if row[0] == family.name])


def _report_family(reporter: pytest.TerminalReporter, family: Family, rows: list[list[Any]]) -> None:
    if not rows:
        return
    pairs = {(str(knobs), problem, arch) for knobs, problem, arch in rows}
    arches = sorted({arch for _, _, arch in pairs}, key=lambda arch: (len(arch), arch))
    counts = Counter((knob, value) for knobs, _, _ in rows for knob, value in knobs)
    lines, missing = [], 0
    for knob in family.knobs:
        lines.append(f"  {knob.name}  {', '.join(f'{value}: {counts[knob.name, value]}' for value in knob.candidates)}")
        missing += sum(not counts[knob.name, value] for value in knob.candidates)
    reporter.write_line(
        f"{family.name}: {len(pairs)} pairs of config and layer, {len({problem for _, problem, _ in pairs})} layers, "
        f"on {', '.join(arches)}; {missing} knob values not run"
    )
    for line in lines:
        reporter.write_line(line)


def devices(family: Family, models: Sequence[DeviceSpec]) -> list[DeviceSpec]:
    """Models that the family runs on, also with few multiprocessors, on which blocks walk over many tiles."""
    usable = [spec for spec in models if dtypes(family, spec)]
    return [replace(spec, sm_count=count) for spec in usable for count in (3, spec.sm_count)]


def dtypes(family: Family, spec: DeviceSpec) -> list[DType]:
    layers = {dtype: ConvProblem(**FRIENDLY, dtype=dtype) for dtype in sorted(INPUT_DTYPES)}  # type: ignore[arg-type]
    return [dtype for dtype, layer in layers.items() if family.unsupported(layer, spec) is None]


@st.composite
def problems(draw: st.DrawFn, dtype: DType, sizes: Sizes) -> ConvProblem:
    """Layers of every kind, those that kernels like being the most frequent."""

    def usually(value: int, others: st.SearchStrategy[int]) -> int:
        return draw(st.just(value) | st.just(value) | others)

    groups = usually(1, st.sampled_from((1, 2, 3, 4, 8)))
    unit = draw(st.sampled_from((1, 2, 3, 8, 16, 16, 32, 64)))
    filters = st.integers(1, 12) | st.sampled_from(range(8, sizes.filters + 1, 8)) | st.sampled_from((32, 64, 128))
    filters |= st.integers(64, sizes.filters)
    epilogue = Epilogue()
    if draw(st.booleans()):
        outs = (DType.S8, DType.S32, DType.F32, DType.F16) if dtype is DType.S8 else (dtype, DType.F32)
        epilogue = Epilogue(
            bias=draw(st.booleans()),
            residual=draw(st.booleans()),
            activation=draw(st.sampled_from(ACTIVATIONS)),
            scale=draw(st.sampled_from(SCALES)),
            out_dtype=draw(st.sampled_from(outs)),
        )
    shape = {
        "N": draw(st.integers(1, sizes.batch)),
        "C": groups * unit * draw(st.integers(1, max(1, sizes.channels // (unit * groups)))),
        "H": draw(st.integers(1, sizes.extent)),
        "W": draw(st.integers(1, sizes.extent)),
        "K": groups * draw(filters),
        "R": draw(st.integers(1, 5) | st.sampled_from((1, 3, 7, 17))),
        "S": draw(st.integers(1, 5) | st.sampled_from((1, 3, 7, 17))),
        "stride": (usually(1, st.integers(1, 3)), usually(1, st.integers(1, 3))),
        "dilation": (usually(1, st.integers(1, 3)), usually(1, st.integers(1, 3))),
        "padding": draw(st.integers(0, 3) | st.tuples(*[st.integers(0, 4)] * 4)),
        "groups": groups,
        "dtype": dtype,
        "epilogue": epilogue,
    }
    # a long axis keeps tiles legal that are long along it
    kept = draw(st.sampled_from(("", "", "H", "W")))
    return affordable(shape, [axis for axis in ("N", "H", "W") if axis != kept], sizes)


def affordable(shape: dict[str, Any], axes: list[str], sizes: Sizes) -> ConvProblem:
    """The layer, these axes cut until it is small enough; rejected where that is impossible or leaves no output."""
    while True:
        try:
            problem = ConvProblem(**shape)
        except ValueError:
            reject()
        if problem.flops <= 2 * sizes.multiplications:
            return problem
        longest = max(axes, key=lambda name: shape[name])
        if shape[longest] == 1:
            reject()
        shape = shape | {longest: (shape[longest] + 1) // 2}


@st.composite
def cases(draw: st.DrawFn, family: Family, models: Sequence[DeviceSpec], sizes: Sizes) -> Case:
    """A config that has a value of a knob drawn beforehand, if the layer has such: rare values come up too."""
    spec = draw(st.sampled_from(devices(family, models)))
    problem = draw(problems(draw(st.sampled_from(dtypes(family, spec))), sizes))
    assume(family.unsupported(problem, spec) is None)
    configs = family.configs(problem, spec)
    assume(configs)
    knob = draw(st.sampled_from(family.knobs))
    value = draw(st.sampled_from(knob.candidates))
    having = [config for config in configs if config[knob.name] == value] or configs
    return Case(family, draw(st.sampled_from(having)), problem, spec)


def cases_with(
    missing: Sequence[tuple[str, int]],
    family: Family,
    models: Sequence[DeviceSpec],
    sizes: Sizes,
    rng: random.Random,
) -> list[Case]:
    """Configs of one larger layer that have such of the missing knob values as are legal there; perhaps none."""
    spec = rng.choice(devices(family, models))
    problem = _large_layer(rng, rng.choice(missing)[1], rng.choice(dtypes(family, spec)), sizes)
    configs = family.configs(problem, spec)
    having = [[config for config in configs if config[knob] == value] for knob, value in missing]
    chosen = {rng.choice(some) for some in having if some}
    return [Case(family, config, problem, spec) for config in sorted(chosen, key=str)]


def _large_layer(rng: random.Random, extent: int, dtype: DType, sizes: Sizes) -> ConvProblem:
    """A layer larger than those of ``problems`` in some extents, perhaps with as many filters or channels as given."""
    C = rng.choice((8 * rng.randint(1, 32), 16 * rng.randint(1, 6), max(8, extent // 8 * 8)))
    K = rng.choice((8 * rng.randint(1, 40), extent, extent))
    R, S = rng.choice(((1, 1), (1, 1), (3, 3), (1, 3), (3, 1), (5, 5)))
    pixels = 2 * sizes.multiplications // (C * K * R * S)
    H = rng.randint(1, max(1, min(pixels, 40)))
    W = max(1, min(pixels // H, 300))
    return ConvProblem(N=1, C=C, H=H, W=W, K=K, R=R, S=S, padding=(R // 2, S // 2), dtype=dtype)
