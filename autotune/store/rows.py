"""Values to rows and back; the only place that knows how a value is spelt in a table."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem, DType
from autotune.trial import Config, Measurement, Provenance, Record, Status, Trial

Values = dict[str, Any]

LAYER_COLUMNS = (
    *("n", "c", "h", "w", "k", "r", "s", "stride_h", "stride_w", "pad_top", "pad_bottom", "pad_left", "pad_right"),
    *("dilation_h", "dilation_w", "groups", "dtype", "layout", "epilogue", "out_dtype"),
)
_MEASUREMENT = tuple(field.name for field in fields(Measurement))
_PROVENANCE = tuple(field.name for field in fields(Provenance))


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


def spec_of(values: Values) -> DeviceSpec:
    """Inverse of ``spec_values``; unknown names are ignored. KeyError, TypeError or ValueError when it is not one."""
    known = {field.name: values[field.name] for field in fields(DeviceSpec) if field.name in values}
    major, minor = known.get("compute_capability", (0, 0))
    rates = tuple((DType(dtype), float(rate)) for dtype, rate in known["rates"])
    return DeviceSpec(**known | {"compute_capability": (int(major), int(minor)), "rates": rates})


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
    return Record(
        problem=problem,
        device=device,
        config=config_of(row),
        measurement=_measurement_of(row),
        provenance=_provenance_of(row),
        verified=row.verified,
    )


def trial_of(row: Any, problem: ConvProblem, device: DeviceSpec) -> Trial:
    """The trial in a row; ValueError when the row does not hold one."""
    return Trial(
        problem=problem,
        device=device,
        config=config_of(row),
        status=Status(row.status),
        detail=row.detail,
        provenance=_provenance_of(row),
        measurement=_measurement_of(row) if row.time_us is not None else None,
        compile_s=row.compile_s,
        registers=row.registers,
        spill_bytes=row.spill_bytes,
    )


def config_of(row: Any) -> Config:
    """The config in a row of a trial or a record, whether or not its family still exists."""
    return Config.of(row.family, row.knobs)


def _measurement_of(row: Any) -> Measurement:
    return Measurement(**{name: getattr(row, name) for name in _MEASUREMENT})


def _provenance_of(row: Any) -> Provenance:
    return Provenance(**{name: getattr(row, name) for name in _PROVENANCE})
