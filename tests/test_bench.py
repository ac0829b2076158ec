"""The benchmark's suites, rows and tables; what it measures needs a device."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from autotune import Epilogue, Store, bench
from autotune.problem import DType

SUITE = Path(__file__).parent.parent / "scripts" / "layers.json"
ROW = bench.Row(
    layer="one",
    dtype="s8",
    epilogue="scale_channel+bias+relu",
    ours_us=10.0,
    default_us=12.0,
    rival_us=25.0,
    rival="cuDNN",
    floor_us=5.0,
    family="igemm_mma",
    config="igemm_mma-x",
    trials=64,
    tune_seconds=4.5,
    compile_s=0.4,
)


def test_every_layer_of_the_suite_gets_the_epilogue() -> None:
    layers = bench.layers_of(SUITE, DType.S8, Epilogue.parse("scale_channel+bias+relu"))
    assert len(layers) >= 20
    # a scaled s8 layer stores s8
    assert {(str(x.problem.epilogue), x.problem.out_dtype) for x in layers} == {("scale_channel+bias+relu", DType.S8)}
    assert {str(x.problem.epilogue) for x in bench.layers_of(SUITE, DType.F16)} == {"identity"}


def test_a_file_that_is_no_suite_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text('{"layers": [{"name": "one"}]}')
    with pytest.raises(ValueError, match="is not a suite of layers") as caught:
        bench.layers_of(path, DType.F16)
    assert "\n" not in str(caught.value)


def test_rows_written_before_there_were_epilogues_are_read(tmp_path: Path) -> None:
    old = asdict(ROW)
    del old["epilogue"]
    path = tmp_path / "bench.json"
    path.write_text(json.dumps({"rows": [old, asdict(ROW)]}))
    assert bench.read(path) == [replace(ROW, epilogue="identity"), ROW]


def test_the_table_has_a_cell_for_every_column() -> None:
    table = bench.markdown([ROW, replace(ROW, rival_us=None)]).splitlines()
    assert {line.count("|") for line in table[:4]} == {table[0].count("|")}
    assert "| scale_channel+bias+relu | 5.0 | 25.0 | 10.0 | 2.50 |" in table[2]
    assert "| 5.0 | - | 10.0 | - |" in table[3]


def test_a_layer_is_run_once_for_each_epilogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def compare(layer: bench.Layer, *_: object, **__: object) -> bench.Row:
        ran.append(f"{layer.name} {layer.problem.epilogue}")
        return replace(ROW, layer=layer.name, dtype="f32", epilogue=str(layer.problem.epilogue))

    monkeypatch.setattr(bench, "compare", compare)
    out = tmp_path / "bench.json"
    with Store(tmp_path / "tuning.db") as store:
        for text in ("identity", "bias", "bias", "identity"):
            layers = bench.layers_of(SUITE, DType.F32, Epilogue.parse(text))[:2]
            rows = bench.run(layers, store, "cpu", trials=1, out=out)
    names = [layer.name for layer in layers]
    assert ran == [f"{name} {text}" for text in ("identity", "bias") for name in names]
    assert rows == bench.read(out)
    assert len(rows) == 4
