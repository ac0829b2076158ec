"""What a search reports while it runs and when it is done."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.trial import Record, Trial


class NoValidConfig(Exception):
    """No config that was tried gives a correct result; one line with the counts and the first reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """After each trial. done: configs that count for the budget so far. total: how many there will be at most.

    best: the fastest correct trial so far, None while there is none. last: the trial that just ended.
    """

    done: int
    total: int
    best: Trial | None
    last: Trial


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """best: the layer's record. trials: every recorded trial of the layer on this device, in the order first recorded.

    measured: how many of them this run measured. renewed: where none was missing but the record could not be trusted
    any more, so that its best few were verified and timed again, the reason in one line.
    """

    best: Record
    trials: list[Trial]
    measured: int
    renewed: str = ""
