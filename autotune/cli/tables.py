"""The verbs that move tuning tables: ``trials``, ``export`` and ``import``."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli.options import AsJson, Database, DeviceText
from autotune.cli.output import Failure, print_json, print_table
from autotune.problem import ConvProblem
from autotune.trial import Trial

FORMATS = ("jsonl", "csv", "markdown", "header")


def trials(problem: ConvProblem, device: DeviceText = "auto", db: Database = None, as_json: AsJson = False) -> None:
    """List every recorded trial of a layer.

    Fastest first. The device need not be present: its model's name will do.
    """
    from autotune.store import Store

    with Store(db, create=False) as store:
        try:
            found = fastest_first(store.trials(problem, device))
        except ValueError as error:
            raise Failure(str(error)) from None
        if not found:
            raise Failure(f"no trial of {problem} on {device} is recorded in {store.url}")
    if as_json:
        spec = found[0].device
        print_json({"layer": str(problem), "device": spec.key, "trials": [trial_object(trial) for trial in found]})
        return
    print_table(("time_us", "status", "config", "detail"), [_row(trial) for trial in found], numbers=("time_us",))


def export(
    format: Annotated[str, typer.Option(metavar="|".join(FORMATS), help="Form of the table.")] = "jsonl",
    out: Annotated[str, typer.Option(metavar="PATH", help="File to write, or - for stdout.")] = "-",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only the records of this device or model. [default: all]")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Write the records of a database as a tuning table.

    The format header is a C++17 header with a constexpr table and its look-up function.
    """
    if format not in FORMATS:
        raise typer.BadParameter(f"{format!r} is not one of {', '.join(FORMATS)}", param_hint="'--format'")
    to_stdout = out == "-" or _is_stdout(out)
    if as_json and to_stdout:
        raise typer.BadParameter("the table itself goes to stdout: give --out PATH", param_hint="'--json'")
    from autotune.store import Store, exchange

    with Store(db, create=False) as store:
        try:
            if to_stdout:
                print(exchange.export_rows(store, format, device), end="")
                return
            exchange.write(store, format, Path(out), device)
            records = len(store.records(device, shipped=False))
        except ValueError as error:
            raise Failure(str(error)) from None
    if as_json:
        print_json({"format": format, "out": out, "records": records})
    else:
        print(f"{out}: {records} {'record' if records == 1 else 'records'} written")


def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Tables written by export --format jsonl.")],
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Merge tuning tables into a database.

    Of a layer's records the one whose kernel is unchanged wins, then the faster, whatever the order of the files.
    """
    from autotune.freshness import Freshness
    from autotune.store import Store, exchange

    # before a database is made for them
    records = exchange.read(files)
    with Store(db) as store:
        report = store.merge(records, Freshness().why_stale)
    counts = asdict(report)
    if as_json:
        print_json(counts)
    else:
        print(", ".join(f"{count} {name}" for name, count in counts.items()))


def _is_stdout(path: str) -> bool:
    """True for another name of where this program's output goes, such as /dev/stdout."""
    try:
        return os.path.samestat(Path(path).stat(), os.fstat(1))
    except OSError:
        return False


def fastest_first(trials: list[Trial]) -> list[Trial]:
    """Correct trials by time, then the failed ones; equals in the order given."""
    return sorted(trials, key=lambda trial: trial.measurement.time_us if trial.measurement else float("inf"))


def trial_object(trial: Trial) -> dict[str, object]:
    """What ``--json`` prints of a trial."""
    measured = trial.measurement
    return {
        "config": trial.config.name,
        "family": trial.config.family,
        "knobs": dict(trial.config.knobs),
        "status": str(trial.status),
        "time_us": None if measured is None else measured.time_us,
        "spread_us": None if measured is None else measured.spread_us,
        "detail": trial.detail,
        "compile_s": trial.compile_s,
        "registers": trial.registers,
        "spill_bytes": trial.spill_bytes,
    }


def _row(trial: Trial) -> tuple[str, str, str, str]:
    time = f"{trial.measurement.time_us:.1f}" if trial.measurement else "-"
    return time, str(trial.status), trial.config.name, trial.detail
