"""Tuning tables as files: exported as jsonl, csv, markdown or a C++ header, imported from jsonl."""

from __future__ import annotations

import csv
import io
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path

from autotune.device import roofline_us
from autotune.store import header, jsonl, rows
from autotune.store.engine import StoreError, sync_names
from autotune.store.jsonl import StrPath
from autotune.store.lookup import AnyDevice
from autotune.store.merging import MergeReport
from autotune.store.store import Store
from autotune.trial import Measurement, Provenance, Record

FORMATS = ("jsonl", "csv", "markdown", "header")


def export_rows(store: Store, fmt: str, device: AnyDevice | None = None) -> str:
    """Every record of a database, or those of a device, as one text; shipped tables are not part of it.

    jsonl: one record a line, lossless, keys and lines sorted. csv: one record a line, with a header. markdown: a table
    for people, in the order of ``Store.records``. header: see ``autotune.store.header``.

    ValueError for a format that is not in ``FORMATS``, and for a device as ``lookup.device_key`` says.
    """
    if fmt not in FORMATS:
        raise ValueError(f"unknown format {fmt!r}: use one of {', '.join(FORMATS)}")
    writers = {"jsonl": jsonl.text, "csv": _csv, "markdown": _markdown, "header": header.text}
    return writers[fmt](store.records(device, shipped=False))


def write(store: Store, fmt: str, path: StrPath, device: AnyDevice | None = None) -> None:
    """Export to a file: see ``export_rows`` and ``save``."""
    save(export_rows(store, fmt, device), path)


def save(text: str, path: StrPath) -> None:
    """Write a file, which appears, or is replaced, when it is complete; StoreError when it cannot be written."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            # a pipe or a terminal has no name to replace; that of an open one, /dev/fd/3, leads nowhere
            path.write_text(text, encoding="utf-8", newline="")
        else:
            # a link stays a link
            _publish(text, Path(os.path.realpath(path)))
    except OSError as error:
        raise StoreError(f"{os.fspath(path)}: {error.strerror}") from error


def import_files(
    store: Store, paths: Iterable[StrPath], is_stale: Callable[[Record], object] | None = None
) -> MergeReport:
    """Merge jsonl files into a store, or none when one cannot be read: see ``read`` and ``Store.merge``."""
    return store.merge(read(paths), is_stale)


def read(paths: Iterable[StrPath]) -> list[Record]:
    """The records of jsonl files; StoreError, in one line, names the file, and the line that is not a record."""
    return [record for path in paths for record in jsonl.read(path)]


def _csv(records: list[Record]) -> str:
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    names = [field.name for kind in (Measurement, Provenance) for field in fields(kind)]
    writer.writerow(["device", "problem", *rows.LAYER_COLUMNS, "family", "config", "verified", "roofline_us", *names])
    for record in records:
        where = [record.device.key, record.problem, *rows.layer_values(record.problem).values()]
        what = [record.family, record.config, str(record.verified).lower(), roofline_us(record.problem, record.device)]
        measured = [*asdict(record.measurement).values(), *asdict(record.provenance).values()]
        writer.writerow([*where, *what, *measured])
    return out.getvalue()


def _markdown(records: list[Record]) -> str:
    lines = ["| device | layer | config | time in us | of the roofline |", "| --- | --- | --- | ---: | ---: |"]
    for record in records:
        share = roofline_us(record.problem, record.device) / record.time_us
        config = record.config.name if record.verified else f"{record.config} (not verified)"
        cells = (record.device.key, record.problem, config, f"{record.time_us:.2f}", f"{share:.0%}")
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "".join(f"{line}\n" for line in lines)


def _publish(text: str, target: Path) -> None:
    scratch = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}")
    try:
        with scratch.open("x", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)
    sync_names(target.parent)
