"""Where a database is and how it is opened: SQLite files, SQLite in memory, PostgreSQL."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import stat
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import platformdirs
from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.pool import QueuePool

BUSY_S = 30.0  # how long a lock of another process is waited for
_HEADER_BYTES = 100
_ATTEMPTS = 5  # to read a whole file that others may be writing to
_LOCK_NOT_AVAILABLE = "55P03"  # PostgreSQL's word for it
# a database named by URL: percent-encoded, so that every path can be written
_SQLITE_URL = re.compile(r"sqlite(?:\+pysqlite)?://(?:/(?P<path>[^?]*))?")


class StoreError(Exception):
    """A database or a table's file cannot be used; one line that names it and the cause."""


class UnreadableRow(StoreError):
    """A row holds no value; the rest of the database may."""


class NoDatabase(StoreError):
    """There is no database where one was to be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A database. path: of an SQLite file, symbolic links resolved. server: SQLAlchemy URL of a PostgreSQL database.

    Neither: SQLite in memory. label: what messages call it, without a password.
    """

    label: str
    path: Path | None = None
    server: str | None = None

    @property
    def url(self) -> str:
        """SQLAlchemy URL, a password hidden."""
        return "sqlite:///" + quote(os.fsencode(self.path)) if self.path else self.label


def locate(location: str | os.PathLike[str] | None) -> Location:
    """The database meant by a path, an SQLAlchemy URL (a text with ``://``) or None: AUTOTUNE_DB, else the user's own.

    ``sqlite://`` and ``:memory:`` are a database in memory. StoreError for a URL of another kind.
    """
    if location is None:
        location = os.environ.get("AUTOTUNE_DB") or _default()
    if isinstance(location, str) and "://" in location:
        return _locate_url(location)
    if location == ":memory:":
        return Location(label="sqlite://")
    text = os.fspath(location)
    if not text or "\0" in text:
        raise StoreError(f"{text!r} is not a path")
    return Location(label=text, path=Path(os.path.realpath(text)))


def _default() -> Path:
    try:
        path = platformdirs.user_data_path("conv-autotune") / "tuning.db"
    except RuntimeError:
        path = Path()
    # without HOME and without an entry among the system's users, ~ stands for nothing
    if not path.is_absolute():
        raise StoreError("no home directory to keep tuning.db in: set AUTOTUNE_DB or name a database")
    return path


def _locate_url(text: str) -> Location:
    if found := _SQLITE_URL.fullmatch(text):
        path = unquote(found["path"] or ":memory:")
        return locate(path if path == ":memory:" else Path(path))
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):
        raise StoreError(f"{text!r} is neither a path nor an SQLAlchemy URL") from None
    label = url.render_as_string(hide_password=True)
    if url.drivername not in ("postgresql", "postgres", "postgresql+psycopg"):
        raise StoreError(f"{label}: use a path, sqlite:///PATH (without options) or postgresql://...")
    server = url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)
    return Location(label=label, server=server)


def is_writable(path: Path) -> bool:
    """True when SQLite can write the file and the journal beside it."""
    return os.access(path, os.W_OK) and os.access(path.parent, os.W_OK)


def is_database(path: Path) -> bool:
    """True when there is a file that looks like a whole SQLite database, False when there is none; touches nothing.

    StoreError when it is not a file, is empty, is of another kind, or is shorter than it states.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise StoreError("not a file")
        with path.open("rb") as file:
            header = file.read(_HEADER_BYTES)
            size = file.seek(0, os.SEEK_END)
    except FileNotFoundError:
        return False
    # new databases appear whole, so an empty file is what is left of something else
    if not header:
        raise StoreError("the file is empty: delete it to start a new database there")
    if not header.startswith(b"SQLite format 3\0"):
        raise StoreError("not an SQLite database")
    page_bytes = int.from_bytes(header[16:18], "big")
    stated = int.from_bytes(header[28:32], "big") * (65536 if page_bytes == 1 else page_bytes)
    if size < max(stated, _HEADER_BYTES) and not journal_of(path):
        raise StoreError(f"truncated: {size} of {stated} bytes are left")
    return True


def journal_of(path: Path) -> Path | None:
    """What may hold rows beside the file: a write-ahead log, or a rollback journal where there is no WAL."""
    journals = (path.with_name(path.name + suffix) for suffix in ("-wal", "-journal"))
    return next((journal for journal in journals if journal.exists() and journal.stat().st_size), None)


def sync(path: Path) -> None:
    """Have the disk hold what a file contains."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_names(folder: Path) -> None:
    """Have the disk hold which files a folder has, where its file system can do that: some of a network cannot."""
    with suppress(OSError):
        sync(folder)


def open_sqlite(path: Path | None, *, read_only: bool = False, foreign_keys: bool = True) -> Engine:
    """An engine on an existing SQLite file, or on a new database in memory. Connections are made on demand.

    read_only: a file in write-ahead mode that lies where no journal can be made is read as it is now, into memory,
    since whoever can write there may change it; on a file system that nobody can write it is read in place.
    """
    uri = sqlite_uri(path, "ro" if read_only else "rw") if path else "file::memory:"
    content = None
    if read_only and path and _needs_journal(path):
        if _is_unchangeable(path):
            uri += "&immutable=1"
        else:
            content = _content(path)

    def connect() -> sqlite3.Connection:
        target = uri if content is None else "file::memory:"
        # isolation_level None: transactions are begun below, not by the driver
        connection = sqlite3.connect(target, uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            # SQLite does not look at what a text holds; what no UTF-8 is, the reader of its row refuses
            connection.text_factory = _text
            if content is not None:
                connection.deserialize(content)
            prepare(connection)
        except sqlite3.Error:
            connection.close()
            raise
        return connection

    def prepare(connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA foreign_keys = {'ON' if foreign_keys else 'OFF'}")
        # a commit outlives a killed process and a power cut; a trial takes longer to measure than its fsync takes
        connection.execute("PRAGMA synchronous = FULL")
        if not _has_logarithm():
            connection.create_function("ln", 1, math.log, deterministic=True)

    # a database in memory lives as long as its only connection
    size, overflow = (8, -1) if path and content is None else (1, 0)
    pool: dict[str, Any] = {"poolclass": QueuePool, "pool_size": size, "max_overflow": overflow}
    engine = create_engine("sqlite://", creator=connect, json_deserializer=_json, **pool)
    event.listen(engine, "begin", _begin)
    return engine


def _text(content: bytes) -> str:
    return content.decode(errors="surrogateescape")


def _json(text: Any) -> Any:
    """The value of a JSON column; what no JSON is comes back as it is, for the reader of the row to refuse."""
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return text


@cache
def _has_logarithm() -> bool:
    # SQLite may be built without its mathematical functions
    with closing(sqlite3.connect(":memory:")) as connection:
        try:
            connection.execute("SELECT ln(2.0)")
        except sqlite3.OperationalError:
            return False
    return True


def _begin(connection: Connection) -> None:
    # a writer takes the lock at once: one that reads first and then writes cannot wait for another
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def sqlite_uri(path: Path, mode: str) -> str:
    """What SQLite opens a file by, whatever its name."""
    return f"file://{quote(os.fsencode(path))}?mode={mode}"


def _needs_journal(path: Path) -> bool:
    """Whether SQLite refuses to read a file, since it can make no journal; StoreError where one is there."""
    with closing(sqlite3.connect(sqlite_uri(path, "ro"), uri=True)) as connection:
        try:
            connection.execute("SELECT count(*) FROM sqlite_master")
        except sqlite3.OperationalError:
            if journal_of(path):
                raise StoreError(
                    "read-only, with rows left in its -wal file: open it where it can be written"
                ) from None
            return True
    return False


def _is_unchangeable(path: Path) -> bool:
    """True on a file system that is mounted for reading only."""
    return hasattr(os, "statvfs") and bool(os.statvfs(path).f_flag & os.ST_RDONLY)


def _content(path: Path) -> bytearray:
    """A database as it was at one moment, for memory; StoreError when others keep writing to it."""
    for _ in range(_ATTEMPTS):
        before = path.stat()
        content = bytearray(path.read_bytes())
        after = path.stat()
        if (before.st_ino, before.st_size, before.st_mtime_ns) == (after.st_ino, after.st_size, after.st_mtime_ns):
            # in memory there is no write-ahead log (SQLite, "Database File Format", file format version numbers)
            content[18:20] = b"\1\1"
            return content
    raise StoreError("read-only, and others write to it: open it again later")


def open_server(text: str) -> Engine:
    """An engine on a PostgreSQL database; StoreError when the driver is not installed."""
    url = make_url(text)
    given = url.query.get("options", "")
    options = f"{given if isinstance(given, str) else ' '.join(given)} -c lock_timeout={int(BUSY_S * 1000)}"
    connect = {"connect_timeout": int(BUSY_S), "options": options.strip()}
    try:
        # pre-ping: a server that was restarted between two trials does not end a search. The level is stated because
        # at a server's stricter default writers would have to repeat what collides instead of waiting for each other
        return create_engine(url, connect_args=connect, pool_pre_ping=True, isolation_level="READ COMMITTED")
    except ModuleNotFoundError as error:
        raise StoreError(
            f"PostgreSQL needs the Python package {error.name}: pip install 'conv-autotune[postgres]'"
        ) from None


def why_without_journal(error: DBAPIError) -> str | None:
    """Why SQLite could not make or write a journal and its index, without which it opens no file for writing.

    None when the error is another.
    """
    cause = error.orig
    if getattr(cause, "sqlite_errorname", "") == "SQLITE_IOERR_SHMSIZE":
        return "the disk is full"
    without = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY)
    return f"read-only ({cause})" if getattr(cause, "sqlite_errorcode", 0) & 0xFF in without else None


def reason(error: Exception) -> str:
    """Why the database refused, in one line."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    code = getattr(cause, "sqlite_errorcode", 0) & 0xFF or getattr(cause, "sqlstate", None)
    locked = f"locked by another process for more than {BUSY_S:g} s"
    known = {
        sqlite3.SQLITE_BUSY: locked,
        _LOCK_NOT_AVAILABLE: locked,
        sqlite3.SQLITE_READONLY: "read-only",
        sqlite3.SQLITE_FULL: "the disk is full",
        sqlite3.SQLITE_CORRUPT: "damaged",
        sqlite3.SQLITE_NOTADB: "not an SQLite database",
    }
    # a server adds lines with the statement and a pointer into it
    text = next(iter(str(cause).strip().splitlines()), type(cause).__name__)
    return f"{known[code]} ({text})" if code in known else text
