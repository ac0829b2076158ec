"""Records as JSON lines: lossless, keys and lines sorted, every value checked when it is read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

from autotune.device import DeviceSpec, roofline_us
from autotune.problem import ConvProblem
from autotune.store import rows
from autotune.store.engine import StoreError
from autotune.trial import Config, Measurement, Provenance, Record

FORMAT_VERSION = 1  # raised when older versions of the package could not read it

StrPath = str | os.PathLike[str]

_JSON_NAMES: dict[type, str] = {
    **{str: "a text", int: "an integer", float: "a number", bool: "true or false"},
    **{type(None): "null", list: "an array", dict: "an object"},
}
_HINTS: dict[type, dict[str, Any]] = {kind: get_type_hints(kind) for kind in (DeviceSpec, Measurement, Provenance)}
_Parts = TypeVar("_Parts", Measurement, Provenance)


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
    version = _member(entry, "format", int)
    if version > FORMAT_VERSION:
        raise ValueError(f"format {version} is newer than {FORMAT_VERSION}, the newest that this version reads")
    problem = ConvProblem.parse(_member(entry, "problem", str))
    record = Record(
        problem=problem,
        device=_spec(_member(entry, "device_spec", dict), problem),
        config=Config(_member(entry, "family", str), tuple(map(_knob, _member(entry, "knobs", list)))),
        measurement=_parts(Measurement, entry),
        provenance=_parts(Provenance, _member(entry, "provenance", dict)),
        verified=_member(entry, "verified", bool),
    )
    for name, value in (("device", record.device.key), ("config", record.config.name)):
        if _member(entry, name, str) != value:
            raise ValueError(f"{name} is {entry[name]!r} where its parts say {value!r}")
    return record


def _parts(kind: type[_Parts], entry: dict[str, Any]) -> _Parts:
    return kind(**{name: _member(entry, name, hint) for name, hint in _HINTS[kind].items()})


def _spec(values: dict[str, Any], problem: ConvProblem) -> DeviceSpec:
    for name, hint in _HINTS[DeviceSpec].items():
        if name in values and hint in _JSON_NAMES:
            _member(values, name, hint)
    try:
        spec = rows.spec_of(values)
        roofline_us(problem, spec)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ValueError(f"device_spec does not describe a device: {error!r}") from None
    return spec


def _knob(pair: object) -> tuple[str, int]:
    if not isinstance(pair, list) or [type(item) for item in pair] != [str, int]:
        raise ValueError(f"a knob must be a name and an integer, not {pair!r}")
    return pair[0], pair[1]


def _member(entry: dict[str, Any], name: str, kind: Any) -> Any:
    """The value of a key, which has to be there and of this type."""
    if name not in entry:
        raise ValueError(f"{name} is missing")
    value = entry[name]
    allowed = get_args(kind) or (kind,)
    if float in allowed and type(value) is int:
        value = float(value)
    # exact, because to isinstance a bool is an int
    if type(value) not in allowed:
        raise ValueError(f"{name} must be {' or '.join(_JSON_NAMES[one] for one in allowed)}, not {value!r}")
    return value
