"""What may befall a database, one function a fault: each brings it about once and asserts what was promised.

``scripts/torture-store`` does each many times and writes the table in docs/results; the tests do each once.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import postgres_server
from store_samples import GPU, config, in_a_fork, layer, many_records, record, release, start, trial

from autotune.backends import find
from autotune.problem import ConvProblem
from autotune.store import Store, StoreError, exchange, schema
from autotune.store.models import SCHEMA_VERSION

NOBODY = 65534
PROCESSES = 8
TRIALS = 5

# tunes a layer and names each trial once it is recorded
_TUNE = (
    "from autotune import tune\n"
    "from autotune.problem import ConvProblem\n"
    "with Store(sys.argv[1]) as store:\n"
    "    tune(ConvProblem.parse(sys.argv[2]), store=store, device='cpu', trials=int(sys.argv[3]),\n"
    "         progress=lambda now: print(now.last.config.name, flush=True))\n"
)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """name: what befalls it. promise: what is asserted. kinds: of databases that it can befall. tries: for the table.

    bring: does it once, to a database at a place of its own; where several things may come of it, it says which did.
    """

    name: str
    promise: str
    bring: Callable[[str, random.Random], str | None]
    kinds: tuple[str, ...] = ("SQLite",)
    tries: int = 20


@contextmanager
def place(kind: str) -> Iterator[str]:
    """Where a database may be made: a path in a new folder, or a server's empty database."""
    if kind == "PostgreSQL":
        with postgres_server.new_database() as url:
            yield url
        return
    # users other than the one that runs this may look into it
    folder = Path(tempfile.mkdtemp(prefix="conv-autotune-torture-"))
    folder.chmod(0o755)
    try:
        yield str(folder / "tuning.db")
    finally:
        shutil.rmtree(folder)


def small_layer(number: int) -> ConvProblem:
    """A layer that is tuned in seconds on any CPU."""
    return ConvProblem(N=1, C=8, H=8, W=8 + number, K=8, R=3, S=3, padding=1, dtype="f32")


def _cpu_trials(location: str, problem: ConvProblem) -> list[str]:
    spec = find("cpu").spec
    assert spec is not None
    with Store(location) as store:
        assert store.check() == []
        return [one.config.name for one in store.trials(problem, spec)]


def _die(process: subprocess.Popen[str], after_s: float) -> str:
    """What a process printed that is killed after so many seconds, if it has not ended by then."""
    release(process)
    time.sleep(after_s)
    process.send_signal(signal.SIGKILL)
    return process.communicate()[0]


# Processes


def kill_a_search(location: str, draw: random.Random) -> None:
    """A search killed at any moment, from its imports to its finalists."""
    problem = small_layer(draw.randrange(8))
    printed = _die(start(_TUNE, location, problem, 12), draw.uniform(0.0, 5.0))
    # the last line may be cut off
    recorded = printed.splitlines() if printed.endswith("\n") else printed.splitlines()[:-1]
    found = _cpu_trials(location, problem)
    assert len(found) == len(set(found))
    assert set(recorded) <= set(found), f"{set(recorded) - set(found)} were lost"


def kill_a_writer(location: str, draw: random.Random) -> None:
    code = (
        "store = Store(sys.argv[1])\n"
        "for i in range(10**6):\n"
        "    store.add_trial(samples.trial(i)); store.offer(samples.record(1e6 / (1 + i), i)); print(i, flush=True)\n"
    )
    printed = _die(start(code, location), draw.uniform(0.0, 0.4)).splitlines()[:-1]
    with Store(location) as store:
        assert store.check() == []
        assert store.trial_names(layer(), GPU) >= {config(int(i)).name for i in printed}


def kill_an_import(location: str, draw: random.Random) -> None:
    """All of the table or nothing of it."""
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "table.jsonl"
        with Store(":memory:") as store:
            store.merge(many_records(3000, 3))
            exchange.write(store, "jsonl", table)
            wanted = store.records(shipped=False)
        code = "from autotune.store import exchange\nexchange.import_files(Store(sys.argv[1]), [sys.argv[2]])"
        _die(start(code, location, table), draw.uniform(0.0, 1.5))
    with Store(location) as store:
        assert store.check() == []
        assert store.records(shipped=False) in ([], wanted)


def kill_an_export(location: str, draw: random.Random) -> None:
    """The old file or the new one, whole."""
    with Store(location) as store, tempfile.TemporaryDirectory() as folder:
        store.merge(many_records(2000, 4))
        wanted = exchange.export_rows(store, "jsonl")
        target = Path(folder) / "table.jsonl"
        target.write_text("old\n")
        code = "from autotune.store import exchange\nexchange.write(Store(sys.argv[1]), 'jsonl', sys.argv[2])"
        _die(start(code, location, target), draw.uniform(0.0, 0.5))
        assert target.read_text() in ("old\n", wanted)


def kill_an_upgrade(location: str, draw: random.Random) -> None:
    """The old tables or the new ones, with every row."""
    import stored_databases
    from test_migrations import write_next

    with Store(location) as store:
        stored_databases.fill(store)
    code = (
        "from pathlib import Path\n"
        "from autotune.store import schema\n"
        "schema.migrations = lambda: Path(sys.argv[2]); schema.SCHEMA_VERSION = '9999'\n"
        "Store(sys.argv[1]).close()\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        newer = Path(folder) / "migrations"
        shutil.copytree(schema.migrations(), newer)
        write_next(newer, recreate="always" if "://" not in location else "auto")
        _die(start(code, location, newer), draw.uniform(0.0, 0.5))
        refusal = ""
        try:
            with Store(location) as store:
                assert store.records(shipped=False) == list(stored_databases.RECORDS)
        except StoreError as error:
            refusal = str(error)
        assert refusal == "" or f"schema 9999 is newer than {SCHEMA_VERSION}" in refusal
        again = start(code + "print(len(Store(sys.argv[1]).records(shipped=False)))", location, newer)
        release(again)
        out, err = again.communicate()
    assert out == f"{len(stored_databases.RECORDS)}\n", err


def eight_layers_at_once(location: str, draw: random.Random) -> None:
    """A fresh path, 8 processes, 5 trials of 8 layers: 8 exits with 0, 40 trials."""
    _tune_at_once(location, [small_layer(number) for number in range(PROCESSES)], draw)
    found = [_cpu_trials(location, small_layer(number)) for number in range(PROCESSES)]
    assert [len(set(names)) for names in found] == [len(names) for names in found] == [TRIALS] * PROCESSES


def one_layer_at_once(location: str, draw: random.Random) -> None:
    """A fresh path, 8 processes, 5 trials of one layer: 8 exits with 0, 5 trials, none twice."""
    _tune_at_once(location, [small_layer(0)] * PROCESSES, draw)
    found = _cpu_trials(location, small_layer(0))
    assert len(found) == len(set(found)) == TRIALS


def _tune_at_once(location: str, problems: list[ConvProblem], draw: random.Random) -> None:
    command = [sys.executable, "-m", "autotune", "tune", "--device", "cpu", "--trials", str(TRIALS), "--db", location]
    processes = [
        subprocess.Popen(
            [*command, "--seed", str(draw.randrange(100)), "--layer", str(problem)],
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for problem in problems
    ]
    said = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), said


def restart_the_server(location: str, draw: random.Random) -> None:
    """A search goes on, or ends with one line when it was just writing; nothing recorded is lost."""
    problem = small_layer(draw.randrange(8))
    process = start(_TUNE, location, problem, 8)
    release(process)
    time.sleep(draw.uniform(0.5, 3.0))
    postgres_server.restart(location)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 or "StoreError: postgresql://" in err.splitlines()[-1], err
    assert set(out.splitlines()) <= set(_cpu_trials(location, problem))


# Files


def _filled(location: str, trials: int = 60) -> Path:
    with Store(location) as store:
        for number in range(trials):
            store.add_trial(trial(number))
        store.merge([record(), *(record(5.0, problem=layer(number)) for number in range(1, 60))])
    return Path(location)


def _use(path: Path) -> str:
    """Do everything with a database: whether it was refused, in one line that names it, has defects, or is sound."""
    try:
        with Store(path) as store:
            defects = store.check()
            if defects:
                assert not any("\n" in line for line in defects)
                return "defects found"
            assert len(store.trials(layer(), GPU)) == 60
            assert len(store.records(shipped=False)) == 60
            store.add_trial(trial(60))
            return "sound"
    except StoreError as error:
        said = str(error)
    assert said.startswith(f"{path}: ")
    assert "\n" not in said
    return "refused"


def cut_off(location: str, draw: random.Random) -> None:
    path = _filled(location)
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size))
    left = path.read_bytes()
    assert _use(path) == "refused"
    assert path.read_bytes() == left


def scribble(location: str, draw: random.Random) -> str:
    """64 bytes somewhere overwritten: a number in a row may have changed unseen, but nothing fails in another way."""
    path = _filled(location)
    with path.open("r+b") as file:
        file.seek(draw.randrange(path.stat().st_size))
        file.write(draw.randbytes(64))
    return _use(path)


def other_file(location: str, draw: random.Random) -> None:
    path = Path(location)
    path.write_bytes(
        draw.choice([b"", b"PK\x03\x04", b"SQLite format 3\0", b"\0"]) + draw.randbytes(draw.randrange(9000))
    )
    left = path.read_bytes()
    assert _use(path) == "refused"
    assert path.read_bytes() == left
    assert [one.name for one in path.parent.iterdir()] == [path.name]


@contextmanager
def small_disk(folder: Path, options: str = "size=600k") -> Iterator[None]:
    """A folder on a disk of its own; Unavailable where none can be mounted."""
    if (
        os.geteuid() == 0
        and subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", folder], check=False).returncode == 0
    ):
        try:
            yield
        finally:
            subprocess.run(["umount", folder], check=True)
        return
    raise Unavailable("only root can mount a small disk")


class Unavailable(Exception):
    """A fault that cannot be brought about on this machine; one line."""


def full_disk(location: str, draw: random.Random) -> None:
    path = Path(location)
    with small_disk(path.parent):
        filler = path.parent / "filler"
        filler.write_bytes(bytes(draw.randrange(300_000)))
        count = 0
        try:
            with Store(path) as store:
                for count in range(10_000):
                    store.add_trial(trial(count))
            said = "never full"
        except StoreError as error:
            said = str(error)
        assert said.startswith(f"{path}: "), said
        assert "full" in said or "disk I/O error" in said or "No space left" in said, said
        made = path.exists()
        if made:
            # look-ups need no room
            with Store(path) as store:
                assert store.trials(layer(), GPU) == [trial(number) for number in range(count)]
        filler.unlink()
        if not made:
            return
        with Store(path) as store:
            assert store.check() == []
            assert store.trials(layer(), GPU) == [trial(number) for number in range(count)]
            store.add_trial(trial(count))


def read_only_directory(location: str, draw: random.Random) -> None:
    """A copy in a directory that the user may not write serves look-ups."""
    path = _filled(location)
    path.chmod(0o444)
    path.parent.chmod(0o555)

    def look() -> str:
        with Store(path) as store:
            assert store.best(layer(), "cuda") == record()
            assert store.check() == []
            try:
                store.add_trial(trial(99))
            except StoreError as error:
                return str(error)
        return "written"

    try:
        said = in_a_fork(look, user=NOBODY if os.geteuid() == 0 else None)
        assert said == f"{path}: read-only"
        assert [one.name for one in path.parent.iterdir()] == [path.name]
    finally:
        path.parent.chmod(0o755)


def copy_while_written(location: str, draw: random.Random) -> None:
    path = Path(location)
    Store(path).close()
    code = "store = Store(sys.argv[1])\nfor i in range(10**6): store.add_trial(samples.trial(i)); print(i, flush=True)"
    writer = start(code, path)
    release(writer)
    assert writer.stdout is not None
    wanted = draw.randrange(60)
    while int(writer.stdout.readline()) < wanted:
        pass
    copy = path.with_name("copy.db")
    with Store(path) as store:
        store.backup(copy)
    writer.kill()
    writer.communicate()
    with Store(copy) as store:
        assert store.check() == []
        assert store.trial_names(layer(), GPU) >= {config(number).name for number in range(wanted + 1)}


def long_lock(location: str, draw: random.Random) -> None:
    """A writer that holds the lock for seconds is waited for, and readers are not held up."""
    path = _filled(location)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    writer = start("Store(sys.argv[1]).add_trial(samples.trial(60)); print('written')", path)
    release(writer)
    time.sleep(draw.uniform(0.1, 2.0))
    with Store(path) as store:
        assert len(store.trials(layer(), GPU)) == 60
    connection.execute("COMMIT")
    connection.close()
    assert writer.communicate(timeout=60)[0] == "written\n"


def merge_orders(location: str, draw: random.Random) -> None:
    """Three tables of the same layers, merged in two orders, give the same bytes."""
    base = many_records(200, draw.randrange(10**6))
    tables = [
        [
            replace(
                one,
                config=config(draw.randrange(5)),
                measurement=replace(one.measurement, time_us=draw.choice([1.0, 2.0])),
            )
            for one in base
        ]
        for _ in range(3)
    ]
    exports = []
    for order in ((0, 1, 2), (2, 0, 1)):
        with Store(":memory:") as store:
            for index in order:
                store.merge(tables[index])
            exports.append(exchange.export_rows(store, "jsonl"))
    assert exports[0] == exports[1]
    with Store(location) as store:
        store.merge(one for table in tables for one in table)
        assert exchange.export_rows(store, "jsonl") == exports[0]


BOTH = ("SQLite", "PostgreSQL")
FAULTS = (
    Fault(
        name="`kill -9` of a search, at a random moment",
        promise="sound, no recorded trial lost or twice",
        bring=kill_a_search,
        kinds=BOTH,
        tries=50,
    ),
    Fault(
        name="`kill -9` of a fast writer",
        promise="sound, nothing committed lost",
        bring=kill_a_writer,
        kinds=BOTH,
        tries=50,
    ),
    Fault(name="`kill -9` of an import", promise="all of the table or nothing", bring=kill_an_import, kinds=BOTH),
    Fault(
        name="`kill -9` of an export", promise="the old file or the new one, whole", bring=kill_an_export, kinds=BOTH
    ),
    Fault(
        name="`kill -9` of a schema upgrade",
        promise="the old tables or the new ones, every row there",
        bring=kill_an_upgrade,
        kinds=BOTH,
    ),
    Fault(
        name="8 processes tune 8 layers, no database yet",
        promise="8 exits with 0, 40 trials",
        bring=eight_layers_at_once,
        kinds=BOTH,
        tries=3,
    ),
    Fault(
        name="8 processes tune one layer, no database yet",
        promise="8 exits with 0, 5 trials, none twice",
        bring=one_layer_at_once,
        kinds=BOTH,
        tries=3,
    ),
    Fault(
        name="the server drops every connection during a search",
        promise="it goes on, or ends with one line; nothing lost",
        bring=restart_the_server,
        kinds=("PostgreSQL",),
    ),
    Fault(name="a lock held for up to 2 s", promise="writers wait, readers do not", bring=long_lock),
    Fault(
        name="a copy made while a writer is at work",
        promise="sound, every row committed before",
        bring=copy_while_written,
    ),
    Fault(
        name="a file cut off at a random length", promise="refused in one line, left as it was", bring=cut_off, tries=50
    ),
    Fault(
        name="64 random bytes written somewhere into a file",
        promise="refused in one line or defects listed, unless unused bytes or a row's values were hit",
        bring=scribble,
        tries=50,
    ),
    Fault(name="a file of another kind", promise="refused in one line, left as it was", bring=other_file, tries=50),
    Fault(
        name="a full disk",
        promise="one line, sound, nothing committed lost, serves look-ups, goes on once there is room",
        bring=full_disk,
    ),
    Fault(
        name="a read-only directory, another user",
        promise="serves look-ups, leaves nothing behind",
        bring=read_only_directory,
        tries=5,
    ),
    Fault(name="three tables merged in two orders", promise="the same bytes", bring=merge_orders, kinds=BOTH),
)
