"""Verification and timing on a backend made of NumPy, and the worker process on the real cpu."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from autotune.backends import (
    Backend,
    Comparison,
    CompiledKernel,
    CompileError,
    ConstraintsError,
    DeviceFault,
    Kernel,
    Operands,
    find,
)
from autotune.backends.operands import spread
from autotune.device import DeviceSpec
from autotune.families import Launch, Source
from autotune.measure.failures import ChildDied, ChildTimeout, WrongOutput, classify, leaves_child_healthy, one_line
from autotune.measure.harness import GUARD_BYTES, Harness, Measured, set_count
from autotune.measure.timing import SampleLength, Samples, is_loser, launches_for, samples_of
from autotune.measure.worker import Worker
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.trial import Status

SPEC = DeviceSpec(
    kind="cpu", name="NumPy", arch="x", sm_count=1, l2_bytes=4000, bytes_per_s=1e10, rates=((DType.F32, 1e11),)
)
PROBLEM = ConvProblem(N=1, C=2, H=4, W=4, K=3, R=1, S=1, dtype="f32")
INTEGER = ConvProblem(N=1, C=2, H=4, W=4, K=3, R=1, S=1, dtype="s8")
_NUMPY = {DType.F32: np.float32, DType.S8: np.int8, DType.S32: np.int32}


class NumPyBackend(Backend):
    """Runs kernels that are Python functions of four arrays, found by ``CompiledKernel.entry``; its clock is given."""

    spec = SPEC
    condition = "cold-loop"
    driver = "none"

    def __init__(self, kernels: dict[str, Callable[..., None]], times: Iterator[float]) -> None:
        self.kernels, self.times = kernels, times
        self.asked: list[tuple[str, int, int]] = []
        self.outputs: set[int] = set()

    def load(self, compiled: CompiledKernel, _launch: Launch) -> Kernel:
        if compiled.entry not in self.kernels:
            raise ConstraintsError(f"no {compiled.entry}")

        def kernel(operands: Operands) -> None:
            self.outputs.add(operands.output.ctypes.data)
            self.kernels[compiled.entry](operands)

        kernel.entry = compiled.entry  # type: ignore[attr-defined]
        return kernel

    def allocate(self, nbytes: int) -> Any:
        whole = np.full(nbytes + 256, 0x55, np.uint8)
        start = -whole.ctypes.data % 256
        return whole[start : start + nbytes]

    def fill(self, buffer: Any, byte: int) -> None:
        buffer[:] = byte

    def copy(self, target: Any, source: Any) -> None:
        target[:] = source

    def is_filled(self, buffer: Any, byte: int) -> bool:
        return bool((buffer == byte).all())

    def is_same(self, one: Any, other: Any) -> bool:
        return bool(np.array_equal(one, other))

    def randomize(self, buffer: Any, dtype: DType, seed: int, deviation: float, mean: float = 0.0) -> None:
        draw = np.random.default_rng(seed)
        values = buffer.view(_NUMPY[dtype])
        values[:] = (
            draw.integers(-128, 128, values.size) if dtype.is_integer else draw.normal(mean, deviation, values.size)
        )

    def reference(self, problem: ConvProblem, activation: Any, filter: Any, **epilogue: Any) -> Any:
        return pointwise(problem, activation, filter, **epilogue)

    def compare(self, problem: ConvProblem, output: Any, expected: Any) -> Comparison:
        error = np.abs(output.view(_NUMPY[problem.out_dtype]).astype(float) - expected)
        wrong = ~(error <= (0 if problem.dtype.is_integer else 1e-5))
        return Comparison(mismatches=int(wrong.sum()), worst=float(error.max()))

    def time(self, kernel: Kernel, operands: Sequence[Operands], launches: int, samples: int) -> list[float]:
        self.asked.append((kernel.entry, launches, samples))  # type: ignore[attr-defined]
        for i in range(launches):
            kernel(operands[i % len(operands)])
        return [next(self.times) for _ in range(samples)]

    def synchronize(self) -> None:
        return

    def clocks(self) -> tuple[int | None, int | None]:
        return 1234, 56

    def bytes_of(self, name: str, array: Any, problem: ConvProblem) -> Any:
        raise NotImplementedError

    def new_output(self, problem: ConvProblem) -> Any:
        raise NotImplementedError

    def constant(self, value: float) -> Any:
        raise NotImplementedError

    def is_capturing(self) -> bool:
        raise NotImplementedError

    def stream_key(self) -> int:
        raise NotImplementedError


def pointwise(problem: ConvProblem, activation: Any, filter: Any, bias: Any = None, residual: Any = None) -> Any:
    x = activation.view(_NUMPY[problem.dtype]).reshape(-1, problem.C).astype(float)
    w = filter.view(_NUMPY[problem.dtype]).reshape(-1, problem.C).astype(float)
    y = x @ w.T
    for added in (bias, residual):
        y += 0 if added is None else added.view(np.float32).reshape(-1, problem.K)
    return y.reshape(-1)


def right(o: Operands, problem: ConvProblem = PROBLEM) -> None:
    o.output.view(_NUMPY[problem.out_dtype])[:] = pointwise(problem, o.activation, o.filter)


def beyond(array: Any, offset: int, value: int = 1) -> None:
    """Write a byte ``offset`` bytes from an array's start, inside of it or not."""
    start = array.ctypes.data - array.base.ctypes.data
    array.base[start + offset] = value


def ever(value: float) -> Iterator[float]:
    while True:
        yield value


def compiled(entry: str) -> CompiledKernel:
    return CompiledKernel(path="", entry=entry, digest="d", compiler="c", compile_s=0.0)


LAUNCH = Launch(grid=1, block=1)


def harness(
    kernel: Callable[[Operands], None], problem: ConvProblem = PROBLEM, times: Iterator[float] | None = None
) -> tuple[Harness, NumPyBackend]:
    backend = NumPyBackend({"kernel": kernel}, times or ever(100.0))
    return Harness(backend, problem, seed=1), backend


def wrong(kernel: Callable[[Operands], None], problem: ConvProblem = PROBLEM, launch: Launch = LAUNCH) -> WrongOutput:
    bench, _ = harness(kernel, problem)
    with pytest.raises(WrongOutput) as found:
        bench.run(compiled("kernel"), launch, None)
    return found.value


# verification


def test_a_right_kernel_is_measured() -> None:
    bench, backend = harness(right)
    found = bench.run(compiled("kernel"), LAUNCH, None)
    assert (found.clock_mhz, found.temperature_c) == (1234, 56)
    m = found.measurement
    assert (m.time_us, m.spread_us, m.samples, m.launches, m.condition) == (100.0, 0.0, 5, 35, "cold-loop")
    assert backend.asked == [("kernel", 1, 1), ("kernel", 35, 5), ("kernel", 1, 1)]


def test_the_sets_exceed_the_cache_and_all_are_used() -> None:
    bench, backend = harness(right)
    # 128 + 24 + 192 bytes a set; 3 * 4000 bytes of cache
    assert bench.sets == set_count(PROBLEM, 4000) == 35
    bench.run(compiled("kernel"), LAUNCH, None)
    assert len(backend.outputs) == 35


@pytest.mark.parametrize(("l2_bytes", "count"), [(0, 2), (100, 2), (4000, 35), (1 << 20, 256), (1 << 40, 256)])
def test_the_number_of_sets_is_bounded(l2_bytes: int, count: int) -> None:
    assert set_count(PROBLEM, l2_bytes) == count
    large = ConvProblem(N=256, C=64, H=224, W=224, K=64, R=1, S=1)
    assert set_count(large, l2_bytes) == 2


def test_a_kernel_that_writes_nothing_is_wrong() -> None:
    assert str(wrong(lambda _: None)).startswith("48 of 48 elements are wrong")


@pytest.mark.parametrize("missing", [0, 17, 47])
def test_one_element_that_is_not_written_is_found(missing: int) -> None:
    def skips(o: Operands) -> None:
        kept = o.output.view(np.float32)[missing].copy()
        right(o)
        o.output.view(np.float32)[missing] = kept

    failure = wrong(skips)
    assert str(failure).startswith("1 of 48 elements are wrong")
    assert not failure.damaged


@pytest.mark.parametrize("poison", [0x7F7F7F7F, -0x7E7E7E7F])
def test_an_integer_that_is_not_written_is_found_even_if_it_should_be_the_poison(poison: int) -> None:
    bench, backend = harness(lambda _: None, INTEGER)
    assert poison.to_bytes(4, "little", signed=True) in (b"\x7f" * 4, b"\x81" * 4)
    # the reference says that every output is the poison of one of the sets
    bench._expected = np.full(48, float(poison))
    with pytest.raises(WrongOutput, match="48 of 48 elements are wrong"):
        bench.run(compiled("kernel"), LAUNCH, None)
    assert len(backend.asked) <= 1


def test_integers_are_compared_exactly() -> None:
    bench, _ = harness(lambda o: right(o, INTEGER), INTEGER)
    bench.run(compiled("kernel"), LAUNCH, None)

    def off_by_one(o: Operands) -> None:
        right(o, INTEGER)
        o.output.view(np.int32)[7] += 1

    assert str(wrong(off_by_one, INTEGER)) == "1 of 48 elements are wrong, the worst by 1"


def test_nan_is_wrong() -> None:
    def writes_nan(o: Operands) -> None:
        right(o)
        o.output.view(np.float32)[3] = np.nan

    assert str(wrong(writes_nan)).startswith("1 of 48")


@pytest.mark.parametrize("name", ["activation", "filter", "output", "workspace"])
@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("distance", [1, GUARD_BYTES])
def test_a_write_beside_any_buffer_is_found(name: str, place: str, distance: int) -> None:
    def stray(o: Operands) -> None:
        right(o)
        array = getattr(o, name)
        beyond(array, -distance if place == "before" else array.size + distance - 1)

    failure = wrong(stray, launch=replace(LAUNCH, workspace_bytes=100))
    assert (str(failure), failure.damaged) == (f"wrote {place} the {name}", True)


@pytest.mark.parametrize("name", ["activation", "filter"])
@pytest.mark.parametrize("offset", [0, -1])
def test_a_write_into_an_input_is_found(name: str, offset: int) -> None:
    def stray(o: Operands) -> None:
        right(o)
        getattr(o, name)[offset] ^= 1

    failure = wrong(stray)
    assert (str(failure), failure.damaged) == (f"wrote into the {name}", True)


BIASED = ConvProblem(N=1, C=2, H=4, W=4, K=3, R=1, S=1, dtype="f32", epilogue=Epilogue(bias=True, residual=True))


def test_what_the_epilogue_reads_is_drawn_guarded_and_compared() -> None:
    seen: list[tuple[int, int]] = []

    def biased(o: Operands, missing: str = "") -> None:
        read = {name: getattr(o, name) for name in ("bias", "residual") if name != missing}
        seen.append((o.bias.size, o.residual.ctypes.data))
        o.output.view(np.float32)[:] = pointwise(BIASED, o.activation, o.filter, **read)

    bench, _ = harness(biased, BIASED)
    # 128 + 24 + 192 bytes as without an epilogue, 12 of bias, 192 of residual
    assert bench.sets == 3 * 4000 // 548 + 1
    bench.run(compiled("kernel"), LAUNCH, None)
    assert {size for size, _ in seen} == {12}
    assert len({address for _, address in seen}) == bench.sets
    for name in ("bias", "residual"):

        def forgets(o: Operands, name: str = name) -> None:
            biased(o, missing=name)

        def writes(o: Operands, name: str = name) -> None:
            biased(o)
            getattr(o, name)[0] ^= 1

        def strays(o: Operands, name: str = name) -> None:
            biased(o)
            beyond(getattr(o, name), -1)

        assert "elements are wrong" in str(wrong(forgets, BIASED))
        assert str(wrong(writes, BIASED)) == f"wrote into the {name}"
        assert str(wrong(strays, BIASED)) == f"wrote before the {name}"


@pytest.mark.parametrize(
    ("moved", "by", "foreign", "right"),
    [(0, 1, False, True), (1, 1, False, False), (4, 1, True, True), (5, 1, True, False), (1, 2, True, False)],
)
def test_a_few_s8_of_a_foreign_kernel_may_be_rounded_apart(moved: int, by: int, foreign: bool, right: bool) -> None:
    problem = ConvProblem(N=1, C=2, H=40, W=40, K=3, R=1, S=1, dtype="s8", epilogue=Epilogue(out_dtype=DType.S8))

    def kernel(o: Operands) -> None:
        o.output.view(np.int8)[:] = 7
        o.output.view(np.int8)[:moved] += by

    bench, _ = harness(kernel, problem)
    bench._expected = np.full(4800, 7.0)
    loaded = bench.load(compiled("kernel"), LAUNCH)
    loaded = bench.foreign(loaded.kernel) if foreign else loaded
    if right:
        bench.verify(loaded)
    else:
        with pytest.raises(WrongOutput, match=f"^{moved} of 4800"):
            bench.verify(loaded)


def test_operands_use_the_range_of_their_dtype() -> None:
    shape = {"N": 1, "C": 64, "H": 9, "W": 9, "K": 8, "R": 3, "S": 3}
    scaled = ConvProblem(**shape, dtype="s8", epilogue=Epilogue.parse("scale_channel+bias"))
    # uniform s8 have a deviation of 74: sums have 74 * 74 * sqrt(576), outputs 50
    assert spread(scaled)["scale"].mean == pytest.approx(50 / (74 * 74 * 24))
    assert spread(scaled)["bias"] == (0, 25)
    plain = ConvProblem(**shape, dtype="s8", epilogue=Epilogue.parse("bias"))
    assert spread(plain)["bias"].deviation == 74 * 74 * 24 / 2
    floats = ConvProblem(**shape, epilogue=Epilogue.parse("scale_tensor+residual"))
    assert spread(floats) == {"activation": (0, 1), "filter": (0, 1 / 24), "scale": (1, 0.25), "residual": (0, 0.5)}


def test_a_kernel_that_is_right_only_at_first_is_found_after_timing() -> None:
    calls = iter(range(1000))

    def tires(o: Operands) -> None:
        if next(calls) < 10:
            right(o)

    bench, backend = harness(tires)
    with pytest.raises(WrongOutput, match="48 of 48"):
        bench.run(compiled("kernel"), LAUNCH, None)
    assert len(backend.asked) == 3


def test_the_workspace_is_zeroed_and_shared_by_all_sets() -> None:
    seen: list[tuple[int, int, int]] = []

    def looks(o: Operands) -> None:
        right(o)
        seen.append((o.workspace.ctypes.data, o.workspace.size, int(o.workspace.max())))

    bench, _ = harness(looks)
    bench.run(compiled("kernel"), replace(LAUNCH, workspace_bytes=100), None)
    assert {(size, largest) for _, size, largest in seen} == {(100, 0)}
    assert len({address for address, _, _ in seen}) == 1


def test_operands_are_aligned() -> None:
    addresses: list[int] = []

    def looks(o: Operands) -> None:
        right(o)
        addresses.extend(a.ctypes.data for a in (o.activation, o.filter, o.output, o.workspace))

    bench, _ = harness(looks)
    bench.run(compiled("kernel"), replace(LAUNCH, workspace_bytes=100), None)
    assert {address % 256 for address in addresses} == {0}


def test_inputs_are_drawn_by_seed() -> None:
    drawn = []

    def looks(o: Operands) -> None:
        right(o)
        drawn.append((o.activation.tobytes(), o.filter.tobytes()))

    for seed in (1, 1, 2):
        Harness(NumPyBackend({"kernel": looks}, ever(5000.0)), PROBLEM, seed).run(compiled("kernel"), LAUNCH, None)
    third = len(drawn) // 3
    assert drawn[0] == drawn[third - 1] == drawn[third]
    assert drawn[0][0] != drawn[-1][0]
    assert drawn[0][1] != drawn[-1][1]


def test_a_kernel_that_the_device_refuses_is_refused() -> None:
    bench, _ = harness(right)
    with pytest.raises(ConstraintsError, match="no other"):
        bench.run(compiled("other"), LAUNCH, None)


# timing

LENGTH = SampleLength(least_us=1000, rotation_us=5000, total_us=100_000)


class Clock:
    """A timer that reads given values, and remembers how it was asked."""

    def __init__(self, *values: float) -> None:
        self.values = iter(values)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, launches: int, samples: int) -> list[float]:
        self.asked.append((launches, samples))
        return [next(self.values) for _ in range(samples)]


def test_median_and_spread() -> None:
    assert Samples(values_us=(5.0, 1.0, 2.0, 100.0, 3.0), launches=1).median_us == 3.0
    assert Samples(values_us=(5.0, 1.0, 2.0, 4.0, 3.0), launches=1).spread_us == 2.0
    assert Samples(values_us=(1.0, 2.0), launches=1).spread_us == 0.5
    assert Samples(values_us=(7.0,), launches=1).spread_us == 0.0


@pytest.mark.parametrize(
    ("launch_us", "sets", "launches"),
    [
        (10.0, 2, 100),
        (10.0, 300, 300),
        (10.0, 2000, 500),
        (300.0, 2, 4),
        (2000.0, 20, 2),
        (7000.0, 20, 1),
    ],
)
def test_a_sample_is_long_enough_and_visits_all_sets_if_it_can(launch_us: float, sets: int, launches: int) -> None:
    assert launches_for(launch_us, sets, LENGTH) == launches


def test_steady_samples_are_taken_once() -> None:
    clock = Clock(10, 10.1, 10.2, 10.1, 10)
    taken = samples_of(clock, 10, 2, LENGTH)
    assert clock.asked == [(100, 5)]
    assert taken == Samples(values_us=(10, 10.1, 10.2, 10.1, 10), launches=100)


def test_unsteady_samples_are_followed_by_more() -> None:
    clock = Clock(10, 10.5, 10.2, 10.9, 10, 10.3, 10.4)
    taken = samples_of(clock, 10, 2, LENGTH)
    assert clock.asked == [(100, 5), (100, 2)]
    assert (len(taken.values_us), taken.median_us) == (7, 10.3)


def test_disturbed_samples_are_taken_again_and_the_quieter_count() -> None:
    disturbed = [10, 20, 10, 20, 15, 12, 11]
    clock = Clock(*disturbed, 10, 10.1, 10, 10.1, 10)
    taken = samples_of(clock, 10, 2, LENGTH)
    assert clock.asked == [(100, 5), (100, 2), (100, 5)]
    assert taken.values_us == (10, 10.1, 10, 10.1, 10)
    clock = Clock(*disturbed, *[2 * d for d in disturbed[:5]], 100, 20)
    assert samples_of(clock, 10, 2, LENGTH).values_us == tuple(disturbed)


def test_a_clear_loser_gets_one_launch_more_than_the_first() -> None:
    assert not is_loser(220.0, 100.0)
    assert is_loser(220.1, 100.0)
    assert not is_loser(1e9, None)
    bench, backend = harness(right, times=ever(221.0))
    m = bench.run(compiled("kernel"), LAUNCH, best_us=100.0).measurement
    assert (m.time_us, m.samples, m.launches, m.spread_us) == (221.0, 1, 1, 0.0)
    assert backend.asked == [("kernel", 1, 1)]
    assert len(backend.outputs) == 2
    assert bench.run(compiled("kernel"), LAUNCH, best_us=101.0).measurement.samples == 5


def test_long_launches_are_sampled_less_often() -> None:
    assert len(samples_of(Clock(*[60_000] * 3), 60_000, 2, LENGTH).values_us) == 3


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_is_a_fault(value: float) -> None:
    with pytest.raises(DeviceFault, match="the timer read"):
        samples_of(Clock(10, 10, 10, value, 10), 10, 2, LENGTH)
    bench, _ = harness(right, times=ever(value))
    with pytest.raises(DeviceFault, match="the timer read"):
        bench.run(compiled("kernel"), LAUNCH, None)


def test_finalists_are_timed_in_turn() -> None:
    def wrong_one(o: Operands) -> None:
        right(o)
        o.output[3] ^= 0x40

    backend = NumPyBackend({"a": right, "b": right, "c": wrong_one}, iter([500, 1000, *[500, 1000] * 7]))
    bench = Harness(backend, PROBLEM, 1)
    answers = bench.retime([(compiled("a"), LAUNCH), (compiled("c"), LAUNCH), (compiled("b"), LAUNCH)])
    a, c, b = answers
    assert isinstance(c, WrongOutput)
    assert isinstance(a, Measured)
    assert isinstance(b, Measured)
    assert (a.measurement.time_us, a.measurement.launches, a.measurement.samples) == (500, 35, 7)
    assert (b.measurement.time_us, b.measurement.launches, b.measurement.samples) == (1000, 35, 7)
    assert [entry for entry, _, _ in backend.asked] == ["a", "b"] * 8


# failures


@pytest.mark.parametrize(
    ("failure", "status", "healthy"),
    [
        (CompileError("x"), Status.COMPILE, True),
        (ConstraintsError("x"), Status.CONSTRAINTS, True),
        (DeviceFault("x"), Status.RUNTIME, False),
        (ChildDied("x"), Status.RUNTIME, False),
        (ChildTimeout("x"), Status.TIMEOUT, False),
        (WrongOutput("x"), Status.CORRECTNESS, True),
        (WrongOutput("x", damaged=True), Status.CORRECTNESS, False),
    ],
)
def test_every_failure_has_its_status(failure: Exception, status: Status, healthy: bool) -> None:
    assert classify(failure, compiling=False) is status
    assert classify(failure, compiling=True) is Status.COMPILE
    assert leaves_child_healthy(failure) is healthy
    copy = pickle.loads(pickle.dumps(failure))
    assert (type(copy), str(copy)) == (type(failure), "x")
    assert leaves_child_healthy(copy) is healthy


def test_a_bug_has_no_status() -> None:
    with pytest.raises(TypeError, match="ZeroDivisionError is no failure"):
        classify(ZeroDivisionError(), compiling=False)


def test_one_line_is_the_first() -> None:
    assert one_line("\n  first \nsecond") == "first"
    assert one_line("") == ""
    assert len(one_line("x" * 1000)) == 300


# the worker


@pytest.fixture
def spec() -> DeviceSpec:
    found = find("cpu").spec
    assert found is not None
    return found


def text(body: str) -> Source:
    return Source(language="c", stem="small", text=f"void small(void *a) {{ {body} }}", entry="small")


@pytest.fixture
def worker(spec: DeviceSpec) -> Iterator[Worker]:
    started = Worker(60, "compiling", spec)
    yield started
    started.kill()


def test_a_worker_answers_one_request_after_another(worker: Worker, spec: DeviceSpec) -> None:
    version = worker.answer()
    assert isinstance(version, str)
    for body in ("(void)a;", "*(char *)a = 1;"):
        worker.ask(60, "compile", text(body))
        kernel = worker.answer()
        assert (kernel.entry, kernel.compiler) == ("small", version)
        assert Path(kernel.path).stat().st_size > 0
    worker.ask(60, "compile", text("broken"))
    with pytest.raises(CompileError, match="broken"):
        worker.answer()
    worker.ask(60, "compile", text("(void)a;"))
    assert worker.answer().entry == "small"


def test_a_bug_in_the_child_is_told_with_its_traceback(worker: Worker) -> None:
    worker.answer()
    worker.ask(60, "no_such_request")
    with pytest.raises(RuntimeError, match="AttributeError"):
        worker.answer()


def test_a_killed_child_has_died(worker: Worker) -> None:
    worker.answer()
    os.kill(worker.pid, signal.SIGKILL)
    worker.ask(60, "compile", text("(void)a;"))
    with pytest.raises(ChildDied, match=r"^killed by SIGKILL$"):
        worker.answer()


def test_a_child_that_cannot_start_says_why(spec: DeviceSpec) -> None:
    worker = Worker(60, "compiling", replace(spec, kind="cpu"), "one argument too many")
    with pytest.raises(RuntimeError, match="TypeError"):
        worker.answer()
    worker.kill()


def test_a_child_that_does_not_answer_is_killed(worker: Worker) -> None:
    worker.answer()
    os.kill(worker.pid, signal.SIGSTOP)
    worker.ask(0.2, "compile", text("(void)a;"))
    with pytest.raises(ChildTimeout, match=r"^no answer within 0.2 s$"):
        worker.answer()
    worker.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(worker.pid, 0)


def test_children_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    # no __main__ guard: a child that ran the script again would never end
    script.write_text(
        textwrap.dedent(
            """
            import os, signal
            from autotune.backends import find
            from autotune.measure.worker import Worker
            worker = Worker(60, "compiling", find("cpu").spec)
            worker.answer()
            print(worker.pid, flush=True)
            os.kill(worker.pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGKILL)
            """
        )
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert _ends(int(ended.stdout))


def _ends(pid: int) -> bool:
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        # an orphan that nobody waits for stays a zombie
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False
