"""Databases as earlier versions wrote them, in tests/data: run before a schema change to keep the present version's.

    python tests/stored_databases.py

writes ``schema-VERSION.db`` (SQLite) and ``schema-VERSION.sql`` (PostgreSQL). What they hold is ``TRIALS`` and
``RECORDS``, which must not change: every later version has to read the same from them.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import postgres_server
from store_samples import CPU, GPU, PROVENANCE, config, layer, measurement

from autotune.problem import ConvProblem, Epilogue
from autotune.store import Store
from autotune.store.models import SCHEMA_VERSION
from autotune.trial import Record, Status, Trial

FOLDER = Path(__file__).parent / "data"

_LAYERS = (
    layer(),
    ConvProblem(
        **{"N": 1, "C": 24, "H": 9, "W": 8, "K": 48, "R": 3, "S": 2, "stride": (2, 1), "padding": (0, 1, 2, 3)},
        **{"dilation": (1, 2), "groups": 12, "dtype": "s8", "layout": "nchw"},
        epilogue=Epilogue(bias=True, residual=True, activation="relu", scale="channel"),
    ),
)
TRIALS = tuple(
    Trial(
        problem=problem,
        device=device,
        config=config(number),
        status=status,
        provenance=replace(PROVENANCE, clock_mhz=None if number == 2 else 1980),
        measurement=measurement(0.1 + 0.2 + number) if status is Status.CORRECT else None,
        detail="" if status is Status.CORRECT else 'it\'s "no" | good; ünïcödé',
        compile_s=0.25 * number,
        registers=None if number == 1 else 168,
        spill_bytes=number,
    )
    for problem in _LAYERS
    for device in (GPU, CPU)
    for number, status in enumerate((Status.CORRECT, *Status))
)
RECORDS = tuple(
    Record(
        problem=problem,
        device=device,
        config=config(0),
        measurement=measurement(0.1 + 0.2),
        provenance=PROVENANCE,
        verified=device is GPU,
    )
    for device in (CPU, GPU)
    for problem in sorted(_LAYERS, key=str)
)


def versions() -> list[str]:
    """The schema versions of which databases are stored."""
    return sorted(path.stem.removeprefix("schema-") for path in FOLDER.glob("schema-*.db"))


def fill(store: Store) -> None:
    """Write what every stored database holds."""
    for trial in TRIALS:
        store.add_trial(trial)
    store.merge(RECORDS)


def main() -> None:
    path = FOLDER / f"schema-{SCHEMA_VERSION}.db"
    path.unlink(missing_ok=True)
    with Store(path) as store:
        fill(store)
    with postgres_server.new_database() as url:
        with Store(url) as store:
            fill(store)
        path.with_suffix(".sql").write_text(_dump(url))


def _dump(url: str) -> str:
    """The statements that make the tables of a database in whatever schema is the current one."""
    (schema,) = postgres_server.execute(url, "SELECT current_schema()")[0]
    command = ["pg_dump", "--inserts", "--no-owner", "--no-privileges", f"--schema={schema}", f"--dbname={url}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # settings and comments differ from server to server, and the schema is not ours to make
    dropped = ("--", "SET ", "SELECT pg_catalog.set_config", "CREATE SCHEMA", "\\")
    lines = [line for line in text.replace(f"{schema}.", "").splitlines() if line and not line.startswith(dropped)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
