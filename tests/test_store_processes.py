"""Databases that many processes share: what was committed is there, and nothing is twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from store_samples import GPU, config, in_a_fork, layer, run_at_once, trial

from autotune.store import Store


@pytest.fixture(params=["sqlite", "postgresql"])
def location(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a database may be made: a path in a folder that does not exist, or a server's empty database."""
    if request.param == "postgresql":
        url: str = request.getfixturevalue("postgresql")
        return url
    return str(tmp_path / "new" / "tuning.db")


def test_processes_on_one_layer_keep_the_fastest_and_no_trial_twice(location: str) -> None:
    code = (
        "seed = int(sys.argv[2])\n"
        "with Store(sys.argv[1]) as store:\n"
        "    for i in range(5):\n"
        "        store.add_trial(samples.trial(i))\n"
        "        if store.offer(samples.record(10.0 + (7 * seed + 3 * i) % 40, seed)): print('took')\n"
    )
    printed = run_at_once(code, [(location, number) for number in range(8)])
    times = {number: min(10.0 + (7 * number + 3 * i) % 40 for i in range(5)) for number in range(8)}
    with Store(location) as store:
        assert store.check() == []
        assert sorted(store.trials(layer(), GPU), key=lambda one: one.config.name) == [trial(i) for i in range(5)]
        best = store.best(layer(), GPU)
    assert best is not None
    assert best.time_us == min(times.values())
    assert "took" in "".join(printed)


def test_a_forked_child_has_connections_of_its_own(location: str) -> None:
    with Store(location) as store:
        store.add_trial(trial(0))

        def work() -> list[str]:
            store.add_trial(trial(1))
            return sorted(store.trial_names(layer(), GPU))

        assert in_a_fork(work) == str(sorted([config(0).name, config(1).name]))
        store.add_trial(trial(2))
        assert store.trial_names(layer(), GPU) == {config(i).name for i in range(3)}
        assert store.check() == []


def test_a_database_in_memory_does_not_follow_a_fork() -> None:
    with Store(":memory:") as store:
        assert in_a_fork(store.records) == (
            "StoreError: sqlite://: a database in memory does not follow a process into its fork"
        )
