"""How unlike two layers are, in Python and in SQL, and which tuned layers are nearest to a given one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, Double, Select, and_, case, cast, false, func, or_, select
from sqlalchemy.sql.elements import ColumnElement

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.store import statements
from autotune.store.models import LayerRow, RecordRow
from autotune.store.statements import Unreadable
from autotune.trial import Record

# of each family the kernel digest and the compiler that its rows have to name to be trusted
Current = Mapping[str, tuple[str, str]]
Rank = tuple[bool, float, str]


def distance(one: ConvProblem, other: ConvProblem) -> float:
    """The sum of the logarithms of the ratios of the extents that kernels care about."""
    return sum(abs(math.log(a / b)) for a, b in zip(_extents(one), _extents(other), strict=True))


def rank(record: Record, problem: ConvProblem, current: Current | None) -> Rank:
    """Smaller is better: trusted before not, then by distance, then by the problem's text."""
    said = (record.provenance.kernel_digest, record.provenance.compiler)
    trusted = current is None or (record.verified and current.get(record.family) == said)
    return (not trusted, distance(problem, record.problem), str(record.problem))


def is_alike(one: ConvProblem, other: ConvProblem, any_epilogue: bool) -> bool:
    """Whether a config of one layer may be of use for another, different one."""
    same = any_epilogue or (one.layout, one.epilogue) == (other.layout, other.epilogue)
    return same and one.dtype is other.dtype and one != other


def page(
    connection: Connection,
    problem: ConvProblem,
    device: DeviceSpec,
    current: Current | None,
    any_epilogue: bool,
    within: float,
    limit: int,
    offset: int,
    unreadable: Unreadable | None,
) -> tuple[list[Record], int]:
    """So many records of alike layers on a device in the order of ``rank``, which the database establishes.

    With them their number, those included of which ``unreadable`` was told: see ``statements.records``.
    """
    found = statements.find_device(connection, device)
    if found is None:
        return [], 0
    device_id, spec = found
    ranked = _ranked(problem, device_id, current, any_epilogue, within).limit(limit).offset(offset)
    layers = {row.problem: row.id for row in connection.execute(ranked)}
    records = statements.records(connection, {device_id: spec}, layers.values(), unreadable)
    return [records[text, device_id] for text in layers if (text, device_id) in records], len(layers)


def _ranked(
    problem: ConvProblem, device_id: int, current: Current | None, any_epilogue: bool, within: float
) -> Select[int, str]:
    query = select(LayerRow.id, LayerRow.problem).join(RecordRow, LayerRow.id == RecordRow.layer_id)
    query = query.where(RecordRow.device_id == device_id, LayerRow.problem != str(problem))
    query = query.where(LayerRow.dtype == str(problem.dtype))
    if not any_epilogue:
        alike = {"layout": problem.layout, "epilogue": problem.epilogue, "out_dtype": problem.out_dtype}
        query = query.where(*(getattr(LayerRow, name) == str(value) for name, value in alike.items()))
    terms = [_apart(mine, value) for mine, value in zip(_EXTENTS, _extents(problem), strict=True)]
    far = sum(terms[1:], start=terms[0])
    if within < math.inf:
        query = query.where(far <= within)
    # an expression, because SQLite would read the layers in the order of a column's index, which takes twice as long
    nearest = (far, LayerRow.problem + "")
    if current is None:
        return query.order_by(*nearest)
    said = [
        and_(RecordRow.family == family, RecordRow.kernel_digest == digest, RecordRow.compiler == compiler)
        for family, (digest, compiler) in current.items()
    ]
    return query.order_by(case((and_(RecordRow.verified, or_(false(), *said)), 0), else_=1), *nearest)


def _apart(column: Any, value: int) -> ColumnElement[float]:
    # most extents are equal, and comparing is cheaper than a logarithm
    return case((column == value, cast(0, Double)), else_=func.abs(func.ln(cast(column, Double) / float(value))))


def _extents(p: ConvProblem) -> tuple[int, ...]:
    pixels = max(1, p.N * p.P * p.Q)
    return (pixels, p.K // p.groups, p.C // p.groups, p.groups, p.R, p.S, *p.stride, *p.dilation)


def _output(extent: Any, pads: Any, dilation: Any, taps: Any, stride: Any) -> Any:
    return (extent + pads - dilation * (taps - 1) - 1) // stride + 1


_L = LayerRow
_PIXELS = (
    _L.n
    * _output(_L.h, _L.pad_top + _L.pad_bottom, _L.dilation_h, _L.r, _L.stride_h)
    * _output(_L.w, _L.pad_left + _L.pad_right, _L.dilation_w, _L.s, _L.stride_w)
)
# the same extents, in the same order, as columns; all divisions are of integers
_EXTENTS: tuple[Any, ...] = (
    case((_L.n == 0, 1), else_=_PIXELS),
    *(_L.k // _L.groups, _L.c // _L.groups, _L.groups, _L.r, _L.s),
    *(_L.stride_h, _L.stride_w, _L.dilation_h, _L.dilation_w),
)
