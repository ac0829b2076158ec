"""Every CUDA family on the host, against the reference: random layers and configs, and every value of every knob."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
from conftest import EDGE_PROBLEMS
from gpu_models import GPU_MODELS
from host_execution import Case, HostFault, HostMachine
from hypothesis import HealthCheck, Phase, assume, given, reject, seed, settings
from hypothesis import strategies as st

from autotune.device import DeviceSpec
from autotune.families import FAMILIES, Family, Launch, Source, family_named
from autotune.problem import ACTIVATIONS, INPUT_DTYPES, SCALES, ConvProblem, DType, Epilogue
from autotune.trial import Config

CUDA_FAMILIES = [family for family in FAMILIES if family.kind == "cuda"]
SEED = int(os.environ.get("AUTOTUNE_TEST_SEED", "20"))
# of all families together, two cases each
EXAMPLES = 360
MULTIPLICATIONS = 4_000_000  # of a case: some 20 ms on the host
# a layer that a family refuses only for its dtype or its device
FRIENDLY = {"N": 1, "C": 64, "H": 8, "W": 8, "K": 64, "R": 3, "S": 3, "padding": 1}


class Coverage:
    """What was run, for the end of pytest's report."""

    def __init__(self) -> None:
        self.values: Counter[tuple[str, str, int]] = Counter()
        self.ran: dict[str, set[Case]] = {family.name: set() for family in CUDA_FAMILIES}

    def note(self, case: Case) -> None:
        self.ran[case.family.name].add(case)
        self.values.update((case.family.name, knob, value) for knob, value in case.config.knobs)

    def missing(self, family: Family) -> list[tuple[str, int]]:
        every = [(knob.name, value) for knob in family.knobs for value in knob.candidates]
        return [(knob, value) for knob, value in every if not self.values[family.name, knob, value]]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"CUDA kernels on the host, seed {SEED} (AUTOTUNE_TEST_SEED)")
        for family in CUDA_FAMILIES:
            ran = self.ran[family.name]
            layers = {case.problem for case in ran}
            arches = sorted({case.spec.arch for case in ran}, key=list(GPU_MODELS).index)
            terminalreporter.write_line(
                f"{family.name}: {len(ran)} configs of {len(layers)} layers on {', '.join(arches) or 'nothing'}; "
                f"{len(self.missing(family))} knob values not run"
            )
            for knob in family.knobs:
                counts = (f"{value}: {self.values[family.name, knob.name, value]}" for value in knob.candidates)
                terminalreporter.write_line(f"  {knob.name}  {', '.join(counts)}")


@pytest.fixture(scope="module")
def coverage(request: pytest.FixtureRequest) -> Coverage:
    found = Coverage()
    request.config.pluginmanager.register(found)
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> HostMachine:
    return HostMachine(tmp_path_factory.mktemp("host"))


def devices(family: Family) -> list[DeviceSpec]:
    """Models that the family runs on, also with few multiprocessors, on which blocks walk over many tiles."""
    models = [spec for spec in GPU_MODELS.values() if dtypes(family, spec)]
    return [replace(spec, sm_count=count) for spec in models for count in (3, spec.sm_count)]


def dtypes(family: Family, spec: DeviceSpec) -> list[DType]:
    layers = {dtype: ConvProblem(**FRIENDLY, dtype=dtype) for dtype in sorted(INPUT_DTYPES)}
    return [dtype for dtype, layer in layers.items() if family.unsupported(layer, spec) is None]


def check_all(machine: HostMachine, coverage: Coverage, cases: Iterable[Case], number: int) -> None:
    """Runs the cases on all cores; the first that is wrong fails the test."""

    def check(case: Case) -> None:
        try:
            machine.check(case, number)
        except HostFault as fault:
            raise AssertionError(f"{case} (seed {number}): {fault}") from None
        coverage.note(case)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(check, cases):
            pass


@st.composite
def problems(draw: st.DrawFn, dtype: DType) -> ConvProblem:
    """Layers of every kind, those that kernels like being the most frequent."""

    def usually(value: int, others: st.SearchStrategy[int]) -> int:
        return draw(st.just(value) | st.just(value) | others)

    groups = usually(1, st.sampled_from((1, 2, 3, 4, 8)))
    unit = draw(st.sampled_from((1, 2, 3, 8, 16, 16, 32, 64)))
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
        "N": draw(st.integers(1, 3)),
        "C": groups * unit * draw(st.integers(1, max(1, 96 // (unit * groups)))),
        "H": draw(st.integers(1, 40)),
        "W": draw(st.integers(1, 40)),
        "K": groups * draw(st.integers(1, 12) | st.sampled_from(range(8, 137, 8)) | st.sampled_from((32, 64, 128))),
        "R": draw(st.integers(1, 5) | st.sampled_from((1, 3, 7, 17))),
        "S": draw(st.integers(1, 5) | st.sampled_from((1, 3, 7, 17))),
        "stride": (usually(1, st.integers(1, 3)), usually(1, st.integers(1, 3))),
        "dilation": (usually(1, st.integers(1, 3)), usually(1, st.integers(1, 3))),
        "padding": draw(st.integers(0, 3) | st.tuples(*[st.integers(0, 4)] * 4)),
        "groups": groups,
        "dtype": dtype,
        "epilogue": epilogue,
    }
    return affordable(shape)


def affordable(shape: dict[str, Any]) -> ConvProblem:
    """The layer, its image cut until the host can compute it; rejected where it has no output."""
    while True:
        try:
            problem = ConvProblem(**shape)
        except ValueError:
            reject()
        if problem.flops <= 2 * MULTIPLICATIONS:
            return problem
        longest = max(("N", "H", "W"), key=lambda name: shape[name])
        if shape[longest] == 1:
            reject()
        shape = shape | {longest: (shape[longest] + 1) // 2}


@st.composite
def cases(draw: st.DrawFn, family: Family) -> Case:
    """A config that has a value of a knob drawn beforehand, if the layer has such: rare values come up too."""
    spec = draw(st.sampled_from(devices(family)))
    problem = draw(problems(draw(st.sampled_from(dtypes(family, spec)))))
    assume(family.unsupported(problem, spec) is None)
    configs = family.configs(problem, spec)
    assume(configs)
    knob = draw(st.sampled_from(family.knobs))
    value = draw(st.sampled_from(knob.candidates))
    having = [config for config in configs if config[knob.name] == value] or configs
    return Case(family, draw(st.sampled_from(having)), problem, spec)


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_random_layers_are_right_in_random_configs(family: Family, machine: HostMachine, coverage: Coverage) -> None:
    @seed(SEED)
    @settings(
        max_examples=EXAMPLES // len(CUDA_FAMILIES),
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases(family), min_size=2, max_size=2), st.integers(0, 2**31))
    def check(batch: list[Case], number: int) -> None:
        check_all(machine, coverage, batch, number)

    check()


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_edge_layers_are_right(family: Family, machine: HostMachine, coverage: Coverage) -> None:
    rng = random.Random(SEED)
    spec = replace(devices(family)[-1], sm_count=5)
    chosen: list[Case] = []
    for dtype in dtypes(family, spec):
        for problem in EDGE_PROBLEMS(dtype).values():
            configs = family.configs(problem, spec)
            if configs:
                chosen += [Case(family, config, problem, spec) for config in {configs[0], rng.choice(configs)}]
    assert len(chosen) >= 10
    check_all(machine, coverage, chosen, SEED)


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_every_value_of_every_knob_is_right(family: Family, machine: HostMachine, coverage: Coverage) -> None:
    """Runs what the tests above have left out: each value in a layer for which it is legal."""
    rng = random.Random(SEED)
    for _ in range(200):
        missing = coverage.missing(family)
        if not missing:
            return
        spec = rng.choice(devices(family))
        problem = large_layer(rng, rng.choice(missing)[1], rng.choice(dtypes(family, spec)))
        configs = family.configs(problem, spec)
        having = [[c for c in configs if c[knob] == value] for knob, value in missing]
        chosen = {rng.choice(some) for some in having if some}
        check_all(machine, coverage, [Case(family, c, problem, spec) for c in sorted(chosen, key=str)], SEED)
    pytest.fail(f"no layer tried has a legal config with {missing}")


def large_layer(rng: random.Random, extent: int, dtype: DType) -> ConvProblem:
    """A layer larger than those above in some extents, perhaps with as many filters or channels as ``extent``."""
    C = rng.choice((8 * rng.randint(1, 32), max(8, extent // 8 * 8)))
    K = rng.choice((8 * rng.randint(1, 40), extent))
    R, S = rng.choice(((1, 1), (3, 3), (1, 3), (3, 1), (5, 5)))
    pixels = 2 * MULTIPLICATIONS // (C * K * R * S)
    H = rng.randint(1, max(1, min(pixels, 40)))
    W = max(1, min(pixels // H, 300))
    return ConvProblem(N=1, C=C, H=H, W=W, K=K, R=R, S=S, padding=(R // 2, S // 2), dtype=dtype)


@dataclass(frozen=True, slots=True)
class Wide:
    """A family whose kernel counts beyond 31 bits even where the layer does not need it."""

    family: Family

    def source(self, config: Config, problem: ConvProblem, spec: DeviceSpec) -> Source:
        source = self.family.source(config, problem, spec)
        assert source.text.count("bool wide = 0;") == 1
        return replace(source, text=source.text.replace("bool wide = 0;", "bool wide = 1;"))

    def launch(self, config: Config, problem: ConvProblem, spec: DeviceSpec) -> Launch:
        return self.family.launch(config, problem, spec)


@pytest.mark.parametrize("name", ["igemm_mma", "halo_mma"])
def test_offsets_beyond_31_bits_are_right(name: str, machine: HostMachine) -> None:
    family = family_named(name)
    assert family is not None
    rng = random.Random(SEED)
    spec = GPU_MODELS["sm_80"]
    chosen = []
    for layer in ("plain-3x3", "stride-and-dilation", "grouped", "c21-k13", "deep"):
        problem = EDGE_PROBLEMS("f16")[layer]
        if family.unsupported(problem, spec) is None:
            chosen += [Case(family, config, problem, spec) for config in rng.sample(family.configs(problem, spec), 3)]
    assert len(chosen) >= 6
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda case: machine.check(replace(case, family=Wide(family)), SEED), chosen):  # type: ignore[arg-type]
            pass
