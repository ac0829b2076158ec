"""Rivals: whatever else computes a layer, each of its plans verified and timed as ours are."""

from __future__ import annotations

import heapq
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from autotune.backends import Kernel, NoDevice
from autotune.backends.cudnn import Cudnn
from autotune.measure.failures import WrongOutput, one_line
from autotune.measure.harness import Harness, Loaded
from autotune.problem import ConvProblem, Layout

FINALISTS = 6  # plans that are timed in turn with ours, by their first times
# timed plans of a rival after which it is left when its best takes this many times the best of all
FAIR_TRIES = 5
BEHIND = 2.0


class Rival(Protocol):
    """Another implementation of a layer, in one layout, with several plans, by what it expects to be fastest first."""

    name: str
    layout: Layout

    def __len__(self) -> int:
        """Number of plans."""

    def kernel(self, index: int) -> Kernel:
        """A plan as a kernel; raises what it likes when that plan cannot run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A verified plan. first_us: what its first launch with a cold cache took."""

    rival: str
    loaded: Loaded
    first_us: float


@dataclass(slots=True)
class Contest:
    """The plans to be timed in turn with ours, and what became of the others, by name and reason."""

    finalists: list[Plan] = field(default_factory=list)
    timed: int = 0
    left: int = 0
    skipped: Counter[str] = field(default_factory=Counter)


def cudnn(problem: ConvProblem) -> list[Callable[[], Rival]]:
    """cuDNN with the layer's epilogue fused, where it has one: in the layer's layout, then in the other.

    Where it has none, fused plans with a neutral bias too, in the layer's layout.
    """
    layouts = sorted(Layout, key=lambda layout: layout is not problem.layout)
    found: list[Callable[[], Rival]] = [partial(Cudnn, replace(problem, layout=layout)) for layout in layouts]
    if problem.epilogue.is_identity and not problem.dtype.is_integer:
        found.insert(1, partial(Cudnn, problem, neutral_bias=True))
    return found


def contest(
    harness: Harness, problem: ConvProblem, seconds: float, rivals: Sequence[Callable[[], Rival]] | None = None
) -> Contest:
    """Try plan after plan, one of each rival in turn, for about so many seconds; at least the first of each."""
    deadline = time.monotonic() + seconds
    found = Contest()
    racing: list[_Racer] = []
    for opened in cudnn(problem) if rivals is None else rivals:
        try:
            racing.append(_Racer(opened()))
        except (NoDevice, ValueError) as error:
            found.skipped[one_line(error)] += 1
    best_us = float("inf")
    while racing:
        for racer in list(racing):
            late = racer.tried and time.monotonic() > deadline
            if late or racer.tried == len(racer.rival) or racer.is_behind(best_us):
                found.left += len(racer.rival) - racer.tried
                racing.remove(racer)
                continue
            plan = _try(harness, racer.rival, racer.tried, found)
            racer.tried += 1
            if plan is not None:
                racer.timed += 1
                racer.best_us = min(racer.best_us, plan.first_us)
                best_us = min(best_us, plan.first_us)
                found.timed += 1
                # the others are dropped, and with them their workspaces
                found.finalists = _leading([*found.finalists, plan])
    return found


@dataclass(slots=True)
class _Racer:
    rival: Rival
    tried: int = 0
    timed: int = 0
    best_us: float = float("inf")

    def is_behind(self, best_us: float) -> bool:
        return self.timed >= FAIR_TRIES and self.best_us > BEHIND * best_us


def _try(harness: Harness, rival: Rival, index: int, found: Contest) -> Plan | None:
    try:
        loaded = harness.foreign(rival.kernel(index), rival.layout)
        return Plan(rival=rival.name, loaded=loaded, first_us=harness.verify(loaded).median_us)
    except WrongOutput:
        found.skipped[f"{rival.name}: wrong output"] += 1
    # not ours: whatever befalls one plan is a reason to count, and ends nothing
    except Exception as error:
        found.skipped[f"{rival.name}: {one_line(error, 120) or type(error).__name__}"] += 1
    return None


def _leading(plans: Sequence[Plan]) -> list[Plan]:
    """The fastest plans, and the fastest of each rival."""
    best = {plan.rival: plan for plan in sorted(plans, key=lambda plan: -plan.first_us)}
    leading = heapq.nsmallest(FINALISTS, plans, key=lambda plan: plan.first_us)
    return [*leading, *(plan for plan in best.values() if plan not in leading)]
