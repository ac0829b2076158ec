"""The migrations make the tables that the models describe, upgrade older files after a backup, refuse newer ones."""

from __future__ import annotations

import shutil
import sqlite3
from pathlib import Path

import pytest
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
    with op.batch_alter_table("layer", recreate="always") as table:
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
        )
        for table in seen.get_table_names()
        if table != VERSION_TABLE
    }


def test_the_newest_migration_is_the_one_that_the_models_name() -> None:
    assert ScriptDirectory(str(schema.migrations())).get_heads() == [SCHEMA_VERSION]


def test_models_and_migrations_agree(tmp_path: Path) -> None:
    Store(tmp_path / "tuning.db").close()
    made = create_engine("sqlite://")
    Base.metadata.create_all(made)
    with create_engine(f"sqlite:///{tmp_path}/tuning.db").connect() as migrated, made.connect() as modelled:
        context = MigrationContext.configure(migrated, opts={"version_table": VERSION_TABLE, "compare_type": True})
        assert compare_metadata(context, Base.metadata) == []
        assert _facts(migrated) == _facts(modelled)
        assert set(_facts(migrated)) == {"device", "layer", "trial", "record"}


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A database of this version, with rows."""
    path = tmp_path / "tuning.db"
    with Store(path) as store:
        store.add_trial(trial())
        store.offer(record())
    return path


@pytest.fixture
def newer(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process a version whose schema is one further; the folder of its migrations."""
    folder = tmp_path_factory.mktemp("100% new") / "migrations"
    shutil.copytree(schema.migrations(), folder)
    (folder / "versions" / "9999_note.py").write_text(_NEXT.format(down=SCHEMA_VERSION, extra=""))
    monkeypatch.setattr(schema, "migrations", lambda: folder)
    monkeypatch.setattr(schema, "SCHEMA_VERSION", "9999")
    return folder


def _query(path: Path, sql: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def test_an_older_file_is_upgraded_after_a_backup(old: Path, newer: Path) -> None:
    with Store(old) as store:
        assert store.trials(layer(), GPU) == [trial()]
        assert store.best(layer(), GPU) == record()
        assert not store.offer(record())
    assert _query(old, "SELECT note FROM layer") == [("none",)]
    assert _query(old, f"SELECT version_num FROM {VERSION_TABLE}") == [("9999",)]
    assert _query(old, "PRAGMA foreign_key_check") == []
    (backup,) = (path for path in old.parent.iterdir() if path != old)
    assert backup.name.startswith(f"tuning.db.schema-{SCHEMA_VERSION}.")
    assert backup.name.endswith(".bak")
    assert _query(backup, f"SELECT version_num FROM {VERSION_TABLE}") == [(SCHEMA_VERSION,)]
    assert _query(backup, "SELECT config FROM record") == [(record().config.name,)]
    # once
    Store(old).close()
    assert len(list(old.parent.iterdir())) == 2


def test_an_upgrade_that_fails_changes_nothing(old: Path, newer: Path) -> None:
    (newer / "versions" / "9999_note.py").write_text(
        _NEXT.format(down=SCHEMA_VERSION, extra="op.execute('DELETE FROM layer')")
    )
    with pytest.raises(StoreError, match=r"the upgrade would leave 2 rows without their layer or device$"):
        Store(old)
    (newer / "versions" / "9999_note.py").write_text(_NEXT.format(down=SCHEMA_VERSION, extra="op.execute('nonsense')"))
    with pytest.raises(StoreError, match="syntax error") as caught:
        Store(old)
    assert "\n" not in str(caught.value)
    assert _query(old, f"SELECT version_num FROM {VERSION_TABLE}") == [(SCHEMA_VERSION,)]
    assert _query(old, "SELECT problem FROM layer") == [(str(layer()),)]
    assert _query(old, "SELECT count(*) FROM pragma_table_info('layer') WHERE name = 'note'") == [(0,)]


def test_processes_upgrading_at_once_upgrade_once(old: Path, newer: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from autotune.store import schema\n"
        "schema.migrations = lambda: Path(sys.argv[2]); schema.SCHEMA_VERSION = '9999'\n"
        "with Store(sys.argv[1]) as store: store.add_trial(samples.trial(int(sys.argv[3])))\n"
    )
    run_at_once(code, [(old, newer, number) for number in range(1, 5)])
    with Store(old) as store:
        assert len(store.trials(layer(), GPU)) == 5
    assert len([path for path in old.parent.iterdir() if path.suffix == ".bak"]) == 1


def test_a_newer_file_is_refused_and_left_alone(old: Path, newer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(old).close()
    content = old.read_bytes()
    files = sorted(old.parent.iterdir())
    monkeypatch.undo()
    with pytest.raises(StoreError) as caught:
        Store(old)
    assert str(caught.value) == (
        f"{old}: schema 9999 is newer than {SCHEMA_VERSION}, the newest that this version knows: upgrade conv-autotune"
    )
    assert old.read_bytes() == content
    assert sorted(old.parent.iterdir()) == files


def test_an_older_file_that_cannot_be_written_is_refused(
    old: Path, newer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # permissions do not bind the root user, so the question is answered for the store
    monkeypatch.setattr("autotune.store.engine.is_writable", lambda _: False)
    monkeypatch.setattr(schema, "is_writable", lambda _: False)
    with pytest.raises(StoreError) as caught:
        Store(old)
    assert str(caught.value) == (
        f"{old}: read-only with schema {SCHEMA_VERSION}, and this version needs 9999: upgrade a copy of it"
    )
