"""Shipped tables: they lie beneath every database, a row of which wins, and are never written."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import CPU, GPU, layer, record, trial

from autotune.device import DeviceSpec
from autotune.families import FAMILIES, supporting
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.resources import folder
from autotune.store import Store, exchange, jsonl, shipped
from autotune.trial import Config, Record

SMALLER = replace(GPU, sm_count=66)
LAYER = {"N": 2, "C": 16, "H": 14, "W": 14, "K": 32, "R": 3, "S": 3, "padding": 1}


def servable(time_us: float, *, problem: ConvProblem | None = None, device: DeviceSpec = GPU) -> Record:
    """A record of a config that is legal for the layer."""
    made = record(time_us, problem=problem, device=device)
    found = supporting(made.problem, device, FAMILIES)[0].default(made.problem, device)
    assert found is not None
    return replace(made, config=found)


@pytest.fixture
def ship(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Ship these records, each in its model's table."""
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(shipped, "tables", lambda: folder)

    def write(*records: Record) -> None:
        for name in {one.device.name for one in records}:
            of_model = [one for one in records if one.device.name == name]
            (folder / shipped.file_name(name)).write_text(jsonl.text(of_model))

    return write


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tuning.db")


def test_the_file_is_named_after_the_model() -> None:
    assert shipped.file_name("NVIDIA H200") == "nvidia_h200.jsonl"
    assert shipped.file_name("NVIDIA GeForce RTX 4090 (Laptop)") == "nvidia_geforce_rtx_4090_laptop.jsonl"


def test_shipped_records_are_seen_beneath_those_of_the_database(ship: Callable[..., None], store: Store) -> None:
    mine = record(99.0, 5, problem=layer(1))
    ship(record(1.0, 1), record(2.0, 2, problem=layer(1)), record(3.0, 3, device=SMALLER), record(4.0, 4, device=CPU))
    store.offer(mine)
    # slower, but measured here
    assert store.best(layer(1), GPU) == mine
    assert store.best(layer(0), GPU) == record(1.0, 1)
    assert store.best(layer(0), SMALLER) == record(3.0, 3, device=SMALLER)
    assert store.best(layer(2), GPU) is None
    assert store.records(GPU) == [record(1.0, 1), mine]
    assert store.records() == [record(4.0, 4, device=CPU), record(1.0, 1), mine, record(3.0, 3, device=SMALLER)]
    assert store.records(shipped=False) == [mine]
    # nothing of it is the database's own
    assert store.trials(layer(0), GPU) == []
    assert exchange.export_rows(store, "jsonl") == jsonl.text([mine])
    assert store.offer(record(5.0, 6))
    assert store.best(layer(0), GPU) == record(5.0, 6)


def test_shipped_layers_are_similar_unless_the_database_has_them(ship: Callable[..., None], store: Store) -> None:
    ship(*(record(1.0, i, problem=layer(i)) for i in range(1, 5)), record(1.0, device=SMALLER, problem=layer(7)))
    store.merge([record(9.0, 9, problem=layer(2)), record(9.0, 9, problem=layer(5))])
    found = [(one.problem, one.time_us) for _, one in store.similar(layer(0), GPU)]
    assert found == [(layer(1), 1.0), (layer(2), 9.0), (layer(3), 1.0), (layer(4), 1.0), (layer(5), 9.0)]
    # imported, a table is found once
    store.merge([record(1.0, i, problem=layer(i)) for i in range(1, 5)])
    assert [one.problem for _, one in store.similar(layer(0), GPU)] == [layer(i) for i in range(1, 6)]
    near = [one.problem for _, one in store.similar(layer(0), GPU, within=1.2)]
    assert near == [layer(1), layer(2)]
    current = {"igemm_mma": ("another", "source")}
    store.replace(replace(record(3.0, problem=layer(5)), provenance=replace(record().provenance, kernel_digest="x")))
    ranked = [one.problem for _, one in store.similar(layer(0), GPU, current=current)]
    assert ranked == [layer(i) for i in range(1, 6)]
    current = {"igemm_mma": ("x", record().provenance.compiler)}
    ranked = [one.problem for _, one in store.similar(layer(0), GPU, current=current)]
    assert ranked == [layer(5), *(layer(i) for i in range(1, 5))]


def test_a_shipped_record_that_does_not_work_is_hidden(ship: Callable[..., None], store: Store) -> None:
    ship(record(1.0, 1))
    found = store.best(layer(), GPU)
    assert found is not None
    assert shipped.is_shipped(found)
    assert store.distrust(found)
    assert store.best(layer(), GPU) == replace(record(1.0, 1), verified=False)
    # and loses to whatever is found correct
    assert store.offer(record(100.0, 2))
    assert store.best(layer(), GPU) == record(100.0, 2)
    assert not store.distrust(found)
    assert store.best(layer(), GPU) == record(100.0, 2)


def test_a_malformed_table_is_warned_of_once_and_ignored(ship: Callable[..., None], store: Store) -> None:
    ship(record(1.0, 1), record(4.0, 4, device=CPU))
    path = shipped.tables() / "nvidia_h200.jsonl"
    path.write_text(path.read_text() + '{"format": 1}\n')
    with pytest.warns(RuntimeWarning, match=r"^a shipped tuning table is ignored: .*nvidia_h200\.jsonl:2: problem is"):
        assert store.best(layer(), GPU) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.best(layer(), GPU) is None
        assert store.records() == [record(4.0, 4, device=CPU)]
        assert list(store.similar(layer(1), GPU)) == []
        store.offer(record(2.0))
        assert store.best(layer(), GPU) == record(2.0)


def test_the_table_of_another_model_is_not_read(ship: Callable[..., None], store: Store) -> None:
    ship(record(4.0, 4, device=CPU))
    (shipped.tables() / "nvidia_h200.jsonl").write_text("nonsense")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert store.best(layer(), CPU) == record(4.0, 4, device=CPU)


def test_a_package_without_tables_ships_none(store: Store) -> None:
    assert not shipped.tables().exists()
    assert store.best(layer(), GPU) is None
    assert store.records() == []


EPILOGUES = (
    ConvProblem(**LAYER, dtype="f16"),
    ConvProblem(**LAYER, dtype="f16", epilogue=Epilogue(bias=True, residual=True, activation="relu")),
    ConvProblem(**LAYER, dtype="f16", epilogue=Epilogue(scale="tensor", out_dtype=DType.F32)),
    ConvProblem(**LAYER, dtype="s8"),
    ConvProblem(**LAYER, dtype="s8", epilogue=Epilogue(scale="channel", bias=True, activation="relu")),
    ConvProblem(**LAYER, dtype="s8", epilogue=Epilogue(scale="tensor", out_dtype=DType.F16)),
)


def test_a_made_table_answers_for_each_dtype_and_epilogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = [servable(1.0 + number, problem=problem) for number, problem in enumerate(EPILOGUES)]
    odd = replace(GPU, name="nvidia-h200")
    with Store(tmp_path / "tuning.db") as tuned:
        tuned.merge([*made, servable(9.0, device=odd), replace(servable(9.0, problem=layer(7)), verified=False)])
    script = Path(__file__).parent.parent / "scripts" / "make-tables"
    command = [sys.executable, script, "--db", tmp_path / "tuning.db", "--out", tmp_path / "made"]
    subprocess.run(command, capture_output=True, check=True)
    monkeypatch.setattr(shipped, "tables", lambda: tmp_path / "made")
    # models whose names differ in punctuation alone share a file
    assert [path.name for path in shipped.tables().iterdir()] == ["nvidia_h200.jsonl"]
    with Store(":memory:") as store:
        assert [store.best(problem, GPU) for problem in EPILOGUES] == made
        assert store.best(layer(), odd) == servable(9.0, device=odd)
        assert store.best(layer(7), GPU) is None
        # only other extents of the same dtype, layout and epilogue are similar
        for problem in EPILOGUES:
            near = [one.problem for _, one in store.similar(replace(problem, N=3), GPU)]
            assert near == [problem]


@pytest.mark.parametrize("path", sorted((folder("db") / "tables").iterdir()), ids=lambda path: path.name)
def test_what_the_package_ships_is_what_the_script_writes(path: Path) -> None:
    records = jsonl.read(path)
    assert path.read_text() == jsonl.text(records)
    assert {shipped.file_name(one.device.name) for one in records} == {path.name}
    assert all(one.verified and one.device.kind == "cuda" for one in records)
    assert len({(one.device.key, one.problem) for one in records}) == len(records) > 0


def test_tables_are_made_from_a_database(tmp_path: Path, store: Store) -> None:
    mine = [servable(1.0), servable(2.0, device=SMALLER)]
    store.merge([*mine, record(3.0, 3, device=CPU), record(4.0, problem=layer(4))])
    store.replace(replace(servable(5.0, problem=layer(5)), verified=False))
    store.replace(replace(servable(6.0, problem=layer(6)), config=Config.of("gone", {"a": 1})))
    store.add_trial(trial())
    store.close()
    script = Path(__file__).parent.parent / "scripts" / "make-tables"
    command = [sys.executable, script, "--db", tmp_path / "tuning.db", "--out", tmp_path / "made"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["nvidia_h200.jsonl"]
    assert jsonl.read(tmp_path / "made" / "nvidia_h200.jsonl") == mine
    assert done.stdout == f"{tmp_path}/made/nvidia_h200.jsonl: 2 records\n"
    left_out = [line.split(": ", 3) for line in done.stderr.splitlines()]
    assert [(where, why.partition(" knobs")[0]) for _, _, where, why in left_out] == [
        (f"{layer()} on {CPU.key}", "the CPUs of those who tune are nobody else's"),
        (f"{layer(4)} on {GPU.key}", "igemm_mma has the"),
        (f"{layer(5)} on {GPU.key}", "not verified"),
        (f"{layer(6)} on {GPU.key}", "no family is gone"),
    ]
    again = (tmp_path / "made" / "nvidia_h200.jsonl").read_bytes()
    subprocess.run([*command, "--device", "NVIDIA H200 x66"], capture_output=True, check=True)
    assert jsonl.read(tmp_path / "made" / "nvidia_h200.jsonl") == mine[1:]
    subprocess.run(command, capture_output=True, check=True)
    assert (tmp_path / "made" / "nvidia_h200.jsonl").read_bytes() == again
    bad = subprocess.run([*command, "--device", "H100"], capture_output=True, text=True, check=False)
    assert bad.returncode == 1
    assert bad.stderr == (
        "make-tables: no device 'H100' in the database: it has 'Example CPU @ 2.50GHz x4', "
        "'NVIDIA H200 x132', 'NVIDIA H200 x66'\n"
    )
