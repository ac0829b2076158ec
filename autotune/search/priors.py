"""What to try first: defaults, the winners of similar layers, and the predictions' favourites."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.search.space import Space
from autotune.trial import Config

if TYPE_CHECKING:
    from autotune.store import Store

_NEIGHBOURS = 4
# of the trials that go to favourites before the sampler takes over
_FAVOURITES_SHARE = 0.25
_FAVOURITES_AT_LEAST = 6


def first_proposals(
    space: Space, store: Store, problem: ConvProblem, device: DeviceSpec, trials: int, earlier: Iterable[Config] = ()
) -> list[Config]:
    """Legal configs in the order to try them.

    Defaults, the layer's record, ``earlier`` ones, winners of similar layers, favourites of the predictions.
    """
    present = store.best(problem, device)
    favourites = space.favourites(max(_FAVOURITES_AT_LEAST, math.ceil(_FAVOURITES_SHARE * trials)))
    wanted = [
        *space.defaults(),
        *([present.config] if present else []),
        *earlier,
        *neighbours(store, problem, device),
        *favourites,
    ]
    return [config for config in dict.fromkeys(wanted) if config in space]


def neighbours(store: Store, problem: ConvProblem, device: DeviceSpec) -> list[Config]:
    """Winners of the most similar layers of the same dtype that were tuned on this device model, nearest first."""
    records = [r for r in store.records(device) if r.problem.dtype is problem.dtype and r.problem != problem]
    return [r.config for r in sorted(records, key=lambda r: distance(problem, r.problem))[:_NEIGHBOURS]]


def distance(one: ConvProblem, other: ConvProblem) -> float:
    """How unlike two layers are: the sum of the logarithms of the ratios of the extents that kernels care about."""
    return sum(abs(math.log(a / b)) for a, b in zip(_extents(one), _extents(other), strict=True))


def _extents(p: ConvProblem) -> tuple[int, ...]:
    return (p.N * p.P * p.Q, p.K // p.groups, p.C // p.groups, p.groups, p.R, p.S, *p.stride, *p.dilation)
