"""Migrations make the tables that the models describe, upgrade older databases after a backup, refuse newer ones."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import postgres_server
import pytest
import stored_databases
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect
from store_samples import GPU, layer, record, run_at_once, trial

from autotune.store import Store, StoreError, schema
from autotune.store.models import SCHEMA_VERSION, VERSION_TABLE, Base

_NEXT = """
import sqlalchemy as sa
from alembic import op

revision = "9999"
down_revision = "{down}"


def upgrade():
    with op.batch_alter_table("layer", recreate="{recreate}") as table:
        table.add_column(sa.Column("note", sa.String, server_default="none", nullable=False))
    {extra}
"""


def _facts(connection: Connection) -> dict[str, object]:
    """What Alembic's comparison passes over: primary keys, unique and check constraints by name and text."""
    seen = inspect(connection)
    return {
        table: (
            [
                (one["name"], str(one["type"]), one["nullable"])
                for one in sorted(seen.get_columns(table), key=lambda c: c["name"])
            ],
            seen.get_pk_constraint(table),
            sorted(seen.get_unique_constraints(table), key=str),
            sorted(seen.get_check_constraints(table), key=str),
            sorted(seen.get_foreign_keys(table), key=str),
            sorted(seen.get_indexes(table), key=str),
        )
        for table in seen.get_table_names()
        if table != VERSION_TABLE
    }


def _query(location: str, sql: str) -> list[tuple[object, ...]]:
    if "://" in location:
        return postgres_server.execute(location, sql)
    connection = sqlite3.connect(location)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_the_newest_migration_is_the_one_that_the_models_name() -> None:
    assert ScriptDirectory(str(schema.migrations())).get_heads() == [SCHEMA_VERSION]


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a database may be made."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("postgresql")
        return url
    return str(tmp_path / "tuning.db")


def _engine_url(location: str) -> str:
    return location.replace("postgresql:", "postgresql+psycopg:") if "://" in location else f"sqlite:///{location}"


def test_models_and_migrations_agree(location: str) -> None:
    Store(location).close()
    with create_engine(_engine_url(location)).connect() as migrated:
        context = MigrationContext.configure(migrated, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert set(_facts(migrated)) == {"device", "layer", "trial", "record"}
        if "://" not in location:
            made = create_engine("sqlite://")
            Base.metadata.create_all(made)
            with made.connect() as modelled:
                assert _facts(migrated) == _facts(modelled)


# Databases that earlier versions wrote


def test_a_database_of_every_version_is_stored() -> None:
    revisions = {script.revision for script in ScriptDirectory(str(schema.migrations())).walk_revisions()}
    assert set(stored_databases.versions()) == revisions, "run tests/stored_databases.py before a schema change"


@pytest.mark.parametrize("version", stored_databases.versions())
def test_a_stored_database_is_upgraded_and_holds_what_was_written(version: str, location: str) -> None:
    stored = stored_databases.FOLDER / f"schema-{version}"
    if "://" in location:
        postgres_server.execute(location, stored.with_suffix(".sql").read_text())
    else:
        shutil.copy(stored.with_suffix(".db"), location)
    assert _query(location, f"SELECT version_num FROM {VERSION_TABLE}") == [(version,)]
    with Store(location) as store:
        assert store.check() == []
        assert store.records() == list(stored_databases.RECORDS)
        for problem in {one.problem for one in stored_databases.TRIALS}:
            for device in {one.device for one in stored_databases.TRIALS}:
                wanted = [t for t in stored_databases.TRIALS if (t.problem, t.device) == (problem, device)]
                assert store.trials(problem, device) == wanted
        # and is written to like any other
        store.add_trial(trial(99))
        assert store.offer(record(0.01))
    assert _query(location, f"SELECT version_num FROM {VERSION_TABLE}") == [(SCHEMA_VERSION,)]


# A version whose schema is one further than this one's


@pytest.fixture
def old(location: str) -> str:
    """A database of this version, with rows."""
    with Store(location) as store:
        store.add_trial(trial())
        store.offer(record())
    return location


@pytest.fixture
def newer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process a version whose schema is one further; the folder of its migrations."""
    folder = tmp_path_factory.mktemp("100% new") / "migrations"
    shutil.copytree(schema.migrations(), folder)
    write_next(folder)
    monkeypatch.setattr(schema, "migrations", lambda: folder)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", "9999")
    return folder


def write_next(folder: Path, extra: str = "", recreate: str = "auto") -> None:
    text = _NEXT.format(down=SCHEMA_VERSION, extra=extra, recreate=recreate)
    (folder / "versions" / "9999_note.py").write_text(text)


def _backups(location: str) -> list[str]:
    """What was kept of a database by its upgrades: files or schemas."""
    if "://" in location:
        query = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'autotune%' ORDER BY 1"
        return [str(name) for (name,) in _query(location, query)]
    return sorted(str(path) for path in Path(location).parent.iterdir() if path.suffix == ".bak")


def test_an_older_database_is_upgraded_after_a_backup(old: str, newer: Path) -> None:
    with Store(old) as store:
        assert store.trials(layer(), GPU) == [trial()]
        assert store.best(layer(), GPU) == record()
        assert not store.offer(record())
    assert _query(old, "SELECT note FROM layer") == [("none",)]
    assert _query(old, f"SELECT version_num FROM {VERSION_TABLE}") == [("9999",)]
    (backup,) = _backups(old)
    if "://" in old:
        assert backup.startswith(f"autotune_{SCHEMA_VERSION}_")
        assert _query(old, f'SELECT version_num FROM "{backup}".{VERSION_TABLE}') == [(SCHEMA_VERSION,)]
        assert _query(old, f'SELECT config FROM "{backup}".record') == [(record().config.name,)]
        assert _query(old, f'SELECT config FROM "{backup}".trial') == [(trial().config.name,)]
    else:
        assert Path(backup).name.startswith(f"tuning.db.schema-{SCHEMA_VERSION}.")
        assert _query(backup, f"SELECT version_num FROM {VERSION_TABLE}") == [(SCHEMA_VERSION,)]
        assert _query(backup, "SELECT config FROM record") == [(record().config.name,)]
        assert len(list(Path(old).parent.iterdir())) == 2
    # once
    Store(old).close()
    assert _backups(old) == [backup]


def test_a_file_whose_tables_are_built_anew_keeps_its_links(tmp_path: Path, newer: Path) -> None:
    path = str(tmp_path / "tuning.db")
    shutil.copy(stored_databases.FOLDER / f"schema-{SCHEMA_VERSION}.db", path)
    write_next(newer, recreate="always")
    with Store(path) as store:
        assert store.records() == list(stored_databases.RECORDS)
    assert _query(path, "PRAGMA foreign_key_check") == []


def test_an_upgrade_that_fails_changes_nothing(old: str, newer: Path) -> None:
    write_next(newer, "op.execute('DELETE FROM layer')", recreate="always" if "://" not in old else "auto")
    with pytest.raises(StoreError, match=r"without their layer or device$|violates foreign key"):
        Store(old)
    write_next(newer, "op.execute('nonsense')")
    with pytest.raises(StoreError, match="syntax error") as caught:
        Store(old)
    assert "\n" not in str(caught.value)
    assert _query(old, f"SELECT version_num FROM {VERSION_TABLE}") == [(SCHEMA_VERSION,)]
    assert _query(old, "SELECT problem FROM layer") == [(str(layer()),)]
    with pytest.raises(Exception, match=r"no such column|does not exist"):
        _query(old, "SELECT note FROM layer")


_UPGRADING = (
    "from pathlib import Path\n"
    "from autotune.store import schema\n"
    "schema.migrations = lambda: Path(sys.argv[2]); schema.SCHEMA_VERSION = '9999'\n"
    "with Store(sys.argv[1]) as store: store.add_trial(samples.trial(int(sys.argv[3])))\n"
)


def test_processes_upgrading_at_once_upgrade_once(old: str, newer: Path) -> None:
    run_at_once(_UPGRADING, [(old, newer, number) for number in range(1, 5)])
    with Store(old) as store:
        assert len(store.trials(layer(), GPU)) == 5
    assert len(_backups(old)) == 1


def test_a_store_that_was_open_before_an_upgrade_writes_no_more(
    old: str, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with Store(old) as store:
        run_at_once(_UPGRADING, [(old, newer, 1)])
        with pytest.raises(StoreError, match=f"schema 9999 is newer than {SCHEMA_VERSION}"):
            store.add_trial(trial(2))
        assert store.best(layer(), GPU) == record()
    assert _query(old, "SELECT count(*) FROM trial") == [(2,)]


def test_a_newer_database_is_refused_and_left_alone(old: str, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(old).close()
    folder = Path(old).parent
    before = {} if "://" in old else {path: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.undo()
    with pytest.raises(StoreError) as caught:
        Store(old)
    assert str(caught.value).endswith(
        f": schema 9999 is newer than {SCHEMA_VERSION}, the newest that this version knows: upgrade conv-autotune"
    )
    assert str(caught.value).startswith(old.partition("?")[0])
    assert _query(old, f"SELECT version_num FROM {VERSION_TABLE}") == [("9999",)]
    assert before == ({} if "://" in old else {path: path.read_bytes() for path in folder.iterdir()})


def test_an_older_file_that_cannot_be_written_is_refused(
    tmp_path: Path, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "tuning.db"
    shutil.copy(stored_databases.FOLDER / f"schema-{SCHEMA_VERSION}.db", old)
    # permissions do not bind the root user, so the question is answered for the store
    monkeypatch.setattr("autotune.store.engine.is_writable", lambda _: False)
    monkeypatch.setattr(schema, "is_writable", lambda _: False)
    with pytest.raises(StoreError) as caught:
        Store(old)
    assert str(caught.value) == (
        f"{old}: read-only with schema {SCHEMA_VERSION}, and this version needs 9999: upgrade a copy of it"
    )
