"""The benchmark's suites, rivals, rows, table and chart; cuDNN itself needs a device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from store_samples import GPU, layer, record

from autotune import Epilogue, Store, backends, bench, reference
from autotune.backends import ConstraintsError, Kernel, NoDevice, Operands, open_backend
from autotune.backends.cudnn import Cudnn
from autotune.bench import comparison
from autotune.bench.rivals import FAIR_TRIES, FINALISTS, contest, cudnn
from autotune.families import Unsupported
from autotune.measure.failures import WrongOutput
from autotune.measure.harness import Harness
from autotune.problem import ConvProblem, DType, Layout
from autotune.store import jsonl, shipped

ROOT = Path(__file__).parent.parent
SUITE = ROOT / "scripts" / "layers.json"
LAYERS = bench.layers_of(SUITE, DType.S8, Epilogue.parse("scale_channel+bias+relu"))
SMALL = ConvProblem(N=2, C=3, H=6, W=5, K=4, R=3, S=2, padding=1, dtype="f32", epilogue=Epilogue.parse("bias+residual"))
ROW = bench.Row(
    layer="one",
    dtype="s8",
    epilogue="scale_channel+bias+relu",
    problem=str(LAYERS[0].problem),
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
    date="2026-11-30",
    command="scripts/bench --dtype s8",
)


def test_every_layer_of_the_suite_gets_the_epilogue() -> None:
    assert len(LAYERS) >= 20
    # a scaled s8 layer stores s8
    assert {(str(x.problem.epilogue), x.problem.out_dtype) for x in LAYERS} == {("scale_channel+bias+relu", DType.S8)}
    assert {str(x.problem.epilogue) for x in bench.layers_of(SUITE, DType.F16)} == {"identity"}


def test_the_dense_layers_of_the_suite() -> None:
    others = {layer.name for layer in LAYERS if not bench.is_dense(layer.problem)}
    assert others == {"rn50_conv1", "yolo_stem", "resnext_g32", "mbv2_dw3", "convnext_dw7"}


def test_cutlass_is_known_for_the_epilogue_that_was_measured() -> None:
    ratios = {layer.name: layer.cutlass_per_cudnn for layer in LAYERS}
    assert ratios["seed_k16"] == pytest.approx(29.6 / 34.0)
    # cuDNN alone was measured on these
    assert ratios["unet_out_k2"] is None
    for dtype, epilogue in ((DType.F16, "scale_channel+bias+relu"), (DType.S8, "bias+relu"), (DType.S8, "identity")):
        layers = bench.layers_of(SUITE, dtype, Epilogue.parse(epilogue))
        assert {layer.cutlass_per_cudnn for layer in layers} == {None}


def test_a_file_that_is_no_suite_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "suite.json"
    path.write_text('{"layers": [{"name": "one"}]}')
    with pytest.raises(ValueError, match="is not a suite of layers") as caught:
        bench.layers_of(path, DType.F16)
    assert "\n" not in str(caught.value)


# Rivals


class NumPyRival:
    """Plans that compute the layer with NumPy in a layout, each after what ``plans`` does to the output."""

    def __init__(self, problem: ConvProblem, layout: Layout, plans: list[Callable[[Any], None]]) -> None:
        self.name, self.layout, self._plans = f"NumPy {layout}", layout, plans
        self._problem = replace(problem, layout=layout)

    def __len__(self) -> int:
        return len(self._plans)

    def kernel(self, index: int) -> Kernel:
        spoil = self._plans[index]

        def run(operands: Operands) -> None:
            arrays = {
                name: getattr(operands, name).view(np.float32).reshape(self._problem.operand(name)[0])
                for name in self._problem.operands
            }
            output = operands.output.view(np.float32).reshape(self._problem.output_shape)
            output[...] = reference.conv2d(self._problem, **arrays).value
            spoil(output)

        return run


def right(_: Any) -> None:
    return


def transposes(output: Any) -> None:
    output[...] = output.transpose(0, 2, 3, 1).reshape(output.shape)


def refuses(_: Any) -> None:
    raise ConstraintsError("no engine\nand a stack of frames")


@pytest.fixture
def harness() -> Harness:
    return Harness(open_backend(backends.find("cpu")), SMALL, seed=3)


def test_a_kernel_of_another_layout_gets_the_same_values_and_is_verified(harness: Harness) -> None:
    rival = NumPyRival(SMALL, Layout.NCHW, [right, transposes])
    loaded = harness.foreign(rival.kernel(0), Layout.NCHW)
    harness.verify(loaded)
    assert len({operands.activation.ctypes.data for operands in loaded.operands}) == harness.sets
    ours = harness.foreign(NumPyRival(SMALL, Layout.NHWC, [right]).kernel(0)).operands[0]
    for name in ("activation", "filter", "residual"):
        held, wanted = (getattr(x, name).view(np.float32) for x in (loaded.operands[0], ours))
        shape, _ = replace(SMALL, layout=Layout.NCHW).operand(name)
        assert np.array_equal(held.reshape(shape).transpose(0, 2, 3, 1).ravel(), wanted)
    with pytest.raises(WrongOutput, match="elements are wrong"):
        harness.verify(harness.foreign(rival.kernel(1), Layout.NCHW))


def test_a_kernel_of_another_layout_must_leave_its_inputs_alone(harness: Harness) -> None:
    honest = NumPyRival(SMALL, Layout.NCHW, [right]).kernel(0)

    def writes(operands: Operands) -> None:
        honest(operands)
        operands.filter[0] ^= 1

    with pytest.raises(WrongOutput, match="wrote into the filter"):
        harness.verify(harness.foreign(writes, Layout.NCHW))


def test_plans_that_fail_are_counted_and_end_nothing(harness: Harness) -> None:
    def absent() -> NumPyRival:
        raise NoDevice("it is not installed")

    nhwc = NumPyRival(SMALL, Layout.NHWC, [refuses, right, right])
    nchw = NumPyRival(SMALL, Layout.NCHW, [transposes, refuses, refuses])
    found = contest(harness, SMALL, 60, [absent, lambda: nhwc, lambda: nchw])
    assert [plan.rival for plan in found.finalists] == ["NumPy nhwc", "NumPy nhwc"]
    assert (found.timed, found.left) == (2, 0)
    assert found.skipped == {
        "it is not installed": 1,
        "NumPy nhwc: no engine": 1,
        "NumPy nchw: wrong output": 1,
        "NumPy nchw: no engine": 2,
    }


def test_the_fastest_plans_and_each_rivals_best_are_timed_again(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    # first times of NHWC and NCHW in turn: the latter is never fast enough, and left once that is plain
    times = [us for i in range(40) for us in ((20.0 - i / 10, 90.0 - i) if i < FAIR_TRIES else (20.0 - i / 10,))]
    clock = iter(times)
    monkeypatch.setattr(harness, "verify", lambda _: SimpleNamespace(median_us=next(clock)))
    rivals = [NumPyRival(SMALL, layout, [right] * 12) for layout in (Layout.NHWC, Layout.NCHW)]
    found = contest(harness, SMALL, 60, [lambda: rivals[0], lambda: rivals[1]])
    assert [plan.first_us for plan in found.finalists if plan.rival == "NumPy nhwc"] == [
        pytest.approx(20 - i / 10) for i in range(11, 11 - FINALISTS, -1)
    ]
    assert [plan.first_us for plan in found.finalists if plan.rival == "NumPy nchw"] == [90.0 - (FAIR_TRIES - 1)]
    assert (found.timed, found.left) == (12 + FAIR_TRIES, 12 - FAIR_TRIES)


def test_a_rival_is_not_left_for_plans_that_fail(harness: Harness) -> None:
    nhwc = NumPyRival(SMALL, Layout.NHWC, [refuses] * FAIR_TRIES + [right])
    nchw = NumPyRival(SMALL, Layout.NCHW, [right])
    found = contest(harness, SMALL, 60, [lambda: nhwc, lambda: nchw])
    assert (found.timed, found.left, found.skipped.total()) == (2, 0, FAIR_TRIES)


def test_without_time_each_rival_has_its_first_plan_tried(harness: Harness) -> None:
    rivals = [NumPyRival(SMALL, layout, [right] * 3) for layout in (Layout.NHWC, Layout.NCHW)]
    found = contest(harness, SMALL, 0, [lambda: rivals[0], lambda: rivals[1]])
    assert {plan.rival for plan in found.finalists} == {"NumPy nhwc", "NumPy nchw"}
    assert (found.timed, found.left) == (2, 4)


def fake_frontend(plans: list[str]) -> tuple[ModuleType, dict[str, Any]]:
    """What of cuDNN's frontend is called, recording strides and a plan's pointers; a plan ``bad`` fails."""
    strides: dict[str, Any] = {}

    class Tensor:
        set_output = set_data_type = set_dim = lambda self, _: self

        def set_stride(self, stride: list[int]) -> None:
            strides["output"] = stride

        def get_uid(self) -> int:
            return id(self)

    class Graph:
        def __init__(self, **_: object) -> None: ...

        validate = build_operation_graph = create_execution_plans = lambda *_: None
        get_plan_name_at_index = staticmethod(plans.__getitem__)
        get_execution_plan_count = staticmethod(lambda: len(plans))

        def tensor(self, name: str, stride: list[int], **_: object) -> Tensor:
            strides[name] = stride
            return Tensor()

        conv_fprop = add = mul = relu = lambda *_, **__: Tensor()

        def build_plan_at_index(self, index: int) -> None:
            if plans[index] == "bad":
                raise RuntimeError("not supported\non this card")

        get_workspace_size_plan_at_index = staticmethod(lambda _: 0)

        def execute_plan_at_index(self, pointers: dict[int, int], *_: object, **__: object) -> None:
            strides["pointers"] = sorted(pointers.values())

    frontend = ModuleType("cudnn")
    names = ("HALF", "BFLOAT16", "FLOAT", "INT8", "INT32")
    frontend.__dict__.update(
        data_type=SimpleNamespace(**dict.fromkeys(names)),
        heur_mode=SimpleNamespace(A=0, B=1, FALLBACK=2),
        backend_version_string=lambda: "9.19.0",
        create_handle=lambda: 1,
        set_stream=lambda **_: None,
        cudnnGraphNotSupportedError=type("cudnnGraphNotSupportedError", (Exception,), {}),
        pygraph=Graph,
    )
    return frontend, strides


def test_cudnn_plans_are_distinct_and_know_their_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, strides = fake_frontend(["eng0", "bad", "eng0", "eng1"])
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    rival = Cudnn(replace(SMALL, layout=Layout.NCHW))
    assert (rival.name, rival.layout, len(rival)) == ("cuDNN 9.19.0 NCHW", Layout.NCHW, 3)
    assert strides == {
        "x": [90, 30, 5, 1],
        "w": [18, 6, 2, 1],
        "bias": [4, 1, 4, 4],
        "residual": [144, 36, 6, 1],
        "output": [144, 36, 6, 1],
    }
    with pytest.raises(ConstraintsError, match=r"^not supported$"):
        rival.kernel(1)
    Cudnn(SMALL)
    assert strides["x"] == [90, 1, 15, 3]


def test_a_neutral_bias_is_the_plans_own(monkeypatch: pytest.MonkeyPatch) -> None:
    frontend, strides = fake_frontend(["eng0"])
    cupy = ModuleType("cupy")

    def array(count: int, _: object) -> SimpleNamespace:
        return SimpleNamespace(data=SimpleNamespace(ptr=1000 + count))

    stream = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
    cupy.__dict__.update(zeros=array, empty=array, float32=None, uint8=None, cuda=stream)
    monkeypatch.setitem(sys.modules, "cudnn", frontend)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    identity = replace(SMALL, epilogue=Epilogue())
    rival = Cudnn(identity, neutral_bias=True)
    assert rival.name == "cuDNN 9.19.0 NHWC with a bias of zeros"
    assert strides["bias"] == [4, 1, 4, 4]
    given = {name: array(number, None) for number, name in enumerate(("activation", "filter", "output"))}
    rival.kernel(0)(Operands(**given))
    assert strides["pointers"] == [1000, 1001, 1002, 1004]  # the last one of K elements, made here
    strides.clear()
    Cudnn(identity)
    assert "bias" not in strides
    assert len(cudnn(identity)) == 3  # two layouts, and a neutral bias
    assert len(cudnn(SMALL)) == len(cudnn(replace(identity, dtype=DType.S8))) == 2


# Rows, table and chart


def test_a_table_states_every_command(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    later = replace(ROW, dtype="f16", command="scripts/bench --dtype f16", date="2026-12-02")
    table = bench.Table(device="Some GPU", rows=[ROW, replace(ROW, layer="two"), later])
    table.write(path)
    assert bench.Table.read(path) == table
    data = json.loads(path.read_text())
    assert {name: data[name] for name in ("device", "date", "command")} == {
        "device": "Some GPU",
        "date": "2026-12-02",
        "command": "scripts/bench --dtype s8 && scripts/bench --dtype f16",
    }
    contract = "layer dtype ours_us rival_us rival floor_us family config trials tune_seconds"
    assert all(set(contract.split()) <= set(row) for row in data["rows"])


@pytest.mark.parametrize("text", ["", "[]", '{"device": "x", "rows": [{"layer": "one"}]}'])
def test_a_file_that_is_no_table_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bench.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a benchmark's table") as caught:
        bench.Table.read(path)
    assert "\n" not in str(caught.value)


def test_the_table_has_a_cell_for_every_column() -> None:
    table = bench.markdown([ROW, replace(ROW, rival_us=None, rival="no plan")]).splitlines()
    assert {line.count("|") for line in table[:4]} == {table[0].count("|")}
    assert "| scale_channel+bias+relu | 5.0 | 25.0 | 10.0 | 2.50 |" in table[2]
    assert "| 5.0 | - | 10.0 | - |" in table[3]


def test_the_summary_is_over_the_dense_layers_of_each_dtype_and_epilogue() -> None:
    grouped = next(layer for layer in LAYERS if layer.problem.groups > 1)
    rows = [
        ROW,
        replace(ROW, layer="two", rival_us=9.6, default_us=13.1, compile_s=0.2),
        replace(ROW, layer="no rival", rival_us=None, default_us=10.0),
        replace(ROW, layer="grouped", problem=str(grouped.problem), rival_us=1000.0),
        replace(ROW, dtype="f16", rival_us=12.1),
    ]
    summary = bench.markdown(rows).splitlines()[-3:]
    # the mean of 2.5 and 0.96
    assert summary[1] == "| s8 | scale_channel+bias+relu | 3 | 2 | 1.55 | 1 | 67% | 0.40 |"
    assert summary[2] == "| f16 | scale_channel+bias+relu | 1 | 1 | 1.21 | 0 | 100% | 0.40 |"
    assert summary[1].count("|") == summary[0].count("|")


def test_a_chart_is_the_same_for_the_same_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install '.[bench]'")
    table = bench.Table(device="Some GPU", rows=[ROW, replace(ROW, layer="two", rival_us=None)])
    for name in ("one.svg", "two.svg"):
        bench.draw(table, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    assert ">two</text>" in text
    assert "Some GPU, s8, scale_channel+bias+relu" in text


def test_a_missing_matplotlib_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(bench.NoChart, match=r"pip install 'conv-autotune\[bench\]'") as caught:
        bench.draw(bench.Table(device="Some GPU", rows=[ROW]), tmp_path / "bench.svg")
    assert "\n" not in str(caught.value)


# Runs


def test_a_layer_is_run_once_for_each_epilogue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def compare(layer: bench.Layer, *_: object, **__: object) -> bench.Row:
        if layer.name == "seed_k32":
            raise Unsupported("no kernel")
        ran.append(f"{layer.name} {layer.problem.epilogue}")
        return replace(ROW, layer=layer.name, dtype="f32", epilogue=str(layer.problem.epilogue))

    monkeypatch.setattr(comparison, "compare", compare)
    out = tmp_path / "bench.json"
    failed: list[str] = []
    with Store(tmp_path / "tuning.db") as store:
        for text in ("identity", "bias", "bias", "identity"):
            layers = bench.layers_of(SUITE, DType.F32, Epilogue.parse(text))[:3]
            command = f"scripts/bench --epilogue {text}"
            table = bench.run(
                layers,
                store,
                "cpu",
                trials=1,
                out=out,
                command=command,
                failed=lambda x, e: failed.append(f"{x.name} {e}"),
            )
        assert ran == [f"{name} {text}" for text in ("identity", "bias") for name in ("seed_k16", "seed_k64")]
        assert failed == ["seed_k32 no kernel"] * 4
        assert table == bench.Table.read(out)
        assert {(row.epilogue, row.command) for row in table.rows} == {
            (text, f"scripts/bench --epilogue {text}") for text in ("identity", "bias")
        }
        bench.Table(device="another", rows=[ROW]).write(out)
        with pytest.raises(ValueError, match="is a table of another, and this is"):
            bench.run(layers, store, "cpu", trials=1, out=out, command=command)


def test_each_layer_is_tuned_as_from_an_empty_database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shipped, "tables", lambda: tmp_path)
    (tmp_path / shipped.file_name(GPU.name)).write_text(jsonl.text([record(1.0, 1, problem=layer(0))]))
    mine = record(99.0, 5, problem=layer(1))
    with Store(tmp_path / "tuning.db") as store:
        store.offer(mine)
        assert store.best(layer(0), GPU) == record(1.0, 1, problem=layer(0))
        assert len(list(store.similar(layer(2), GPU))) == 2
    with bench.IsolatedStore(tmp_path / "tuning.db") as store:
        assert store.best(layer(0), GPU) is None
        assert store.best(layer(1), GPU) == mine
        assert list(store.similar(layer(2), GPU, any_epilogue=True)) == []


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "bench"), *arguments], capture_output=True, text=True, check=False
    )


def test_the_script_measures_a_suite_and_draws_it_again(tmp_path: Path) -> None:
    small = {"name": "small", "N": 1, "C": 32, "H": 8, "W": 8, "K": 8, "R": 3, "S": 3}
    small |= {"stride": 1, "padding": [1, 1], "dilation": 1, "groups": 1}
    (tmp_path / "suite.json").write_text(json.dumps({"layers": [small]}))
    out = tmp_path / "new" / "bench.json"
    suite = ("--layers", str(tmp_path / "suite.json"), "--dtype", "f32", "--device", "cpu")
    run = script(*suite, "--trials", "2", "--db", str(tmp_path / "tuning.db"), "--out", str(out))
    assert run.returncode == 0, run.stderr
    (row,) = bench.Table.read(out).rows
    # cuDNN is no rival on the cpu: the reason why is told instead
    assert (row.layer, row.trials, row.rival_us, row.rivals) == ("small", 2, None, {})
    assert row.command.startswith("scripts/bench --layers ")
    table = out.with_suffix(".md").read_text()
    assert run.stdout.endswith(table)
    out.with_suffix(".md").unlink()
    more = small | {"name": "another"}
    (tmp_path / "suite.json").write_text(json.dumps({"layers": [small, more]}))
    late = script(*suite, "--trials", "2", "--db", str(tmp_path / "tuning.db"), "--out", str(out), "--seconds", "0")
    assert (late.returncode, late.stdout) == (0, table)
    assert "bench: time is up: the same command goes on; layers left: 1" in late.stderr
    assert script("--draw", str(out)).stdout == table == out.with_suffix(".md").read_text()


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (("--dtype", "f17"), 2, "unknown dtype 'f17'"),
        (("--epilogue", "gelu"), 2, "unknown activation 'gelu'"),
        (("--family", "igem"), 2, "no family igem"),
        (("--only", "seed_k17"), 1, "has no layer seed_k17"),
        (("--layers", "missing.json"), 1, "missing.json"),
        (("--draw", "missing.json"), 1, "missing.json"),
        (("--device", "gpu"), 1, "unknown device 'gpu'"),
        (("--trials", "0", "--device", "cpu"), 2, "at least 1"),
    ],
)
def test_the_script_refuses_in_one_line(tmp_path: Path, arguments: tuple[str, ...], status: int, reason: str) -> None:
    run = script("--db", str(tmp_path / "tuning.db"), "--out", str(tmp_path / "bench.json"), *arguments)
    assert (run.returncode, run.stdout) == (status, "")
    assert reason in run.stderr.splitlines()[-1]
    assert "Traceback" not in run.stderr
