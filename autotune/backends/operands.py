"""What a layer's operands are drawn from, so that outputs use their dtype's range and an error shows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from autotune.backends.backend import Backend
from autotune.problem import ConvProblem, DType

_S8_DEVIATION = 74.0  # of the uniform values from -128 to 127
_SCALED_S8_DEVIATION = 50.0  # of the outputs: a few of a hundred saturate


class Spread(NamedTuple):
    """A normal distribution; that of s8 is uniform, whatever it says here."""

    mean: float
    deviation: float


def spread(problem: ConvProblem) -> dict[str, Spread]:
    """The distribution of each of ``problem.operands``.

    Activation (deviation 1) and filter are such that sums have deviation 1, s8 apart. Scales vary by a quarter; bias
    and residual are half as large as the scaled sums.
    """
    taps = problem.C // problem.groups * problem.R * problem.S
    scaled = sums = 1.0
    if problem.dtype is DType.S8:
        scaled = sums = _S8_DEVIATION**2 * taps**0.5
        if problem.epilogue.scale != "none":
            scaled = _SCALED_S8_DEVIATION
    known = {
        "activation": Spread(0.0, 1.0),
        "filter": Spread(0.0, taps**-0.5),
        "scale": Spread(scaled / sums, scaled / sums / 4),
        "bias": Spread(0.0, scaled / 2),
        "residual": Spread(0.0, scaled / 2),
    }
    return {name: known[name] for name in problem.operands}


def drawn(backend: Backend, problem: ConvProblem, seed: int) -> dict[str, Any]:
    """New buffers of the device with random values for each of ``problem.operands``."""
    buffers: dict[str, Any] = {}
    for index, (name, one) in enumerate(spread(problem).items()):
        shape, dtype = problem.operand(name)
        buffers[name] = backend.allocate(math.prod(shape) * dtype.bytes)
        backend.randomize(buffers[name], dtype, seed + index, one.deviation, one.mean)
    return buffers
