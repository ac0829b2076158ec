"""Tuning tables that come with the package: one file per device model, read on demand, beneath every database."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.resources import folder
from autotune.store import jsonl
from autotune.store.engine import StoreError
from autotune.store.merging import winner
from autotune.store.similar import Current, distance, is_alike, rank
from autotune.trial import Record

Table = dict[tuple[str, str], Record]  # by device key and problem text


def tables() -> Path:
    """The folder of the shipped tables."""
    return folder("db") / "tables"


def file_name(device_name: str) -> str:
    """The file of a device model: ``nvidia_h200.jsonl``."""
    return re.sub("[^a-z0-9]+", "_", device_name.lower()).strip("_") + ".jsonl"


def best(problem: ConvProblem, device: str) -> Record | None:
    """The shipped record of a layer on a device, given by its key."""
    return _table_of(device).get((device, str(problem)))


def is_shipped(record: Record) -> bool:
    """True for a record that ``best`` or ``records`` gave, and for one equal to it."""
    return best(record.problem, record.device.key) == record


def records(device: str | None = None) -> list[Record]:
    """The shipped records of a device, given by its key, or of all."""
    if device is not None:
        return [record for (key, _), record in _table_of(device).items() if key == device]
    return [record for path in sorted(tables().glob("*.jsonl")) for record in _read(path).values()]


def similar(
    problem: ConvProblem, device: DeviceSpec, *, current: Current | None, any_epilogue: bool, within: float
) -> Iterator[tuple[float, Record]]:
    """What ``Store.similar`` gives, of the shipped records."""
    alike = (record for record in records(device.key) if is_alike(problem, record.problem, any_epilogue))
    for record in sorted(alike, key=lambda record: rank(record, problem, current)):
        if (apart := distance(problem, record.problem)) <= within:
            yield apart, record


def _table_of(device: str) -> Table:
    # a key is the model's name and " x" and its number of multiprocessors
    return _read(tables() / file_name(device.rpartition(" x")[0]))


@cache
def _read(path: Path) -> Table:
    """A table; none, with a warning, where it cannot be read, and none where there is no file."""
    if not path.exists():
        return {}
    try:
        found = jsonl.read(path)
    except StoreError as error:
        warnings.warn(f"a shipped tuning table is ignored: {error}", RuntimeWarning, stacklevel=2)
        return {}
    table: Table = {}
    for record in found:
        key = record.device.key, str(record.problem)
        table[key] = winner([record, table.get(key, record)])
    return table
