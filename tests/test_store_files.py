"""SQLite files under stress: locks, odd paths, permissions, full disks, and files that are not what they should be."""

from __future__ import annotations

import itertools
import os
import re
import resource
import shutil
import sqlite3
import stat
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torture
from store_samples import GPU, config, failure, in_a_fork, layer, record, trial

from autotune.backends import find
from autotune.dispatch import Dispatcher, NotTuned
from autotune.problem import ConvProblem
from autotune.store import Store, StoreError, engine, exchange
from autotune.store.models import VERSION_TABLE

NOBODY = 65534


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(path: Path, match: str) -> None:
    """Opening the path fails in one line that names it, and leaves everything as it was."""
    before = path.read_bytes()
    around = sorted(path.parent.iterdir())
    with pytest.raises(StoreError, match=match) as caught:
        Store(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert sorted(path.parent.iterdir()) == around


# Locks


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[tuple[Path, sqlite3.Connection]]:
    """A database with one trial, and the connection that holds its write lock."""
    path = tmp_path / "tuning.db"
    with Store(path) as store:
        store.add_trial(trial(0))
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("BEGIN IMMEDIATE")
    yield path, connection
    connection.close()


def test_a_lock_held_for_too_long_is_a_clear_error(
    locked: tuple[Path, sqlite3.Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = locked
    monkeypatch.setattr(engine, "BUSY_S", 0.2)
    with Store(path) as store:
        with pytest.raises(StoreError) as caught:
            store.offer(record())
        assert str(caught.value) == f"{path}: locked by another process for more than 0.2 s (database is locked)"
        assert store.trials(layer(), GPU) == [trial(0)]


def test_a_reader_at_work_does_not_hold_up_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "BUSY_S", 0.2)
    with Store(tmp_path / "tuning.db") as store:
        store.add_trial(trial(0))
        reader = sqlite3.connect(tmp_path / "tuning.db", isolation_level=None)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM trial").fetchall() == [(1,)]
        store.add_trial(trial(1))
        assert store.trials(layer(), GPU) == [trial(0), trial(1)]
        # and goes on seeing what it saw
        assert reader.execute("SELECT count(*) FROM trial").fetchall() == [(1,)]
        reader.close()


# Paths


@pytest.mark.parametrize(
    "name", ["a b", "ünï", "what?", "no#1", "100%", "%41", "'q\"", "a;b&c=d", "x:y", ":memory: ", "-"]
)
def test_any_text_without_a_scheme_is_a_path(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / f"{name}.db"
    with Store(str(path)) as store:
        store.add_trial(trial())
        url = store.url
    assert names(path.parent) == [path.name]
    assert re.fullmatch(r"sqlite:///[\w/.%~-]+", url)
    for again in (path, url):
        with Store(again) as store:
            assert store.trials(layer(), GPU) == [trial()]
            store.backup(path.with_suffix(".copy"))
    assert names(tmp_path) == [name]


def test_a_name_that_is_not_utf8_is_a_path(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.db")
    with Store(path) as store:
        store.add_trial(trial())
    with Store(path) as store:
        assert store.trials(layer(), GPU) == [trial()]


def test_a_relative_path_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store("tuning.db") as store:
        monkeypatch.chdir("/")
        store.add_trial(trial())
        assert store.url == f"sqlite:///{tmp_path}/tuning.db"
    assert Path(tmp_path / "tuning.db").exists()


def test_the_default_is_the_environment_then_the_user_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOTUNE_DB", str(tmp_path / "named.db"))
    Store().close()
    monkeypatch.setenv("AUTOTUNE_DB", "")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    Store().close()
    assert (tmp_path / "named.db").exists()
    assert (tmp_path / "data" / "conv-autotune" / "tuning.db").exists()
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(
        StoreError, match=r"^no home directory to keep tuning\.db in: set AUTOTUNE_DB or name a database$"
    ):
        Store()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user whom the system does not know")
def test_a_user_without_a_home_directory_is_told_to_name_a_database() -> None:
    def work() -> object:
        for name in ("HOME", "AUTOTUNE_DB", "XDG_DATA_HOME"):
            os.environ.pop(name, None)
        return Store()

    reason = "no home directory to keep tuning.db in: set AUTOTUNE_DB or name a database"
    assert in_a_fork(work, user=54321) == f"StoreError: {reason}"


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near.db").symlink_to(tmp_path / "far" / "tuning.db")
    for _ in range(2):
        with Store(tmp_path / "near.db") as store:
            store.add_trial(trial())
    assert names(tmp_path) == ["far", "near.db"]
    assert names(tmp_path / "far") == ["tuning.db"]


@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("", "'' is not a path"),
        ("a\0b", "'a\\x00b' is not a path"),
        ("mysql://host/db", "mysql://host/db: use a path, sqlite:///PATH (without options) or postgresql://..."),
        ("sqlite://tuning.db", "sqlite://tuning.db: use a path, sqlite:///PATH (without options) or postgresql://..."),
        (
            "sqlite:///t.db?mode=ro",
            "sqlite:///t.db?mode=ro: use a path, sqlite:///PATH (without options) or postgresql://...",
        ),
        ("postgresql://h:p/db", "'postgresql://h:p/db' is neither a path nor an SQLAlchemy URL"),
        ("-://", "'-://' is neither a path nor an SQLAlchemy URL"),
    ],
)
def test_what_is_no_location_is_refused(location: str, message: str) -> None:
    with pytest.raises(StoreError, match=f"^{re.escape(message)}$"):
        Store(location)


def test_a_password_is_not_shown() -> None:
    with pytest.raises(StoreError) as caught:
        Store("oracle://me:secret@host/db")
    assert "secret" not in str(caught.value)


# Files that are not what they should be


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    path.touch()
    refused(path, "the file is empty: delete it to start a new database there$")


@pytest.mark.parametrize("content", [b"\0", b"hello\n" * 1000, b"SQLite format 3", b"PK\x03\x04" + bytes(5000)])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other.db"
    path.write_bytes(content)
    refused(path, "not an SQLite database$")


def test_the_database_of_another_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE trial (a); CREATE TABLE alembic_version (version_num); INSERT INTO trial VALUES (1)"
    )
    connection.close()
    refused(path, r"not a tuning database: it has the tables alembic_version, trial$")
    bare = tmp_path / "bare.db"
    connection = sqlite3.connect(bare)
    connection.execute("PRAGMA user_version = 3")
    connection.close()
    refused(bare, "not a tuning database: it has no tables$")


_LEFT: list[sqlite3.Connection] = []


def leave(path: Path, journal: str, *statements: str, commit: bool = True) -> None:
    """A process writes to a file and is killed: its journal stays beside it."""

    def write() -> None:
        connection = sqlite3.connect(path, isolation_level=None)
        _LEFT.append(connection)  # never closed
        connection.execute(f"PRAGMA journal_mode = {journal}")
        connection.execute("PRAGMA cache_size = 1")
        connection.execute("BEGIN")
        for statement in statements:
            connection.execute(statement)
        if commit:
            connection.execute("COMMIT")

    assert in_a_fork(write) == "None"
    assert engine.journal_of(path) is not None


def test_a_file_of_another_program_with_a_write_ahead_log_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    leave(path, "WAL", "CREATE TABLE a (x)", "INSERT INTO a VALUES (1)")
    log = tmp_path / "other.db-wal"
    before = log.read_bytes()
    refused(path, r"not a tuning database: it has the tables a$")
    assert log.read_bytes() == before
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT x FROM a").fetchall() == [(1,)]


def test_a_file_of_another_program_with_a_rollback_journal_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript("CREATE TABLE a (x); INSERT INTO a VALUES (zeroblob(100000));")
    change = ("UPDATE a SET x = randomblob(100000)", "INSERT INTO a SELECT randomblob(100000) FROM a")
    leave(path, "DELETE", *change, commit=False)
    journal = tmp_path / "other.db-journal"
    before = journal.read_bytes()
    refused(path, r"not a tuning database: it has the tables a$")
    assert journal.read_bytes() == before


def test_a_newer_schema_in_a_write_ahead_log_is_not_written(tmp_path: Path, sound: Path) -> None:
    path = tmp_path / "tuning.db"
    shutil.copy(sound, path)
    leave(path, "WAL", f"UPDATE {VERSION_TABLE} SET version_num = '0999'")
    log = tmp_path / "tuning.db-wal"
    before = log.read_bytes()
    refused(path, "schema 0999 is newer than ")
    assert log.read_bytes() == before


@pytest.mark.parametrize("journal", ["WAL", "DELETE"])
def test_what_a_killed_writer_left_is_taken_up(tmp_path: Path, sound: Path, journal: str) -> None:
    path = tmp_path / "tuning.db"
    shutil.copy(sound, path)
    leave(path, journal, "DELETE FROM trial", "DELETE FROM record", commit=journal == "WAL")
    with Store(path) as store:
        assert len(store.trials(layer(), GPU)) == (0 if journal == "WAL" else 40)
        assert store.check() == []


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sound") / "tuning.db"
    with Store(path) as store:
        for i in range(40):
            store.add_trial(trial(i))
        store.offer(record())
    return path


@pytest.mark.parametrize("part", [0.001, 0.3, 0.7, 0.999])
def test_a_truncated_file_is_refused(tmp_path: Path, sound: Path, part: float) -> None:
    path = tmp_path / "tuning.db"
    whole = sound.read_bytes()
    path.write_bytes(whole[: int(len(whole) * part)])
    refused(path, "(truncated: [0-9]+ of [0-9]+ bytes are left|not an SQLite database)$")


def test_damage_is_found_and_named(tmp_path: Path, sound: Path) -> None:
    path = tmp_path / "tuning.db"
    pages = bytearray(sound.read_bytes())
    for page in range(3, len(pages) // 4096):
        pages[4096 * page : 4096 * page + 64] = b"\xff" * 64
    path.write_bytes(pages)
    with Store(path) as store:
        found = store.check()
        assert found
        assert not any("\n" in line for line in found)
        with pytest.raises(StoreError, match=f"^{re.escape(str(path))}: damaged"):
            store.trials(layer(), GPU)


def test_rows_that_hold_no_value_are_found(tmp_path: Path, sound: Path) -> None:
    path = tmp_path / "tuning.db"
    shutil.copy(sound, path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE layer SET c = 17")
    connection.execute("""UPDATE trial SET knobs = '{"cta_m": "wide"}' WHERE id = 3""")
    connection.execute("UPDATE trial SET config = 'other' WHERE id = 4")
    connection.execute("UPDATE record SET layer_id = 99")
    connection.commit()
    connection.close()
    with Store(path) as store:
        found = store.check()
        assert found[0] == "record 1: its layer is missing"
        assert found[1] == "layer 1: c is 17 where its value says 16"
        assert re.match(r"trial 3: .*'wide'", found[2])
        assert found[3] == f"trial 4: config is 'other' where its value says '{config(3).name}'"
        assert len(found) == 4
        with pytest.raises(StoreError, match=f"^{re.escape(str(path))}: trial 3 cannot be read: .*'wide'"):
            store.trials(layer(), GPU)


_UNLIKELY = ("'{'", "'{\"rates\": 5}'", "x'00ff'", "1e999", "'2\n3'")


@pytest.mark.parametrize("table", ["device", "layer", "trial", "record", VERSION_TABLE])
def test_whatever_a_column_holds_is_used_or_refused_in_one_line(tmp_path: Path, table: str) -> None:
    cpu = find("cpu").spec
    assert cpu is not None
    tuned = ConvProblem(N=1, C=8, H=6, W=7, K=8, R=3, S=3, dtype="f32")
    other = replace(tuned, N=2)
    whole, path = tmp_path / "whole.db", tmp_path / "tuning.db"
    with Store(whole) as store:
        store.add_trial(trial(0, problem=tuned, device=cpu))
        store.add_trial(replace(failure(1), problem=tuned, device=cpu))
        store.offer(record(problem=tuned, device=cpu))
    works: tuple[Callable[[Store], object], ...] = (
        *(partial(exchange.export_rows, fmt=fmt) for fmt in exchange.FORMATS),
        lambda store: store.trials(tuned, cpu),
        Store.provenances,
        lambda store: list(store.similar(other, cpu, current={})),
        lambda store: store.offer(record(1.0, problem=tuned, device=cpu)),
        lambda store: store.merge([record(0.5, problem=tuned, device=cpu)]),
        lambda store: store.add_trial(trial(0, problem=tuned, device=cpu)),
    )
    with closing(sqlite3.connect(whole)) as connection:
        columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
    said: list[str] = []
    # the columns of a layer behind its text are all read alike
    for column, value in itertools.product(columns[:4] if table == "layer" else columns, _UNLIKELY):
        shutil.copy(whole, path)
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA ignore_check_constraints = ON")
            with suppress(sqlite3.IntegrityError):
                connection.execute(f"UPDATE {table} SET {column} = {value}")
            connection.commit()
        try:
            store = Store(path)
        except StoreError as error:
            said.append(str(error))
            continue
        with store:
            said += store.check()
            # no fault of the database reaches a program that convolves
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NotTuned)
                dispatcher = Dispatcher(store, "cpu")
                assert {dispatcher.select(problem).family for problem in (tuned, other)} == {"direct_cpu"}
            for work in works:
                try:
                    work(store)
                except StoreError as error:
                    said.append(str(error))
        path.unlink()
    assert len(said) > len(columns)
    assert [line for line in said if "\n" in line] == []


@pytest.mark.parametrize("versions", [[], ["0001", "0001"], [""], [None]])
def test_a_database_that_tells_no_version_is_refused(tmp_path: Path, sound: Path, versions: list[str | None]) -> None:
    path = tmp_path / "tuning.db"
    shutil.copy(sound, path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"DROP TABLE {VERSION_TABLE}")
        connection.execute(f"CREATE TABLE {VERSION_TABLE} (version_num)")
        connection.executemany(f"INSERT INTO {VERSION_TABLE} VALUES (?)", [(version,) for version in versions])
        connection.commit()
    refused(path, f"damaged: {VERSION_TABLE} holds {len(versions)} rows in place of one with the schema's version$")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
def test_what_is_no_file_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "thing"
    make(path)
    with pytest.raises(StoreError, match=r"thing: not a file$"):
        Store(path)


def test_a_file_in_place_of_the_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file/tuning\.db: Not a directory$"):
        Store(tmp_path / "file" / "tuning.db")


def test_a_journal_whose_database_is_gone_is_not_written_into_a_new_one(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"
    with Store(path) as store:
        store.add_trial(trial(0))
        journal = path.with_name("tuning.db-wal")
        rows = journal.read_bytes()
    path.unlink()
    journal.write_bytes(rows)
    with pytest.raises(StoreError) as caught:
        Store(path)
    reason = "there is no database, but tuning.db-wal holds rows: put its file back or delete it"
    assert str(caught.value) == f"{path}: {reason}"
    assert names(tmp_path) == ["tuning.db-wal"]
    assert journal.read_bytes() == rows
    journal.write_bytes(b"")
    with Store(path) as store:
        assert store.records() == []


def test_what_is_committed_or_made_is_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with Store(tmp_path / "tuning.db") as store:
        assert synced == ["new.db", tmp_path.name]
        store.backup(tmp_path / "copy")
        assert synced[2:] == ["copy.db", tmp_path.name]
        exchange.write(store, "csv", tmp_path / "table.csv")
        assert [re.sub(r"\.[0-9a-f]{16}$", "", name) for name in synced[4:]] == [".table.csv", tmp_path.name]
        with store._transaction(writes=True) as connection:
            assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2


# Copies, permissions, space


def test_a_copy_takes_the_place_of_nothing_that_is_in_use(tmp_path: Path) -> None:
    path, other = tmp_path / "tuning.db", tmp_path / "other.db"
    (tmp_path / "link.db").symlink_to(path)
    with Store(path) as store, Store(other) as live:
        store.add_trial(trial(0))
        live.add_trial(trial(1))
        for target, reason in (
            (path, "a copy in its own place would cut off those who have it open"),
            (tmp_path / "link.db", "a copy in its own place would cut off those who have it open"),
            (other, f"no copy at {other}: in use, or other.db-wal was left behind"),
            (tmp_path / "none" / "copy.db", f"no copy at {tmp_path}/none/copy.db: No such file or directory"),
        ):
            with pytest.raises(StoreError) as caught:
                store.backup(target)
            assert str(caught.value) == f"{path}: {reason}"
        live.close()
        store.backup(other)
        assert store.trials(layer(), GPU) == [trial(0)]
    for database in (path, other):
        with Store(database) as store:
            assert store.trials(layer(), GPU) == [trial(0)]


def test_the_file_has_the_permissions_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        Store(tmp_path / "tuning.db").close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "tuning.db").stat().st_mode) == 0o640


@pytest.fixture
def shipped(sound: Path) -> Iterator[Path]:
    """A database in a directory that an unprivileged user may read but not write."""
    # not below tmp_path, into which only the user that runs the tests may look
    folder = Path(tempfile.mkdtemp(prefix="conv-autotune-shipped-"))
    shutil.copy(sound, folder / "tuning.db")
    (folder / "tuning.db").chmod(0o444)
    folder.chmod(0o555)
    yield folder / "tuning.db"
    folder.chmod(0o755)
    shutil.rmtree(folder)


def as_reader(work: Callable[[], object]) -> str:
    """Run as a user whom permissions bind: root becomes nobody."""
    return in_a_fork(work, user=NOBODY if os.geteuid() == 0 else None)


def test_a_database_in_a_read_only_directory_serves_look_ups(shipped: Path) -> None:
    def look() -> object:
        with Store(shipped) as store:
            best = store.best(layer(), "cuda")
            assert best == record()
            assert store.check() == []
            try:
                store.add_trial(trial())
            except StoreError as error:
                return len(store.trials(layer(), GPU)), str(error)
            return "written"

    assert as_reader(look) == str((40, f"{shipped}: read-only"))
    assert names(shipped.parent) == ["tuning.db"]


def test_what_others_write_later_does_not_disturb_a_reader_without_permission(shipped: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be the writer whom the reader may not imitate")
    shipped.parent.chmod(0o755)
    shipped.chmod(0o644)
    told, tell = os.pipe()
    ready, done = os.pipe()

    def look() -> object:
        with Store(shipped) as store:
            os.write(tell, b"1")
            os.read(ready, 1)
            assert store.check() == []
            return len(store.trials(layer(), GPU)), store.best(layer(), GPU) == record()

    writer = os.fork()
    if writer == 0:
        try:
            os.read(told, 1)
            with Store(shipped) as store:
                for i in range(40, 400):
                    store.add_trial(trial(i))
                store.replace(record(1.0))
            os.write(done, b"1")
        finally:
            os._exit(0)
    assert as_reader(look) == str((40, True))
    os.waitpid(writer, 0)
    assert as_reader(lambda: len(Store(shipped).trials(layer(), GPU))) == "400"


def test_a_reader_without_permission_sees_what_a_live_writer_commits(shipped: Path) -> None:
    shipped.parent.chmod(0o755)
    shipped.chmod(0o644)
    if os.geteuid() != 0:
        pytest.skip("only root can be the writer whom the reader may not imitate")
    with Store(shipped) as store:
        store.add_trial(trial(100))
        assert as_reader(lambda: config(100).name in Store(shipped).trial_names(layer(), GPU)) == "True"
    # a journal left behind by a killed writer holds rows that must not be passed over
    with Store(shipped) as store:
        store.add_trial(trial(101))
        pair = [shipped, shipped.with_name(shipped.name + "-wal")]
        left = {path.name: path.read_bytes() for path in pair}
    other = shipped.parent / "left"
    other.mkdir()
    for name, content in left.items():
        (other / name).write_bytes(content)
    outcome = as_reader(lambda: config(101).name in Store(other / shipped.name).trial_names(layer(), GPU))
    reason = "read-only, with rows left in its -wal file: open it where it can be written"
    assert outcome == f"StoreError: {other / shipped.name}: {reason}"


def test_a_journal_of_another_user_leaves_look_ups(shipped: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can leave a journal that another user may not write")
    shipped.parent.chmod(0o777)
    shipped.chmod(0o666)

    def look() -> object:
        with Store(shipped) as store:
            assert store.best(layer(), GPU) == record()
            store.add_trial(trial())

    with Store(shipped) as store:
        store.add_trial(trial())
        for suffix in ("-wal", "-shm"):
            shipped.with_name(shipped.name + suffix).chmod(0o644)
        reason = "read-only (attempt to write a readonly database)"
        assert as_reader(look) == f"StoreError: {shipped}: {reason}"


def test_a_directory_without_room_for_another_name_leaves_look_ups(tmp_path: Path, sound: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    with torture.small_disk(tmp_path, "size=600k,nr_inodes=3"):
        path = tmp_path / "tuning.db"
        shutil.copy(sound, path)
        (tmp_path / "last").touch()
        with Store(path) as store:
            assert store.best(layer(), GPU) == record()
            with pytest.raises(StoreError, match=r"read-only \(unable to open database file\)$"):
                store.add_trial(trial())


def test_a_directory_without_permission_is_a_clear_error(shipped: Path) -> None:
    path = shipped.parent / "new.db"
    assert as_reader(lambda: Store(path)) == f"StoreError: {path}: Permission denied"
    assert names(shipped.parent) == ["tuning.db"]


def test_a_file_without_permission_is_a_clear_error(shipped: Path) -> None:
    shipped.chmod(0o000)
    assert as_reader(lambda: Store(shipped)) == f"StoreError: {shipped}: Permission denied"


def test_a_full_disk_is_a_clear_error_and_leaves_a_sound_file(tmp_path: Path) -> None:
    path = tmp_path / "tuning.db"

    def fill() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        with Store(path) as store:
            for i in range(10_000):
                store.add_trial(trial(i))
        return "never full"

    assert re.match(rf"StoreError: {re.escape(str(path))}: .*(full|disk I/O error)", in_a_fork(fill))
    with Store(path) as store:
        assert store.check() == []
        count = len(store.trials(layer(), GPU))
        assert count > 5
        store.add_trial(trial(count))
        assert store.trials(layer(), GPU) == [trial(i) for i in range(count + 1)]


def test_a_disk_full_from_the_start_leaves_nothing(tmp_path: Path) -> None:
    def fill() -> object:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        Store(tmp_path / "tuning.db")

    assert re.match(r"StoreError: .*tuning\.db: .*(full|I/O)", in_a_fork(fill))
    assert names(tmp_path) == []
