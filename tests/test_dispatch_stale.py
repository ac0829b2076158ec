"""The dispatcher and rows that cannot be trusted: stale, marked, shipped, or in a database that fails."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_dispatch import LAYER, configs_of, record_of

from autotune import ConvProblem, Dispatcher, Store, cli, reference
from autotune.backends import Comparison
from autotune.backends.cpu import CpuBackend
from autotune.dispatch import Choice, NotTuned
from autotune.store import jsonl, shipped
from autotune.trial import Record, Status, Trial

NEAR = ConvProblem(N=1, C=16, H=12, W=20, K=32, R=3, S=3, padding=1, dtype="f32")
FAR = ConvProblem(N=1, C=16, H=24, W=20, K=16, R=3, S=3, padding=1, dtype="f32")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "tuning.db") as opened:
        yield opened


def stale(record: Record) -> Record:
    return replace(record, provenance=replace(record.provenance, compiler="cc 1"))


def trial_of(record: Record) -> Trial:
    return Trial(
        problem=record.problem,
        device=record.device,
        config=record.config,
        status=Status.CORRECT,
        provenance=record.provenance,
        measurement=record.measurement,
    )


def quietly(store: Store, problem: ConvProblem = LAYER) -> Choice:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotTuned)
        return Dispatcher(store, device="cpu").select(problem)


def convolve(dispatcher: Dispatcher) -> None:
    """Run LAYER once, and find the output right."""
    rng = np.random.default_rng(4)
    x = rng.standard_normal(LAYER.activation_shape, dtype=np.float32)
    w = rng.standard_normal(LAYER.filter_shape, dtype=np.float32)
    y = dispatcher.conv2d(x, w, padding=1)
    assert reference.compare(LAYER, y, reference.conv2d(LAYER, x, w))[0] == 0


@contextmanager
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[ConvProblem]:
    """The layers of which a kernel was compared with the reference, in order."""
    seen: list[ConvProblem] = []
    compare = CpuBackend.compare

    def spy(self: CpuBackend, problem: ConvProblem, output: object, expected: object) -> Comparison:
        seen.append(problem)
        return compare(self, problem, output, expected)

    monkeypatch.setattr(CpuBackend, "compare", spy)
    return seen


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """So many of the next comparisons find 7 elements wrong: the one number in the list."""
    left = [0]
    compare = CpuBackend.compare

    def find(self: CpuBackend, problem: ConvProblem, output: object, expected: object) -> Comparison:
        if left[0]:
            left[0] -= 1
            return Comparison(mismatches=7, worst=0.5)
        return compare(self, problem, output, expected)

    monkeypatch.setattr(CpuBackend, "compare", find)
    return left


# Ranking


def test_a_stale_record_of_the_layer_serves_and_says_so(store: Store) -> None:
    config = configs_of(LAYER)[7]
    store.replace(stale(record_of(LAYER, config, 12.5)))
    with no_warning():
        choice = Dispatcher(store, device="cpu").select(LAYER)
    assert (choice.match, choice.config, choice.time_us, choice.verified) == ("exact", config, 12.5, False)
    assert choice.stale.startswith("the compiler was cc 1, now ")
    assert choice.why == f"tuned on 2026-01-02; stale: {choice.stale}"


def test_a_fresh_layer_nearby_does_not_beat_the_stale_record_of_the_layer(store: Store) -> None:
    store.replace(stale(record_of(LAYER, configs_of(LAYER)[7])))
    store.replace(record_of(NEAR, configs_of(NEAR)[3]))
    assert quietly(store).match == "exact"


def test_of_layers_nearby_the_fresh_ones_come_first(store: Store) -> None:
    store.replace(stale(record_of(NEAR, configs_of(NEAR)[3])))
    choice = quietly(store)
    assert (choice.match, choice.config) == ("nearest", configs_of(NEAR)[3])
    assert choice.stale in choice.why
    assert choice.stale.startswith("the compiler was cc 1")
    store.replace(record_of(FAR, configs_of(FAR)[5]))
    choice = quietly(store)
    assert (choice.config, choice.stale) == (configs_of(FAR)[5], "")
    assert str(FAR) in choice.why


def test_select_neither_compiles_nor_opens_the_device(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.replace(stale(record_of(LAYER, configs_of(LAYER)[7])))

    def fail(*_: object) -> None:
        raise AssertionError("select did more than look up")

    monkeypatch.setattr("autotune.dispatch.open_backend", fail)
    monkeypatch.setattr("autotune.backends.cpu.CpuCompiler.compile", fail)
    assert quietly(store).match == "exact"


# Trust


def test_a_stale_record_is_verified_once_before_it_serves(store: Store, proofs: list[ConvProblem]) -> None:
    config = configs_of(LAYER)[7]
    store.replace(stale(record_of(LAYER, config)))
    dispatcher = Dispatcher(store, device="cpu")
    with no_warning():
        dispatcher.select(LAYER)
        assert proofs == []
        dispatcher.warmup([LAYER])
        assert proofs == [LAYER]
        convolve(dispatcher)
        convolve(dispatcher)
        dispatcher.warmup([LAYER])
    choice = dispatcher.select(LAYER)
    assert proofs == [LAYER]
    assert (choice.config, choice.stale, choice.verified) == (config, "", True)
    assert choice.why.endswith("; verified by this process")


def test_the_first_convolution_of_a_cold_layer_verifies_too(store: Store, proofs: list[ConvProblem]) -> None:
    store.replace(stale(record_of(LAYER, configs_of(LAYER)[7])))
    with no_warning():
        convolve(Dispatcher(store, device="cpu"))
    assert proofs == [LAYER]


def test_what_is_fresh_is_not_verified_again(store: Store, proofs: list[ConvProblem]) -> None:
    store.replace(record_of(LAYER, configs_of(LAYER)[7]))
    with no_warning():
        convolve(Dispatcher(store, device="cpu"))
    assert proofs == []


def test_a_stale_layer_nearby_is_verified_on_the_layer_at_hand(store: Store, proofs: list[ConvProblem]) -> None:
    store.replace(stale(record_of(NEAR, configs_of(NEAR)[3])))
    dispatcher = Dispatcher(store, device="cpu")
    with pytest.warns(NotTuned, match="the config of"):
        convolve(dispatcher)
    assert proofs == [LAYER]
    # the config is right, but this layer was never timed
    assert (dispatcher.select(LAYER).stale, dispatcher.select(LAYER).verified) == ("", False)


def test_a_stale_record_that_is_wrong_is_marked_and_the_next_best_trial_serves(store: Store, wrong: list[int]) -> None:
    configs = configs_of(LAYER)
    record = stale(record_of(LAYER, configs[7], 10.0))
    store.replace(record)
    for config, time_us in ((configs[7], 10.0), (configs[3], 12.0), (configs[4], 11.0)):
        store.add_trial(trial_of(stale(record_of(LAYER, config, time_us))))
    dispatcher = Dispatcher(store, device="cpu")
    wrong[0] = 1
    with pytest.warns(NotTuned) as caught:
        convolve(dispatcher)
    assert [str(one.message) for one in caught] == [
        f"{LAYER}: {configs[7]} cannot be used: 7 of {2 * 12 * 20 * 32} elements are wrong, the worst by 0.5"
    ]
    choice = dispatcher.select(LAYER)
    assert (choice.match, choice.config, choice.time_us) == ("exact", configs[4], 11.0)
    assert choice.why.startswith("next best of its trials; stale: the compiler was cc 1")
    with no_warning():
        convolve(dispatcher)
    assert store.best(LAYER, dispatcher.device) == replace(record, verified=False)
    assert len(store.trials(LAYER, dispatcher.device)) == 3
    # another process does not try it again
    with no_warning():
        convolve(Dispatcher(store, device="cpu"))
    choice = quietly(store)
    assert choice.config == configs[4]
    assert f"its record, {configs[7]}, is marked as not verified" in choice.why
    # until it is found right where it is measured
    store.replace(record_of(LAYER, configs[7], 10.0))
    assert quietly(store).config == configs[7]


def test_when_every_stale_row_is_wrong_the_default_serves(store: Store, wrong: list[int]) -> None:
    store.replace(stale(record_of(LAYER, configs_of(LAYER)[7])))
    store.replace(stale(record_of(NEAR, configs_of(NEAR)[3])))
    dispatcher = Dispatcher(store, device="cpu")
    wrong[0] = 2
    with pytest.warns(NotTuned, match="elements are wrong") as caught:
        convolve(dispatcher)
    assert len(caught) == 2
    assert dispatcher.select(LAYER).match == "default"
    # the other layer's record was right on its own layer, for all that is known
    near = store.best(NEAR, dispatcher.device)
    assert near is not None
    assert near.verified


def test_a_read_only_database_is_not_marked_and_serves_on(
    store: Store, wrong: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = stale(record_of(LAYER, configs_of(LAYER)[7]))
    store.replace(record)
    monkeypatch.setattr(store, "_why_read_only", "read-only")
    dispatcher = Dispatcher(store, device="cpu")
    wrong[0] = 1
    with pytest.warns(NotTuned, match="elements are wrong"):
        convolve(dispatcher)
    assert store.best(LAYER, dispatcher.device) == record
    with no_warning():
        convolve(dispatcher)


def test_without_memory_to_verify_the_next_best_serves(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.replace(stale(record_of(LAYER, configs_of(LAYER)[7])))

    def none(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(CpuBackend, "reference", none)
    dispatcher = Dispatcher(store, device="cpu")
    with pytest.warns(NotTuned, match="cannot be used: there is too little memory to verify it"):
        convolve(dispatcher)
    assert dispatcher.select(LAYER).match == "default"


# Shipped tables


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Ship these records of this machine's CPU."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(shipped, "tables", lambda: folder)

    def write(*records: Record) -> None:
        (folder / shipped.file_name(records[0].device.name)).write_text(jsonl.text(records))

    return write


def test_a_shipped_record_serves_unless_the_database_has_one(store: Store, ship: Callable[..., None]) -> None:
    configs = configs_of(LAYER)
    ship(record_of(LAYER, configs[7], 5.0))
    with no_warning():
        choice = Dispatcher(store, device="cpu").select(LAYER)
    assert (choice.match, choice.config, choice.time_us, choice.verified) == ("exact", configs[7], 5.0, True)
    assert choice.why == "tuned on 2026-01-02 in the shipped table"
    near = quietly(store, NEAR)
    assert (near.match, near.config) == ("nearest", configs[7])
    assert near.why == f"the config of {LAYER} in the shipped table, distance 0.69"
    store.replace(record_of(LAYER, configs[2], 50.0))
    assert quietly(store).config == configs[2]
    assert "shipped" not in quietly(store).why


def test_query_says_that_a_record_was_shipped(
    store: Store, ship: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ship(record_of(LAYER, configs_of(LAYER)[7], 5.0))
    arguments = ["query", "--device", "cpu", "--layer", str(LAYER), "--exact", "--db", str(tmp_path / "tuning.db")]
    assert cli.run([*arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["match"], told["time_us"], told["why"]) == ("exact", 5.0, "tuned on 2026-01-02 in the shipped table")
    assert cli.run(["export", "--db", str(tmp_path / "tuning.db")]) == 0
    assert capsys.readouterr().out == ""


def test_a_stale_shipped_record_that_is_wrong_is_hidden(
    store: Store, ship: Callable[..., None], wrong: list[int]
) -> None:
    ship(stale(record_of(LAYER, configs_of(LAYER)[7])))
    wrong[0] = 1
    with pytest.warns(NotTuned, match="elements are wrong"):
        convolve(Dispatcher(store, device="cpu"))
    with pytest.warns(NotTuned, match="default"):
        convolve(Dispatcher(store, device="cpu"))


def test_a_record_of_another_driver_is_stale(store: Store, proofs: list[ConvProblem]) -> None:
    record = record_of(LAYER, configs_of(LAYER)[7])
    store.replace(replace(record, provenance=replace(record.provenance, driver="Linux 1")))
    dispatcher = Dispatcher(store, device="cpu")
    choice = dispatcher.select(LAYER)
    assert choice.stale == f"the driver was Linux 1, now {record.provenance.driver}"
    convolve(dispatcher)
    assert proofs == [LAYER]
    assert dispatcher.select(LAYER).verified


# Databases that fail


def closed(store: Store, _: Path) -> None:
    store.close()


def forget(store: Store) -> None:
    """Leave nothing of the rows in memory or in the write-ahead log, from which they would still be read."""
    with store._engine.connect() as connection:
        connection.exec_driver_sql("COMMIT")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
    store._engine.dispose()


def overwritten(store: Store, path: Path) -> None:
    forget(store)
    path.write_bytes(b"nonsense" * 1000)


def truncated(store: Store, path: Path) -> None:
    forget(store)
    with path.open("r+b") as file:
        file.truncate(5000)


def removed_tables(store: Store, path: Path) -> None:
    with Store(path) as other, other._transaction(writes=True) as connection:
        connection.exec_driver_sql("DROP TABLE record")


@pytest.mark.parametrize("fault", [closed, overwritten, truncated, removed_tables])
def test_whatever_happens_to_the_database_defaults_serve_with_one_warning(
    store: Store, tmp_path: Path, fault: Callable[[Store, Path], None]
) -> None:
    store.replace(record_of(LAYER, configs_of(LAYER)[7]))
    dispatcher = Dispatcher(store, device="cpu")
    fault(store, tmp_path / "tuning.db")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        convolve(dispatcher)
        for problem in (NEAR, FAR, LAYER):
            assert dispatcher.select(problem).match == "default"
    failed = [str(one.message) for one in caught if "cannot be read" in str(one.message)]
    assert len(failed) == 1
    assert failed[0].startswith(f"the database cannot be read, and is not asked again: {tmp_path}/tuning.db: ")
    assert "\n" not in failed[0]


@pytest.mark.parametrize("fault", ["knobs = '[1]'", "family = CAST(x'ff41' AS TEXT)", "time_us = 'a'"])
def test_a_row_that_cannot_be_read_costs_its_own_layer_only(store: Store, fault: str) -> None:
    config = next(c for c in configs_of(LAYER) if c in configs_of(NEAR) and c in configs_of(FAR))
    for problem in (LAYER, NEAR):
        store.replace(record_of(problem, config))
    with store._transaction(writes=True) as connection:
        connection.exec_driver_sql("PRAGMA ignore_check_constraints = ON")
        connection.exec_driver_sql(f"UPDATE record SET {fault} WHERE id = 1")
    dispatcher = Dispatcher(store, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        served = [dispatcher.select(problem) for problem in (LAYER, FAR)]
        convolve(dispatcher)
    failed = [one for one in caught if "cannot be read" in str(one.message)]
    assert [str(one.message).count(": record 1 cannot be read: ") for one in failed] == [1]
    assert [one.filename for one in caught] == [__file__] * 3
    assert [(choice.match, str(NEAR) in choice.why) for choice in served] == [("nearest", True)] * 2
    with no_warning():
        assert dispatcher.select(NEAR).match == "exact"


def test_a_device_that_cannot_be_read_is_warned_of_once(store: Store, ship: Callable[..., None]) -> None:
    ship(record_of(FAR, configs_of(FAR)[3]))
    store.replace(record_of(LAYER, configs_of(LAYER)[7]))
    with store._transaction(writes=True) as connection:
        connection.exec_driver_sql("UPDATE device SET spec = '[1]'")
    dispatcher = Dispatcher(store, device="cpu")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [dispatcher.select(problem).match for problem in (LAYER, FAR, NEAR)] == ["nearest", "exact", "nearest"]
    assert sum(": device 1 cannot be read: " in str(one.message) for one in caught) == 1


def test_a_mark_holds_whatever_else_cannot_be_read(store: Store, ship: Callable[..., None]) -> None:
    marked = record_of(LAYER, configs_of(LAYER)[7])
    ship(marked)
    store.replace(record_of(NEAR, configs_of(NEAR)[7]))
    store.distrust(marked)
    with store._transaction(writes=True) as connection:
        connection.exec_driver_sql("UPDATE record SET knobs = '[1]' WHERE id = 1")
    choice = quietly(store)
    assert choice.match == "default"
    assert choice.config != marked.config


def test_a_database_is_opened_where_there_is_one(store: Store, tmp_path: Path) -> None:
    store.replace(record_of(LAYER, configs_of(LAYER)[7]))
    with no_warning():
        assert Dispatcher(tmp_path / "tuning.db", device="cpu").select(LAYER).match == "exact"


@pytest.mark.parametrize(
    ("content", "reason"), [(None, "there is no database"), (b"nonsense" * 1000, "not an SQLite database")]
)
def test_a_database_that_cannot_be_opened_is_done_without(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "tuning.db"
    if content is not None:
        path.write_bytes(content)
    with pytest.warns(NotTuned, match=rf"^the database cannot be opened: .*tuning\.db: {reason}$") as caught:
        dispatcher = Dispatcher(str(path), device="cpu")
    assert [warning.filename for warning in caught] == [__file__]
    with pytest.warns(NotTuned, match="default"):
        convolve(dispatcher)
    assert (path.read_bytes() if path.exists() else None) == content


def test_a_removed_file_is_served_from_while_it_is_open(store: Store, tmp_path: Path) -> None:
    config = configs_of(LAYER)[7]
    store.replace(record_of(LAYER, config))
    dispatcher = Dispatcher(store, device="cpu")
    for path in tmp_path.glob("tuning.db*"):
        path.unlink()
    assert dispatcher.select(LAYER).match in ("exact", "default")
    convolve(dispatcher)


def test_shipped_records_serve_when_the_database_fails(store: Store, ship: Callable[..., None]) -> None:
    ship(record_of(LAYER, configs_of(LAYER)[7]))
    dispatcher = Dispatcher(store, device="cpu")
    store.close()
    with pytest.warns(NotTuned, match="cannot be read"):
        choice = dispatcher.select(LAYER)
    assert (choice.match, choice.config) == ("exact", configs_of(LAYER)[7])
    with pytest.warns(NotTuned, match="shipped table, distance"):
        assert dispatcher.select(NEAR).match == "nearest"
