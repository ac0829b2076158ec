"""Stale rows: listed with the reason, renewed in seconds from the best few, and noticed by an ordinary tune."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from replay import PROBLEM, SPEC, Grid, Replay, trial_of

from autotune import cli
from autotune.backends import find
from autotune.backends.backend import Compiler
from autotune.families import Source
from autotune.freshness import Freshness
from autotune.problem import ConvProblem
from autotune.search import NoValidConfig, renew, tune
from autotune.store import SCHEMA_VERSION, Store
from autotune.trial import Config, Record, Status

LAYER = ["--input", "1x8x6x7", "--filters", "8", "--kernel", "3x3", "--padding", "1", "--dtype", "f32"]
LAYER_TEXT = "n1c8h6w7-k8r3s3-stride1x1-pad1.1.1.1-dil1x1-g1-f32-nhwc-identity-f32"


class Sourced(Grid):
    """A grid with a source, whose digest a compiler can tell."""

    def source(self, *_: object) -> Source:
        return Source(language="c", stem="grid", text="", entry="grid")


class Told(Compiler):
    """The compiler that rows of a replay name, or a newer one."""

    def __init__(self, version: str) -> None:
        self.version = version

    def compile(self, source: Source) -> Any:  # noqa: ARG002 - the contract's
        raise AssertionError("a replay compiles nothing")

    def digest(self, source: Source) -> str:  # noqa: ARG002 - the contract's
        return "d"


GRID = Sourced()
GRIDS = (GRID,)
LEGAL = GRID.configs(PROBLEM, SPEC)


def time_us(config: Config) -> float:
    return 10.0 + 3 * LEGAL.index(config)


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    return Replay(monkeypatch, time_us)


@pytest.fixture
def store() -> Iterator[Store]:
    with Store(":memory:") as opened:
        yield opened


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Told:
    """The compiler that is installed; its version can be changed."""
    told = Told("c")
    monkeypatch.setattr("autotune.freshness.compiler_for", lambda _: told)
    return told


def why(record: Record) -> str | None:
    return Freshness(GRIDS).why_stale(record)


# Renewing, on replayed tables


def tuned(store: Store, trials: int) -> tuple[Record, list[Config]]:
    """The record of a search, and the configs that it tried, fastest first."""
    result = tune(PROBLEM, store=store, trials=trials, families=GRIDS)
    return result.best, sorted((trial.config for trial in result.trials), key=time_us)


def test_the_best_four_are_timed_again_and_the_winner_renewed(store: Store, replay: Replay, compiler: Told) -> None:
    before, tried = tuned(store, 12)
    assert before.config == tried[0]
    replay.retimed.clear()
    # the new compiler turns their order around
    replay.final = lambda config: 1000.0 - time_us(config)
    result = renew(before, "the compiler changed", store=store, device="cpu", families=GRIDS)
    assert replay.retimed == [tried[:4]]
    assert result.best.config == tried[3]
    assert result.best.time_us == 1000.0 - time_us(tried[3])
    assert store.best(PROBLEM, SPEC) == result.best
    assert (result.measured, result.renewed, len(result.trials)) == (0, "the compiler changed", 12)
    again = {trial.config: trial.measurement.time_us for trial in result.trials if trial.measurement}
    expected = [1000.0 - time_us(config) for config in tried[:4]] + [time_us(config) for config in tried[4:]]
    assert [again[config] for config in tried] == expected


def test_those_that_fail_now_are_recorded_and_others_move_up(store: Store, replay: Replay, compiler: Told) -> None:
    before, tried = tuned(store, 12)
    replay.final = lambda config: Status.CORRECTNESS if config in tried[:4] else time_us(config)
    result = renew(before, "", store=store, device="cpu", families=GRIDS)
    assert result.best.config == tried[4]
    statuses = {trial.config: trial.status for trial in result.trials}
    assert [statuses[config] for config in tried[:5]] == [Status.CORRECTNESS] * 4 + [Status.CORRECT]


def test_when_nothing_works_any_more_the_record_is_not_verified(store: Store, replay: Replay, compiler: Told) -> None:
    before = tune(PROBLEM, store=store, trials=6, families=GRIDS).best
    replay.final = lambda _: Status.COMPILE
    with pytest.raises(NoValidConfig, match="6 compile"):
        renew(before, "", store=store, device="cpu", families=GRIDS)
    assert store.best(PROBLEM, SPEC) == replace(before, verified=False)


def test_an_imported_record_is_tried_here_first(store: Store, replay: Replay, compiler: Told) -> None:
    imported = Record.of(trial_of(LEGAL[20], 1.0))
    store.merge([imported])
    result = renew(imported, "", store=store, device="cpu", families=GRIDS)
    assert result.best == Record.of(trial_of(LEGAL[20], time_us(LEGAL[20])))
    assert [trial.config for trial in result.trials] == [LEGAL[20]]


def test_the_same_command_again_renews_a_stale_record(store: Store, replay: Replay, compiler: Told) -> None:
    _, tried = tuned(store, 8)
    assert tune(PROBLEM, store=store, trials=8, families=GRIDS).renewed == ""
    assert replay.started == 1
    compiler.version = "c 2"
    replay.retimed.clear()
    again = tune(PROBLEM, store=store, trials=8, families=GRIDS)
    assert again.renewed == "the compiler was c, now c 2"
    assert (again.measured, replay.retimed) == (0, [tried[:4]])
    assert {trial.config for trial in again.trials} == set(tried)


def test_a_record_that_is_not_verified_is_renewed_too(store: Store, replay: Replay, compiler: Told) -> None:
    best = tune(PROBLEM, store=store, trials=8, families=GRIDS).best
    store.distrust(best)
    again = tune(PROBLEM, store=store, trials=8, families=GRIDS)
    assert again.renewed == "it is not verified"
    assert again.best.verified


def test_a_stale_time_does_not_stand_in_the_way_of_a_search(store: Store, replay: Replay, compiler: Told) -> None:
    imported = Record.of(trial_of(LEGAL[-1], 0.5))
    store.merge([imported])
    # out of reach of this search
    space = LEGAL[:-1]
    replay.table = replay.final = lambda config: time_us(config) if config in space else Status.TIMEOUT
    assert tune(PROBLEM, store=store, trials=1, families=GRIDS).best == imported
    compiler.version = "c 2"
    assert why(imported) == "the compiler was c, now c 2"
    result = tune(PROBLEM, store=store, trials=2, families=GRIDS)
    assert result.best.config in space
    assert store.best(PROBLEM, SPEC) == result.best


# The command line, on the cpu


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "tuned.db"
    assert cli.run(["tune", "--device", "cpu", *LAYER, "--trials", "3", "--db", str(path)]) == 0
    return path


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str], database: Path) -> Callable[..., tuple[int, str, str]]:
    """Runs a verb on the database in this process: status, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = cli.run([*arguments, "--db", str(database)])
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def set_everywhere(database: Path, column: str, value: str, tables: tuple[str, ...] = ("trial", "record")) -> None:
    connection = sqlite3.connect(database)
    for table in tables:
        connection.execute(f"UPDATE {table} SET {column} = ?", (value,))
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("kernel_digest", "ab", "the kernel source changed"),
        ("compiler", "cc 1", "the compiler was cc 1, now "),
        ("driver", "Linux 1", "the driver was Linux 1, now Linux "),
    ],
)
def test_stale_rows_are_listed_with_the_reason(
    autotune: Callable[..., tuple[int, str, str]], database: Path, column: str, value: str, reason: str
) -> None:
    status, out, err = autotune("db", "stale")
    assert (status, out) == (0, "")
    assert err.endswith(": 0 of 1 records and 0 of 3 trials are stale\n")
    set_everywhere(database, column, value)
    status, out, err = autotune("db", "stale")
    assert status == 0
    assert LAYER_TEXT in out.splitlines()[1]
    assert reason in out.splitlines()[1]
    trials = out.splitlines()[-1]
    assert "direct_cpu" in trials
    assert f"3 trials  {reason}" in trials
    assert err.endswith(": 1 of 1 records and 3 of 3 trials are stale\n")
    status, out, _ = autotune("db", "stale", "--json")
    listed = json.loads(out)
    assert (listed["records"], listed["trials"], listed["stale_trials"]) == (1, 3, 3)
    assert [one["layer"] for one in listed["stale"]] == [LAYER_TEXT]
    assert listed["stale"][0]["why"].startswith(reason)
    (group,) = listed["trials_by_reason"]
    assert (group["family"], group["trials"]) == ("direct_cpu", 3)
    assert group["why"].startswith(reason)


def test_tune_stale_renews_every_stale_layer(autotune: Callable[..., tuple[int, str, str]], database: Path) -> None:
    set_everywhere(database, "compiler", "cc 1")
    status, out, _ = autotune("tune", "--stale", "--device", "cpu", "--json")
    told = json.loads(out)
    assert status == 0
    assert (told["records"], told["failed"]) == (1, [])
    assert told["renewed"][0]["why"].startswith("renewed: the compiler was cc 1")
    spec = find("cpu").spec
    assert spec is not None
    with Store(database) as store:
        record = store.best(ConvProblem.parse(LAYER_TEXT), spec)
        assert len(store.trials(ConvProblem.parse(LAYER_TEXT), spec)) == 3
    assert record is not None
    assert Freshness().why_stale(record) is None
    assert record.time_us == told["renewed"][0]["time_us"]
    status, out, err = autotune("tune", "--stale", "--device", "cpu")
    assert (status, out) == (0, "")
    assert err.endswith("0 of 1 record is stale: 0 renewed, 0 failed\n")


def test_tune_stale_may_be_told_the_layer(autotune: Callable[..., tuple[int, str, str]], database: Path) -> None:
    set_everywhere(database, "kernel_digest", "ab")
    other = ["--input", "1x8x6x7", "--filters", "4", "--kernel", "3x3", "--dtype", "f32"]
    status, _, err = autotune("tune", "--stale", "--device", "cpu", *other)
    assert (status, err) == (0, "0 of 0 records are stale: 0 renewed, 0 failed\n")
    status, out, _ = autotune("tune", "--stale", "--device", "cpu", *LAYER)
    assert status == 0
    assert LAYER_TEXT in out.splitlines()[1]
    assert "the kernel source changed" in out.splitlines()[1]


def test_what_cannot_be_renewed_is_told(autotune: Callable[..., tuple[int, str, str]], database: Path) -> None:
    set_everywhere(database, "family", "gone")
    status, out, err = autotune("tune", "--stale", "--device", "cpu")
    assert status == 1
    assert f"no correct config for {LAYER_TEXT}" in out
    assert err.endswith("1 of 1 record is stale: 0 renewed, 1 failed\n")
    status, out, _ = autotune("tune", "--stale", "--device", "cpu", "--json")
    assert status == 1
    assert json.loads(out)["failed"][0]["layer"] == LAYER_TEXT


def test_an_ordinary_tune_says_what_it_renewed(autotune: Callable[..., tuple[int, str, str]], database: Path) -> None:
    set_everywhere(database, "kernel_digest", "ab", ("record",))
    status, out, _ = autotune("tune", "--device", "cpu", *LAYER, "--trials", "3")
    assert status == 0
    assert "found in the database, the best few timed again (the kernel source changed)" in out
    assert (
        "found in the database, nothing measured now" in autotune("tune", "--device", "cpu", *LAYER, "--trials", "3")[1]
    )


def test_stale_and_force_exclude_each_other(autotune: Callable[..., tuple[int, str, str]]) -> None:
    status, _, err = autotune("tune", "--stale", "--force", "--device", "cpu")
    assert status == 2
    assert "--force" in err
    assert autotune("tune", "--device", "cpu")[0] == 2


def test_db_upgrade_says_what_it_did(autotune: Callable[..., tuple[int, str, str]], database: Path) -> None:
    status, out, _ = autotune("db", "upgrade")
    assert (status, out) == (0, f"sqlite:///{database}: schema {SCHEMA_VERSION}, nothing to do\n")
    told = json.loads(autotune("db", "upgrade", "--json")[1])
    assert told == {"db": f"sqlite:///{database}", "schema": SCHEMA_VERSION, "upgraded_from": None}
