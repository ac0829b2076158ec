"""Values to rows and back; the only place that knows how a value is spelt in a table."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar, get_args, get_type_hints

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem, DType
from autotune.trial import LARGEST_INTEGER, Config, Measurement, Provenance, Record, Status, Trial

Values = dict[str, Any]
_Parts = TypeVar("_Parts", Measurement, Provenance)

_TYPE_NAMES: dict[type, str] = {
    **{str: "a text", int: "an integer", float: "a number", bool: "true or false"},
    **{type(None): "null", list: "an array", dict: "an object"},
}
_INTEGERS = range(-(2**63), 2**63)

LAYER_COLUMNS = (
    *("n", "c", "h", "w", "k", "r", "s", "stride_h", "stride_w", "pad_top", "pad_bottom", "pad_left", "pad_right"),
    *("dilation_h", "dilation_w", "groups", "dtype", "layout", "epilogue", "out_dtype"),
)
_MEASUREMENT = tuple(field.name for field in fields(Measurement))
# of each value the types of its fields, those apart that are stored as lists
_TYPES: dict[type, dict[str, tuple[type, ...]]] = {
    kind: {
        name: get_args(hint) or (hint,)
        for name, hint in get_type_hints(kind).items()
        if name not in ("compute_capability", "rates")
    }
    for kind in (DeviceSpec, Measurement, Provenance)
}


def member(values: Mapping[str, Any], name: str, *types: type) -> Any:
    """The value of a name, which has to be there and of one of these types; ValueError says what is wrong with it."""
    if name not in values:
        raise ValueError(f"{name} is missing")
    value = values[name]
    if type(value) is int and value not in _INTEGERS:
        raise ValueError(f"{name} has more than 64 bits")
    if type(value) is str:
        _check_text(name, value)
    if type(value) in (int, float) and float in types:
        # of the two zeros, which are equal but are written differently, the plain one
        value = float(value) + 0.0
    # exact, because to isinstance a bool is an int
    if type(value) not in types:
        raise ValueError(f"{name} must be {' or '.join(_TYPE_NAMES[one] for one in types)}, not {value!r}")
    return value


def _check_text(name: str, text: str) -> None:
    """ValueError for what no database takes."""
    if "\0" in text:
        raise ValueError(f"{name} holds a NUL character")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name} is no UTF-8 text") from None


def parts(kind: type[_Parts], values: Mapping[str, Any]) -> _Parts:
    """A value from the members that it has; other members are ignored. ValueError as ``member``."""
    return kind(**{name: member(values, name, *types) for name, types in _TYPES[kind].items()})


def spec_values(spec: DeviceSpec) -> Values:
    """A device spec as JSON values."""
    values = asdict(spec)
    values["compute_capability"] = list(spec.compute_capability)
    values["bytes_per_s"] = float(spec.bytes_per_s)
    values["rates"] = [[str(dtype), float(rate)] for dtype, rate in spec.rates]
    return values


def spec_text(spec: DeviceSpec) -> str:
    """A device spec as canonical JSON text."""
    return json.dumps(spec_values(spec), sort_keys=True)


def spec_of(values: object) -> DeviceSpec:
    """Inverse of ``spec_values``; unknown names are ignored. ValueError, in one line, when it is not one."""
    if not isinstance(values, dict):
        raise ValueError(f"{values!r} does not describe a device")
    known = {name: member(values, name, *types) for name, types in _TYPES[DeviceSpec].items() if name in values}
    try:
        major, minor = values.get("compute_capability", (0, 0))
        rates = tuple((DType(dtype), float(rate)) for dtype, rate in values["rates"])
        spec = DeviceSpec(**known, compute_capability=(int(major), int(minor)), rates=rates)
        per_s = (spec.bytes_per_s, spec.rate(DType.F32), *(rate for _, rate in rates))
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"device_spec does not describe a device: {error!r}") from None
    if not 1 <= spec.sm_count <= LARGEST_INTEGER or not all(0 < rate < math.inf for rate in per_s):
        wanted = "sm_count and rates must be positive and finite, and sm_count below 2^31"
        raise ValueError(f"device_spec does not describe a device: {wanted}")
    return spec


def device_values(spec: DeviceSpec) -> Values:
    """The columns of a device."""
    named = {name: getattr(spec, name) for name in ("key", "name", "kind", "arch", "sm_count")}
    return named | {"spec": spec_values(spec)}


def layer_values(problem: ConvProblem) -> Values:
    """The columns of a layer, without its key ``problem``."""
    p = problem
    texts = (str(p.dtype), str(p.layout), str(p.epilogue), str(p.out_dtype))
    values = (p.N, p.C, p.H, p.W, p.K, p.R, p.S, *p.stride, *p.padding, *p.dilation, p.groups, *texts)
    return dict(zip(LAYER_COLUMNS, values, strict=True))


def record_values(record: Record) -> Values:
    """The columns of a record, without its layer and device."""
    return _run_values(record.config, record.measurement, record.provenance) | {"verified": record.verified}


def trial_values(trial: Trial) -> Values:
    """The columns of a trial, without its layer and device."""
    # a compiler's log may hold anything; these two no database takes
    detail = trial.detail.replace("\0", "").encode(errors="backslashreplace").decode()
    return _run_values(trial.config, trial.measurement, trial.provenance) | {
        "status": str(trial.status),
        "detail": detail,
        "compile_s": float(trial.compile_s),
        "registers": trial.registers,
        "spill_bytes": trial.spill_bytes,
    }


def _run_values(config: Config, measurement: Measurement | None, provenance: Provenance) -> Values:
    measured = asdict(measurement) if measurement else dict.fromkeys(_MEASUREMENT)
    named = {"family": config.family, "config": config.name, "knobs": dict(config.knobs)}
    return named | measured | asdict(provenance)


def record_of(row: Any, problem: ConvProblem, device: DeviceSpec) -> Record:
    """The record in a row; ValueError when the row does not hold one."""
    values = row._mapping
    return Record(
        problem=problem,
        device=device,
        config=config_of(row),
        measurement=parts(Measurement, values),
        provenance=parts(Provenance, values),
        verified=member(values, "verified", bool),
    )


def trial_of(row: Any, problem: ConvProblem, device: DeviceSpec) -> Trial:
    """The trial in a row; ValueError when the row does not hold one."""
    values = row._mapping
    return Trial(
        problem=problem,
        device=device,
        config=config_of(row),
        status=Status(row.status),
        detail=member(values, "detail", str),
        provenance=parts(Provenance, values),
        measurement=parts(Measurement, values) if row.time_us is not None else None,
        compile_s=member(values, "compile_s", float),
        registers=member(values, "registers", int, type(None)),
        spill_bytes=member(values, "spill_bytes", int, type(None)),
    )


def config_of(row: Any) -> Config:
    """The config in a row of a trial or a record, whether or not its family still exists."""
    values = row._mapping
    knobs = member(values, "knobs", dict)
    for name in knobs:
        _check_text("a knob's name", name)
    return Config(member(values, "family", str), tuple((name, member(knobs, name, int)) for name in knobs))
