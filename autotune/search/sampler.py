"""Proposes configs: given ones first, then by turns a variant of the fastest and what Optuna's TPE sampler asks for.

A variant has the same tile and one knob of its pipeline one step away. What the sampler asks for is moved to the
nearest free legal config; it finds good tiles, and is slow to look at what lies one step beside the best.
"""

from __future__ import annotations

import random
import warnings
from collections import Counter, deque
from collections.abc import Iterable

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution
from optuna.trial import TrialState, create_trial

from autotune.search.space import Space
from autotune.trial import Config, Trial

# A family is sampled no more once the fastest of this many of its trials took this many times as long as the fastest of
# all. It would have kept the winner's family in each of 93 searches on an H200 (2026-11-30).
_TRIED_ENOUGH = 2
_TOO_SLOW = 2.0


class Sampler:
    """Ask for configs and tell their trials; every config is proposed at most once.

    The study lives in memory: what is remembered from run to run is in the store, and ``known`` brings it in. A
    proposal is in the study as running until it is told, so that the sampler does not propose its surroundings
    meanwhile. Failed trials count as worse than any time.
    """

    def __init__(self, space: Space, seed: int, first: Iterable[Config], known: Iterable[Trial]) -> None:
        self._space = space
        self._first = deque(first)
        self._axes = space.axes
        self._study = _study(seed)
        self._length = 0
        self._running: dict[Config, int] = {}
        self._told: Counter[str] = Counter()
        self._fastest: dict[str, tuple[float, Config]] = {}  # of each family
        self._varies = False
        # once others search the same layer
        self._random: random.Random | None = None
        for trial in known:
            self.tell(trial)

    def ask(self) -> Config | None:
        """A free legal config, taken from now on; None when there is none left."""
        while self._first:
            config = self._first.popleft()
            if self._space.is_free(config):
                return self._propose(config)
        self._varies = not self._varies
        if self._varies and self._fastest:
            _, best = min(self._fastest.values(), key=_time_us)
            if variants := self._space.variants(best):
                return self._propose(self._random.choice(variants) if self._random else variants[0])
        asked = self._study.ask()
        self._length += 1
        point: dict[str, str | int] = {}
        family = self._space.families[0]
        if len(self._axes) > 1:
            family = point["family"] = self._promising(asked.suggest_categorical("family", self._space.families))
        for axis, count in self._axes[family].items():
            point[axis] = asked.suggest_int(axis, 0, count - 1)
        # what was sampled may be illegal or known: its place is taken by the config that is measured
        self._study.tell(asked, state=TrialState.FAIL)
        config_or_none = self._space.nearest(point)
        return None if config_or_none is None else self._propose(config_or_none)

    def tell(self, trial: Trial) -> None:
        """Learn from a trial, proposed here or known from elsewhere; one of a config outside the space is ignored."""
        if trial.config not in self._space:
            return
        number = self._running.pop(trial.config, None)
        if number is None:
            if not self._space.is_free(trial.config):
                return
            self._space.take(trial.config)
            number = self._add(trial.config)
        family = trial.config.family
        self._told[family] += 1
        if trial.measurement is not None:
            found = trial.measurement.time_us, trial.config
            self._fastest[family] = min(self._fastest.get(family, found), found, key=_time_us)
            self._study.tell(number, trial.measurement.time_us)
        else:
            self._study.tell(number, state=TrialState.PRUNED)

    def diverge(self) -> None:
        """Go a way of its own: other processes search the same layer, perhaps from the same seed."""
        self._random = random.SystemRandom()
        self._random.shuffle(self._first)
        self._study.sampler.reseed_rng()

    def _promising(self, family: str) -> str:
        """The family, or the fastest one so far where this one lies hopelessly behind."""
        if family not in self._fastest:
            return family
        best_us, best = min(self._fastest.values(), key=_time_us)
        hopeless = self._told[family] >= _TRIED_ENOUGH and _time_us(self._fastest[family]) > _TOO_SLOW * best_us
        return best.family if hopeless else family

    def _propose(self, config: Config) -> Config:
        self._space.take(config)
        self._running[config] = self._add(config)
        return config

    def _add(self, config: Config) -> int:
        point = self._space.point(config)
        distributions = self._distributions(config.family)
        self._study.add_trial(create_trial(state=TrialState.RUNNING, params=point, distributions=distributions))
        self._length += 1
        return self._length - 1

    def _distributions(self, family: str) -> dict[str, BaseDistribution]:
        found: dict[str, BaseDistribution] = {a: IntDistribution(0, n - 1) for a, n in self._axes[family].items()}
        if len(self._axes) > 1:
            found["family"] = CategoricalDistribution(self._space.families)
        return found


def _time_us(found: tuple[float, Config]) -> float:
    return found[0]


def _study(seed: int) -> optuna.Study:
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        with warnings.catch_warnings():
            # multivariate, group and constant_liar are experimental in some versions
            warnings.simplefilter("ignore")
            tpe = optuna.samplers.TPESampler(multivariate=True, group=True, constant_liar=True, seed=seed)
        return optuna.create_study(sampler=tpe)
    finally:
        optuna.logging.set_verbosity(verbosity)
