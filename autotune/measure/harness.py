"""Verifies and times one candidate at a time on a device: what the device child does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from autotune.backends.backend import Backend, CompiledKernel, ConstraintsError, Kernel, Operands
from autotune.backends.operands import drawn
from autotune.families.family import Launch
from autotune.measure.failures import WrongOutput
from autotune.measure.timing import (
    FINAL_SAMPLES,
    SAMPLE_LENGTHS,
    Samples,
    Timer,
    is_loser,
    launches_for,
    sample,
    samples_of,
)
from autotune.problem import ConvProblem, DType, Layout
from autotune.trial import Measurement

GUARD_BYTES = 256
GUARD_BYTE = 0xA5
# NaN for every float. Integers have no such value: two sets are poisoned differently, so that an element that is not
# written differs from the reference in one of them at least
FLOAT_POISON = (0xFF, 0xFF)
INTEGER_POISON = (0x7F, 0x81)
FOREIGN_SHARE = 1e-3  # of scaled s8 outputs that two roundings in place of one may move
CACHE_MULTIPLE = 3
MAX_SETS = 256
MAX_SET_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Guarded:
    """A buffer between two guard bands."""

    name: str
    before: Any
    body: Any
    after: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A candidate ready to run: its kernel and its operand sets, which share one workspace.

    held: the operand sets, and what their inputs must still be after a launch. foreign: not ours, so that a few of its
    scaled s8 outputs may lie beyond a rounding's tie by 1.
    """

    kernel: Kernel
    operands: tuple[Operands, ...]
    held: _Held
    workspace: Guarded | None
    foreign: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    """Operand sets in one layout, and the values of their inputs, which are never handed to a kernel."""

    layout: Layout
    sets: list[dict[str, Guarded]]
    pristine: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A verified candidate's measurement, with the clock in MHz and the temperature in degrees Celsius after it."""

    measurement: Measurement
    clock_mhz: int | None
    temperature_c: int | None


class Harness:
    """Inputs, reference and rotating operand sets of one layer on one device.

    Inputs (activation, filter and what the epilogue reads) are drawn from ``seed``, which differs from run to run; the
    reference is computed once. The sets hold the same values at different addresses, so that one reference serves all,
    and are together larger than the last-level cache, so that a launch finds none of its operands there. Guard bands
    surround every buffer.
    """

    def __init__(self, backend: Backend, problem: ConvProblem, seed: int) -> None:
        self._backend = backend
        self._problem = problem
        self._length = SAMPLE_LENGTHS[backend.spec.kind]
        self._poison = INTEGER_POISON if problem.out_dtype.is_integer else FLOAT_POISON
        inputs = drawn(backend, problem, seed)
        self._expected = backend.reference(problem, **inputs)
        self._held = self._sets_of(problem.layout, inputs)
        self._copies: dict[Layout, _Held] = {problem.layout: self._held}
        # on cuda the first comparison compiles kernels: here, not in a candidate's time
        assert backend.is_same(self._held.sets[0]["activation"].body, inputs["activation"])
        backend.synchronize()

    @property
    def sets(self) -> int:
        """Number of operand sets."""
        return len(self._held.sets)

    def run(self, compiled: CompiledKernel, launch: Launch, best_us: float | None) -> Measured:
        """Load, verify and time a candidate, one much slower than ``best_us`` by a single launch.

        Raises ConstraintsError, DeviceFault or WrongOutput.
        """
        loaded = self.load(compiled, launch)
        first = self.verify(loaded)
        samples = first if is_loser(first.median_us, best_us) else self.measure(loaded, first.median_us)
        return self._measured(samples)

    def load(self, compiled: CompiledKernel, launch: Launch) -> Loaded:
        """Make a compiled config runnable on the operand sets; ConstraintsError when the device refuses it."""
        kernel = self._backend.load(compiled, launch)
        workspace = None
        if launch.workspace_bytes:
            try:
                workspace = self._guarded("workspace", launch.workspace_bytes)
            except MemoryError:
                raise ConstraintsError(f"no memory for a workspace of {launch.workspace_bytes} bytes") from None
            self._backend.fill(workspace.body, 0)
        return self._on_sets(kernel, self._held, workspace)

    def foreign(self, kernel: Kernel, layout: Layout | None = None) -> Loaded:
        """A kernel that is not ours, on the same operand sets or, if it wants another layout, on copies of them.

        The copies, of as many sets, are made by the first call; MemoryError where the device has no room for them.
        """
        wanted = layout or self._problem.layout
        if wanted not in self._copies:
            self._copies[wanted] = self._sets_of(wanted, self._inputs_in(wanted))
        return replace(self._on_sets(kernel, self._copies[wanted], None), foreign=True)

    def _on_sets(self, kernel: Kernel, held: _Held, workspace: Guarded | None) -> Loaded:
        shared = workspace.body if workspace else None
        operands = tuple(
            Operands(**{name: buffer.body for name, buffer in one.items()}, workspace=shared) for one in held.sets
        )
        return Loaded(kernel=kernel, operands=operands, held=held, workspace=workspace)

    def verify(self, loaded: Loaded) -> Samples:
        """Run the first and the last set on poisoned outputs; WrongOutput says what is wrong.

        Returns the time of the last launch, the first having woken what sleeps.
        """
        self._backend.fill(loaded.operands[0].output, self._poison[0])
        loaded.kernel(loaded.operands[0])
        self._backend.synchronize()
        self._check(loaded, 0)
        return self._verify_last(loaded)

    def measure(self, loaded: Loaded, launch_us: float) -> Samples:
        """Time a verified candidate, a launch of which takes about ``launch_us``, over all sets; then verify again."""
        samples = samples_of(self._timer(loaded), launch_us, self.sets, self._length)
        self._verify_last(loaded)
        return samples

    def retime(self, candidates: Sequence[tuple[CompiledKernel, Launch]]) -> list[Measured | Exception]:
        """Verify and time candidates in turn, one sample of each a round: a drift of the clock then meets all alike.

        One answer each: its measurement, or why it failed now. A DeviceFault is raised, as no later answer would count.
        """
        failures: dict[int, Exception] = {}
        verified: dict[int, tuple[Loaded, float]] = {}
        for index, candidate in enumerate(candidates):
            try:
                loaded = self.load(*candidate)
                verified[index] = loaded, self.verify(loaded).median_us
            except (ConstraintsError, WrongOutput) as failure:
                failures[index] = failure
        samples = dict(zip(verified, self.interleaved(list(verified.values())), strict=True))
        return [failures.get(i) or self._measured(samples[i]) for i in range(len(candidates))]

    def interleaved(self, verified: Sequence[tuple[Loaded, float]]) -> list[Samples]:
        """Time verified candidates in turn, one sample of each a round; with each, about what a launch takes in us."""
        timers = [(self._timer(loaded), launches_for(us, self.sets, self._length)) for loaded, us in verified]
        values_us: list[list[float]] = [[] for _ in timers]
        for _ in range(FINAL_SAMPLES):
            for (timer, launches), taken in zip(timers, values_us, strict=True):
                taken.extend(sample(timer, launches, 1).values_us)
        return [Samples(values_us=tuple(v), launches=n) for v, (_, n) in zip(values_us, timers, strict=True)]

    def _verify_last(self, loaded: Loaded) -> Samples:
        last = self.sets - 1
        # else a launch that wrote nothing would leave what an earlier one wrote
        self._backend.fill(loaded.operands[last].output, self._poison[1])
        values = sample(lambda n, count: self._backend.time(loaded.kernel, loaded.operands[last:], n, count), 1, 1)
        self._backend.synchronize()
        self._check(loaded, last)
        return values

    def _timer(self, loaded: Loaded) -> Timer:
        return lambda launches, samples: self._backend.time(loaded.kernel, loaded.operands, launches, samples)

    def _measured(self, samples: Samples) -> Measured:
        clock, temperature = self._backend.clocks()
        measurement = Measurement(
            time_us=samples.median_us,
            spread_us=samples.spread_us,
            samples=len(samples.values_us),
            launches=samples.launches,
            condition=self._backend.condition,
        )
        return Measured(measurement=measurement, clock_mhz=clock, temperature_c=temperature)

    def _check(self, loaded: Loaded, index: int) -> None:
        one = loaded.held.sets[index]
        for buffer in (*one.values(), *([loaded.workspace] if loaded.workspace else [])):
            for side, guard in (("before", buffer.before), ("after", buffer.after)):
                if not self._backend.is_filled(guard, GUARD_BYTE):
                    raise WrongOutput(f"wrote {side} the {buffer.name}", damaged=True)
        for name, pristine in loaded.held.pristine.items():
            if not self._backend.is_same(one[name].body, pristine):
                raise WrongOutput(f"wrote into the {name}", damaged=True)
        output = self._permuted("output", one["output"].body, loaded.held.layout, self._problem.layout)
        found = self._backend.compare(self._problem, output, self._expected)
        elements = self._problem.output_bytes // self._problem.out_dtype.bytes
        rounds_apart = loaded.foreign and self._problem.out_dtype is DType.S8 and found.worst <= 1
        if found.mismatches > (elements * FOREIGN_SHARE if rounds_apart else 0):
            raise WrongOutput(f"{found.mismatches} of {elements} elements are wrong, the worst by {found.worst:.3g}")

    def _sets_of(self, layout: Layout, inputs: dict[str, Any]) -> _Held:
        count = set_count(self._problem, self._backend.spec.l2_bytes)
        return _Held(layout=layout, sets=[self._new_set(inputs) for _ in range(count)], pristine=inputs)

    def _new_set(self, inputs: dict[str, Any]) -> dict[str, Guarded]:
        one = {name: self._guarded(name, buffer.nbytes) for name, buffer in inputs.items()}
        for name, buffer in inputs.items():
            self._backend.copy(one[name].body, buffer)
        return one | {"output": self._guarded("output", self._problem.output_bytes)}

    def _inputs_in(self, layout: Layout) -> dict[str, Any]:
        held = self._held
        return {name: self._permuted(name, buffer, held.layout, layout) for name, buffer in held.pristine.items()}

    def _permuted(self, name: str, buffer: Any, held: Layout, wanted: Layout) -> Any:
        """An operand's or the output's elements in another layout: the buffer itself where that changes nothing."""
        shape, dtype = replace(self._problem, layout=held).operand(name)
        if held is wanted or len(shape) == 1:
            return buffer
        target = self._backend.allocate(buffer.nbytes)
        axes = (0, 3, 1, 2) if wanted is Layout.NCHW else (0, 2, 3, 1)
        self._backend.permute(target, buffer, shape, axes, dtype.bytes)
        return target

    def _guarded(self, name: str, nbytes: int) -> Guarded:
        whole = self._backend.allocate(GUARD_BYTES + nbytes + GUARD_BYTES)
        before, body, after = whole[:GUARD_BYTES], whole[GUARD_BYTES:-GUARD_BYTES], whole[-GUARD_BYTES:]
        self._backend.fill(before, GUARD_BYTE)
        self._backend.fill(after, GUARD_BYTE)
        return Guarded(name, before, body, after)


def set_count(problem: ConvProblem, l2_bytes: int) -> int:
    """Operand sets that together exceed three times the last-level cache: at least 2, at most 256 or 1 GiB."""
    one = problem.min_bytes
    wanted = CACHE_MULTIPLE * l2_bytes // one + 1
    return max(2, min(wanted, MAX_SETS, MAX_SET_BYTES // one))
