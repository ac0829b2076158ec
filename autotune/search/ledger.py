"""What is recorded of a layer: the account of the budget, and the record while and after the search runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.search.result import NoValidConfig, Progress, Result
from autotune.trial import Config, Record, Trial

if TYPE_CHECKING:
    from autotune.store import Store


class Ledger:
    """Counts distinct configs of a layer on a device against a budget, and writes every trial at once.

    Configs that the store holds count, whoever measured them and whatever came of it; with ``force`` only those of this
    run. Several processes may share a layer's budget.
    """

    def __init__(self, store: Store, problem: ConvProblem, device: DeviceSpec, budget: int, force: bool) -> None:
        self._store, self._problem, self._device = store, problem, device
        self._budget, self._force = budget, force
        self.recorded = store.trials(problem, device)
        self._counted = {} if force else {trial.config.name: trial for trial in self.recorded}
        self.measured: list[Trial] = []

    @property
    def counted(self) -> list[Trial]:
        """The trials that count for the budget."""
        return list(self._counted.values())

    @property
    def left(self) -> int:
        """How many configs may still be recorded."""
        return max(0, self._budget - len(self._counted))

    @property
    def best(self) -> Trial | None:
        """The fastest correct one of the trials that count."""
        return min((t for t in self._counted.values() if t.measurement), key=_time_us, default=None)

    @property
    def best_us(self) -> float | None:
        return None if self.best is None else _time_us(self.best)

    def progress(self, total: int) -> Progress:
        """Where the search stands after the trial committed last."""
        return Progress(done=len(self._counted), total=total, best=self.best, last=self.measured[-1])

    def refresh(self) -> list[Trial]:
        """The trials that other processes recorded since; they count from now on."""
        if self._force or self._store.trial_names(self._problem, self._device) <= self._counted.keys():
            return []
        found = [t for t in self._store.trials(self._problem, self._device) if t.config.name not in self._counted]
        self._counted |= {trial.config.name: trial for trial in found}
        return found

    def commit(self, trial: Trial) -> bool:
        """Write a trial, and the record if it is the fastest; False when others have used up the budget meanwhile."""
        best = self.best
        is_best = trial.measurement and not self._force and (best is None or _time_us(trial) < _time_us(best))
        # in one transaction: whoever is killed loses both or none, and a budget that others share is kept
        limit, record = None if self._force else self._budget, Record.of(trial) if is_best else None
        if not self._store.add_trial(trial, limit=limit, record=record):
            return False
        self._counted[trial.config.name] = trial
        self.measured.append(trial)
        return True

    def update(self, trial: Trial) -> None:
        """Write a trial that takes the place of an earlier one of its config."""
        self._store.add_trial(trial)
        self._counted[trial.config.name] = trial

    def close(self, winner: Trial, legal: Container[Config], outdated: bool = False) -> Result:
        """Make the winner the record; in place of an imported one of a legal config not tried here only if faster.

        outdated: the imported one's time is of another kernel, and does not count.
        """
        present = self._store.best(self._problem, self._device)
        tried = present is None or present.config.name in self._counted or present.config not in legal
        if self._force or tried or outdated:
            self._store.replace(Record.of(winner))
        else:
            self._store.offer(Record.of(winner))
        best = self._store.best(self._problem, self._device)
        assert best is not None
        return self.result(best)

    def result(self, best: Record) -> Result:
        trials = self._store.trials(self._problem, self._device)
        return Result(best=best, trials=trials, measured=len(self.measured))

    def nothing_valid(self) -> NoValidConfig:
        """The error that says why there is no winner."""
        counts = Counter(trial.status for trial in self.counted)
        tried = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        first = next((f" (first: {t.config}: {t.detail})" for t in self.counted if t.detail), "")
        return NoValidConfig(
            f"no correct config for {self._problem} on {self._device.key}: {tried or 'none tried'}{first}"
        )


def _time_us(trial: Trial) -> float:
    assert trial.measurement is not None
    return trial.measurement.time_us
