"""The benchmark: our tuned kernels against rivals, layer by layer, as data, table and chart."""

from autotune.bench.chart import NoChart, draw
from autotune.bench.comparison import compare, run
from autotune.bench.isolated import IsolatedStore
from autotune.bench.report import markdown
from autotune.bench.rows import Row, Table
from autotune.bench.suite import Layer, is_dense, layers_of

__all__ = [
    "IsolatedStore",
    "Layer",
    "NoChart",
    "Row",
    "Table",
    "compare",
    "draw",
    "is_dense",
    "layers_of",
    "markdown",
    "run",
]
