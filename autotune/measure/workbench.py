"""Turns configs into trials: compiles them in a pool of children, runs them in another, and survives what they do."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import wait
from typing import Self

from autotune.backends import cache
from autotune.backends.backend import CompiledKernel, NoDevice
from autotune.device import Device, roofline_us
from autotune.families import family_named
from autotune.families.family import Family, Launch, Source
from autotune.measure.failures import FAILURES, classify, leaves_child_healthy, one_line
from autotune.measure.harness import Measured
from autotune.measure.worker import Worker
from autotune.problem import ConvProblem
from autotune.trial import Config, Provenance, Status, Trial

MAX_COMPILERS = 16
_GRACE_S = 1.0  # for a child to end its compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds after which a child is killed.

    compile_s: one config. prepare_s: start of the device, inputs and reference. run_s: verifying and timing one config,
    beyond ``run_rooflines`` times what the layer takes at the device's roofline.
    """

    compile_s: float = 60.0
    prepare_s: float = 600.0
    run_s: float = 20.0
    run_rooflines: float = 200.0


@dataclass(slots=True, kw_only=True, eq=False)
class _Job:
    """A config on its way. run: whether it is to be run once it is compiled."""

    config: Config
    source: Source
    launch: Launch
    run: bool
    kernel: CompiledKernel | None = None
    outcome: Measured | Exception | None = field(default=None)


class Workbench:
    """Measures configs of one layer on one device. A context manager: leaving it kills every child.

    ``submit`` queues a config and ``next`` returns the next trial that is finished, in whatever order. Compilation
    overlaps with timing, except where both would want the same cores. Children start when they are first needed; the
    device child, which draws the inputs and computes the reference, starts at once.
    """

    def __init__(
        self,
        device: Device,
        problem: ConvProblem,
        families: Sequence[Family],
        seed: int,
        limits: Limits | None = None,
    ) -> None:
        if device.spec is None:
            raise NoDevice(f"{device.id} cannot be used: {device.reason}")
        self._device, self._spec = device, device.spec
        self._problem, self._families, self._seed = problem, families, seed
        self._limits = limits or Limits()
        self._run_s = self._limits.run_s + self._limits.run_rooflines * roofline_us(problem, device.spec) / 1e6
        self._takes_turns = device.spec.kind == "cpu"
        self._max_compilers = min(_usable_cores(), MAX_COMPILERS)
        self._queued: deque[_Job] = deque()
        self._compiled: deque[_Job] = deque()
        self._finished: deque[_Job] = deque()
        self._kernels: dict[Config, CompiledKernel] = {}
        # a compile child and its job; None while it starts
        self._compiling: dict[Worker, _Job | None] = {}
        self._idle: list[Worker] = []
        self._running: _Job | None = None
        self._compiler = "unknown"
        self._driver: str | None = None  # until the device child has told it
        self._preparing = False
        self._measurer: Worker | None = None

    def __enter__(self) -> Self:
        self._start_measurer()
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in (*self._idle, *([self._measurer] if self._measurer else [])):
            worker.kill()
        for worker in self._compiling:
            worker.kill(_GRACE_S)

    @property
    def wants_more(self) -> bool:
        """True while more configs in the queue would keep every child busy."""
        return self.unfinished < 2 * self._max_compilers

    @property
    def unfinished(self) -> int:
        """Configs submitted and not yet returned."""
        jobs = [job for job in self._compiling.values() if job is not None and job.run]
        return len(self._queued) + len(jobs) + len(self._compiled) + bool(self._running) + len(self._finished)

    def submit(self, config: Config) -> None:
        """Queue a legal config."""
        self._queued.append(self._job(config, run=True))

    def drop(self, config: Config) -> None:
        """Forget a submitted config, unless it is just being compiled or run."""
        self._queued = deque(job for job in self._queued if job.config != config)
        self._compiled = deque(job for job in self._compiled if job.config != config)

    def cancel(self) -> None:
        """Forget every submitted config but the one that is running."""
        self._queued.clear()
        self._compiled.clear()
        for worker in self._compiling:
            worker.kill(_GRACE_S)
        self._compiling.clear()

    def next(self, best_us: float | None = None) -> Trial | None:
        """The next finished trial; None when nothing is left. A config much slower than ``best_us`` is timed roughly.

        Raises NoDevice when the device or the compiler cannot be used at all.
        """
        while True:
            self._assign(best_us)
            if self._finished and self._driver is not None:
                return self._trial(self._finished.popleft())
            if not self._step():
                return None

    def retime(self, configs: Sequence[Config]) -> list[Trial]:
        """Verify and time configs again, interleaved, so that their times can be compared closely; in the given order.

        To be called when nothing is unfinished.
        """
        jobs = [self._job(config, run=False) for config in configs]
        self._queued.extend(job for job in jobs if job.kernel is None)
        self._assign(None)
        while self._compiling or self._preparing:
            self._step()
            self._assign(None)
        good = [job for job in jobs if job.kernel is not None]
        worker = self._measurer or self._start_measurer()
        while self._preparing:
            self._step()
        worker.ask(self._run_s * len(good), "retime", [(job.kernel, job.launch) for job in good])
        try:
            for job, outcome in zip(good, worker.answer(), strict=True):
                job.outcome = outcome
        except FAILURES:
            # one of them brought the child down: one by one, it is known which
            self._stop_measurer()
            for job in good:
                self._compiled.append(job)
                while self._running or self._compiled:
                    self._assign(None)
                    self._step()
            self._finished.clear()
        return [self._trial(job) for job in jobs]

    def _job(self, config: Config, run: bool) -> _Job:
        family = family_named(config.family, self._families)
        assert family is not None, config
        source = family.source(config, self._problem, self._spec)
        launch = family.launch(config, self._problem, self._spec)
        return _Job(config=config, source=source, launch=launch, run=run, kernel=self._kernels.get(config))

    def _start_measurer(self) -> Worker:
        self._measurer = Worker(self._limits.prepare_s, "measuring", self._device, self._problem, self._seed)
        self._preparing = True
        return self._measurer

    def _stop_measurer(self) -> None:
        assert self._measurer is not None
        self._measurer.kill()
        self._measurer = None

    def _assign(self, best_us: float | None) -> None:
        """Give idle children work."""
        timing = self._running is not None or (bool(self._compiled) and not self._preparing)
        if not (self._takes_turns and timing):
            starting = sum(job is None for job in self._compiling.values())
            while self._queued and self._idle:
                worker, job = self._idle.pop(), self._queued.popleft()
                worker.ask(self._limits.compile_s, "compile", job.source)
                self._compiling[worker] = job
            for _ in range(min(len(self._queued) - starting, self._max_compilers - len(self._compiling))):
                self._compiling[Worker(self._limits.compile_s, "compiling", self._spec)] = None
        if self._compiled and not self._running and not (self._takes_turns and self._compiling):
            worker = self._measurer or self._start_measurer()
            if not self._preparing:
                self._running = job = self._compiled.popleft()
                worker.ask(self._run_s, "run", job.kernel, job.launch, best_us)

    def _step(self) -> bool:
        """Wait until a child answers or its time is over, and take the answers; False when no child is busy."""
        busy = list(self._compiling)
        if self._measurer is not None and (self._running or self._preparing):
            busy.append(self._measurer)
        if not busy:
            return False
        ready = wait([worker.connection for worker in busy], max(0.0, min(worker.seconds_left for worker in busy)))
        for worker in busy:
            if worker.connection in ready or worker.seconds_left <= 0:
                if worker is not self._measurer:
                    self._take_compiled(worker)
                elif self._preparing:
                    self._take_prepared(worker)
                else:
                    self._take_measured(worker)
        return True

    def _take_compiled(self, worker: Worker) -> None:
        job = self._compiling[worker]
        try:
            answer = worker.answer()
        except FAILURES as failure:
            if job is None:
                raise NoDevice(f"the compiler cannot be started: {failure}") from failure
            del self._compiling[worker]
            job.outcome = failure
            if leaves_child_healthy(failure):
                self._idle.append(worker)
            else:
                worker.kill(_GRACE_S)
            if job.run:
                self._finished.append(job)
            return
        del self._compiling[worker]
        self._idle.append(worker)
        if job is None:
            self._compiler = answer
            return
        job.kernel = self._kernels[job.config] = answer
        if job.run:
            self._compiled.append(job)

    def _take_prepared(self, worker: Worker) -> None:
        try:
            self._driver = worker.answer()
        except FAILURES as failure:
            raise NoDevice(f"{self._device.id} cannot be used: {one_line(failure)}") from failure
        self._preparing = False

    def _take_measured(self, worker: Worker) -> None:
        job, self._running = self._running, None
        assert job is not None
        try:
            job.outcome = worker.answer()
        except FAILURES as failure:
            job.outcome = failure
            if not leaves_child_healthy(failure):
                self._stop_measurer()
        self._finished.append(job)

    def _trial(self, job: _Job) -> Trial:
        """The only place where provenance is written."""
        kernel, outcome = job.kernel, job.outcome
        assert outcome is not None
        failure = outcome if isinstance(outcome, Exception) else None
        measured = outcome if isinstance(outcome, Measured) else None
        return Trial(
            problem=self._problem,
            device=self._spec,
            config=job.config,
            status=classify(failure, compiling=kernel is None) if failure else Status.CORRECT,
            provenance=Provenance(
                kernel_digest=kernel.digest if kernel else cache.digest(job.source),
                compiler=kernel.compiler if kernel else self._compiler,
                driver=self._driver or "",
                clock_mhz=measured.clock_mhz if measured else None,
                temperature_c=measured.temperature_c if measured else None,
                created_at=datetime.now(UTC).isoformat(timespec="seconds"),
            ),
            measurement=measured.measurement if measured else None,
            detail=one_line(failure) if failure else "",
            compile_s=kernel.compile_s if kernel else 0.0,
            registers=kernel.registers if kernel else None,
            spill_bytes=kernel.spill_bytes if kernel else None,
        )


def _usable_cores() -> int:
    # not every system can bind a process to some of its cores
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
