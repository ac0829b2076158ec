"""On an NVIDIA GPU: tuning, dispatch, graphs, streams and rivals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune import ConvProblem, Dispatcher, Epilogue, Status, Store, reference, tune
from autotune.backends import Backend, find, open_backend
from autotune.bench.rivals import contest
from autotune.dispatch import NotTuned
from autotune.families import IgemmMma
from autotune.measure.harness import Harness
from autotune.problem import DType

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")]

LAYER = ConvProblem(N=2, C=64, H=20, W=24, K=32, R=3, S=3, padding=1)


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend(find("cuda"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "tuning.db") as opened:
        yield opened


def test_tuning_finds_a_verified_winner(store: Store) -> None:
    result = tune(LAYER, store=store, device="cuda", trials=8)
    assert len(result.trials) == 8
    assert all(trial.status is Status.CORRECT for trial in result.trials), [t.detail for t in result.trials]
    assert result.best.verified
    assert result.best.measurement.condition == "cold-graph"
    assert result.best.provenance.clock_mhz
    again = tune(LAYER, store=store, device="cuda", trials=8)
    assert (again.best, again.measured) == (result.best, 0)
    assert Dispatcher(store, device="cuda").select(LAYER).match == "exact"


def operands(problem: ConvProblem, seed: int) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    import cupy

    rng = np.random.default_rng(seed)
    if problem.dtype is DType.S8:
        x = rng.integers(-128, 128, problem.activation_shape, dtype=np.int8)
        w = rng.integers(-128, 128, problem.filter_shape, dtype=np.int8)
    else:
        x = rng.standard_normal(problem.activation_shape).astype(np.float16)
        w = rng.standard_normal(problem.filter_shape).astype(np.float16)
    return cupy.asarray(x), cupy.asarray(w), x, w


@pytest.mark.parametrize(
    ("text", "dtype", "out"),
    [("scale_channel+bias+relu", "s8", "s8"), ("scale_tensor+bias", "s8", "f32"), ("bias+residual+relu", "f16", "f16")],
)
def test_conv2d_applies_the_epilogue(store: Store, text: str, dtype: str, out: str) -> None:
    import cupy

    epilogue = Epilogue.parse(text, DType.of(out))
    problem = ConvProblem(N=2, C=32, H=13, W=15, K=40, R=3, S=3, padding=1, dtype=dtype, epilogue=epilogue)
    x, w, host_x, host_w = operands(problem, 6)
    rng = np.random.default_rng(7)
    given = {}
    for name in epilogue.operands:
        shape, kind = problem.operand(name)
        given[name] = (rng.standard_normal(shape) * (1e-3 if name == "scale" else 9)).astype(reference.STORAGE[kind])
    dispatcher = Dispatcher(store, device="cuda")
    arrays = {name: cupy.asarray(array) for name, array in given.items()}
    call = {"padding": 1, "activation": epilogue.activation, "out_dtype": out}
    y = dispatcher.conv2d(x, w, **arrays, **call)
    expected = reference.conv2d(problem, host_x, host_w, **given)
    assert reference.compare(problem, y.get(), expected)[0] == 0
    if epilogue.scale == "tensor":
        # a number is the same as an array of it, also on another stream
        with cupy.cuda.Stream(non_blocking=True) as stream:
            again = dispatcher.conv2d(x, w, arrays["bias"], scale=float(given["scale"][0]), **call)
            stream.synchronize()
        assert (again == y).all()
    wrong = arrays | {"bias": arrays["bias"].astype("f2")}
    with pytest.raises(ValueError, match="bias has the dtype float16, the layer needs f32"):
        dispatcher.conv2d(x, w, **wrong, **call)


@pytest.mark.parametrize("dtype", ["f16", "s8"])
def test_conv2d_on_the_current_stream(store: Store, dtype: str) -> None:
    import cupy

    problem = ConvProblem(N=2, C=13, H=20, W=24, K=21, R=3, S=3, stride=2, padding=(1, 2), dtype=dtype)
    x, w, host_x, host_w = operands(problem, 1)
    dispatcher = Dispatcher(store, device="cuda")
    expected = reference.conv2d(problem, host_x, host_w)
    with cupy.cuda.Stream(non_blocking=True) as stream:
        y = dispatcher.conv2d(x, w, stride=2, padding=(1, 2))
        stream.synchronize()
    assert reference.compare(problem, y.get(), expected)[0] == 0
    gaps = cupy.zeros((2, 20, 48, 13), x.dtype)
    gaps[:, :, ::2] = x
    out = cupy.empty(problem.output_shape, y.dtype)
    assert dispatcher.conv2d(gaps[:, :, ::2], w, stride=2, padding=(1, 2), out=out) is out
    assert reference.compare(problem, out.get(), expected)[0] == 0
    misaligned = cupy.empty(x.size + 1, x.dtype)[1:].reshape(x.shape)
    misaligned[...] = x
    assert (
        reference.compare(problem, dispatcher.conv2d(misaligned, w, stride=2, padding=(1, 2)).get(), expected)[0] == 0
    )


def test_a_warm_layer_is_captured_in_a_graph(store: Store) -> None:
    import cupy

    x, w, host_x, host_w = operands(LAYER, 2)
    dispatcher = Dispatcher(store, device="cuda")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        dispatcher.warmup([LAYER])
        out = cupy.zeros(LAYER.output_shape, cupy.float16)
        stream.begin_capture()
        dispatcher.conv2d(x, w, padding=1, out=out)
        graph = stream.end_capture()
        stream.synchronize()
        assert not out.any()
        graph.launch(stream)
        stream.synchronize()
    assert reference.compare(LAYER, out.get(), reference.conv2d(LAYER, host_x, host_w))[0] == 0


def test_a_cold_layer_is_refused_during_capture(store: Store) -> None:
    import cupy

    x, w, host_x, host_w = operands(LAYER, 3)
    dispatcher = Dispatcher(store, device="cuda")
    out = cupy.zeros(LAYER.output_shape, cupy.float16)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with pytest.raises(RuntimeError, match="not warm"):
            dispatcher.conv2d(x, w, padding=1, out=out)
        # the capture is still sound
        stream.end_capture()
        dispatcher.conv2d(x, w, padding=1, out=out)
        stream.synchronize()
    assert reference.compare(LAYER, out.get(), reference.conv2d(LAYER, host_x, host_w))[0] == 0


def test_streams_have_workspaces_of_their_own(store: Store, backend: Backend) -> None:
    import cupy

    problem = ConvProblem(N=1, C=256, H=14, W=14, K=64, R=3, S=3, padding=1)
    config = next(c for c in IgemmMma().configs(problem, backend.spec) if c["split_k"] == 8)
    record = tune(problem, store=store, device="cuda", trials=1).best
    store.replace(replace(record, config=config))
    dispatcher = Dispatcher(store, device="cuda")
    assert dispatcher.select(problem).workspace_bytes > 0
    inputs = [operands(problem, seed) for seed in range(4)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in inputs]
    outputs = []
    for _ in range(20):
        outputs = []
        for (x, w, _, _), stream in zip(inputs, streams, strict=True):
            with stream:
                outputs.append(dispatcher.conv2d(x, w, padding=1))
    cupy.cuda.Device().synchronize()
    for y, (_, _, x, w) in zip(outputs, inputs, strict=True):
        assert reference.compare(problem, y.get(), reference.conv2d(problem, x, w))[0] == 0


def test_arrays_that_do_not_belong_are_refused(store: Store) -> None:
    x, w, host_x, _ = operands(LAYER, 4)
    dispatcher = Dispatcher(store, device="cuda")
    with pytest.raises(ValueError, match="must be a CuPy array"):
        dispatcher.conv2d(host_x, w, padding=1)
    with pytest.raises(ValueError, match="dtype"):
        dispatcher.conv2d(x, w.astype("f4"), padding=1)
    with pytest.raises(ValueError, match="--dtype f16"):
        dispatcher.conv2d(x.astype("f4"), w.astype("f4"), padding=1)


def test_an_untuned_layer_warns_once(store: Store) -> None:
    x, w, _, _ = operands(LAYER, 5)
    dispatcher = Dispatcher(store, device="cuda")
    with pytest.warns(NotTuned) as caught:
        dispatcher.conv2d(x, w, padding=1)
    assert len(caught) == 1


@pytest.mark.parametrize("element_bytes", [1, 2, 4])
def test_axes_are_permuted_as_numpy_does(backend: Backend, element_bytes: int) -> None:
    shape, axes = (3, 5, 7, 6), (0, 3, 1, 2)
    held = np.random.default_rng(element_bytes).integers(0, 256, 630 * element_bytes, np.uint8)
    source, target = backend.allocate(held.size), backend.allocate(held.size)
    source.set(held)
    backend.permute(target, source, shape, axes, element_bytes)
    backend.synchronize()
    expected = held.view(f"u{element_bytes}").reshape(shape).transpose(axes)
    assert np.array_equal(target.get(), np.ascontiguousarray(expected).reshape(-1).view(np.uint8))


@pytest.mark.parametrize(
    ("dtype", "epilogue", "layouts"),
    [
        ("f16", "identity", {"NHWC", "NCHW", "zeros"}),
        ("f16", "bias+relu", {"NHWC"}),
        ("s8", "scale_channel+bias+relu", {"NHWC"}),
    ],
)
def test_cudnn_is_a_rival_in_its_layouts(backend: Backend, dtype: str, epilogue: str, layouts: set[str]) -> None:
    pytest.importorskip("cudnn", reason="cuDNN's frontend is missing: pip install nvidia-cudnn-frontend")
    problem = ConvProblem(
        **{"N": 2, "C": 64, "H": 20, "W": 24, "K": 32, "R": 3, "S": 3},
        padding=1,
        dtype=dtype,
        epilogue=Epilogue.parse(epilogue),
    )
    harness = Harness(backend, problem, seed=5)
    found = contest(harness, problem, seconds=20)
    assert layouts <= {plan.rival.split()[-1] for plan in found.finalists}, found.skipped
    timed = harness.interleaved([(plan.loaded, plan.first_us) for plan in found.finalists])
    assert all(samples.median_us > 0 for samples in timed)
