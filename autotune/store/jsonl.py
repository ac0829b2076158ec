"""Records as JSON lines: lossless, keys and lines sorted, every value checked when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.problem import ConvProblem
from autotune.store import rows
from autotune.store.engine import StoreError
from autotune.trial import Config, Measurement, Provenance, Record

FORMAT_VERSION = 1  # raised when older versions of the package could not read it

StrPath = str | os.PathLike[str]


def text(records: Iterable[Record]) -> str:
    """One record a line."""
    lines = [json.dumps(_object(record), sort_keys=True, allow_nan=False) for record in records]
    return "".join(f"{line}\n" for line in sorted(lines))


def _object(record: Record) -> dict[str, Any]:
    """A record as JSON values; ``layer``, ``device`` and ``config`` repeat for readers what the others hold."""
    return {
        "format": FORMAT_VERSION,
        "problem": str(record.problem),
        "layer": rows.layer_values(record.problem),
        "device": record.device.key,
        "device_spec": rows.spec_values(record.device),
        "config": record.config.name,
        "family": record.family,
        # pairs, because the keys of an object are sorted
        "knobs": [list(knob) for knob in record.config.knobs],
        "verified": record.verified,
        **asdict(record.measurement),
        "provenance": asdict(record.provenance),
    }


def read(path: StrPath) -> list[Record]:
    """The records of a file; StoreError, in one line, names the file, and the line that is not a record."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise StoreError(f"{os.fspath(path)}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise StoreError(f"{os.fspath(path)}: not a text in UTF-8") from None
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(_record(line))
        except ValueError as error:
            raise StoreError(f"{os.fspath(path)}:{number}: {error}") from error
    return records


def _record(line: str) -> Record:
    """The record in a line, unknown keys ignored; ValueError says what is wrong with it."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("not JSON: a table is what export --format jsonl writes") from None
    if not isinstance(entry, dict):
        raise ValueError("not a JSON object")
    version = rows.member(entry, "format", int)
    if version > FORMAT_VERSION:
        raise ValueError(f"format {version} is newer than {FORMAT_VERSION}, the newest that this version reads")
    problem = ConvProblem.parse(rows.member(entry, "problem", str))
    knobs = tuple(map(_knob, rows.member(entry, "knobs", list)))
    if len(dict(knobs)) < len(knobs):
        raise ValueError("a knob is given twice")
    record = Record(
        problem=problem,
        device=rows.spec_of(rows.member(entry, "device_spec", dict)),
        config=Config(rows.member(entry, "family", str), knobs),
        measurement=rows.parts(Measurement, entry),
        provenance=rows.parts(Provenance, rows.member(entry, "provenance", dict)),
        verified=rows.member(entry, "verified", bool),
    )
    for name, value in (("device", record.device.key), ("config", record.config.name)):
        if rows.member(entry, name, str) != value:
            raise ValueError(f"{name} is {entry[name]!r} where its parts say {value!r}")
    return record


def _knob(pair: object) -> tuple[str, int]:
    if not isinstance(pair, list) or [type(item) for item in pair] != [str, int]:
        raise ValueError(f"a knob must be a name and an integer, not {pair!r}")
    name, _ = pair
    return name, rows.member(dict([pair]), name, int)
