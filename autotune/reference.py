"""The oracle: a slow, obviously right convolution in float64, and the error that a kernel's output may have."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune.problem import ConvProblem, DType, Layout

Array = NDArray[Any]

# how an element is held in a NumPy array; NumPy has no bf16: its bit patterns are held as uint16
STORAGE: dict[DType, np.dtype[Any]] = {
    DType.F16: np.dtype(np.float16),
    DType.BF16: np.dtype(np.uint16),
    DType.F32: np.dtype(np.float32),
    DType.S8: np.dtype(np.int8),
    DType.S32: np.dtype(np.int32),
}
# twice the unit roundoff of an output dtype, and its smallest subnormal
_ROUNDOFF = {DType.F16: 2.0**-10, DType.BF16: 2.0**-7, DType.F32: 2.0**-22}
_SUBNORMAL = {DType.F16: 2.0**-24, DType.BF16: 2.0**-133, DType.F32: 2.0**-149}
_CHUNK_ELEMENTS = 2**22  # activation elements that are convolved at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """A layer's exact output. value: ``problem.output_shape``, float64, for s8 int64.

    magnitude: the same shape, float64: the sum over all taps of ``|activation| * |filter|``; None for s8.
    """

    value: Array
    magnitude: Array | None


def decode(dtype: DType, stored: Array) -> NDArray[np.float64]:
    """Elements held as ``STORAGE[dtype]`` as float64, exactly."""
    if dtype is DType.BF16:
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def encode(dtype: DType, values: Array) -> Array:
    """float32 or integer values rounded to nearest even and held as ``STORAGE[dtype]``; finite values only for bf16."""
    if dtype is DType.BF16:
        bits = values.astype(np.float32).view(np.uint32)
        return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return values.astype(STORAGE[dtype])


def conv2d(problem: ConvProblem, activation: Array, filter: Array) -> Expected:
    """The layer, computed tap by tap in float64 (s8: every partial sum is an integer below 2**53, hence exact).

    activation, filter: ``problem.activation_shape`` and ``problem.filter_shape``, held as ``STORAGE[problem.dtype]``.
    ValueError, in one line, for another shape or dtype and for what has no reference yet: an epilogue other than the
    identity, tf32, e4m3, or an output dtype that cannot hold the result.
    """
    _check(problem, activation, filter)
    nhwc = problem.layout is Layout.NHWC
    images = activation if nhwc else activation.transpose(0, 2, 3, 1)
    taps = _taps(problem, decode(problem.dtype, filter if nhwc else filter.transpose(0, 2, 3, 1)))
    value = np.empty((problem.N, problem.P, problem.Q, problem.K))
    magnitude = None if problem.dtype.is_integer else np.empty_like(value)
    step = max(1, _CHUNK_ELEMENTS // (problem.C * problem.H * problem.W))
    top, bottom, left, right = problem.padding
    for n in range(0, problem.N, step):
        chunk = np.pad(decode(problem.dtype, images[n : n + step]), ((0, 0), (top, bottom), (left, right), (0, 0)))
        value[n : n + step] = _convolve(problem, chunk, taps)
        if magnitude is not None:
            magnitude[n : n + step] = _convolve(problem, np.abs(chunk), np.abs(taps))
    if problem.dtype.is_integer:
        value = value.astype(np.int64)
    if not nhwc:
        value = value.transpose(0, 3, 1, 2)
        magnitude = None if magnitude is None else magnitude.transpose(0, 3, 1, 2)
    return Expected(value=value, magnitude=magnitude)


def tolerances(problem: ConvProblem) -> tuple[float, float, float]:
    """(relative, slack, absolute): an element may be off by ``relative |value| + slack magnitude + absolute``.

    relative is twice the unit roundoff of the output's dtype, absolute its smallest subnormal. slack bounds a float32
    summation of n terms, rounded or truncated, in any order: 4 sqrt(n) 2**-24
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019,
    with lambda = 4).
    All zero for s8, whose result is exact: in s32, or that integer rounded to the nearest float32.
    """
    if problem.dtype.is_integer:
        return 0.0, 0.0, 0.0
    terms = problem.C // problem.groups * problem.R * problem.S
    return _ROUNDOFF[problem.out_dtype], 2.0**-22 * math.sqrt(terms), _SUBNORMAL[problem.out_dtype]


def tolerance(problem: ConvProblem, expected: Expected) -> NDArray[np.float64]:
    """The error that each element of an output may have, by ``tolerances``; float64 of ``problem.output_shape``."""
    if expected.magnitude is None:
        return np.zeros(expected.value.shape)
    relative, slack, absolute = tolerances(problem)
    allowed = expected.magnitude * slack
    allowed += np.abs(expected.value) * relative
    allowed += absolute
    return allowed


def compare(problem: ConvProblem, output: Array, expected: Expected) -> tuple[int, float]:
    """Elements of ``output`` outside the tolerance, and the largest error (infinite when an element is NaN).

    output: ``problem.output_shape``, held as ``STORAGE[problem.out_dtype]``. NaN is always outside.
    """
    value = expected.value
    if expected.magnitude is None and problem.out_dtype is DType.F32:
        value = value.astype(np.float32)
    error = decode(problem.out_dtype, output)
    error -= value
    np.abs(error, out=error)
    # written so that a NaN is a mismatch
    mismatches = error.size - int(np.count_nonzero(error <= tolerance(problem, expected)))
    worst = float(error.max(initial=0.0))
    return mismatches, math.inf if math.isnan(worst) else worst


def _check(problem: ConvProblem, activation: Array, filter: Array) -> None:
    if not problem.epilogue.is_identity:
        raise ValueError(f"the reference computes the identity epilogue only, not {problem.epilogue}")
    if problem.dtype not in STORAGE:
        raise ValueError(f"the reference has no rule for {problem.dtype}")
    if problem.out_dtype not in ((DType.S32, DType.F32) if problem.dtype is DType.S8 else _ROUNDOFF):
        raise ValueError(f"the reference has no rule for {problem.dtype} with an output in {problem.out_dtype}")
    for name, array, shape in (
        ("activation", activation, problem.activation_shape),
        ("filter", filter, problem.filter_shape),
    ):
        if array.shape != shape or array.dtype != STORAGE[problem.dtype]:
            held = STORAGE[problem.dtype].name
            raise ValueError(f"{name} must be {held} of shape {shape}, not {array.dtype.name} of shape {array.shape}")


def _taps(problem: ConvProblem, krsc: NDArray[np.float64]) -> NDArray[np.float64]:
    """Filter KRSC as [r, s, group, channel, filter of the group]."""
    groups = problem.groups
    split = krsc.reshape(groups, problem.K // groups, problem.R, problem.S, problem.C // groups)
    return np.ascontiguousarray(split.transpose(2, 3, 0, 4, 1))


def _convolve(problem: ConvProblem, padded: NDArray[np.float64], taps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Padded images [n, h, w, c] and ``_taps`` to [n, p, q, k]: for each tap, one matrix product a group."""
    (stride_h, stride_w), (dilation_h, dilation_w) = problem.stride, problem.dilation
    n, P, Q, groups = padded.shape[0], problem.P, problem.Q, problem.groups
    total = np.zeros((groups, n * P * Q, problem.K // groups))
    for r in range(problem.R):
        for s in range(problem.S):
            h, w = r * dilation_h, s * dilation_w
            seen = padded[:, h : h + (P - 1) * stride_h + 1 : stride_h, w : w + (Q - 1) * stride_w + 1 : stride_w]
            total += seen.reshape(n * P * Q, groups, -1).transpose(1, 0, 2) @ taps[r, s]
    return total.transpose(1, 0, 2).reshape(n, P, Q, problem.K)
