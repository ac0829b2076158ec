"""Creates and upgrades the tables: Alembic, its migrations in the folder ``db``."""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from sqlalchemy import Connection, Engine, String, column, create_engine, inspect, select, table
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from autotune.resources import folder
from autotune.store.engine import (
    BUSY_S,
    Location,
    NoDatabase,
    StoreError,
    is_writable,
    journal_of,
    open_sqlite,
    sqlite_uri,
    sync,
    sync_names,
)
from autotune.store.models import SCHEMA_VERSION, VERSION_TABLE

_VERSIONS = select(column("version_num", String)).select_from(table(VERSION_TABLE))
_UPGRADE_LOCK = 0x61757475  # PostgreSQL advisory lock, held while the tables are made or changed


def migrations() -> Path:
    """The folder of the migrations."""
    return folder("db") / "migrations"


def version(connection: Connection) -> str | None:
    """The schema version of a database, None where it has no tables; StoreError when its tables are not ours."""
    names = inspect(connection).get_table_names()
    if not names:
        return None
    _check_tables(names)
    found = connection.execute(_VERSIONS).scalars().all()
    if len(found) != 1 or not found[0]:
        raise StoreError(f"damaged: {VERSION_TABLE} holds {len(found)} rows in place of one with the schema's version")
    return " ".join(str(found[0]).split())


def recognise(path: Path) -> None:
    """StoreError where a file with a journal beside it is no tuning database, or a newer one; it is only read.

    Opening it for writing would move its journal into it. A file that cannot be read without is not judged.
    """
    # a rollback journal can only be used by who writes: what is in the file without it must do
    for mode in ("ro", "ro&immutable=1"):
        connect = partial(sqlite3.connect, sqlite_uri(path, mode), uri=True, timeout=BUSY_S)
        engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)
        with suppress(DBAPIError), engine.connect() as connection:
            found = version(connection)
            if found is None:
                _check_tables([])
            else:
                _check_version(found)
            return


def _check_tables(names: Sequence[str]) -> None:
    if VERSION_TABLE not in names:
        tables = f"the tables {', '.join(sorted(names)[:5])}" if names else "no tables"
        raise StoreError(f"not a tuning database: it has {tables}")


def _check_version(found: str) -> None:
    if found != SCHEMA_VERSION and found not in _revisions():
        raise StoreError(
            f"schema {found} is newer than {SCHEMA_VERSION}, the newest that this version knows: upgrade conv-autotune"
        )


def check_unchanged(connection: Connection) -> None:
    """StoreError where another process has upgraded the tables since they were opened."""
    for found in connection.execute(_VERSIONS).scalars():
        _check_version(str(found))


def prepare(engine: Engine, location: Location, create: bool) -> str | None:
    """Make sure that a database has this version's tables: create, upgrade, or StoreError with the reason.

    create: make the tables of a server's database that has none. Returns the version of the tables that were upgraded,
    None where none were.
    """
    with engine.connect() as connection:
        found = version(connection)
    if found == SCHEMA_VERSION:
        return None
    if found is None and location.path:
        _check_tables([])
    if found is None and location.server and not create:
        raise NoDatabase("there is no tuning database: it has no tables")
    if found:
        _check_version(found)
    if location.path and not is_writable(location.path):
        raise StoreError(
            f"read-only with schema {found}, and this version needs {SCHEMA_VERSION}: upgrade a copy of it"
        )
    if location.path is None:
        _upgrade(engine, None)
        return found
    # tables are altered by building them anew, so keys are checked at the end rather than on the way
    upgrader = open_sqlite(location.path, foreign_keys=False)
    try:
        _upgrade(upgrader, location.path)
    finally:
        upgrader.dispose()
    return found


def _upgrade(engine: Engine, path: Path | None) -> None:
    with engine.execution_options(writes=True).begin() as connection:
        if connection.dialect.name == "postgresql":
            connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_UPGRADE_LOCK})")
        # another process may have done it while we waited for the lock
        found = version(connection)
        if found == SCHEMA_VERSION:
            return
        if found:
            _back_up(connection, path, found)
        _run_migrations(connection)
        if path and (broken := connection.exec_driver_sql("PRAGMA foreign_key_check").all()):
            raise StoreError(f"the upgrade would leave {len(broken)} rows without their layer or device")


def _back_up(connection: Connection, path: Path | None, found: str) -> None:
    """Keep the tables as they are: a file's in a copy beside it, a server's in another of its schemas."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%f")
    if path:
        with closing(sqlite3.connect(path)) as source:
            copy(source, path.with_name(f"{path.name}.schema-{found}.{stamp}.bak"))
    elif connection.dialect.name == "postgresql":
        kept = f'"autotune_{found}_{stamp}"'
        connection.exec_driver_sql(f"CREATE SCHEMA {kept}")
        for name in inspect(connection).get_table_names():
            connection.exec_driver_sql(f'CREATE TABLE {kept}."{name}" AS TABLE "{name}"')


def create_file(path: Path) -> None:
    """Make a new SQLite database, its directories included, which appears whole or not at all; keep one that is there.

    OSError when a directory cannot be made or written. StoreError where a journal was left behind, whose pages SQLite
    would write into the new file.
    """
    journal = journal_of(path)
    # looked for first: another process's file appears before its journal does
    if journal and not path.exists():
        raise StoreError(f"there is no database, but {journal.name} holds rows: put its file back or delete it")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".tuning-") as scratch:
        new = Path(scratch) / "new.db"
        with closing(sqlite3.connect(new)) as connection:
            # readers and the writer do not block each other. It is kept in the file; where shared memory is missing
            # (some network file systems) SQLite stays with its rollback journal
            connection.execute("PRAGMA journal_mode = WAL")
        engine = open_sqlite(new)
        try:
            _upgrade(engine, None)
        finally:
            # closing the last connection moves the journal into the file
            engine.dispose()
        sync(new)
        try:
            os.link(new, path)
        except FileExistsError:
            return
        except OSError:
            # no hard links here (FAT, some network mounts): first runs in the same instant are not told apart
            if not path.exists():
                new.rename(path)
        sync_names(path.parent)


def copy(source: sqlite3.Connection, target: Path) -> None:
    """Copy a database that others may be writing to, every committed row, by SQLite's backup API.

    The target appears, or is replaced, when the copy is complete. sqlite3.Error or OSError when it cannot be made.
    StoreError where a journal lies beside the target: it is in use, or SQLite would write the journal into the copy.
    """
    beside = [target.with_name(target.name + suffix) for suffix in ("-wal", "-shm", "-journal")]
    for journal in beside:
        if journal.exists():
            raise StoreError(f"in use, or {journal.name} was left behind")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".tuning-") as scratch:
        new = Path(scratch) / "copy.db"
        with closing(sqlite3.connect(new)) as copied:
            source.backup(copied)
        sync(new)
        new.replace(target)
        sync_names(target.parent)


def _run_migrations(connection: Connection) -> None:
    # imported here: only a database that changes pays for Alembic
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(migrations()).replace("%", "%%"))
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


def _revisions() -> set[str]:
    from alembic.script import ScriptDirectory

    return {script.revision for script in ScriptDirectory(str(migrations())).walk_revisions()}
