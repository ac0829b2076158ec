"""The oracle against seven plain loops, and what it accepts as equal."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from conftest import EDGE_PROBLEMS

from autotune import ConvProblem, DType, Epilogue, reference


def seven_loops(problem, activation, filters):
    """Exact value and magnitude of each output by NPQK index, from arrays in the problem's layout."""
    channels, per_group = problem.C // problem.groups, problem.K // problem.groups
    nhwc = problem.layout == "nhwc"
    value, magnitude = {}, {}
    for n, p, q, k in itertools.product(range(problem.N), range(problem.P), range(problem.Q), range(problem.K)):
        terms = []
        for r, s, c in itertools.product(range(problem.R), range(problem.S), range(channels)):
            h = p * problem.stride[0] - problem.padding[0] + r * problem.dilation[0]
            w = q * problem.stride[1] - problem.padding[2] + s * problem.dilation[1]
            if 0 <= h < problem.H and 0 <= w < problem.W:
                x = (k // per_group) * channels + c
                left = activation[n, h, w, x] if nhwc else activation[n, x, h, w]
                right = filters[k, r, s, c] if nhwc else filters[k, c, r, s]
                terms.append(float(left) * float(right))
        # products of float32 values are exact in float64, and fsum rounds once
        value[n, p, q, k] = math.fsum(terms)
        magnitude[n, p, q, k] = math.fsum(map(abs, terms))
    return value, magnitude


def operands(problem, seed=0):
    generator = np.random.Generator(np.random.PCG64(seed))
    if problem.dtype is DType.S8:
        return tuple(
            generator.integers(-128, 128, shape, dtype=np.int8)
            for shape in (problem.activation_shape, problem.filter_shape)
        )
    return tuple(
        reference.encode(problem.dtype, generator.standard_normal(shape, dtype=np.float32))
        for shape in (problem.activation_shape, problem.filter_shape)
    )


def small(problems):
    return [pytest.param(p, id=f"{n}-{p.dtype}-{p.layout}") for n, p in problems.items() if p.flops < 300_000]


@pytest.mark.parametrize(
    "problem",
    small(EDGE_PROBLEMS("f32")) + small(EDGE_PROBLEMS("s8", "nchw")) + small(EDGE_PROBLEMS("bf16", "nchw"))[::5],
)
def test_conv2d_is_the_seven_loops(problem):
    activation, filters = operands(problem)
    value, magnitude = seven_loops(
        problem, reference.decode(problem.dtype, activation), reference.decode(problem.dtype, filters)
    )
    found = reference.conv2d(problem, activation, filters)
    assert found.value.shape == problem.output_shape
    order = (0, 1, 2, 3) if problem.layout == "nhwc" else (0, 2, 3, 1)
    if problem.dtype is DType.S8:
        assert found.value.dtype == np.int64
        assert found.magnitude is None
        assert all(found.value.transpose(order)[index] == exact for index, exact in value.items())
        return
    for index, exact in value.items():
        assert abs(found.value.transpose(order)[index] - exact) <= 1e-13 * magnitude[index]
        assert found.magnitude.transpose(order)[index] == pytest.approx(magnitude[index], rel=1e-12)


def test_images_convolved_in_several_chunks_agree_with_one_by_one(monkeypatch):
    problem = ConvProblem(N=5, C=4, H=6, W=7, K=3, R=3, S=3, padding=1, dtype="s8")
    activation, filters = operands(problem)
    whole = reference.conv2d(problem, activation, filters).value
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 2 * 4 * 6 * 7)
    assert (reference.conv2d(problem, activation, filters).value == whole).all()
    assert np.count_nonzero(whole)


def test_s8_is_exact_where_float32_is_not():
    problem = ConvProblem(N=1, C=2048, H=1, W=1, K=1, R=1, S=1, dtype="s8")
    activation = np.full(problem.activation_shape, -128, np.int8)
    filters = np.full(problem.filter_shape, -128, np.int8)
    activation[0, 0, 0, 0], filters[0, 0, 0, 0] = 1, 1
    expected = reference.conv2d(problem, activation, filters)
    exact = 2047 * 128 * 128 + 1
    assert expected.value.item() == exact
    assert reference.compare(problem, np.full((1, 1, 1, 1), exact, np.int32), expected) == (0, 0.0)
    assert reference.compare(problem, np.full((1, 1, 1, 1), exact + 1, np.int32), expected) == (1, 1.0)
    to_f32 = ConvProblem(N=1, C=2048, H=1, W=1, K=1, R=1, S=1, dtype="s8", epilogue=Epilogue(out_dtype="f32"))
    rounded = np.full((1, 1, 1, 1), exact, np.float32)
    assert rounded.item() != exact
    expected = reference.conv2d(to_f32, activation, filters)
    assert reference.compare(to_f32, rounded, expected) == (0, 0.0)
    assert reference.compare(to_f32, np.nextafter(rounded, np.float32(np.inf)), expected)[0] == 1


@pytest.mark.parametrize(
    ("dtype", "roundoff", "subnormal"), [("f16", 2**-10, 2**-24), ("bf16", 2**-7, 2**-133), ("f32", 2**-22, 2**-149)]
)
def test_tolerance_by_hand(dtype, roundoff, subnormal):
    problem = ConvProblem(N=1, C=8, H=1, W=1, K=4, R=1, S=1, groups=2, dtype=dtype)
    activation = reference.encode(problem.dtype, np.array([1, -2, 3, -4, 5, 6, 7, 8], np.float32)).reshape(1, 1, 1, 8)
    filters = reference.encode(problem.dtype, np.ones((4, 1, 1, 4), np.float32))
    expected = reference.conv2d(problem, activation, filters)
    assert expected.value.ravel().tolist() == [-2, -2, 26, 26]
    assert expected.magnitude.ravel().tolist() == [10, 10, 26, 26]
    allowed = reference.tolerance(problem, expected).ravel()
    assert allowed[0] == 10 * 2**-22 * 2 + 2 * roundoff + subnormal
    assert allowed[2] == 26 * 2**-22 * 2 + 26 * roundoff + subnormal


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_compare_counts_what_is_outside(dtype):
    problem = ConvProblem(N=1, C=16, H=6, W=6, K=8, R=3, S=3, padding=1, dtype=dtype)
    expected = reference.conv2d(problem, *operands(problem))
    output = reference.encode(problem.dtype, expected.value)
    assert reference.compare(problem, output, expected)[0] == 0
    wrong = reference.encode(problem.dtype, expected.value)
    wrong[0, 1, 2, 3] = reference.encode(problem.dtype, np.array([expected.value[0, 1, 2, 3] + 1], np.float32))[0]
    mismatches, worst = reference.compare(problem, wrong, expected)
    assert mismatches == 1
    assert worst == pytest.approx(1, abs=0.1)
    missing = output.copy()
    missing.view(np.uint8).reshape(-1)[-2 * problem.dtype.bytes :] = 0xFF
    assert reference.compare(problem, missing, expected) == (2, math.inf)


def test_a_missing_tap_of_one_pixel_is_outside_the_tolerance():
    problem = ConvProblem(N=1, C=64, H=8, W=8, K=8, R=3, S=3, padding=1, dtype="f16")
    activation, filters = operands(problem)
    expected = reference.conv2d(problem, activation, filters)
    activation[0, 4, 4, 63] = 0
    damaged = reference.conv2d(problem, activation, filters).value.astype(np.float16)
    assert reference.compare(problem, damaged, expected)[0] > 36


def test_float32_summation_in_any_order_is_inside_the_tolerance():
    problem = ConvProblem(N=1, C=2048, H=1, W=1, K=64, R=1, S=1, dtype="f32")
    activation, filters = operands(problem)
    expected = reference.conv2d(problem, activation, filters)
    products = filters.reshape(64, 2048) * activation.reshape(1, 2048)
    forward, backward = np.zeros(64, np.float32), np.zeros(64, np.float32)
    for c in range(2048):
        forward += products[:, c]
        backward += products[:, -1 - c]
    assert (forward != backward).any()
    for total in (forward, backward):
        assert reference.compare(problem, total.reshape(1, 1, 1, 64), expected)[0] == 0


def float32_of(exact):
    """The float32 next to a fraction, ties to even."""
    if exact == 0:
        return Fraction(0)
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= size < Fraction(2) ** exponent
    unit = Fraction(2) ** (exponent - 23)
    return round(exact / unit) * unit


def step_by_step(epilogue, total, scale, bias, residual):
    """One s8 output from its exact sum: every float32 step is a fraction, rounded as it happens."""
    if epilogue.is_identity and epilogue.out_dtype is DType.S32:
        return total
    t = float32_of(float32_of(Fraction(total)) * Fraction(scale) + Fraction(bias))
    t = float32_of(t + float32_of(Fraction(residual)))
    if epilogue.activation == "relu":
        t = max(t, Fraction(0))
    if epilogue.out_dtype is DType.F16:
        return Fraction(float(np.float16(float(t))))
    lowest, highest = {DType.S8: (-128, 127), DType.S32: (-(2**31), 2**31 - 1)}.get(epilogue.out_dtype, (None, None))
    return t if lowest is None else min(max(round(t), lowest), highest)


def epilogue_operands(problem, seed=3, scale=1.0):
    """What the epilogue reads: scales about ``scale``, bias and residual as large as the scaled sums."""
    generator = np.random.Generator(np.random.PCG64(seed))
    size = scale * (5000 if problem.dtype is DType.S8 else 1) * (problem.C * problem.R * problem.S) ** 0.5
    drawn = {}
    for name in problem.epilogue.operands:
        shape, dtype = problem.operand(name)
        values = generator.standard_normal(shape, dtype=np.float32)
        values = scale * (1 + values / 4) if name == "scale" else size * values
        drawn[name] = reference.encode(dtype, values.astype(np.float32))
    return drawn


S8_EPILOGUES = [
    Epilogue.parse(text, out)
    for text, out in (
        ("scale_channel+bias+relu", "s8"),
        ("scale_tensor+bias", "s8"),
        ("scale_channel", "s8"),
        ("relu", "s8"),
        ("identity", "s8"),
        ("scale_channel+bias+residual+relu", "f32"),
        ("scale_tensor+residual", "f16"),
        ("bias", "f32"),
        ("bias+residual+relu", "s32"),
        ("identity", "s32"),
    )
]


@pytest.mark.parametrize("layout", ["nhwc", "nchw"])
@pytest.mark.parametrize("epilogue", S8_EPILOGUES, ids=lambda e: f"{e}-{e.out_dtype}")
def test_s8_epilogues_are_the_float32_steps(epilogue, layout):
    problem = ConvProblem(
        N=2, C=40, H=4, W=5, K=6, R=3, S=3, padding=1, groups=2, dtype="s8", layout=layout, epilogue=epilogue
    )
    activation, filters = operands(problem)
    drawn = epilogue_operands(problem, scale=1e-3 if epilogue.scale != "none" else 1.0)
    found = reference.conv2d(problem, activation, filters, **drawn)
    plain = ConvProblem(N=2, C=40, H=4, W=5, K=6, R=3, S=3, padding=1, groups=2, dtype="s8", layout=layout)
    sums = reference.conv2d(plain, activation, filters).value
    saturated = 0
    for n, p, q, k in itertools.product(range(2), range(4), range(5), range(6)):
        index = (n, p, q, k) if layout == "nhwc" else (n, k, p, q)
        scale = drawn["scale"][k % drawn["scale"].size] if "scale" in drawn else 1
        bias = drawn["bias"][k] if "bias" in drawn else 0
        residual = drawn["residual"][index] if "residual" in drawn else 0
        exact = step_by_step(epilogue, int(sums[index]), *(Fraction(float(x)) for x in (scale, bias, residual)))
        assert found.value[index] == exact, index
        saturated += exact in (-128, 127)
    assert found.magnitude is None
    # with a scale some saturate, without one most
    if epilogue.out_dtype is DType.S8:
        assert 0 < saturated < 200 if epilogue.scale != "none" else saturated > 80
    output = found.value.astype(reference.STORAGE[problem.out_dtype])
    assert reference.compare(problem, output, found) == (0, 0.0)


def test_fma_rounds_once():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal(4000, np.float32), rng.standard_normal(4000, np.float32)
    # ties of the product, broken by an addend far below; addends that cancel most of the product; any others
    x[:1000] = 1 + np.float32(2**-12) * rng.integers(1, 4095, 1000).astype(np.float32)
    y[:1000] = 1 + np.float32(2**-12)
    z = rng.standard_normal(4000, np.float32)
    z[:1000] = np.float32(2**-70) * rng.integers(-1, 2, 1000)
    z[1000:2000] = -(x * y)[1000:2000]
    found = reference._fma(x, y, z)
    exact = [
        float32_of(Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)))
        for a, b, c in zip(x, y, z, strict=True)
    ]
    assert [Fraction(float(value)) for value in found] == exact
    twice = (x.astype(np.float64) * y + z).astype(np.float32)
    assert (twice != found).any()


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
@pytest.mark.parametrize("text", ["bias", "bias+relu", "scale_channel+bias+residual+relu", "scale_tensor", "residual"])
def test_float_epilogues_are_the_formula(dtype, text):
    problem = ConvProblem(N=1, C=6, H=4, W=5, K=4, R=2, S=2, dtype=dtype, epilogue=Epilogue.parse(text))
    activation, filters = operands(problem)
    drawn = epilogue_operands(problem, scale=0.5 if "scale" in text else 1.0)
    found = reference.conv2d(problem, activation, filters, **drawn)
    value, magnitude = seven_loops(
        problem, reference.decode(problem.dtype, activation), reference.decode(problem.dtype, filters)
    )
    residuals = reference.decode(problem.out_dtype, drawn["residual"]) if "residual" in drawn else None
    for (n, p, q, k), total in value.items():
        scale = float(drawn["scale"][k % drawn["scale"].size]) if "scale" in drawn else 1.0
        added = [float(drawn["bias"][k])] if "bias" in drawn else []
        added += [float(residuals[n, p, q, k])] if residuals is not None else []
        y, size = total * scale + sum(added), magnitude[n, p, q, k] * abs(scale) + sum(map(abs, added))
        y = max(y, 0.0) if "relu" in text else y
        assert found.value[n, p, q, k] == pytest.approx(y, abs=1e-13 * size)
        assert found.magnitude[n, p, q, k] == pytest.approx(size, rel=1e-12)
    # float32 steps, rounded once, are inside the tolerance; leaving any operand out is not
    total = np.array([value[i] for i in sorted(value)]).reshape(problem.output_shape).astype(np.float32)
    steps = total * drawn.get("scale", np.float32(1)) + drawn.get("bias", np.float32(0))
    steps = steps + (np.float32(0) if residuals is None else residuals.astype(np.float32))
    steps = np.maximum(steps, 0) if "relu" in text else steps
    assert reference.compare(problem, reference.encode(problem.out_dtype, steps), found)[0] == 0
    assert reference.compare(problem, reference.encode(problem.out_dtype, total), found)[0] > 0


def test_the_epilogues_operands_are_terms_of_the_tolerance():
    problem = ConvProblem(N=1, C=14, H=1, W=1, K=1, R=1, S=1, epilogue=Epilogue.parse("scale_tensor+bias"))
    assert reference.tolerances(problem)[1] == 4 * 2**-22
    activation, filters = np.ones((1, 1, 1, 14), np.float16), np.ones((1, 1, 1, 14), np.float16)
    scale, bias = np.array([-2], np.float32), np.array([30], np.float32)
    expected = reference.conv2d(problem, activation, filters, scale=scale, bias=bias)
    assert (expected.value.item(), expected.magnitude.item()) == (2, 58)


def test_bf16_round_trip_and_ties_to_even():
    bits = np.arange(0x0000, 0x7F80, dtype=np.uint16)
    assert (reference.encode(DType.BF16, reference.decode(DType.BF16, bits)) == bits).all()
    values = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20], np.float32)
    decoded = reference.decode(DType.BF16, reference.encode(DType.BF16, values))
    assert decoded.tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7]


def test_refusals_in_one_line():
    f32 = {"N": 1, "C": 2, "H": 3, "W": 3, "K": 2, "R": 1, "S": 1, "dtype": "f32"}
    problem = ConvProblem(**f32)
    activation, filters = operands(problem)
    for other, message in (
        (ConvProblem(**f32, epilogue=Epilogue(bias=True)), "bias is missing, and the epilogue is bias"),
        (ConvProblem(**f32 | {"dtype": "tf32"}), "no rule for tf32"),
        (
            ConvProblem(**f32 | {"dtype": "s8"}, epilogue=Epilogue(out_dtype="bf16")),
            "no rule for s8 with an output in bf16",
        ),
        (
            ConvProblem(**f32 | {"dtype": "s8"}, epilogue=Epilogue(residual=True, scale="tensor")),
            "a residual of an s8 output needs a scale of its own",
        ),
        (
            ConvProblem(**f32 | {"dtype": "s8"}, epilogue=Epilogue(out_dtype="f16")),
            "an f16 output of s8 needs a scale",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            reference.conv2d(other, activation, filters)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"activation must be float32 of shape \(1, 3, 3, 2\), not float16"):
        reference.conv2d(problem, activation.astype(np.float16), filters)
    with pytest.raises(ValueError, match="bias is given, and the epilogue is identity"):
        reference.conv2d(problem, activation, filters, bias=np.zeros(2, np.float32))
    with pytest.raises(
        ValueError, match=r"filter must be float32 of shape \(2, 1, 1, 2\), not float32 of shape \(2, 2\)"
    ):
        reference.conv2d(problem, activation, filters.reshape(2, 2))
