"""A workbench that answers from a table instead of measuring, so that the search is tested without timing noise."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import pytest

from autotune.device import Device, DeviceSpec
from autotune.families import Family, Knob, Launch, Source
from autotune.problem import ConvProblem, DType
from autotune.search import loop, renewal
from autotune.trial import Config, Measurement, Provenance, Status, Trial

SPEC = DeviceSpec(
    kind="cpu", name="Replay", arch="x", sm_count=2, l2_bytes=1 << 20, bytes_per_s=1e10, rates=((DType.F32, 1e11),)
)
PROBLEM = ConvProblem(N=2, C=8, H=12, W=12, K=16, R=3, S=3, padding=1, dtype="f32")
PROVENANCE = Provenance(kernel_digest="d", compiler="c", driver="v", created_at="2026-01-01T00:00:00+00:00")


class Grid(Family):
    """Two knobs; tile 8 is illegal with an unroll above 2, f16 unsupported, and the prediction likes large tiles."""

    name = "grid"
    kind = "cpu"
    knobs: ClassVar[tuple[Knob, ...]] = (
        Knob(name="tile", candidates=(1, 2, 4, 8, 16, 32), meaning="rows"),
        Knob(name="unroll", candidates=(1, 2, 3, 4, 6, 8), meaning="columns"),
    )

    def unsupported(self, problem: ConvProblem, *_: object) -> str | None:
        return None if problem.dtype is DType.F32 else f"no {problem.dtype}"

    def illegal(self, config: Config, *_: object) -> str | None:
        return "tile 8 needs unroll <= 2" if config["tile"] == 8 and config["unroll"] > 2 else None

    def source(self, *_: object) -> Source:
        raise AssertionError("a replay compiles nothing")

    def launch(self, *_: object) -> Launch:
        raise AssertionError("a replay launches nothing")

    def predict_us(self, config: Config, *_: object) -> float:
        return 100 / config["tile"] + config["unroll"]


# a config's time in microseconds, or the status of its failure
Answer = float | Status
Table = Callable[[Config], Answer]


def trial_of(config: Config, answer: Answer, problem: ConvProblem = PROBLEM, spread_us: float = 0.0) -> Trial:
    failed = isinstance(answer, Status)
    return Trial(
        problem=problem,
        device=SPEC,
        config=config,
        status=answer if isinstance(answer, Status) else Status.CORRECT,
        provenance=PROVENANCE,
        detail="as the table says" if failed else "",
        measurement=None
        if isinstance(answer, Status)
        else Measurement(time_us=answer, spread_us=spread_us, samples=5, launches=1, condition="cold-loop"),
    )


class Replay:
    """Takes the place of the workbench while a test runs, and remembers what was asked of it.

    table: answers ``next``. final: answers ``retime``, by default the table. spread_us: of every measurement.
    before_next: called before each answer with the number of answers so far. started, left: runs begun and ended.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, table: Table) -> None:
        self.table, self.final = table, table
        self.spread_us = 0.0
        self.before_next: Callable[[int], None] = lambda _: None
        self.measured: list[Config] = []
        self.retimed: list[list[Config]] = []
        self.started = 0
        self.left = 0
        for module in (loop, renewal):
            monkeypatch.setattr(module, "find", lambda _: Device(id="cpu", spec=SPEC))
            monkeypatch.setattr(module, "Workbench", self._open)

    def _open(self, _device: Device, problem: ConvProblem, *_: object) -> Bench:
        return Bench(self, problem)


class Bench:
    """One run of a replay."""

    def __init__(self, replay: Replay, problem: ConvProblem) -> None:
        self._replay, self._problem = replay, problem
        self._queue: deque[Config] = deque()

    def __enter__(self) -> Self:
        self._replay.started += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self._replay.left += 1

    @property
    def wants_more(self) -> bool:
        return self.unfinished < 4

    @property
    def unfinished(self) -> int:
        return len(self._queue)

    def submit(self, config: Config) -> None:
        self._queue.append(config)

    def drop(self, config: Config) -> None:
        if config in self._queue:
            self._queue.remove(config)

    def cancel(self) -> None:
        self._queue.clear()

    def next(self, *_: object) -> Trial | None:
        self._replay.before_next(len(self._replay.measured))
        if not self._queue:
            return None
        config = self._queue.popleft()
        self._replay.measured.append(config)
        return self._trial(config, self._replay.table)

    def retime(self, configs: Sequence[Config]) -> list[Trial]:
        self._replay.retimed.append(list(configs))
        return [self._trial(config, self._replay.final) for config in configs]

    def _trial(self, config: Config, table: Table) -> Trial:
        return trial_of(config, table(config), self._problem, self._replay.spread_us)
