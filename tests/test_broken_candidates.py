"""A bad candidate never ends a search: each is recorded with its status, and the winner is right."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken_families import FAULTS, Faulty, FaultyCpu, FaultyCuda, let_the_compiler_go, make_the_compiler_hang

from autotune.backends import find
from autotune.backends.cache import directory
from autotune.measure import Limits, Workbench
from autotune.problem import ConvProblem
from autotune.search import NoValidConfig, tune
from autotune.store import Store
from autotune.trial import Config, Status

# short, but not so short that a slow machine's right candidate misses them
LIMITS = Limits(compile_s=6.0, run_s=4.0, run_rooflines=0.0)
# the name of a device and the family that is broken on it
VARIANTS = [
    pytest.param("cpu", FaultyCpu(), id="cpu"),
    pytest.param("cuda", FaultyCuda(), id="cuda", marks=pytest.mark.gpu),
]


def layer(family: Faulty) -> ConvProblem:
    return ConvProblem(N=2, C=4, H=12, W=12, K=8, R=3, S=3, dtype=family.dialect.dtype)


def faulty(fault: int, effort: int = 1) -> Config:
    return Config.of("faulty", {"fault": fault, "effort": effort})


def hanging_compilers() -> list[str]:
    """Command lines of the compilers that are at work for a test here."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        # it may have ended meanwhile
        with contextlib.suppress(OSError):
            found.append(path.read_bytes().decode(errors="replace"))
    return [line for line in found if str(directory()) in line and "faulty-" in line]


@pytest.fixture(autouse=True)
def hanging_include() -> Iterator[None]:
    make_the_compiler_hang()
    yield
    let_the_compiler_go()


@pytest.mark.parametrize(("device", "family"), VARIANTS)
def test_every_fault_has_its_status_and_the_right_config_wins(device: str, family: Faulty, tmp_path: Path) -> None:
    problem = layer(family)
    with Store(tmp_path / "tuning.db") as store:
        result = tune(problem, store=store, device=device, trials=100, families=[family], limits=LIMITS)
        assert result.measured == len(FAULTS) + 1
        found = {trial.config: trial for trial in result.trials}
        assert {config: trial.status for config, trial in found.items()} == {
            **{faulty(index): fault.status for index, fault in enumerate(FAULTS)},
            faulty(0, 60): Status.CORRECT,
        }
        for index, fault in enumerate(FAULTS):
            assert fault.detail in found[faulty(index)].detail
            assert bool(found[faulty(index)].detail) == (fault.status is not Status.CORRECT)
        assert result.best.config == faulty(0)
        assert store.best(problem, result.best.device) == result.best
        assert tune(problem, store=store, device=device, trials=100, families=[family]).measured == 0
    assert hanging_compilers() == []


@pytest.mark.parametrize(("device", "family"), VARIANTS)
def test_a_right_candidate_after_each_faulty_one_is_right(device: str, family: Faulty) -> None:
    with Workbench(find(device), layer(family), [family], seed=1, limits=LIMITS) as bench:
        for index, fault in enumerate(FAULTS):
            if fault.status in (Status.CORRECT, Status.COMPILE):
                continue
            for config, status in ((faulty(index), fault.status), (faulty(0), Status.CORRECT)):
                bench.submit(config)
                trial = bench.next()
                assert trial is not None
                assert (trial.config, trial.status) == (config, status), trial.detail
        assert bench.next() is None


@pytest.mark.parametrize(("device", "family"), VARIANTS)
def test_a_finalist_that_fails_is_told_from_the_others(device: str, family: Faulty) -> None:
    crash = next(index for index, fault in enumerate(FAULTS) if fault.name == "reads_address_0")
    broken = next(index for index, fault in enumerate(FAULTS) if fault.name == "does_not_compile")
    configs = [faulty(crash), faulty(0), faulty(broken), faulty(0, 60)]
    with Workbench(find(device), layer(family), [family], seed=1, limits=LIMITS) as bench:
        trials = bench.retime(configs)
        assert [t.config for t in trials] == configs
        assert [t.status for t in trials] == [Status.RUNTIME, Status.CORRECT, Status.COMPILE, Status.CORRECT]
        trials = bench.retime([faulty(0, 60), faulty(0)])
        assert [(t.config, t.status) for t in trials] == [
            (faulty(0, 60), Status.CORRECT),
            (faulty(0), Status.CORRECT),
        ]


@pytest.mark.parametrize(("device", "family"), VARIANTS)
def test_only_broken_candidates_leave_no_record(device: str, family: Faulty, tmp_path: Path) -> None:
    class OnlyBroken(type(family)):  # type: ignore[misc]
        def illegal(self, config: Config, *_: object) -> str | None:
            return None if config["effort"] == 1 and config["fault"] in (1, 2, 7) else "not now"

    problem = layer(family)
    with Store(tmp_path / "tuning.db") as store:
        with pytest.raises(NoValidConfig, match=r"^no correct config for .*: 2 correctness, 1 runtime \(first: .*\)$"):
            tune(problem, store=store, device=device, trials=100, families=[OnlyBroken()], limits=LIMITS)
        spec = find(device).spec
        assert spec is not None
        assert len(store.trials(problem, spec)) == 3
        assert store.best(problem, spec) is None
