"""The oracle: a slow, obviously right convolution in float64, and the error that a kernel's output may have."""

from __future__ import annotations

import math
from collections.abc import Callable
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
    """A layer's output. value: ``problem.output_shape``, float64: the exact one, before any rounding. For s8 inputs
    what must be stored, as int64 where the output is an integer.

    magnitude: the same shape, float64: what ``value`` would be with the absolute value of every product, scale, bias
    and residual; None for s8.
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


def conv2d(
    problem: ConvProblem,
    activation: Array,
    filter: Array,
    *,
    scale: Array | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
) -> Expected:
    """The layer, computed tap by tap in float64 (s8: every partial sum is an integer below 2**53, hence exact).

    Operands have the shape and dtype of ``problem.operand``, held as ``STORAGE`` says; those that the epilogue does not
    read are None. ValueError, in one line, for others and for what has no reference: tf32, e4m3, an output dtype that
    cannot hold the result, an epilogue without meaning.
    """
    given = {"activation": activation, "filter": filter, "scale": scale, "bias": bias, "residual": residual}
    _check(problem, given)
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
    if residual is not None:
        held = residual if nhwc else residual.transpose(0, 2, 3, 1)
        residual = decode(problem.out_dtype, held)
    if problem.dtype.is_integer:
        value = _requantized(problem, value, scale, bias, residual)
    else:
        assert magnitude is not None
        if scale is not None:
            value *= scale
            magnitude *= np.abs(scale)
        for operand in (bias, residual):
            if operand is not None:
                value += operand
                magnitude += np.abs(operand)
        value = _ACTIVATIONS[problem.epilogue.activation](value)
    if not nhwc:
        value = value.transpose(0, 3, 1, 2)
        magnitude = None if magnitude is None else magnitude.transpose(0, 3, 1, 2)
    return Expected(value=value, magnitude=magnitude)


def tolerances(problem: ConvProblem) -> tuple[float, float, float]:
    """(relative, slack, absolute): an element may be off by ``relative |value| + slack magnitude + absolute``.

    relative is twice the unit roundoff of the output's dtype, absolute its smallest subnormal. slack bounds a float32
    summation of n terms, rounded or truncated, in any order: 4 sqrt(n) 2**-24
    (Higham and Mary, "A new approach to probabilistic rounding error analysis", SIAM J. Sci. Comput. 41(5), 2019,
    with lambda = 4). The epilogue's operands are terms too; activations do not enlarge an error.
    All zero for s8, whose result is defined to the bit.
    """
    if problem.dtype.is_integer:
        return 0.0, 0.0, 0.0
    terms = problem.C // problem.groups * problem.R * problem.S + len(problem.epilogue.operands)
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
    error = decode(problem.out_dtype, output)
    error -= expected.value
    np.abs(error, out=error)
    # written so that a NaN is a mismatch
    mismatches = error.size - int(np.count_nonzero(error <= tolerance(problem, expected)))
    worst = float(error.max(initial=0.0))
    return mismatches, math.inf if math.isnan(worst) else worst


# by the names in problem.ACTIVATIONS
_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {"identity": lambda x: x, "relu": lambda x: np.maximum(x, 0)}


def _requantized(
    problem: ConvProblem,
    accumulator: NDArray[np.float64],
    scale: Array | None,
    bias: Array | None,
    residual: NDArray[np.float64] | None,
) -> Array:
    """What an s8 layer stores: the float32 steps that ``Epilogue`` states, one by one."""
    sums, out = accumulator.astype(np.int64), problem.out_dtype
    if problem.epilogue.is_identity and out is DType.S32:
        return sums
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    value = _fma(sums.astype(np.float32), one if scale is None else scale, zero if bias is None else bias)
    if residual is not None:
        value = value + residual.astype(np.float32)
    value = _ACTIVATIONS[problem.epilogue.activation](value)
    if not out.is_integer:
        return value.astype(STORAGE[out]).astype(np.float64)
    limits = np.iinfo(STORAGE[out])
    return np.clip(np.rint(value.astype(np.float64)), limits.min, limits.max).astype(np.int64)


def _fma(x: NDArray[np.float32], y: Array, z: Array) -> NDArray[np.float32]:
    """x * y + z, rounded once to float32."""
    # the product of two float32 is exact in float64; what rounding its sum with z loses is exact too (Knuth's two-sum)
    product, addend = x.astype(np.float64) * y, np.broadcast_to(z, x.shape).astype(np.float64)
    total = product + addend
    added = total - product
    lost = (product - (total - added)) + (addend - added)
    # rounded to odd instead: then a second rounding, to fewer bits, is as good as one (Boldo and Melquiond, 2008)
    even = (lost != 0) & (total.view(np.int64) % 2 == 0)
    total[even] = np.nextafter(total[even], np.copysign(np.inf, lost[even]))
    return total.astype(np.float32)


def _check(problem: ConvProblem, given: dict[str, Array | None]) -> None:
    if problem.dtype not in STORAGE:
        raise ValueError(f"the reference has no rule for {problem.dtype}")
    outputs = (DType.S32, DType.F32, DType.S8, DType.F16) if problem.dtype is DType.S8 else tuple(_ROUNDOFF)
    if problem.out_dtype not in outputs:
        raise ValueError(f"the reference has no rule for {problem.dtype} with an output in {problem.out_dtype}")
    if reason := problem.epilogue.undefined(problem.dtype):
        raise ValueError(reason)
    for name, array in given.items():
        if (array is not None) != (name in problem.operands):
            raise ValueError(
                f"{name} is {'missing' if array is None else 'given'}, and the epilogue is {problem.epilogue}"
            )
        shape, dtype = problem.operand(name)
        if array is not None and (array.shape != shape or array.dtype != STORAGE[dtype]):
            held = STORAGE[dtype].name
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
