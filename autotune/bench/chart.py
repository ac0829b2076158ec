"""A chart of a benchmark: the share of the roofline that we and the best rival reach on each layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from autotune.bench.rows import Table

OURS, RIVAL = "#2a6fbb", "#b8b8b8"


class NoChart(Exception):
    """No chart can be drawn; one line with what to install."""


def draw(table: Table, path: Path) -> None:
    """Write the chart as SVG, the same bytes for the same rows; NoChart where matplotlib is missing."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoChart(f"no chart: matplotlib is missing ({error}): pip install 'conv-autotune[bench]'") from None
    groups: dict[tuple[str, str], list[tuple[str, float, float]]] = {}
    for row in table.rows:
        rival = row.floor_us / row.rival_us if row.rival_us else 0.0
        groups.setdefault((row.dtype, row.epilogue), []).append((row.layer, row.floor_us / row.ours_us, rival))
    # text as text, and identifiers that do not change from run to run
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "conv-autotune"}):
        figure = Figure(figsize=(9, 1.2 * len(groups) + 0.34 * len(table.rows)), layout="constrained")
        heights = [len(group) + 2 for group in groups.values()]
        axes = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
        for axis, ((dtype, epilogue), shares) in zip(axes, groups.items(), strict=True):
            _bars(axis, shares)
            axis.set_title(f"{table.device}, {dtype}, {epilogue}: share of the sustained roofline", loc="left")
        figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def _bars(axis: object, shares: Sequence[tuple[str, float, float]]) -> None:
    from matplotlib.axes import Axes

    assert isinstance(axis, Axes)
    places = range(len(shares))
    axis.barh([p - 0.2 for p in places], [100 * ours for _, ours, _ in shares], 0.4, color=OURS, label="ours")
    axis.barh([p + 0.2 for p in places], [100 * rival for *_, rival in shares], 0.4, color=RIVAL, label="best rival")
    axis.set_yticks(places, [name for name, *_ in shares])
    axis.invert_yaxis()
    axis.set_xlim(left=0)
    axis.set_xlabel("%")
    axis.grid(axis="x", linewidth=0.4)
    axis.set_axisbelow(True)
