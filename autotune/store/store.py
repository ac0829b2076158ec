"""The database of trials and records; no row or connection leaves it, only values."""

from __future__ import annotations

import heapq
import math
import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.store import engine as engines
from autotune.store import rows, schema, statements
from autotune.store import shipped as tables
from autotune.store.checking import defects
from autotune.store.engine import NoDatabase, StoreError, UnreadableRow
from autotune.store.lookup import AnyDevice, device_key
from autotune.store.merging import MergeReport, demerit, winner
from autotune.store.similar import Current, distance, page, rank
from autotune.trial import Record, Trial

_CHUNK = 400  # layers in one statement; older SQLite takes 999 parameters
_PAGE = 16  # similar layers read at once; the first few nearly always do


class Store:
    """Every trial and each layer's record, in an SQLite file or a PostgreSQL database.

    location: a path, an SQLAlchemy URL, or None: the environment's AUTOTUNE_DB, else ``tuning.db`` in the user's data
    directory. An absent file is made, its directories too; an empty one is refused. A file that cannot be written,
    whose directory or journal cannot, or whose disk is full, is opened for look-ups only.

    create: where there is no database make one, else NoDatabase, a StoreError.

    Several threads may share a store, and so may a forked child, which gets connections of its own. A device argument
    is a ``DeviceSpec``, a usable ``Device``, or a text: see ``lookup.device_key``, whose ValueError passes through.

    upgraded_from: the schema version that the database had when it was opened, if that was an older one.

    Raises StoreError, in one line, when the database cannot be opened, read or written, here and in every method.
    """

    def __init__(self, location: str | os.PathLike[str] | None = None, *, create: bool = True) -> None:
        self._location = engines.locate(location)
        self._create = create
        self._process = os.getpid()
        self._closed = False
        self._inherited: list[Any] = []
        with self._faults():
            self._engine, self._why_read_only = self._open()
            try:
                self.upgraded_from = self._prepare()
            except BaseException:
                self._engine.dispose()
                raise

    @property
    def url(self) -> str:
        """The database's SQLAlchemy URL, without a password."""
        return self._location.url

    def close(self) -> None:
        """Close the connections; an SQLite file is then complete in itself and may be copied."""
        if not self._closed:
            self._closed = True
            if self._process == os.getpid():
                self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def add_trial(self, trial: Trial, *, limit: int | None = None, record: Record | None = None) -> bool:
        """Keep a trial, in place of an earlier one of the same problem, device model and config.

        limit: do nothing and return False where so many other configs have a trial already, whoever adds them at this
        very moment. record: of the same layer and device, offered in the same transaction: see ``offer``.
        """
        with self._transaction(writes=True) as connection:
            device_id = statements.state_device(connection, trial.device)
            shared = limit is not None or record is not None
            layer_ids = statements.layer_ids(connection, [trial.problem], lock=shared)
            if limit is not None:
                names = statements.trial_names(connection, trial.problem, device_id)
                if len(names) >= limit and trial.config.name not in names:
                    return False
            statements.put_trials(connection, layer_ids[str(trial.problem)], device_id, [trial])
            if record is not None:
                _offer(connection, record, device_id, layer_ids)
            return True

    def trials(self, problem: ConvProblem, device: AnyDevice) -> list[Trial]:
        """The trials of a layer on a device, in the order first recorded."""
        with self._transaction() as connection:
            found = statements.find_device(connection, device)
            return statements.trials(connection, problem, *found) if found else []

    def trial_names(self, problem: ConvProblem, device: AnyDevice) -> set[str]:
        """The names of the configs tried for a layer on a device."""
        with self._transaction() as connection:
            found = statements.find_device(connection, device)
            return statements.trial_names(connection, problem, found[0]) if found else set()

    def provenances(self) -> list[tuple[Trial, int]]:
        """One trial of each device, family, kernel digest, compiler and driver, and how many trials share them."""
        with self._transaction() as connection:
            return statements.provenances(connection)

    def best(self, problem: ConvProblem, device: AnyDevice) -> Record | None:
        """The record of a layer on a device, else the shipped one, else None."""
        with self._transaction() as connection:
            key = statements.key_of(connection, device)
            found = statements.record(connection, problem, key)
        return tables.best(problem, key) if found is None else found

    def similar(
        self,
        problem: ConvProblem,
        device: DeviceSpec,
        *,
        current: Current | None = None,
        any_epilogue: bool = False,
        within: float = math.inf,
        unreadable: statements.Unreadable | None = None,
    ) -> Iterator[tuple[float, Record]]:
        """Records of other layers of the same dtype, layout and epilogue on a device, with their distances up to
        ``within``; shipped ones too.

        Nearest first; equally distant ones in the order of their problem texts. any_epilogue: those of other layouts
        and epilogues too. current: what a family's records have to say to be trusted; those that say something else, or
        are not verified, come after all others. unreadable: told of each record that cannot be read, which is passed
        over; without it UnreadableRow, a StoreError, is raised.

        The database orders them, and no more are read than asked for: 60 ms for the first among 50,000 alike.
        """
        own = self._pages(problem, device, current, any_epilogue, within, unreadable and self._labelled(unreadable))
        beneath = tables.similar(problem, device, current=current, any_epilogue=any_epilogue, within=within)
        seen: set[ConvProblem] = set()
        for apart, record in heapq.merge(own, beneath, key=lambda found: rank(found[1], problem, current)):
            if record.problem not in seen and not self._is_hidden(record, unreadable):
                seen.add(record.problem)
                yield apart, record

    def records(self, device: AnyDevice | None = None, *, shipped: bool = True) -> list[Record]:
        """Every record, or those of a device, sorted by device key and problem text.

        shipped: with the shipped records of layers that have none here.
        """
        with self._transaction() as connection:
            specs = statements.devices(connection)
            key = None if device is None else device_key(device, specs.values())
            wanted = {device_id: spec for device_id, spec in specs.items() if key in (None, spec.key)}
            found = {(one.device.key, str(one.problem)): one for one in statements.records(connection, wanted).values()}
        if shipped:
            found = {(one.device.key, str(one.problem)): one for one in tables.records(key)} | found
        return [found[key] for key in sorted(found)]

    def offer(self, record: Record) -> bool:
        """Make it the record of its layer and device if there is none or it is faster than the present one, atomically.

        True if it was made so. A verified record counts as faster than one that is not, and one of a newer harness than
        one of an older, because their times do not compare: see ``merging.demerit``.
        """
        with self._transaction(writes=True) as connection:
            device_id = statements.state_device(connection, record.device)
            layer_ids = statements.layer_ids(connection, [record.problem], lock=True)
            return _offer(connection, record, device_id, layer_ids)

    def replace(self, record: Record) -> None:
        """Make it the record of its layer and device, whatever stood there, atomically."""
        with self._transaction(writes=True) as connection:
            device_id = statements.state_device(connection, record.device)
            layer_ids = statements.layer_ids(connection, [record.problem], lock=True)
            statements.put_records(connection, layer_ids, {(str(record.problem), device_id): record})

    def distrust(self, record: Record) -> bool:
        """Note that a record was found not to work: it is not verified any more. False if another stands there by now.

        A shipped record is hidden by a copy that is not verified.
        """
        with self._transaction(writes=True) as connection:
            device_id = statements.state_device(connection, record.device)
            layer_ids = statements.layer_ids(connection, [record.problem], lock=True)
            present = statements.record(connection, record.problem, record.device.key)
            if present not in (None, record):
                return False
            changed = {(str(record.problem), device_id): replace(record, verified=False)}
            statements.put_records(connection, layer_ids, changed)
            return True

    def merge(self, records: Iterable[Record], is_stale: Callable[[Record], object] | None = None) -> MergeReport:
        """Merge the records of other databases, all or none; the order in which tables are merged changes nothing.

        Of each layer and device the record that ``merging.winner`` names stays, for which ``is_stale`` tells what does
        not hold any more. Where a device model is described
        differently, the description with the greater JSON text stays, which means nothing but is the same everywhere.
        """
        records = list(records)
        counts = dict.fromkeys(("added", "replaced", "unchanged", "conflicts"), 0)
        with self._transaction(writes=True) as connection:
            statements.queue_merge(connection)
            described = {*statements.devices(connection).values(), *(record.device for record in records)}
            specs = {spec.key: spec for spec in sorted(described, key=rows.spec_text)}
            ids = {
                key: statements.state_device(connection, specs[key]) for key in sorted({r.device.key for r in records})
            }
            incoming: defaultdict[statements.Key, set[Record]] = defaultdict(set)
            for record in records:
                key = record.device.key
                incoming[str(record.problem), ids[key]].add(replace(record, device=specs[key]))
            keys = sorted(incoming)
            specs_of_ids = {device_id: specs[key] for key, device_id in ids.items()}
            for start in range(0, len(keys), _CHUNK):
                chunk = {key: incoming[key] for key in keys[start : start + _CHUNK]}
                problems = [record.problem for group in chunk.values() for record in group]
                layer_ids = statements.layer_ids(connection, problems, lock=True)
                present = statements.records(connection, specs_of_ids, layer_ids.values())
                statements.put_records(connection, layer_ids, _settle(chunk, present, counts, is_stale))
        return MergeReport(**counts)

    def check(self) -> list[str]:
        """The defects of the database, one line each (damage, schema, rows that hold no value); empty when sound."""
        try:
            with self._transaction() as connection:
                return list(defects(connection))
        except StoreError as error:
            # damage may keep the search for damage from ending
            return [str(error)]

    def backup(self, path: str | os.PathLike[str]) -> None:
        """Copy an SQLite database to another file while others may be writing; it holds every row committed before."""
        target = Path(os.path.realpath(path))
        with self._faults():
            if target == self._location.path:
                raise StoreError("a copy in its own place would cut off those who have it open")
            connection = self._live_engine().raw_connection()
            try:
                if not isinstance(connection.driver_connection, sqlite3.Connection):
                    raise StoreError("not an SQLite database: use the server's own backup")
                schema.copy(connection.driver_connection, target)
            except (StoreError, OSError, sqlite3.Error) as error:
                raise StoreError(f"no copy at {target}: {engines.reason(error)}") from error
            finally:
                connection.close()

    def _pages(
        self,
        problem: ConvProblem,
        device: DeviceSpec,
        current: Current | None,
        any_epilogue: bool,
        within: float,
        unreadable: statements.Unreadable | None,
    ) -> Iterator[tuple[float, Record]]:
        start, count = 0, _PAGE
        while True:
            with self._transaction() as connection:
                found, read = page(connection, problem, device, current, any_epilogue, within, count, start, unreadable)
            yield from ((distance(problem, record.problem), record) for record in found)
            if read < count:
                return
            start, count = start + count, 4 * count

    def _is_hidden(self, record: Record, unreadable: statements.Unreadable | None) -> bool:
        """True for a shipped record of a layer that has one here."""
        if not tables.is_shipped(record):
            return False
        try:
            with self._transaction() as connection:
                own = statements.record(connection, record.problem, record.device.key)
        except UnreadableRow as error:
            if unreadable is None:
                raise
            unreadable(error)
            return False
        return own not in (None, record)

    def _labelled(self, tell: statements.Unreadable) -> statements.Unreadable:
        """Says of which database a row is, as ``_faults`` does."""
        return lambda error: tell(UnreadableRow(f"{self._location.label}: {error}"))

    def _open(self) -> tuple[Engine, str]:
        """An engine, and why it does not write, if so."""
        path = self._location.path
        if path is None:
            server = self._location.server
            return (engines.open_server(server) if server else engines.open_sqlite(None)), ""
        if not engines.is_database(path):
            if not self._create:
                raise NoDatabase("there is no database")
            schema.create_file(path)
        read_only = not engines.is_writable(path)
        if not read_only and engines.journal_of(path):
            schema.recognise(path)
        return engines.open_sqlite(path, read_only=read_only), "read-only" if read_only else ""

    def _prepare(self) -> str | None:
        try:
            return schema.prepare(self._engine, self._location, self._create)
        except DBAPIError as error:
            why = engines.why_without_journal(error)
            if why is None or self._location.path is None or self._why_read_only:
                raise
            # what is in the file can be looked up all the same
            self._engine.dispose()
            self._why_read_only = why
            self._engine = engines.open_sqlite(self._location.path, read_only=True)
            return schema.prepare(self._engine, self._location, self._create)

    def _live_engine(self) -> Engine:
        if self._closed:
            raise StoreError("the store is closed")
        if self._process != os.getpid():
            if self._location.path is None and self._location.server is None:
                raise StoreError("a database in memory does not follow a process into its fork")
            # connections of the parent must be neither used nor closed here: keep them, idle, for as long as we live
            self._inherited.append(self._engine.pool)
            self._engine.dispose(close=False)
            self._process = os.getpid()
        return self._engine

    @contextmanager
    def _transaction(self, *, writes: bool = False) -> Iterator[Connection]:
        with self._faults():
            engine = self._live_engine()
            if writes and self._why_read_only:
                raise StoreError(self._why_read_only)
            with engine.connect() as connection:
                connection.execution_options(writes=writes)
                with connection.begin():
                    if writes:
                        schema.check_unchanged(connection)
                    yield connection

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Say of every fault of the database which database it is."""
        try:
            yield
        except StoreError as error:
            raise type(error)(f"{self._location.label}: {error}") from error.__cause__
        except (DBAPIError, sqlite3.Error, OSError, OverflowError, UnicodeEncodeError) as error:
            raise StoreError(f"{self._location.label}: {engines.reason(error)}") from error


def _offer(connection: Connection, record: Record, device_id: int, layer_ids: Mapping[str, int]) -> bool:
    present = statements.record(connection, record.problem, record.device.key)
    if present is not None and demerit(record) >= demerit(present):
        return False
    statements.put_records(connection, layer_ids, {(str(record.problem), device_id): record})
    return True


def _settle(
    incoming: Mapping[statements.Key, set[Record]],
    present: Mapping[statements.Key, Record],
    counts: dict[str, int],
    is_stale: Callable[[Record], object] | None,
) -> dict[statements.Key, Record]:
    """The records to be written; counts what became of each key."""
    changed = {}
    for key, group in incoming.items():
        old = present.get(key)
        candidates = group if old is None else group | {old}
        best = winner(candidates, is_stale)
        counts["added" if old is None else "unchanged" if best == old else "replaced"] += 1
        counts["conflicts"] += len(candidates) - 1
        if best != old:
            changed[key] = best
    return changed
