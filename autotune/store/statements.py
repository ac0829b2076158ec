"""The SQL of the store: each function works inside the transaction of the connection it is given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Row, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.store import rows
from autotune.store.engine import UnreadableRow
from autotune.store.lookup import AnyDevice, device_key
from autotune.store.models import Base, DeviceRow, LayerRow, RecordRow, TrialRow
from autotune.trial import Record, Trial

Key = tuple[str, int]  # of a record: problem text and device id
Unreadable = Callable[[UnreadableRow], object]
# what a row that holds no value makes the value's constructor raise
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError)
_MERGE_LOCK = 0x6D657267  # PostgreSQL advisory lock

_P = ParamSpec("_P")
_T = TypeVar("_T")


def devices(connection: Connection) -> dict[int, DeviceSpec]:
    """Every device by id."""
    found = connection.execute(select(DeviceRow.id, DeviceRow.spec))
    return {row.id: _decoded(f"device {row.id}", _spec_of, row) for row in found}


def key_of(connection: Connection, device: AnyDevice) -> str:
    """A device's key; ValueError as ``device_key``."""
    return device_key(device, devices(connection).values() if isinstance(device, str) else ())


def find_device(connection: Connection, device: AnyDevice) -> tuple[int, DeviceSpec] | None:
    """A device's id and description, None when it is given as a value and unknown; ValueError as ``device_key``."""
    key = key_of(connection, device)
    row = connection.execute(select(DeviceRow.id, DeviceRow.spec).where(DeviceRow.key == key)).one_or_none()
    return None if row is None else (row.id, _decoded(f"device {row.id}", _spec_of, row))


def state_device(connection: Connection, spec: DeviceSpec) -> int:
    """The id of a device model; what is known about it becomes what ``spec`` says."""
    values = rows.device_values(spec)
    query = select(DeviceRow.id, DeviceRow.spec).where(DeviceRow.key == spec.key)
    row = connection.execute(query).one_or_none()
    if row is None:
        connection.execute(_insert(connection, DeviceRow).on_conflict_do_nothing(), [values])
        row = connection.execute(query).one()
    if row.spec != values["spec"]:
        connection.execute(update(DeviceRow).where(DeviceRow.id == row.id).values(values))
    found: int = row.id
    return found


def queue_merge(connection: Connection) -> None:
    """Wait until no other merge is at work: two that lock many layers in different orders would wait for each other.

    An SQLite writer is alone anyway.
    """
    if connection.dialect.name == "postgresql":
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_MERGE_LOCK})")


def layer_ids(connection: Connection, problems: Iterable[ConvProblem], *, lock: bool = False) -> dict[str, int]:
    """The ids of layers by canonical text, made where missing.

    lock: nobody else changes records of these layers before this transaction ends. An SQLite writer is alone anyway.
    """
    wanted = {str(problem): problem for problem in problems}
    query = select(LayerRow.problem, LayerRow.id).where(LayerRow.problem.in_(wanted)).order_by(LayerRow.id)
    if lock:
        query = query.with_for_update(key_share=True)
    found = {row.problem: row.id for row in connection.execute(query)}
    missing = [{"problem": text} | rows.layer_values(wanted[text]) for text in wanted if text not in found]
    if missing:
        connection.execute(_insert(connection, LayerRow).on_conflict_do_nothing(), missing)
        found = {row.problem: row.id for row in connection.execute(query)}
    return found


def trials(connection: Connection, problem: ConvProblem, device_id: int, spec: DeviceSpec) -> list[Trial]:
    """The trials of a layer on a device, in the order first recorded."""
    query = select(TrialRow).join(LayerRow, LayerRow.id == TrialRow.layer_id)
    query = query.where(LayerRow.problem == str(problem), TrialRow.device_id == device_id).order_by(TrialRow.id)
    return [_decoded(f"trial {row.id}", rows.trial_of, row, problem, spec) for row in connection.execute(query)]


def trial_names(connection: Connection, problem: ConvProblem, device_id: int) -> set[str]:
    """The config names of the trials of a layer on a device."""
    query = select(TrialRow.config).join(LayerRow, LayerRow.id == TrialRow.layer_id)
    query = query.where(LayerRow.problem == str(problem), TrialRow.device_id == device_id)
    return set(connection.execute(query).scalars())


def provenances(connection: Connection) -> list[tuple[Trial, int]]:
    """One trial of each device, family, kernel digest, compiler and driver, and how many there are of it."""
    specs = devices(connection)
    same = (TrialRow.device_id, TrialRow.family, TrialRow.kernel_digest, TrialRow.compiler, TrialRow.driver)
    groups = connection.execute(select(func.min(TrialRow.id), func.count()).group_by(*same))
    counts = {int(first): int(count) for first, count in groups}
    query = select(TrialRow, LayerRow.problem).join(LayerRow, LayerRow.id == TrialRow.layer_id)
    found: Iterable[Row[Any]] = connection.execute(query.where(TrialRow.id.in_(counts)).order_by(TrialRow.id))
    return [(_decoded(f"trial {row.id}", _trial_of, row, specs), counts[row.id]) for row in found]


def put_trials(connection: Connection, layer_id: int, device_id: int, found: Sequence[Trial]) -> None:
    """Insert trials or replace those of the same layer, device and config, which keep their places."""
    key = {"layer_id": layer_id, "device_id": device_id}
    values = [key | rows.trial_values(trial) for trial in found]
    _upsert(connection, TrialRow, values, ("layer_id", "device_id", "config"))


def record(connection: Connection, problem: ConvProblem, device: str) -> Record | None:
    """The record of a layer on a device, given by its key."""
    # one statement: a look-up from disk takes half as long as with one for the device and one for the record
    query = (
        select(RecordRow, DeviceRow.spec)
        .join(LayerRow, LayerRow.id == RecordRow.layer_id)
        .join(DeviceRow, DeviceRow.id == RecordRow.device_id)
        .where(LayerRow.problem == str(problem), DeviceRow.key == device)
    )
    row = connection.execute(query).one_or_none()
    if row is None:
        return None
    spec = _decoded(f"device {row.device_id}", _spec_of, row)
    return _decoded(f"record {row.id}", rows.record_of, row, problem, spec)


def records(
    connection: Connection,
    specs: Mapping[int, DeviceSpec],
    layers: Collection[int] | None = None,
    unreadable: Unreadable | None = None,
) -> dict[Key, Record]:
    """The records on these devices, given by id, of these layers or of all.

    unreadable: told of each row that cannot be read, which is left out; without it UnreadableRow is raised.
    """
    query = select(RecordRow, LayerRow.problem).join(LayerRow, LayerRow.id == RecordRow.layer_id)
    query = query.where(RecordRow.device_id.in_(specs))
    if layers is not None:
        query = query.where(RecordRow.layer_id.in_(layers))
    rows_found: Iterable[Row[Any]] = connection.execute(query)
    found = {}
    for row in rows_found:
        try:
            found[row.problem, row.device_id] = _decoded(f"record {row.id}", _record_of, row, specs)
        except UnreadableRow as error:
            if unreadable is None:
                raise
            unreadable(error)
    return found


def put_records(connection: Connection, layers: Mapping[str, int], changed: Mapping[Key, Record]) -> None:
    """Insert records or replace those of the same layer and device."""
    values = [
        {"layer_id": layers[text], "device_id": device_id} | rows.record_values(value)
        for (text, device_id), value in changed.items()
    ]
    if values:
        _upsert(connection, RecordRow, values, ("layer_id", "device_id"))


def _insert(connection: Connection, model: type[Base]) -> sqlite.Insert | postgresql.Insert:
    return postgresql.insert(model) if connection.dialect.name == "postgresql" else sqlite.insert(model)


def _upsert(connection: Connection, model: type[Base], values: Sequence[rows.Values], key: tuple[str, ...]) -> None:
    statement = _insert(connection, model)
    changes = {name: statement.excluded[name] for name in values[0] if name not in key}
    connection.execute(statement.on_conflict_do_update(index_elements=key, set_=changes), values)


def _decoded(
    name: str, decode: Callable[Concatenate[Row[Any], _P], _T], row: Row[Any], *args: _P.args, **kwargs: _P.kwargs
) -> _T:
    try:
        return decode(row, *args, **kwargs)
    except UNREADABLE as error:
        raise UnreadableRow(f"{name} cannot be read: {error}") from error


def _spec_of(row: Row[Any]) -> DeviceSpec:
    return rows.spec_of(row.spec)


def _record_of(row: Row[Any], specs: Mapping[int, DeviceSpec]) -> Record:
    return rows.record_of(row, ConvProblem.parse(row.problem), specs[row.device_id])


def _trial_of(row: Row[Any], specs: Mapping[int, DeviceSpec]) -> Trial:
    return rows.trial_of(row, ConvProblem.parse(row.problem), specs[row.device_id])
