"""A database on a PostgreSQL server: who may do what, and what happens when the server goes away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import postgres_server
import pytest
from postgres_server import execute
from store_samples import GPU, layer, record, trial

from autotune.store import Store, StoreError, engine


@pytest.fixture
def filled(postgresql: str) -> str:
    with Store(postgresql) as store:
        store.add_trial(trial())
        store.offer(record())
    return postgresql


@pytest.fixture
def reader(filled: str) -> Iterator[str]:
    """The same database for a role that may only read it."""
    (schema,) = execute(filled, "SELECT current_schema()")[0]
    execute(
        filled,
        "CREATE ROLE reader LOGIN",
        f"GRANT USAGE ON SCHEMA {schema} TO reader",
        f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO reader",
    )
    yield filled.replace(f"//{postgres_server.ADMIN}@", "//reader@")
    execute(filled, "DROP OWNED BY reader", "DROP ROLE reader")


def test_a_role_that_may_only_read_looks_up(reader: str) -> None:
    with Store(reader) as store:
        assert store.best(layer(), "cuda") == record()
        assert store.trials(layer(), GPU) == [trial()]
        assert store.check() == []
        for write in (lambda: store.add_trial(trial(1)), lambda: store.offer(record(1.0))):
            with pytest.raises(StoreError, match=r"^postgresql://reader@/.*: permission denied for table \w+$"):
                write()
        assert store.records() == [record()]


def test_a_role_that_may_not_make_tables_is_told(postgresql: str) -> None:
    execute(postgresql, "CREATE ROLE guest LOGIN")
    try:
        with pytest.raises(StoreError, match=r"^postgresql://guest@/[^\n]*: (permission denied|no schema)[^\n]*$"):
            Store(postgresql.replace(f"//{postgres_server.ADMIN}@", "//guest@"))
    finally:
        execute(postgresql, "DROP ROLE guest")


def test_the_database_of_another_program_is_refused(postgresql: str) -> None:
    execute(postgresql, "CREATE TABLE trial (a integer)")
    with pytest.raises(StoreError, match=r": not a tuning database: it has the tables trial$"):
        Store(postgresql)
    assert execute(postgresql, "SELECT count(*) FROM trial") == [(0,)]


def test_a_server_that_is_restarted_is_found_again(filled: str) -> None:
    with Store(filled) as store:
        assert store.trials(layer(), GPU) == [trial()]
        postgres_server.restart(filled)
        store.add_trial(trial(1))
        postgres_server.restart(filled)
        assert store.trials(layer(), GPU) == [trial(), trial(1)]


def test_an_absent_server_or_database_is_a_clear_error(postgresql: str, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r'^postgresql://autotune@/nothing\?[^\n]* database "nothing" does not exist$'):
        Store(postgresql.replace("/postgres?", "/nothing?"))
    with pytest.raises(StoreError, match=r"^postgresql://me:\*\*\*@/db\?host=[^\n]*connection[^\n]*$") as caught:
        Store(f"postgresql://me:secret@/db?host={tmp_path}")
    assert "secret" not in str(caught.value)


def test_a_missing_driver_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "psycopg", None)
    with pytest.raises(StoreError) as caught:
        Store("postgresql://host/db")
    assert str(caught.value) == (
        "postgresql://host/db: PostgreSQL needs the Python package psycopg: pip install 'conv-autotune[postgres]'"
    )


def test_a_lock_held_for_too_long_is_a_clear_error(filled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import psycopg

    monkeypatch.setattr(engine, "BUSY_S", 0.2)
    with psycopg.connect(filled) as other, Store(filled) as store:
        other.execute("LOCK TABLE record, trial IN EXCLUSIVE MODE")
        # readers are not held up
        assert store.records() == [record()]
        with pytest.raises(StoreError, match=r": locked by another process for more than 0.2 s \(canceling[^\n]*\)$"):
            store.add_trial(trial(1))
        monkeypatch.setattr(engine, "BUSY_S", 30.0)
        # a writer waits for a lock that is given back
        with Store(filled) as patient:
            writer = threading.Thread(target=patient.add_trial, args=(trial(2),))
            writer.start()
            writer.join(0.3)
            assert writer.is_alive()
            other.rollback()
            writer.join(30)
            assert store.trials(layer(), GPU) == [trial(), trial(2)]


def test_options_of_the_url_are_kept(postgresql: str) -> None:
    with Store(postgresql) as store:
        store.offer(record())
    (schema,) = execute(postgresql, "SELECT current_schema()")[0]
    assert str(schema).startswith("tuning_")
    assert execute(postgresql, f"SELECT count(*) FROM {schema}.record") == [(1,)]


def test_a_server_makes_its_own_backups(postgresql: str, tmp_path: Path) -> None:
    with Store(postgresql) as store, pytest.raises(StoreError, match=r"use the server's own backup$"):
        store.backup(tmp_path / "copy.db")
    assert list(tmp_path.iterdir()) == []
