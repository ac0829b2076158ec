"""ConvProblem and Epilogue: one spelling for one layer, refusals in one line, canonical text, derived values."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from conftest import EDGE_PROBLEMS
from hypothesis import given
from hypothesis import strategies as st

from autotune import ConvProblem, DType, Epilogue, Layout
from autotune.problem import ACTIVATIONS, INPUT_DTYPES, SCALES

BASE = {"N": 2, "C": 8, "H": 9, "W": 11, "K": 16, "R": 3, "S": 3}


def problem(**changes):
    return ConvProblem(**BASE | changes)


@pytest.mark.parametrize(
    ("spelling", "other"),
    [
        ({"stride": 2}, {"stride": (2, 2)}),
        ({"stride": [2, 3]}, {"stride": np.array([2, 3])}),
        ({"stride": np.array(2)}, {"stride": (2, 2)}),
        ({"dilation": np.int64(2)}, {"dilation": (2, 2)}),
        ({"padding": 1}, {"padding": (1, 1, 1, 1)}),
        ({"padding": (1, 2)}, {"padding": (1, 1, 2, 2)}),
        ({"N": np.int32(2), "groups": np.uint8(1)}, {}),
        ({"dtype": "half"}, {"dtype": DType.F16}),
        ({"dtype": np.float16}, {"dtype": np.dtype("float16")}),
        ({"dtype": "torch.bfloat16"}, {"dtype": "bf16"}),
        ({"dtype": "INT8"}, {"dtype": "s8"}),
        ({"layout": "NCHW"}, {"layout": Layout.NCHW}),
        ({"R": 1, "dilation": (5, 2)}, {"R": 1, "dilation": (1, 2)}),
        ({"S": 1, "dilation": (2, 5)}, {"S": 1, "dilation": (2, 1)}),
        ({"epilogue": Epilogue()}, {"epilogue": Epilogue(out_dtype="f16")}),
        ({"dtype": "s8"}, {"dtype": "s8", "epilogue": Epilogue(out_dtype="s32")}),
        (
            {"dtype": "s8", "epilogue": Epilogue(scale="tensor")},
            {"dtype": "s8", "epilogue": Epilogue(scale="tensor", out_dtype="s8")},
        ),
        ({"dtype": "tf32"}, {"dtype": "tf32", "epilogue": Epilogue(out_dtype="f32")}),
    ],
)
def test_spellings_of_one_layer_are_one_value(spelling, other):
    one, two = problem(**spelling), problem(**other)
    assert one == two
    assert hash(one) == hash(two)
    assert str(one) == str(two)
    assert {one: 1}[two] == 1


@pytest.mark.parametrize(
    "change",
    [
        {"N": 3},
        {"C": 16},
        {"H": 10},
        {"W": 12},
        {"K": 8},
        {"R": 2},
        {"S": 2},
        {"stride": 2},
        {"padding": (0, 1, 0, 0)},
        {"padding": (0, 0, 1, 0)},
        {"dilation": (1, 2)},
        {"groups": 2},
        {"dtype": "bf16"},
        {"layout": "nchw"},
        {"epilogue": Epilogue(bias=True)},
        {"epilogue": Epilogue(residual=True)},
        {"epilogue": Epilogue(activation="relu")},
        {"epilogue": Epilogue(scale="channel")},
        {"epilogue": Epilogue(out_dtype="f32")},
    ],
    ids=str,
)
def test_every_field_is_part_of_the_key(change):
    assert problem(**change) != problem()
    assert str(problem(**change)) != str(problem())


def test_a_problem_is_frozen_and_differs_from_other_values():
    with pytest.raises(FrozenInstanceError):
        problem().N = 3
    assert problem() != str(problem())
    assert problem() != 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N": -1}, "N must be at least 0, not -1"),
        ({"C": 0}, "C must be at least 1, not 0"),
        ({"K": 0}, "K must be at least 1, not 0"),
        ({"R": -3}, "R must be at least 1, not -3"),
        ({"H": 1.5}, "H must be an integer, not 1.5"),
        ({"W": "8"}, "W must be an integer, not '8'"),
        ({"N": True}, "N must be an integer, not True"),
        ({"groups": 0}, "groups must be at least 1, not 0"),
        ({"groups": 3}, "groups must divide C: 3 does not divide 8"),
        ({"groups": 8, "K": 12}, "groups must divide K: 8 does not divide 12"),
        ({"stride": 0}, "stride must be at least 1, not 0"),
        ({"stride": (1, 2, 3)}, "stride must be an integer or 1 or 2 of them, not (1, 2, 3)"),
        ({"stride": "2x2"}, "stride must be an integer or 1 or 2 of them, not '2x2'"),
        ({"stride": {1, 2}}, "stride must be an integer, not {1, 2}"),
        ({"stride": {2: 1}}, "stride must be an integer, not {2: 1}"),
        ({"padding": b"12"}, "padding must be an integer or 1 or 2 or 4 of them, not b'12'"),
        ({"dilation": (1, -1)}, "dilation must be at least 1, not -1"),
        ({"padding": -1}, "padding must not be negative, not -1"),
        ({"padding": (1, 2, 3)}, "padding must be an integer or 1 or 2 or 4 of them, not (1, 2, 3)"),
        ({"dtype": "f64"}, "unknown dtype 'f64': use one of f16, bf16, tf32, f32, s8, e4m3"),
        ({"dtype": "s32"}, "s32 is not an input dtype: use one of f16, bf16, tf32, f32, s8, e4m3"),
        ({"layout": "chwn"}, "unknown layout 'chwn': use nhwc or nchw"),
        ({"epilogue": "relu"}, "epilogue must be an Epilogue, not 'relu' (Epilogue.parse reads a text)"),
        ({"N": 2**31}, "N must be below 2**31"),
        ({"stride": (1, 10**30)}, "stride must be below 2**31"),
        ({"padding": (0, 2**31, 0, 0)}, "padding must be below 2**31"),
        (
            {"N": 2**30, "C": 2**18, "H": 2**5, "W": 2**5},
            "the padded activation has 5.8e+17 bytes: a tensor must be smaller than 2**59",
        ),
        (
            {"padding": 10**9, "stride": 10**9},
            "the padded activation has 1.3e+20 bytes: a tensor must be smaller than 2**59",
        ),
        ({"K": 2**30, "C": 2**27}, "the filter has 2.6e+18 bytes: a tensor must be smaller than 2**59"),
        ({"N": 2**27, "K": 2**27}, "the output has 2.3e+18 bytes: a tensor must be smaller than 2**59"),
        ({"H": 2}, "output extent P is 0: the filter reaches beyond the padded input"),
        ({"W": 1}, "output extent Q is -1: the filter reaches beyond the padded input"),
        ({"H": 4, "dilation": 2}, "output extent P is 0: the filter reaches beyond the padded input"),
    ],
)
def test_refusals_name_the_cause_in_one_line(change, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        problem(**change)


def test_layers_of_more_than_2_31_elements_are_layers():
    large = problem(N=2**20, C=2**13)
    assert large.activation_bytes == 2**20 * 2**13 * 9 * 11 * 2
    assert ConvProblem.parse(str(large)) == large


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "gelu9"}, "unknown activation 'gelu9': use one of identity, relu"),
        ({"scale": "row"}, "unknown scale 'row': use one of none, tensor, channel"),
        ({"out_dtype": "f8"}, "unknown dtype 'f8': use one of f16, bf16, tf32, f32, s8, e4m3"),
    ],
)
def test_epilogue_refusals(fields, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Epilogue(**fields)


def test_canonical_text():
    plain = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1)
    assert str(plain) == "n16c64h92w160-k32r3s3-stride1x1-pad1.1.1.1-dil1x1-g1-f16-nhwc-identity-f16"
    full = ConvProblem(
        **{"N": 1, "C": 8, "H": 20, "W": 30, "K": 4, "R": 3, "S": 5, "groups": 2},
        stride=(2, 1),
        padding=(0, 1, 2, 3),
        dilation=(1, 2),
        dtype="s8",
        layout="nchw",
        epilogue=Epilogue(bias=True, residual=True, activation="relu", scale="channel"),
    )
    text = "n1c8h20w30-k4r3s5-stride2x1-pad0.1.2.3-dil1x2-g2-s8-nchw-scale_channel+bias+residual+relu-s8"
    assert str(full) == text
    assert ConvProblem.parse(f" {text}\n") == full


@pytest.mark.parametrize(
    "text", ["", "n1", "n16c64h92w160-k32r3s3", "n1c8h20w30-k4r3s5-stride2x1-pad0.1.2-dil1x2-g2-s8-nchw-identity-s8"]
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not a layer's canonical text") as caught:
        ConvProblem.parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "message"),
    [("-f99-", "unknown dtype 'f99'"), ("-chwn-", "unknown layout 'chwn'"), ("-gelu9-", "unknown activation 'gelu9'")],
)
def test_text_with_an_unknown_word_names_it(part, message):
    text = "n1c8h9w9-k4r3s3-stride1x1-pad0.0.0.0-dil1x1-g1-f16-nhwc-identity-f16"
    known = {"-f99-": "-f16-", "-chwn-": "-nhwc-", "-gelu9-": "-identity-"}[part]
    with pytest.raises(ValueError, match=message):
        ConvProblem.parse(text.replace(known, part, 1))


def epilogues():
    return st.builds(
        Epilogue,
        bias=st.booleans(),
        residual=st.booleans(),
        activation=st.sampled_from(ACTIVATIONS),
        scale=st.sampled_from(SCALES),
        out_dtype=st.sampled_from([None, *DType]),
    )


@st.composite
def problems(draw):
    size = st.integers(1, 300)
    groups = draw(st.integers(1, 9))
    filter_size = (draw(st.integers(1, 7)), draw(st.integers(1, 7)))
    dilation = (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    padding = tuple(draw(st.integers(0, 9)) for _ in range(4))
    reach = [d * (taps - 1) + 1 for d, taps in zip(dilation, filter_size, strict=True)]
    return ConvProblem(
        N=draw(st.integers(0, 5)),
        C=groups * draw(size),
        H=draw(size) + max(0, reach[0] - sum(padding[:2])),
        W=draw(size) + max(0, reach[1] - sum(padding[2:])),
        K=groups * draw(size),
        R=filter_size[0],
        S=filter_size[1],
        stride=(draw(st.integers(1, 9)), draw(st.integers(1, 9))),
        padding=padding,
        dilation=dilation,
        groups=groups,
        dtype=draw(st.sampled_from(INPUT_DTYPES)),
        layout=draw(st.sampled_from(list(Layout))),
        epilogue=draw(epilogues()),
    )


@given(problems())
def test_text_and_pickle_round_trip(value):
    assert ConvProblem.parse(str(value)) == value
    assert str(ConvProblem.parse(str(value))) == str(value)
    assert pickle.loads(pickle.dumps(value)) == value
    # as a shell word and as a field of a file
    assert not set(str(value)) & set(" \t\n'\"$*?&;|<>(){}[]\\,")


@given(problems())
def test_the_last_window_fits_and_one_more_does_not(value):
    for size, taps, stride, dilation, before, after, outputs in (
        (value.H, value.R, value.stride[0], value.dilation[0], *value.padding[:2], value.P),
        (value.W, value.S, value.stride[1], value.dilation[1], *value.padding[2:], value.Q),
    ):
        end = before + size + after
        assert (outputs - 1) * stride + (taps - 1) * dilation < end
        assert outputs * stride + (taps - 1) * dilation >= end


@given(epilogues())
def test_epilogue_text_round_trip(value):
    assert Epilogue.parse(str(value), value.out_dtype) == value
    assert value.is_identity == (str(value) == "identity")


def test_hashes_of_another_process_are_not_trusted():
    value = problem()
    code = f"import pickle, sys; v = pickle.loads({pickle.dumps(value)!r}); sys.stdout.buffer.write(pickle.dumps(v))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONHASHSEED": "1"})
    back = pickle.loads(done.stdout)
    assert back == value
    assert hash(back) == hash(value)


@pytest.mark.parametrize(
    ("changes", "P", "Q"),
    [
        ({}, 7, 9),
        ({"padding": 1}, 9, 11),
        ({"stride": 2}, 4, 5),
        ({"stride": (2, 3), "padding": (0, 1, 2, 0)}, 4, 4),
        ({"dilation": (4, 5)}, 1, 1),
        ({"R": 1, "S": 7, "padding": (0, 3)}, 9, 11),
        ({"R": 2, "S": 4}, 8, 8),
        ({"R": 9, "S": 11}, 1, 1),
    ],
)
def test_output_extents_by_hand(changes, P, Q):
    value = problem(**changes)
    assert (value.P, value.Q) == (P, Q)
    assert value.output_shape == (2, P, Q, 16)


def test_shapes_follow_the_layout():
    nhwc, nchw = problem(groups=2), problem(groups=2, layout="nchw")
    assert nhwc.activation_shape == (2, 9, 11, 8)
    assert nhwc.filter_shape == (16, 3, 3, 4)
    assert nhwc.output_shape == (2, 7, 9, 16)
    assert nchw.activation_shape == (2, 8, 9, 11)
    assert nchw.filter_shape == (16, 4, 3, 3)
    assert nchw.output_shape == (2, 16, 7, 9)


def test_flops_and_bytes_by_hand():
    value = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1)
    assert value.flops == 2 * 16 * 92 * 160 * 32 * 64 * 9 == 8_682_209_280
    assert value.activation_bytes == 16 * 92 * 160 * 64 * 2
    assert value.filter_bytes == 32 * 64 * 9 * 2
    assert value.output_bytes == 16 * 92 * 160 * 32 * 2
    assert value.min_bytes == value.activation_bytes + value.filter_bytes + value.output_bytes == 45_256_704
    grouped = problem(groups=4)
    assert grouped.flops == 2 * 2 * 7 * 9 * 16 * 2 * 9
    assert grouped.filter_bytes == 16 * 2 * 9 * 2


def test_bytes_of_epilogue_operands():
    s8 = problem(dtype="s8", epilogue=Epilogue(bias=True, residual=True, scale="channel"))
    outputs = 2 * 7 * 9 * 16
    # s8 output and residual; float32 bias and scales of 16 filters
    assert s8.output_bytes == outputs
    assert s8.min_bytes == 2 * 9 * 11 * 8 + 16 * 9 * 8 + 2 * outputs + 2 * 4 * 16
    assert problem(dtype="s8").output_bytes == 4 * outputs
    tensor = problem(epilogue=Epilogue(scale="tensor"))
    assert tensor.min_bytes == problem().min_bytes + 4


@pytest.mark.parametrize(("dtype", "size"), [("f16", 2), ("bf16", 2), ("tf32", 4), ("f32", 4), ("s8", 1), ("e4m3", 1)])
def test_element_sizes(dtype, size):
    assert DType.of(dtype).bytes == size
    assert problem(dtype=dtype).activation_bytes == 2 * 9 * 11 * 8 * size


def test_an_empty_batch_is_a_problem_with_no_work():
    value = EDGE_PROBLEMS("f16")["empty-batch"]
    assert value.flops == value.activation_bytes == value.output_bytes == 0
    assert value.output_shape == (0, 5, 5, 8)
