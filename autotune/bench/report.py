"""A benchmark's table for people, and what it comes to over the dense layers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from autotune.bench.rows import Row
from autotune.bench.suite import is_dense
from autotune.problem import ConvProblem

BEHIND = 0.97  # of the rival's speed: below it, a layer counts as behind
GOOD_DEFAULT = 1.3  # times the tuned time

_COLUMNS = (
    "layer",
    "dtype",
    "epilogue",
    "floor us",
    "rival us",
    "ours us",
    "speedup",
    "default us",
    "trials",
    "tuning s",
    "rival",
    "config",
)
_SUMMARY = (
    "dtype",
    "epilogue",
    "dense layers",
    "with a rival",
    "speedup, geometric mean",
    f"below {BEHIND}",
    f"default within {GOOD_DEFAULT}x",
    "compile s, median",
)


def markdown(rows: Sequence[Row]) -> str:
    """A table of the layers and, for each dtype and epilogue, one of what the dense layers among them come to."""
    lines = [*_table(_COLUMNS, map(row_cells, rows)), ""]
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if is_dense(ConvProblem.parse(row.problem)):
            groups.setdefault((row.dtype, row.epilogue), []).append(row)
    if groups:
        lines += [*_table(_SUMMARY, (_summary(*key, group) for key, group in groups.items())), ""]
    return "\n".join(lines)


def line(row: Row) -> str:
    """The row as a line of the table."""
    return _line(row_cells(row))


def row_cells(row: Row) -> tuple[str, ...]:
    return (
        row.layer,
        row.dtype,
        row.epilogue,
        f"{row.floor_us:.1f}",
        "-" if row.rival_us is None else f"{row.rival_us:.1f}",
        f"{row.ours_us:.1f}",
        "-" if row.speedup is None else f"{row.speedup:.2f}",
        f"{row.default_us:.1f}",
        str(row.trials),
        f"{row.tune_seconds:.1f}",
        row.rival,
        f"`{row.config}`",
    )


def _summary(dtype: str, epilogue: str, rows: Sequence[Row]) -> tuple[str, ...]:
    speedups = [row.speedup for row in rows if row.speedup is not None]
    mean = math.exp(statistics.fmean(map(math.log, speedups))) if speedups else None
    good = sum(row.default_us <= GOOD_DEFAULT * row.ours_us for row in rows)
    return (
        dtype,
        epilogue,
        str(len(rows)),
        str(len(speedups)),
        "-" if mean is None else f"{mean:.2f}",
        str(sum(speedup < BEHIND for speedup in speedups)),
        f"{good / len(rows):.0%}",
        f"{statistics.median(row.compile_s for row in rows):.2f}",
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_line(columns), _line(["---"] * len(columns)), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    # a reason may hold what ends a cell
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
