"""Picks a layer's winner: the fastest few are timed again, interleaved, and ties are broken by rule."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

from autotune.search.ledger import Ledger
from autotune.trial import Config, Measurement, Trial

if TYPE_CHECKING:
    from autotune.measure import Workbench

MAX_FINALISTS = 4
WITHIN = 1.05  # times the fastest
DISTURBED = 1.1  # times what the fastest took before: no candidate can be blamed for that
ATTEMPTS = 2


def settle(
    bench: Workbench,
    ledger: Ledger,
    eligible: Container[Config],
    predict_us: Callable[[Config], float],
    within: float = WITHIN,
) -> Trial | None:
    """The winner among the ledger's trials of eligible configs, as it was measured last; None when none is correct.

    within: how many times slower than the fastest a finalist may be.

    A finalist that fails now is recorded as failed, and those behind it move up. Where something disturbs the machine
    every time, so that even the winner is slower than it was in this run, the first times decide.
    """
    while chosen := finalists([trial for trial in ledger.counted if trial.config in eligible], within):
        measured = [trial for trial in chosen if trial in ledger.measured]
        if len(chosen) == len(measured) == 1:
            return chosen[0]
        for _ in range(ATTEMPTS):
            again = bench.retime([trial.config for trial in chosen])
            correct = [trial for trial in again if trial.measurement]
            disturbed = bool(correct and measured) and _fastest_us(correct) > DISTURBED * _fastest_us(measured)
            if not disturbed:
                break
        for trial in again:
            if not (disturbed and trial.measurement):
                ledger.update(trial)
        if correct:
            valid = {trial.config for trial in correct}
            return winner([t for t in chosen if t.config in valid] if disturbed else correct, predict_us)
    return None


def finalists(trials: Sequence[Trial], within: float = WITHIN) -> list[Trial]:
    """The fastest correct trials: at most 4, and within 5 % of the fastest."""
    correct = sorted((t for t in trials if t.measurement), key=lambda t: (_measurement(t).time_us, t.config.name))
    return [t for t in correct[:MAX_FINALISTS] if _measurement(t).time_us <= within * _measurement(correct[0]).time_us]


def winner(trials: Sequence[Trial], predict_us: Callable[[Config], float]) -> Trial:
    """The fastest correct trial; of those within the noise of it the best prediction, then the first name."""
    fastest = min(trials, key=lambda t: _measurement(t).time_us)
    limit = _measurement(fastest).time_us + noise_us(_measurement(fastest))
    tied = [trial for trial in trials if _measurement(trial).time_us <= limit]
    return min(tied, key=lambda t: (predict_us(t.config), t.config.name))


def noise_us(measurement: Measurement) -> float:
    """Standard error of the median of n normal samples: 1.253 deviations over sqrt(n), a deviation being 0.741 IQR."""
    return 1.253 * 0.741 * measurement.spread_us / math.sqrt(measurement.samples)


def _fastest_us(trials: Sequence[Trial]) -> float:
    return min(_measurement(trial).time_us for trial in trials)


def _measurement(trial: Trial) -> Measurement:
    assert trial.measurement is not None
    return trial.measurement
