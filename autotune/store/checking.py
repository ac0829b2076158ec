"""Looks for defects: in the file, in the links between tables, and in every row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqlalchemy import Connection, Row, select

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.store import rows, schema
from autotune.store.models import SCHEMA_VERSION, DeviceRow, LayerRow, RecordRow, TrialRow
from autotune.store.statements import UNREADABLE


def defects(connection: Connection) -> Iterator[str]:
    """One line for each defect; none when the database is sound."""
    if connection.dialect.name == "sqlite":
        found = [line for (line,) in connection.exec_driver_sql("PRAGMA integrity_check")]
        yield from (" ".join(line.split()) for line in found if line != "ok")
        for table, row, parent, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
            yield f"{table} {row}: its {parent} is missing"
    if (version := schema.version(connection)) != SCHEMA_VERSION:
        yield f"schema {version} is not {SCHEMA_VERSION}"
    devices: dict[int, DeviceSpec] = {}
    for row in connection.execute(select(DeviceRow)):
        try:
            spec = devices[row.id] = rows.spec_of(row.spec)
            yield from _differences(f"device {row.id}", row, rows.device_values(spec) | {"spec": row.spec})
        except UNREADABLE as error:
            yield f"device {row.id}: {error}"
    layers: dict[int, ConvProblem] = {}
    for row in connection.execute(select(LayerRow)):
        try:
            problem = layers[row.id] = ConvProblem.parse(row.problem)
            yield from _differences(f"layer {row.id}", row, rows.layer_values(problem) | {"problem": str(problem)})
        except UNREADABLE as error:
            yield f"layer {row.id}: {error}"
    for model, decode in ((TrialRow, rows.trial_of), (RecordRow, rows.record_of)):
        for row in connection.execute(select(model)):
            name = f"{model.__tablename__} {row.id}"
            # a missing or unreadable layer or device is reported above
            if row.layer_id not in layers or row.device_id not in devices:
                continue
            try:
                value = decode(row, layers[row.layer_id], devices[row.device_id])
                yield from _differences(name, row, {"config": value.config.name})
            except UNREADABLE as error:
                yield f"{name}: {error}"


def _differences(name: str, row: Row[Any], values: rows.Values) -> Iterator[str]:
    for column, value in values.items():
        if getattr(row, column) != value:
            yield f"{name}: {column} is {getattr(row, column)!r} where its value says {value!r}"
