"""A database on a PostgreSQL server: who may do what, and what happens when the server goes away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import postgres_server
import pytest
from postgres_server import execute
from store_samples import GPU, layer, measurement, record, run_at_once, trial

from autotune.store import Store, StoreError, engine
from autotune.store import store as store_module


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


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
def test_a_server_of_a_stricter_isolation_makes_no_writer_fail(postgresql: str, level: str) -> None:
    stricter = f"options=-cdefault_transaction_isolation%3D{level.replace(' ', '%5C%20')}%20"
    location = postgresql.replace("options=", stricter)
    assert execute(location, "SHOW default_transaction_isolation") == [(level,)]
    code = (
        "with Store(sys.argv[1]) as store:\n"
        "    for i in range(20):\n"
        "        store.add_trial(samples.trial(i), limit=15)\n"
        "        store.offer(samples.record(90.0 - i, int(sys.argv[2])))\n"
    )
    run_at_once(code, [(location, number) for number in range(4)])
    with Store(location) as store:
        assert len(store.trials(layer(), GPU)) == 15
        assert [one.time_us for one in store.records()] == [71.0]


def test_merges_of_the_same_layers_in_other_orders_do_not_wait_for_each_other(
    postgresql: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autotune.store.store._CHUNK", 1)
    early, late = (record(9.0, problem=layer(number)) for number in range(2))
    with Store(postgresql) as store:
        # the layer that comes later by its text has the smaller number, by which one statement locks
        store.merge([late])
        store.merge([early])
        first_locked, other_waits = threading.Event(), threading.Event()
        settle = store_module._settle

        def slowly(*arguments: Any) -> Any:
            if threading.current_thread() is merging and not first_locked.is_set():
                first_locked.set()
                assert other_waits.wait(30)
            return settle(*arguments)

        monkeypatch.setattr(store_module, "_settle", slowly)
        merging = threading.Thread(target=store.merge, args=([replace(early, measurement=measurement(5.0)), late],))
        merging.start()
        assert first_locked.wait(30)
        monkeypatch.setattr("autotune.store.store._CHUNK", 400)
        both = [replace(one, measurement=measurement(4.0)) for one in (early, late)]
        second = threading.Thread(target=store.merge, args=(both,))
        second.start()
        while execute(postgresql, "SELECT count(*) FROM pg_locks WHERE NOT granted") == [(0,)]:
            assert second.is_alive()
        other_waits.set()
        merging.join(60)
        second.join(60)
        assert [one.time_us for one in store.records()] == [4.0, 4.0]


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
