"""The dispatcher: which config serves a layer, how the match is reported, and that outputs are right."""

from __future__ import annotations

import os
import threading
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autotune import ConvProblem, Dispatcher, Epilogue, Store, devices, reference
from autotune.backends import CompileError, find
from autotune.dispatch import MAX_DISTANCE, Choice, NotTuned, Unsupported
from autotune.families import family_named
from autotune.freshness import Freshness
from autotune.trial import Config, Measurement, Provenance, Record

LAYER = ConvProblem(N=2, C=16, H=12, W=20, K=32, R=3, S=3, padding=1, dtype="f32")


def record_of(problem: ConvProblem, config: Config, time_us: float = 10.0) -> Record:
    """A record as it would be written now."""
    device = find("cpu")
    spec = device.spec
    assert spec is not None
    digest, compiler = Freshness().current(LAYER, spec)["direct_cpu"]  # type: ignore[index]
    return Record(
        problem=problem,
        device=spec,
        config=config,
        measurement=Measurement(time_us=time_us, spread_us=0.1, samples=5, launches=10, condition="cold-loop"),
        provenance=Provenance(
            kernel_digest=digest,
            compiler=compiler,
            driver=device.driver,
            created_at="2026-01-02T03:04:05+00:00",
        ),
    )


def configs_of(problem: ConvProblem) -> tuple[Config, ...]:
    spec = find("cpu").spec
    family = family_named("direct_cpu")
    assert family is not None
    assert spec is not None
    return family.configs(problem, spec)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "tuning.db")


def chosen(store: Store, problem: ConvProblem) -> Choice:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotTuned)
        return Dispatcher(store, device="cpu").select(problem)


def test_exact_record_is_chosen(store: Store) -> None:
    config = configs_of(LAYER)[7]
    store.replace(record_of(LAYER, config, 12.5))
    choice = chosen(store, LAYER)
    assert (choice.match, choice.config, choice.time_us, choice.verified) == ("exact", config, 12.5, True)
    assert "2026-01-02" in choice.why


def test_a_tuned_layer_does_not_wait_for_the_legal_configs(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configs_of(LAYER)[7]
    store.replace(record_of(LAYER, config))
    dispatcher = Dispatcher(store, device="cpu")

    def fail(*_: object) -> None:
        raise AssertionError("every legal config was listed")

    monkeypatch.setattr(type(family_named("direct_cpu")), "configs", fail)
    assert dispatcher.select(LAYER).config == config


def test_nearest_layer_serves_when_its_config_is_legal_here(store: Store) -> None:
    near, far = (
        ConvProblem(N=1, C=16, H=12, W=20, K=32, R=3, S=3, padding=1, dtype="f32"),
        ConvProblem(N=1, C=8, H=6, W=6, K=32, R=1, S=1, dtype="f32"),
    )
    store.replace(record_of(far, configs_of(far)[0]))
    store.replace(record_of(near, configs_of(near)[3]))
    choice = chosen(store, LAYER)
    assert (choice.match, choice.config) == ("nearest", configs_of(near)[3])
    assert str(near) in choice.why
    assert choice.time_us is None
    assert not choice.verified


def test_illegal_or_unknown_neighbours_are_passed_over(store: Store) -> None:
    near = replace(LAYER, N=1)
    broken = replace(configs_of(near)[0], knobs=(("pixels", 999), *configs_of(near)[0].knobs[1:]))
    store.replace(record_of(near, broken))
    store.replace(record_of(replace(LAYER, N=3), Config.of("a_family_of_the_past", {"x": 1})))
    choice = chosen(store, LAYER)
    assert choice.match == "default"
    assert choice.why == "no config of a tuned layer nearby can run here: direct_cpu's default"


def test_a_layer_of_another_epilogue_layout_or_dtype_is_no_neighbour(store: Store) -> None:
    other = ConvProblem(**_extents(LAYER), padding=1, dtype="f32", epilogue=Epilogue(activation="relu"))
    store.replace(record_of(other, configs_of(LAYER)[0]))
    assert chosen(store, LAYER).match == "default"


def test_beyond_the_distance_a_neighbour_says_nothing(store: Store) -> None:
    factor = int(np.exp(MAX_DISTANCE)) + 2
    far = ConvProblem(N=2, C=16, H=12, W=20 * factor, K=32, R=3, S=3, padding=1, dtype="f32")
    store.replace(record_of(far, configs_of(far)[3]))
    choice = chosen(store, LAYER)
    assert (choice.match, choice.why) == ("default", "no tuned layer is near: direct_cpu's default")


def test_default_is_the_best_prediction_and_warned_of_once(store: Store) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    with pytest.warns(NotTuned, match="direct_cpu's default") as caught:
        choice = dispatcher.select(LAYER)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = dispatcher.select(replace(LAYER))
    assert again is choice
    assert choice.config == configs_of(LAYER)[0]


def test_select_looks_a_layer_up_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    with pytest.warns(NotTuned):
        dispatcher.select(LAYER)

    def fail(*_: object) -> None:
        raise AssertionError("the database was asked again")

    monkeypatch.setattr(Store, "best", fail)
    monkeypatch.setattr(Store, "records", fail)
    assert dispatcher.select(LAYER).match == "default"


def test_a_failing_database_leaves_defaults(store: Store) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    store.close()
    with pytest.warns(NotTuned, match=r"database cannot be read|default"):
        assert dispatcher.select(LAYER).match == "default"


def test_unsupported_layer_is_refused_in_one_line(store: Store) -> None:
    with pytest.raises(Unsupported, match="--dtype f32") as caught:
        Dispatcher(store, device="cpu").select(ConvProblem(**_extents(LAYER), dtype="f16"))
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
@pytest.mark.parametrize("groups", [1, 4])
def test_conv2d_agrees_with_the_reference(store: Store, groups: int) -> None:
    problem = ConvProblem(
        **{"N": 2, "C": 8, "H": 9, "W": 11, "K": 12, "R": 3, "S": 2, "groups": groups, "dtype": "f32"},
        **{"stride": (2, 1), "padding": (0, 2, 3, 1), "dilation": (1, 2)},
    )
    rng = np.random.default_rng(5)
    x = rng.standard_normal(problem.activation_shape, dtype=np.float32)
    w = rng.standard_normal(problem.filter_shape, dtype=np.float32)
    dispatcher = Dispatcher(store, device="cpu")
    y = dispatcher.conv2d(x, w, stride=(2, 1), padding=(0, 2, 3, 1), dilation=[1, 2], groups=groups)
    assert reference.compare(problem, y, reference.conv2d(problem, x, w))[0] == 0
    # a view with gaps is copied, an array given for the output is written
    gappy = np.zeros((2, 9, 11, 16), np.float32)
    gappy[..., ::2] = x
    out = np.full(problem.output_shape, np.nan, np.float32)
    same = dispatcher.conv2d(
        gappy[..., ::2], w, stride=(2, 1), padding=(0, 2, 3, 1), dilation=(1, 2), groups=groups, out=out
    )
    assert same is out
    assert np.array_equal(out, y)


def test_an_output_over_an_operand_is_refused(store: Store) -> None:
    memory = np.ones(2 * 5 * 6 * 4 + 4, np.float32)
    x, out = memory[:240].reshape(2, 5, 6, 4), memory[4:].reshape(2, 5, 6, 4)
    w = np.ones((4, 1, 1, 4), np.float32)
    dispatcher = Dispatcher(store, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotTuned)
        with pytest.raises(ValueError, match=r"^out must not overlap the activation$"):
            dispatcher.conv2d(x, w, out=out)
        with pytest.raises(ValueError, match=r"^out must not overlap the filter$"):
            dispatcher.conv2d(x[:1, :1, :4, :4], w, out=w.reshape(1, 1, 4, 4))
        assert memory.min() == memory.max() == 1
        # neighbours do not overlap, and what is copied for the kernel may be overwritten
        dispatcher.conv2d(memory[:120].reshape(1, 5, 6, 4), w, out=memory[120:240].reshape(1, 5, 6, 4))
        assert memory[:120].max() == 1
        assert memory[120:240].min() == memory[120:240].max() == 4
        dispatcher.conv2d(x[:, :, ::-1], w, out=x)
        assert (x[0].min(), x[1].max()) == (4, 16)


def epilogue_operands(problem: ConvProblem) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(8)
    return {n: rng.standard_normal(problem.operand(n)[0], dtype=np.float32) for n in ("scale", "bias", "residual")}


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
@pytest.mark.parametrize(
    "text", ["bias", "residual", "scale_tensor", "scale_channel", "relu", "scale_channel+bias+residual+relu"]
)
def test_conv2d_applies_the_epilogue(store: Store, text: str) -> None:
    problem = replace(LAYER, epilogue=Epilogue.parse(text))
    rng = np.random.default_rng(9)
    x = rng.standard_normal(problem.activation_shape, dtype=np.float32)
    w = rng.standard_normal(problem.filter_shape, dtype=np.float32)
    given = {name: array for name, array in epilogue_operands(problem).items() if name in problem.operands}
    y = Dispatcher(store, device="cpu").conv2d(x, w, padding=1, activation=problem.epilogue.activation, **given)
    assert reference.compare(problem, y, reference.conv2d(problem, x, w, **given))[0] == 0
    assert reference.compare(LAYER, y, reference.conv2d(LAYER, x, w))[0] > 0


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
def test_a_scale_is_a_number_or_an_array(store: Store) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    rng = np.random.default_rng(10)
    x = rng.standard_normal((1, 5, 6, 8), dtype=np.float32)
    w = rng.standard_normal((12, 3, 3, 8), dtype=np.float32)
    plain = dispatcher.conv2d(x, w)
    for scale in (2, 0.5, np.float32(0.25), np.array(4, np.float32), np.array([-8], np.float32)):
        # powers of two: exact
        assert np.array_equal(dispatcher.conv2d(x, w, scale=scale), plain * np.float32(scale)), scale
    each = np.repeat(np.array([1, 2, -4], np.float32), 4)
    assert np.array_equal(dispatcher.conv2d(x, w, scale=each), plain * each)


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": np.zeros(31, np.float32)}, r"^bias must be f32 of shape \(32,\), not float32 of shape \(31,\)$"),
        ({"bias": np.zeros(32)}, r"^bias must be f32 of shape \(32,\), not float64 of shape \(32,\)$"),
        (
            {"scale": np.zeros((1, 32), np.float32)},
            r"^scale must be f32 of shape \(32,\), not float32 of shape \(1, 32\)$",
        ),
        ({"scale": np.zeros(1)}, r"^scale must be f32 of shape \(1,\), not float64 of shape \(1,\)$"),
        ({"scale": [1.0]}, "^scale must be a number or an array, not list$"),
        ({"residual": np.zeros((2, 12, 20, 31), np.float32)}, r"^residual must be f32 of shape \(2, 12, 20, 32\), not"),
        ({"activation": "swish"}, "^unknown activation 'swish': use one of identity, relu$"),
    ],
)
def test_epilogue_operands_that_do_not_fit_are_refused(store: Store, given: dict[str, object], message: str) -> None:
    x, w = np.zeros(LAYER.activation_shape, np.float32), np.zeros(LAYER.filter_shape, np.float32)
    with pytest.raises(ValueError, match=message) as caught:
        Dispatcher(store, device="cpu").conv2d(x, w, padding=1, **given)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
def test_the_output_must_not_overlap_the_residual(store: Store) -> None:
    x, w = np.zeros(LAYER.activation_shape, np.float32), np.zeros(LAYER.filter_shape, np.float32)
    out = np.zeros(LAYER.output_shape, np.float32)
    with pytest.raises(ValueError, match=r"^out must not overlap the residual$"):
        Dispatcher(store, device="cpu").conv2d(x, w, residual=out, padding=1, out=out)


def test_strides_and_paddings_may_be_lists_and_arrays(store: Store) -> None:
    x, w = np.ones((1, 6, 7, 3), np.float32), np.ones((4, 3, 3, 3), np.float32)
    dispatcher = Dispatcher(store, device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotTuned)
        expected = dispatcher.conv2d(x, w, stride=2, padding=(1, 0))
        for form in (list, np.array):
            output = dispatcher.conv2d(x, w, stride=form([2, 2]), padding=form([1, 0]))
            np.testing.assert_array_equal(output, expected)


def test_empty_batch_gives_an_empty_output_and_no_launch(store: Store) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    y = dispatcher.conv2d(np.zeros((0, 9, 9, 8), np.float32), np.zeros((4, 3, 3, 8), np.float32))
    assert y.shape == (0, 7, 7, 4)
    assert y.dtype == np.float32
    assert store.records() == []
    with pytest.raises(ValueError, match=r"^out must have the shape \(0, 7, 7, 4\), not \(3, 3\)$"):
        dispatcher.conv2d(
            np.zeros((0, 9, 9, 8), np.float32), np.zeros((4, 3, 3, 8), np.float32), out=np.zeros((3, 3), np.float32)
        )


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (np.zeros((1, 9, 9, 7), np.float32), np.zeros((4, 3, 3, 8), np.float32), "8 channels"),
        (np.zeros((1, 2, 2, 8), np.float32), np.zeros((4, 3, 3, 8), np.float32), "output extent"),
        (np.zeros((1, 9, 9, 8), np.float32), np.zeros((4, 3, 3, 8), np.float64), "filter"),
        (np.zeros((9, 9, 8), np.float32), np.zeros((4, 3, 3, 8), np.float32), "four axes"),
        (np.zeros((1, 9, 9, 8), np.float16), np.zeros((4, 3, 3, 8), np.float16), "--dtype f32"),
        ([[[[1.0]]]], np.zeros((1, 1, 1, 1), np.float32), "must be arrays, not list and ndarray"),
    ],
)
def test_operands_that_do_not_fit_are_refused(store: Store, x: object, w: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        Dispatcher(store, device="cpu").conv2d(x, w)
    assert "\n" not in str(caught.value)


def test_a_config_that_does_not_compile_is_passed_over(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.backends.cpu import CpuCompiler

    bad = configs_of(LAYER)[5]
    store.replace(record_of(LAYER, bad))
    compile_ = CpuCompiler.compile
    refused = family_named("direct_cpu").source(bad, LAYER, find("cpu").spec)  # type: ignore[union-attr, arg-type]

    def compile_all_but_one(self: CpuCompiler, source: object) -> object:
        if source == refused:
            raise CompileError("internal compiler error\nand its log")
        return compile_(self, source)  # type: ignore[arg-type]

    monkeypatch.setattr(CpuCompiler, "compile", compile_all_but_one)
    dispatcher = Dispatcher(store, device="cpu")
    rng = np.random.default_rng(6)
    x = rng.standard_normal(LAYER.activation_shape, dtype=np.float32)
    w = rng.standard_normal(LAYER.filter_shape, dtype=np.float32)
    with pytest.warns(NotTuned, match="internal compiler error"):
        y = dispatcher.conv2d(x, w, padding=1)
    assert reference.compare(LAYER, y, reference.conv2d(LAYER, x, w))[0] == 0
    assert dispatcher.select(LAYER).config != bad


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
def test_warm_layers_neither_compile_nor_read_the_database(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from autotune.backends.cpu import CpuCompiler

    dispatcher = Dispatcher(store, device="cpu")
    dispatcher.warmup([LAYER])
    store.close()

    def fail(*_: object) -> None:
        raise AssertionError("a warm layer was compiled")

    monkeypatch.setattr(CpuCompiler, "compile", fail)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        y = dispatcher.conv2d(np.ones(LAYER.activation_shape, "f4"), np.ones(LAYER.filter_shape, "f4"), padding=1)
    assert y[0, 5, 5, 0] == 9 * 16


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned")
def test_threads_share_a_dispatcher(store: Store) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    rng = np.random.default_rng(7)
    w = rng.standard_normal(LAYER.filter_shape, dtype=np.float32)
    inputs = [rng.standard_normal(LAYER.activation_shape, dtype=np.float32) for _ in range(8)]
    outputs: dict[int, np.ndarray] = {}

    def work(i: int) -> None:
        for _ in range(20):
            outputs[i] = dispatcher.conv2d(inputs[i], w, padding=1)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, x in enumerate(inputs):
        assert reference.compare(LAYER, outputs[i], reference.conv2d(LAYER, x, w))[0] == 0


@pytest.mark.filterwarnings("ignore::autotune.dispatch.NotTuned", "ignore::DeprecationWarning")
def test_a_forked_process_is_told_to_make_its_own(store: Store) -> None:
    dispatcher = Dispatcher(store, device="cpu")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            dispatcher.conv2d(np.ones(LAYER.activation_shape, "f4"), np.ones(LAYER.filter_shape, "f4"), padding=1)
            os.write(write, b"ran")
        except RuntimeError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert b"does not follow a fork" in os.read(read, 200)


def test_devices_names_the_cpu() -> None:
    assert [device.id for device in devices()][-1] == "cpu"


def _extents(problem: ConvProblem) -> dict[str, int]:
    return {name: getattr(problem, name) for name in ("N", "C", "H", "W", "K", "R", "S")}
