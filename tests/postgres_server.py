"""A real PostgreSQL server for the tests, in a folder of its own and as an unprivileged user."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

ADMIN = "autotune"  # the role that owns every database of the tests
_START_S = 60
_PR_SET_PDEATHSIG = 1
_counter = itertools.count()


class NoServer(Exception):
    """No server can be started here; one line with the reason."""


@cache
def why_missing() -> str | None:
    """Why the tests have no server, None when they have one, which is then running."""
    try:
        _start()
    except NoServer as error:
        return str(error)
    return None


@contextmanager
def new_database() -> Iterator[str]:
    """The URL of a database without tables, removed at the end: a schema of its own, which is made in no time."""
    name = f"tuning_{next(_counter)}"
    admin = f"postgresql://{ADMIN}@/postgres?host={_start()}"
    execute(admin, f"CREATE SCHEMA {name}")
    try:
        yield f"{admin}&options=-csearch_path%3D{name}"
    finally:
        # with what upgrades kept
        kept = execute(admin, "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'autotune_%'")
        execute(admin, *(f'DROP SCHEMA "{schema}" CASCADE' for schema in [name, *(row[0] for row in kept)]))


def execute(url: str, *statements: str) -> list[tuple[object, ...]]:
    """Run statements, each in a transaction of its own; the rows of the last one."""
    import psycopg

    rows: list[tuple[object, ...]] = []
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement.encode())
            rows = cursor.fetchall() if cursor.description else []
    return rows


def restart(url: str) -> None:
    """Do what a restart of the server does to its clients."""
    execute(
        url, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename <> ''"
    )


@cache
def _start() -> Path:
    """Start the server; the folder of its socket. It ends with this process."""
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise NoServer(f"the Python package psycopg cannot be imported: {error}") from None
    programs = _programs()
    user = _unprivileged()
    libc = ctypes.CDLL(None)
    # short: the path of a socket has at most 107 bytes. Not below pytest's folder, into which its user alone may look
    folder = Path(tempfile.mkdtemp(prefix="conv-autotune-pg-", dir="/tmp"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    if user:
        os.chown(folder, user["user"], user["group"])
    folder.chmod(0o755)
    data = folder / "data"
    new = [programs / "initdb", "-D", data, "-U", ADMIN, "-A", "trust", "-E", "UTF8", "--locale=C", "-N"]
    made = _run(new, **user)
    if made.returncode:
        raise NoServer(f"initdb failed: {' '.join(made.stderr.split())}")
    settings = {
        "listen_addresses": "",
        "unix_socket_directories": folder,
        # nothing here outlives the tests: a power cut may cost all of it
        **{"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"},
        **{"max_connections": "100", "shared_buffers": "32MB", "jit": "off"},
    }
    options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
    log = (folder / "log").open("wb")
    server = subprocess.Popen(
        [programs / "postgres", "-D", data, *options],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        cwd="/",
        # a test run that is killed leaves no server behind
        preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGINT),  # noqa: PLW1509 - no threads here
        start_new_session=True,
        **user,
    )

    def stop() -> None:
        server.send_signal(signal.SIGINT)
        server.wait()

    atexit.register(stop)
    deadline = time.monotonic() + _START_S
    while _run([programs / "pg_isready", "-h", folder, "-U", ADMIN]).returncode:
        if server.poll() is not None or time.monotonic() > deadline:
            said = (folder / "log").read_text(errors="replace")
            raise NoServer(f"the server does not start: {' '.join(said.split())}")
        time.sleep(0.05)
    return folder


def _programs() -> Path:
    """The folder of the server's programs: PATH's, else the newest of Debian's."""
    found = shutil.which("postgres")
    if found and shutil.which("initdb"):
        return Path(found).resolve().parent
    versions = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "postgres").exists()]
    if not versions:
        raise NoServer("PostgreSQL is not installed: apt-get install postgresql")
    return max(versions, key=lambda path: int(path.parent.name))


def _unprivileged() -> dict[str, Any]:
    """Who a server is whose tests run as root, which it refuses to be; nothing to change for any other user."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            entry = pwd.getpwnam(name)
            return {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": []}
    raise NoServer("root has no unprivileged user to run PostgreSQL as: neither postgres nor nobody exists")


def _run(command: list[object], **user: Any) -> subprocess.CompletedProcess[str]:
    words = [str(word) for word in command]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, cwd="/", check=False, **user)
