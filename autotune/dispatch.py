"""From a problem to a launched kernel: the best known config that is legal here, and how good the match was."""

from __future__ import annotations

import contextlib
import inspect
import os
import secrets
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

from autotune.backends import (
    Backend,
    CompileError,
    ConstraintsError,
    DeviceFault,
    Kernel,
    Operands,
    compiler_for,
    find,
    open_backend,
)
from autotune.device import Device, DeviceSpec
from autotune.families import FAMILIES, Family, Unsupported, family_named, supporting, why_unsupported
from autotune.freshness import Freshness
from autotune.problem import ConvProblem, DType, Epilogue, IntPair, Layout
from autotune.proof import disproof
from autotune.store import Store, StoreError, UnreadableRow, shipped
from autotune.trial import Config, Record, Status

__all__ = ["Choice", "Dispatcher", "NotTuned", "Unsupported"]

_NEXT_BEST = 3  # of a layer's trials that serve in place of its record
MAX_DISTANCE = 4.0  # beyond it a tuned layer's config says nothing: each factor of e in one extent counts 1


class NotTuned(UserWarning):
    """A layer is served by another layer's config or by a default, or its record cannot be used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A config proven legal for a problem on a device. match: ``exact``, ``nearest`` or ``default``.

    why: one line. record: the stored record that it comes from; None for a default. stale: what changed since that was
    written, in one line, empty for nothing; the kernel is then compared with the reference before it serves.
    workspace_bytes: device memory that a launch needs beyond the operands; the dispatcher keeps one workspace a stream.
    """

    problem: ConvProblem
    device: DeviceSpec
    config: Config
    match: str
    why: str
    record: Record | None = None
    stale: str = ""
    workspace_bytes: int = 0

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def time_us(self) -> float | None:
        """The measured time of an exact match in microseconds; None where this layer was not measured."""
        return self.record.time_us if self.record is not None and self.match == "exact" else None

    @property
    def verified(self) -> bool:
        """True when this config, as it is built now, was compared with the reference on this very layer."""
        return self.match == "exact" and self.record is not None and self.record.verified and not self.stale


@dataclass(frozen=True, slots=True)
class _Ready:
    problem: ConvProblem
    choice: Choice
    kernel: Kernel
    workspaces: dict[int, Any]


class Dispatcher:
    """Answers which config runs a layer, and runs it, on one device.

    store: where records are looked up, each layer once: a store, or where there is one, as ``Store`` takes it. device:
    as in ``find``. A layer that is not tuned is served by the nearest tuned layer's config, or by a default, with one
    ``NotTuned`` warning; so is everything, shipped records apart, once the database has failed, and from the beginning
    where it cannot be opened, which is warned of once. A row that cannot be read is warned of too, and costs only the
    layers that would have read it. Threads may share a dispatcher; a forked process may not use its parent's to run
    kernels.

    A record whose kernel source, compiler or driver changed is stale. The layer's own record serves first all the same,
    then its next best trials, then nearest layers, of which those whose kernel is the present one come first, whatever
    their distance.
    What is stale is compared with the reference, one launch on random inputs, by ``warmup`` or the first ``conv2d`` of
    the layer. One that fails then, or can no longer be built, is warned of and marked in the database, where that can
    be written, as not verified; a record so marked does not serve.

    Raises NoDevice when the device is absent, ValueError when its text has another form.
    """

    def __init__(
        self,
        store: Store | str | os.PathLike[str] | None,
        device: str | Device | DeviceSpec = "auto",
        *,
        families: Sequence[Family] = FAMILIES,
    ) -> None:
        self._device = find(device)
        assert self._device.spec is not None
        self._spec = self._device.spec
        self._families = families
        self._choices: dict[ConvProblem, Choice] = {}
        self._ready: dict[ConvProblem, _Ready] = {}
        self._calls: dict[tuple[object, ...], ConvProblem] = {}
        self._constants: dict[float, Any] = {}
        self._lock = threading.RLock()
        self._backend: Backend | None = None
        self._process = os.getpid()
        self._freshness = Freshness(families, [self._device])
        self._unreadable: set[str] = set()
        # None from when it has failed
        self._store = _opened(store) if store is None or isinstance(store, str | os.PathLike) else store

    @property
    def device(self) -> DeviceSpec:
        """The device that this dispatcher serves."""
        return self._spec

    def select(self, problem: ConvProblem) -> Choice:
        """The config for a layer; never compiles or measures. A layer seen before costs a dictionary look-up.

        Raises Unsupported, in one line, when no family can run the layer on the device.
        """
        try:
            return self._choices[problem]
        except KeyError:
            pass  # not seen before: looked up below, outside the handler
        with self._lock:
            choice = next(self._candidates(problem))
            self._choices[problem] = choice
        if choice.match != "exact":
            _warn(f"{problem}: {choice.why}")
        return choice

    def warmup(self, problems: Iterable[ConvProblem]) -> None:
        """Compile and load the kernels of these layers for the calling thread's current stream.

        Afterwards ``conv2d`` on them neither compiles nor reads the database, and can be captured in a CUDA graph.
        """
        for problem in problems:
            if problem.N:
                self._workspace(self._prepare(problem))

    def conv2d(
        self,
        x: Any,
        w: Any,
        bias: Any = None,
        residual: Any = None,
        *,
        scale: Any = None,
        stride: IntPair = 1,
        padding: IntPair = 0,
        dilation: IntPair = 1,
        groups: int = 1,
        layout: str = Layout.NHWC,
        activation: str = "identity",
        out_dtype: object = None,
        out: Any = None,
    ) -> Any:
        """Convolve on the caller's current stream.

        x: activation, NHWC (layout nchw: NCHW). w: filter, KRSC with C / groups channels (KCRS). The dtype is x's.
        bias, residual, scale, activation: as ``Epilogue`` says; a scale is a number, an array of one, or one of K. out:
        where to write, contiguous, of the output's shape and dtype, not overlapping an operand; a new array when None.
        Returns the output, NPQK (NKPQ). Arrays are CuPy's on cuda and NumPy's on cpu; those that are not contiguous or
        aligned are copied. A number is kept on the device for later calls.

        Raises ValueError, in one line, for operands that do not fit together, Unsupported when no family can run the
        layer, and RuntimeError when the layer, or a scale that is a number, is not warm while the stream is being
        captured, or after a fork.
        """
        try:
            form = (x.shape, w.shape, x.dtype, stride, padding, dilation, groups, layout, activation, out_dtype)
        except AttributeError:
            kinds = f"{type(x).__name__} and {type(w).__name__}"
            raise ValueError(f"activation and filter must be arrays, not {kinds}") from None
        epilogue = (_scaling(scale), bias is not None, residual is not None)
        key = (*form, *epilogue)
        try:
            problem = self._calls[key]
        except KeyError:
            problem = self._calls[key] = _problem(*form, *epilogue)
        # an argument that cannot be hashed, such as a list or an array of strides
        except TypeError:
            problem = _problem(*form, *epilogue)
        backend = self._open()
        if problem.epilogue.scale == "tensor":
            scale = self._constant(scale, backend) if isinstance(scale, Real) else scale.reshape(1)
        given = {"activation": x, "filter": w, "scale": scale, "bias": bias, "residual": residual}
        read = {name: backend.bytes_of(name, array, problem) for name, array in given.items() if array is not None}
        output = backend.new_output(problem) if out is None else out
        if problem.N == 0:
            if output.shape != problem.output_shape:
                raise ValueError(f"out must have the shape {problem.output_shape}, not {output.shape}")
            return output
        ready = self._ready.get(problem) or self._prepare(problem)
        target = backend.bytes_of("output", output, problem)
        if not _shares(target, output):
            raise ValueError("out must be contiguous and aligned to 16 bytes")
        for name, array in read.items() if out is not None else ():
            if _overlap(target, array):
                raise ValueError(f"out must not overlap the {name}")
        ready.kernel(Operands(**read, output=target, workspace=self._workspace(ready)))
        return output

    def _constant(self, value: Any, backend: Backend) -> Any:
        """The device's copy of a number, made when it is first asked for."""
        number = float(value)
        if number not in self._constants:
            with self._lock:
                self._constants[number] = backend.constant(number)
        return self._constants[number]

    def _candidates(self, problem: ConvProblem) -> Iterator[Choice]:
        """Choices for a layer, best first; Unsupported when there is none."""
        served = replace(problem, N=1) if problem.N == 0 else problem
        seen: set[Config] = set()
        reason = "no tuned layer is near"
        for record, match, why in self._known(problem, served):
            reason = "no config of a tuned layer nearby can run here"
            if record.config not in seen and self._legal(record.config, served):
                seen.add(record.config)
                yield self._choice(problem, served, record.config, match, why, record)
        # all legal configs of all families, which a layer that was tuned need not wait for
        families = supporting(served, self._spec, self._families)
        if not families:
            raise Unsupported(why_unsupported(served, self._spec, self._families))
        every = [config for family in families for config in self._defaults(family, served)]
        for config in sorted(every, key=lambda c: self._family(c).predict_us(c, served, self._spec)):
            if config not in seen:
                seen.add(config)
                yield self._choice(problem, served, config, "default", f"{reason}: {config.family}'s default", None)

    def _known(self, problem: ConvProblem, served: ConvProblem) -> Iterator[tuple[Record, str, str]]:
        """Stored records that may serve the layer, best first, with the match and why."""
        if self._store is not None:
            try:
                yield from self._stored(self._store, problem, served)
                return
            except UnreadableRow as error:  # the device's
                self._pass_over(error)
            except StoreError as error:
                self._store = None
                _warn(f"the database cannot be read, and is not asked again: {error}")
        record = shipped.best(problem, self._spec.key)
        if record is not None:
            yield record, "exact", _tuned(record)
        current = self._freshness.current(served, self._spec)
        near = shipped.similar(problem, self._spec, current=current, any_epilogue=False, within=MAX_DISTANCE)
        yield from ((other, "nearest", _near(apart, other)) for apart, other in near)

    def _stored(self, store: Store, problem: ConvProblem, served: ConvProblem) -> Iterator[tuple[Record, str, str]]:
        try:
            record = store.best(problem, self._spec)
        except UnreadableRow as error:
            self._pass_over(error)
            record = shipped.best(problem, self._spec.key)
        remark = ""
        if record is not None and record.verified:
            yield record, "exact", _tuned(record)
        elif record is not None:
            remark = f" (its record, {record.config}, is marked as not verified)"
        if record is not None:
            try:
                trials = store.trials(problem, self._spec)
            except UnreadableRow as error:
                self._pass_over(error)
                trials = []
            correct = [Record.of(t) for t in trials if t.status is Status.CORRECT and t.config != record.config]
            for other in sorted(correct, key=lambda one: one.time_us)[:_NEXT_BEST]:
                yield other, "exact", f"next best of its trials{remark}"
        current = self._freshness.current(served, self._spec)
        passed: list[UnreadableRow] = []
        near = store.similar(problem, self._spec, current=current, within=MAX_DISTANCE, unreadable=passed.append)
        for apart, other in near:
            self._pass_over(*passed)
            if other.verified:
                yield other, "nearest", _near(apart, other) + remark
        self._pass_over(*passed)

    def _pass_over(self, *errors: UnreadableRow) -> None:
        """Warn of each row once."""
        for text in map(str, errors):
            if text not in self._unreadable:
                self._unreadable.add(text)
                _warn(text)

    def _defaults(self, family: Family, problem: ConvProblem) -> Sequence[Config]:
        return family.configs(problem, self._spec)[:8]

    def _choice(
        self, problem: ConvProblem, served: ConvProblem, config: Config, match: str, why: str, record: Record | None
    ) -> Choice:
        launch = self._family(config).launch(config, served, self._spec)
        stale = (record and self._freshness.why_stale(record)) or ""
        return Choice(
            problem=problem,
            device=self._spec,
            config=config,
            match=match,
            why=f"{why}; stale: {stale}" if stale else why,
            record=record,
            stale=stale,
            workspace_bytes=launch.workspace_bytes,
        )

    def _legal(self, config: Config, problem: ConvProblem) -> bool:
        family = family_named(config.family, self._families)
        return family is not None and family.legal(config, problem, self._spec) is None

    def _family(self, config: Config) -> Family:
        family = family_named(config.family, self._families)
        assert family is not None
        return family

    def _open(self) -> Backend:
        if os.getpid() != self._process:
            raise RuntimeError("a dispatcher does not follow a fork: make one in the child process")
        if self._backend is None:
            with self._lock:
                self._backend = self._backend or open_backend(self._device)
        return self._backend

    def _prepare(self, problem: ConvProblem) -> _Ready:
        """Compile and load the layer's kernel; a config that fails is passed over, with one warning."""
        backend = self._open()
        with self._lock:
            if problem in self._ready:
                return self._ready[problem]
            if backend.is_capturing():
                raise RuntimeError(f"{problem} is not warm, and its stream is being captured: call warmup before")
            self.select(problem)
            compiler = compiler_for(self._spec)
            failure: Exception | None = None
            for choice in self._candidates(problem):
                family = self._family(choice.config)
                try:
                    compiled = compiler.compile(family.source(choice.config, problem, self._spec))
                    kernel = backend.load(compiled, family.launch(choice.config, problem, self._spec))
                    proven = self._proven(choice, backend, kernel) if choice.stale else choice
                except (CompileError, ConstraintsError, _Disproved) as error:
                    failure = error
                    self._reject(choice, str(error).splitlines()[0])
                    continue
                ready = self._ready[problem] = _Ready(problem, proven, kernel, {})
                self._choices[problem] = proven
                return ready
            raise Unsupported(f"no config of {problem} can be built on {self._spec.name}: {failure}") from failure

    def _proven(self, choice: Choice, backend: Backend, kernel: Kernel) -> Choice:
        """The choice, no longer stale, once one launch agrees with the reference; _Disproved when it does not."""
        try:
            wrong = disproof(backend, choice.problem, kernel, choice.workspace_bytes, secrets.randbits(31))
        except DeviceFault as error:
            self._reject(choice, str(error))
            raise
        if wrong:
            raise _Disproved(wrong)
        return replace(choice, stale="", why=f"{choice.why}; verified by this process")

    def _reject(self, choice: Choice, reason: str) -> None:
        """Warn of a choice that does not work, and mark the layer's own record, if it was stale, in the database."""
        _warn(f"{choice.problem}: {choice.config} cannot be used: {reason}")
        if choice.stale and choice.match == "exact" and choice.record is not None and self._store is not None:
            # a fresh one that cannot be built says more about this machine than about the record
            with contextlib.suppress(StoreError):  # read-only, or gone: this process passes it over all the same
                self._store.distrust(choice.record)

    def _workspace(self, ready: _Ready) -> Any:
        """The workspace of the current stream, zeroed when it is made; None when the kernel needs none."""
        if not ready.choice.workspace_bytes:
            return None
        backend = self._open()
        stream = backend.stream_key()
        if stream not in ready.workspaces:
            workspace = backend.allocate(ready.choice.workspace_bytes)
            backend.fill(workspace, 0)
            ready.workspaces[stream] = workspace
        return ready.workspaces[stream]


class _Disproved(Exception):
    """A kernel's output is not the reference's; one line."""


def _opened(location: str | os.PathLike[str] | None) -> Store | None:
    """The store there, for look-ups; None, with a warning, where it cannot be opened."""
    try:
        return Store(location, create=False)
    except StoreError as error:
        _warn(f"the database cannot be opened: {error}")
        return None


def _warn(text: str) -> None:
    """Warn, and name the line that called this module, from however deep in it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals is globals():
        level, frame = level + 1, frame.f_back
    warnings.warn(text, NotTuned, stacklevel=level)


def _tuned(record: Record) -> str:
    where = " in the shipped table" if shipped.is_shipped(record) else ""
    return f"tuned on {record.provenance.created_at[:10]}{where}"


def _near(apart: float, other: Record) -> str:
    where = " in the shipped table" if shipped.is_shipped(other) else ""
    return f"the config of {other.problem}{where}, distance {apart:.2f}"


def _problem(
    x: tuple[int, ...],
    w: tuple[int, ...],
    dtype: object,
    stride: IntPair,
    padding: IntPair,
    dilation: IntPair,
    groups: int,
    layout: str,
    activation: str,
    out_dtype: object,
    scaling: str,
    bias: bool,
    residual: bool,
) -> ConvProblem:
    """The layer that a call describes; ValueError when filter and activation do not fit together."""
    if len(x) != 4 or len(w) != 4:
        raise ValueError(f"activation and filter have four axes, not {len(x)} and {len(w)}")
    nhwc = str(layout).lower() != Layout.NCHW
    n, h, width, c = x if nhwc else (x[0], x[2], x[3], x[1])
    k, r, s, depth = w if nhwc else (w[0], w[2], w[3], w[1])
    if depth * groups != c:
        raise ValueError(f"the filter has {depth} channels in {groups} groups, the activation {c}")
    return ConvProblem(
        **{"N": n, "C": c, "H": h, "W": width, "K": k, "R": r, "S": s, "groups": groups},
        stride=stride,
        padding=padding,
        dilation=dilation,
        dtype=dtype,
        layout=layout,
        epilogue=Epilogue(
            bias=bias,
            residual=residual,
            activation=activation,
            scale=scaling,
            out_dtype=None if out_dtype is None else DType.of(out_dtype),
        ),
    )


def _scaling(scale: Any) -> str:
    """The ``Epilogue.scale`` that a call's argument means; ValueError when it is neither a number nor an array."""
    if scale is None:
        return "none"
    if isinstance(scale, Real):
        return "tensor"
    if not hasattr(scale, "reshape"):
        raise ValueError(f"scale must be a number or an array, not {type(scale).__name__}")
    return "tensor" if scale.shape in ((), (1,)) else "channel"


def _shares(flat: Any, array: Any) -> bool:
    """Whether a flat view still is the caller's memory, not a copy."""
    return bool(_address(flat) == _address(array))


def _overlap(one: Any, other: Any) -> bool:
    """Whether two flat arrays of bytes have memory in common."""
    start, other_start = _address(one), _address(other)
    return start < other_start + int(other.size) and other_start < start + int(one.size)


def _address(array: Any) -> int:
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])
