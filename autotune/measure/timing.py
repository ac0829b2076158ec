"""Timing statistics: how many launches make a sample, how many samples a measurement, and when to stop early."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from autotune.backends.backend import DeviceFault

SAMPLES = 5
MORE_SAMPLES = 2
FINAL_SAMPLES = 7  # of a finalist, taken in turn with those of the others
UNSTABLE = 0.03  # relative spread beyond which more samples are taken
DISTURBED = 0.10  # relative spread beyond which all samples are taken again, once
LOSER = 2.0  # times the best: a candidate that slow gets one sample
OVERHEAD_US = 20.0  # of a sample with a single launch, which must not make a short kernel look like a loser


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLength:
    """How long samples are, in microseconds.

    least_us: a sample lasts at least so long (or one launch). rotation_us: it is prolonged up to here to visit every
    operand set, without which the sets that it visits would stay in the cache from sample to sample. total_us: all
    samples of a candidate together, as far as three samples allow.
    """

    least_us: float
    rotation_us: float
    total_us: float


SAMPLE_LENGTHS = {
    "cuda": SampleLength(least_us=700, rotation_us=5_000, total_us=100_000),
    "cpu": SampleLength(least_us=2_000, rotation_us=50_000, total_us=1_000_000),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Samples:
    """Times of one candidate: microseconds a launch, one value a sample."""

    values_us: tuple[float, ...]
    launches: int

    @property
    def median_us(self) -> float:
        return statistics.median(self.values_us)

    @property
    def spread_us(self) -> float:
        """Interquartile range; 0 with fewer than two samples."""
        if len(self.values_us) < 2:
            return 0.0
        lower, _, upper = statistics.quantiles(self.values_us, n=4, method="inclusive")
        return upper - lower

    @property
    def relative_spread(self) -> float:
        return self.spread_us / self.median_us


# launches, samples -> microseconds a launch of each sample
Timer = Callable[[int, int], Sequence[float]]


def sample(timer: Timer, launches: int, samples: int) -> Samples:
    """Ask the timer; DeviceFault when it reads zero, a negative value, infinity or NaN, which is no time."""
    values = tuple(float(value) for value in timer(launches, samples))
    for value in values:
        if not (math.isfinite(value) and value > 0):
            raise DeviceFault(f"the timer read {value} us")
    return Samples(values_us=values, launches=launches)


def launches_for(launch_us: float, sets: int, length: SampleLength) -> int:
    """Launches in a sample: enough for the timer, and all operand sets once where that takes no more than allowed."""
    enough = math.ceil(length.least_us / launch_us)
    return max(1, enough, min(sets, math.floor(length.rotation_us / launch_us)))


def is_loser(launch_us: float, best_us: float | None) -> bool:
    """True when the time of a single launch says that a candidate is far from the best."""
    return best_us is not None and launch_us > LOSER * best_us + OVERHEAD_US


def samples_of(timer: Timer, launch_us: float, sets: int, length: SampleLength) -> Samples:
    """Time a candidate of which a launch takes about ``launch_us``: samples until they agree.

    A set of samples that something disturbed is taken again once; the quieter of the two counts.
    """
    launches = launches_for(launch_us, sets, length)
    count = max(3, min(SAMPLES, int(length.total_us / (launches * launch_us))))
    taken = _until_stable(timer, launches, count)
    if taken.relative_spread > DISTURBED:
        taken = min(taken, _until_stable(timer, launches, count), key=lambda s: s.relative_spread)
    return taken


def _until_stable(timer: Timer, launches: int, count: int) -> Samples:
    taken = sample(timer, launches, count)
    if taken.relative_spread <= UNSTABLE:
        return taken
    more = sample(timer, launches, MORE_SAMPLES)
    return Samples(values_us=taken.values_us + more.values_us, launches=launches)
