"""Every CUDA family on the host, against the reference: random layers and configs, and every value of every knob."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import pytest
from conftest import EDGE_PROBLEMS
from gpu_models import GPU_MODELS
from host_execution import Case, HostFault, HostMachine
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_cases import CUDA_FAMILIES, FRIENDLY, HOST, SEED, Coverage, cases, cases_with, devices, dtypes

from autotune.device import DeviceSpec
from autotune.families import Family, Launch, Source
from autotune.problem import ConvProblem
from autotune.trial import Config

MODELS = tuple(GPU_MODELS.values())
# of all families together, two cases each
EXAMPLES = 360


@pytest.fixture(scope="module")
def values() -> Counter[tuple[str, str, int]]:
    return Counter()


@pytest.fixture
def coverage(values: Counter[tuple[str, str, int]], request: pytest.FixtureRequest) -> Coverage:
    return Coverage(f"CUDA kernels on the host, seed {SEED} (AUTOTUNE_TEST_SEED)", values, request.node)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> HostMachine:
    return HostMachine(tmp_path_factory.mktemp("host"))


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


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_random_layers_are_right_in_random_configs(family: Family, machine: HostMachine, coverage: Coverage) -> None:
    @seed(SEED)
    @settings(
        max_examples=EXAMPLES // len(CUDA_FAMILIES),
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(cases(family, MODELS, HOST), min_size=2, max_size=2), st.integers(0, 2**31))
    def check(batch: list[Case], number: int) -> None:
        # a pair that was right once is not run again
        check_all(machine, coverage, [case for case in batch if case not in coverage.ran], number)

    check()


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_edge_layers_are_right(family: Family, machine: HostMachine, coverage: Coverage) -> None:
    rng = random.Random(SEED)
    spec = replace(devices(family, MODELS)[-1], sm_count=5)
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
    for _ in range(500):
        missing = coverage.missing(family)
        if not missing:
            return
        check_all(machine, coverage, cases_with(missing, family, MODELS, HOST, rng), SEED)
    pytest.fail(f"no layer tried has a legal config with {missing}")


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


def widens(family: Family) -> bool:
    """Whether the kernel counts beyond 31 bits only where a layer needs it."""
    spec, problem = devices(family, MODELS)[-1], ConvProblem(**FRIENDLY)  # type: ignore[arg-type]
    return "bool wide = 0;" in family.source(family.configs(problem, spec)[0], problem, spec).text


@pytest.mark.parametrize("family", [f for f in CUDA_FAMILIES if widens(f)], ids=lambda family: family.name)
def test_offsets_beyond_31_bits_are_right(family: Family, machine: HostMachine) -> None:
    rng = random.Random(SEED)
    spec = devices(family, MODELS)[-1]
    chosen = []
    for layer in ("plain-3x3", "stride-and-dilation", "grouped", "c21-k13", "deep"):
        problem = EDGE_PROBLEMS("f16")[layer]
        if family.unsupported(problem, spec) is None:
            chosen += [Case(family, config, problem, spec) for config in rng.sample(family.configs(problem, spec), 3)]
    assert len(chosen) >= 6
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for _ in pool.map(lambda case: machine.check(replace(case, family=Wide(family)), SEED), chosen):  # type: ignore[arg-type]
            pass
