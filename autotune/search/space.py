"""The search space of a layer on a device: every legal config, as points on a grid of candidate indices."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

import numpy as np

from autotune.device import DeviceSpec
from autotune.families import Family, Unsupported, supporting, why_unsupported
from autotune.problem import ConvProblem
from autotune.trial import Config

# times the best prediction: of each tile predicted to be that fast there is a favourite
_PROMISING = 1.3


class Space:
    """The legal configs of all families that support a layer, each taken at most once.

    A point maps ``family`` (to a name, only where there are several) and each ``FAMILY.KNOB`` (to a candidate's index).
    Any point stands for the nearest legal config that is still free, so that what a sampler proposes is never illegal.

    Raises Unsupported when there is no legal config.
    """

    def __init__(self, problem: ConvProblem, device: DeviceSpec, families: Sequence[Family]) -> None:
        supporters = supporting(problem, device, families)
        if not supporters:
            raise Unsupported(why_unsupported(problem, device, families))
        self._problem, self._device = problem, device
        self._tables = {family.name: _Table(family, problem, device) for family in supporters}

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(self._tables)

    @property
    def axes(self) -> dict[str, dict[str, int]]:
        """For each family its axes and their number of candidates: knobs of which legal configs use several."""
        return {name: table.axes for name, table in self._tables.items()}

    def __len__(self) -> int:
        return sum(len(table.configs) for table in self._tables.values())

    def __contains__(self, config: object) -> bool:
        return any(config in table.row for table in self._tables.values())

    def is_free(self, config: Config) -> bool:
        """True for a legal config that is not taken."""
        return config in self and bool(self._tables[config.family].free[self._tables[config.family].row[config]])

    def take(self, config: Config) -> None:
        """Never offer this config again."""
        if config in self:
            self._tables[config.family].free[self._tables[config.family].row[config]] = False

    def point(self, config: Config) -> dict[str, str | int]:
        """Where a legal config stands."""
        table = self._tables[config.family]
        point: dict[str, str | int] = {"family": config.family} if len(self._tables) > 1 else {}
        return point | {axis: int(table.index[table.row[config], table.column[axis]]) for axis in table.axes}

    def nearest(self, point: Mapping[str, str | int]) -> Config | None:
        """The free config next to a point, the better prediction of two as near; None when every config is taken.

        It is of the point's family unless all of that are taken.
        """
        name = str(point.get("family", next(iter(self._tables))))
        found = self._tables[name].nearest(point)
        return found or next((config for config in self.by_prediction() if self.is_free(config)), None)

    def variants(self, config: Config) -> list[Config]:
        """The free configs of the same tile one step of one knob away, the best prediction first."""
        table = self._tables[config.family]
        found = np.flatnonzero(table.surroundings(config) & table.same_tile(config) & table.free)
        return [table.configs[row] for row in found if row != table.row[config]]

    def by_prediction(self) -> Iterator[Config]:
        """Every config, the fastest predicted first."""
        return heapq.merge(*(table.configs for table in self._tables.values()), key=self.predict_us)

    def predict_us(self, config: Config) -> float:
        return self._tables[config.family].family.predict_us(config, self._problem, self._device)

    def defaults(self) -> list[Config]:
        """Each family's default, the fastest predicted first."""
        found = (table.family.default(self._problem, self._device) for table in self._tables.values())
        return sorted((config for config in found if config is not None), key=self.predict_us)

    def favourites(self, count: int) -> list[Config]:
        """The best predictions: first of different tiles, then others that are not next to each other on the grid."""
        chosen = list(islice(self._promising_tiles(), count))
        near = {name: np.zeros(len(table.configs), bool) for name, table in self._tables.items()}
        for config in chosen:
            near[config.family] |= self._tables[config.family].surroundings(config)
        for config in self.by_prediction():
            if len(chosen) >= count:
                break
            table = self._tables[config.family]
            if not near[config.family][table.row[config]]:
                chosen.append(config)
                near[config.family] |= table.surroundings(config)
        return chosen

    def _promising_tiles(self) -> Iterator[Config]:
        """The best prediction of each tile, the fastest first, as far as they are promising."""
        seen: set[tuple[str, tuple[int, ...]]] = set()
        best_us = None
        for config in self.by_prediction():
            predicted_us = self.predict_us(config)
            best_us = best_us or predicted_us
            if predicted_us > _PROMISING * best_us:
                return
            knobs = self._tables[config.family].family.knobs
            tile = config.family, tuple(config[knob.name] for knob in knobs if not knob.pipeline)
            if tile not in seen:
                seen.add(tile)
                yield config


class _Table:
    """A family's legal configs, the fastest predicted first, and their candidate indices, one row each."""

    def __init__(self, family: Family, problem: ConvProblem, device: DeviceSpec) -> None:
        self.family = family
        self.configs = family.configs(problem, device)
        self.row = {config: row for row, config in enumerate(self.configs)}
        values = np.array([[value for _, value in config.knobs] for config in self.configs], np.int64)
        used = [np.unique(values[:, column]) for column in range(len(family.knobs))]
        indices = [np.searchsorted(candidates, values[:, column]) for column, candidates in enumerate(used)]
        self.index = np.stack(indices, axis=1).astype(np.int32)
        self.column = {f"{family.name}.{knob.name}": column for column, knob in enumerate(family.knobs)}
        self.axes = {axis: len(used[column]) for axis, column in self.column.items() if len(used[column]) > 1}
        self.free = np.ones(len(self.configs), bool)
        self._tile = [column for column, knob in enumerate(family.knobs) if not knob.pipeline]

    def same_tile(self, config: Config) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which configs have this one's tile."""
        same = self.index[:, self._tile] == self.index[self.row[config]][self._tile]
        alike: np.ndarray[tuple[int], np.dtype[np.bool_]] = same.all(axis=1)
        return alike

    def surroundings(self, config: Config) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which configs are at most one step of one knob away, itself included."""
        distance = np.abs(self.index - self.index[self.row[config]]).sum(axis=1)
        near: np.ndarray[tuple[int], np.dtype[np.bool_]] = distance <= 1
        return near

    def nearest(self, point: Mapping[str, str | int]) -> Config | None:
        if not self.free.any():
            return None
        columns = [self.column[axis] for axis in self.axes]
        target = np.array([int(point[axis]) for axis in self.axes], np.int32)
        distance = np.abs(self.index[:, columns] - target).sum(axis=1)
        distance[~self.free] = np.iinfo(distance.dtype).max
        return self.configs[int(distance.argmin())]
