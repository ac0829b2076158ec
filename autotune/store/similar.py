"""Which tuned layers are like a given one, nearest first."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.trial import Record

if TYPE_CHECKING:
    from autotune.store.store import Store


def similar(store: Store, problem: ConvProblem, device: DeviceSpec) -> list[tuple[float, Record]]:
    """Records of other layers of the same dtype on this device model with their distances, nearest first.

    Equally distant ones come in the order of their problem texts.
    """
    records = [r for r in store.records(device) if r.problem.dtype is problem.dtype and r.problem != problem]
    return sorted(((distance(problem, r.problem), r) for r in records), key=lambda found: found[0])


def distance(one: ConvProblem, other: ConvProblem) -> float:
    """How unlike two layers are: the sum of the logarithms of the ratios of the extents that kernels care about."""
    return sum(abs(math.log(a / b)) for a, b in zip(_extents(one), _extents(other), strict=True))


def _extents(p: ConvProblem) -> tuple[int, ...]:
    pixels = max(1, p.N * p.P * p.Q)
    return (pixels, p.K // p.groups, p.C // p.groups, p.groups, p.R, p.S, *p.stride, *p.dilation)
