"""Family halo_wgmma without a GPU: legality, launches and tensor maps by hand, and that it compiles as predicted."""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from gpu_models import GPU_MODELS

from autotune.backends import compiler_for
from autotune.families import HaloWgmma, IgemmWgmma, TensorMap
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.trial import Config

FAMILY = HaloWgmma()
H200 = GPU_MODELS["sm_90a"]
HEADLINE = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1)
# weights of 64 filters beside two tiles are more than shared memory holds
WIDE = ConvProblem(N=4, C=256, H=64, W=64, K=64, R=3, S=3, padding=1)
LAYERS = (
    HEADLINE,
    ConvProblem(N=16, C=64, H=92, W=160, K=64, R=3, S=3, padding=1, dtype="s8"),
    ConvProblem(N=2, C=48, H=20, W=30, K=13, R=5, S=2, padding=(2, 1), stride=(2, 1), dtype="bf16"),
    ConvProblem(N=4, C=32, H=28, W=28, K=96, R=3, S=3, padding=1, stride=2, dtype="s8"),
    ConvProblem(N=1, C=64, H=40, W=33, K=24, R=3, S=3, padding=2, dilation=2),
    WIDE,
    # few filters, whose taps are stacked along both axes
    ConvProblem(N=4, C=64, H=60, W=70, K=8, R=3, S=3, padding=1),
)


def config(**knobs: int) -> Config:
    """A legal config of the headline layer with some knobs changed."""
    usual = {"orient": 0, "stack": 3, "cta_n": 32, "chunk_bytes": 128, "consumers": 2, "stages": 4}
    usual |= {"grouped": 0, "turns": 1, "reassign": 1, "streamed": 0, "stack_fast": 0, "slabs": 0}
    return Config.of(FAMILY.name, usual | knobs)


@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_choices_skip_only_what_is_illegal(problem: ConvProblem) -> None:
    found = set(FAMILY.configs(problem, H200))
    assert len(found) >= 100
    rng = random.Random(3)
    illegal = 0
    for _ in range(6000):
        c = Config.of(FAMILY.name, {knob.name: rng.choice(knob.candidates) for knob in FAMILY.knobs})
        assert (FAMILY.legal(c, problem, H200) is None) == (c in found), c
        illegal += c not in found
    assert illegal < 6000
    for c in rng.sample(sorted(found, key=str), 50):
        assert FAMILY.legal(c, problem, H200) is None


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({}, None),
        ({"cta_n": 40}, "cta_n=40 does not divide 32 filters well"),
        ({"chunk_bytes": 64}, "chunk_bytes=64 is needlessly small for 128 bytes of channels"),
        ({"stages": 2, "consumers": 3}, "2 stages are fewer than 3 consumers"),
        ({"consumers": 1}, "one consumer has no turns"),
        ({"stack": 1, "grouped": 1}, "grouped changes nothing with products of one shape"),
        ({"stages": 8}, "bytes of shared memory are more than"),
        ({"consumers": 4, "stack": 4, "reassign": 0}, "registers a thread are more than"),
        ({"stages": 7}, "stages=7 is not one of"),
        ({"streamed": 1}, "weights that stay in shared memory need not be streamed"),
        ({"stack_fast": 1}, "a product of 288 columns does not exist for f16"),
        ({"stack_fast": 1, "stack": 2, "stages": 6}, None),
    ],
)
def test_legality_states_its_reason(knobs: dict[str, int], reason: str | None) -> None:
    found = FAMILY.legal(config(**knobs), HEADLINE, H200)
    assert found is None if reason is None else reason in str(found), found


def test_what_the_epilogue_keeps_counts_as_registers() -> None:
    wide = ConvProblem(N=16, C=64, H=92, W=160, K=64, R=3, S=3, padding=1)
    c = config(stack=2, cta_n=64, stages=3, consumers=3, turns=0, reassign=0)
    # input rows meet the first output row, both or the second: 64 / 2 registers for each output that they meet
    for text, kept in (("relu", 0), ("scale_tensor", 0), ("bias", 16), ("scale_channel+bias+residual", 32)):
        problem = replace(wide, epilogue=Epilogue.parse(text))
        said = FAMILY.legal(c, problem, H200)
        assert said == f"about {4 * 32 + kept + 40} registers a thread are more than 128"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "f32"}, "(--dtype f16)"),
        ({"layout": "nchw"}, "nhwc"),
        ({"groups": 2}, "without groups"),
        ({"C": 12}, "a multiple of 16 bytes of channels"),
        ({"R": 8, "H": 12}, "at most 7 taps"),
        ({"stride": 3}, "strides of 1 and 2"),
        ({"dtype": "s8", "C": 16384}, "can overflow"),
        ({"N": 0}, "empty"),
        ({"epilogue": Epilogue(out_dtype=DType.BF16)}, "f16 or f32 from f16, not bf16"),
        ({"dtype": "s8", "epilogue": Epilogue(residual=True, scale="tensor")}, "a scale of its own"),
    ],
)
def test_unsupported_layers_are_refused_in_one_line(changes: dict[str, object], reason: str) -> None:
    problem = ConvProblem(**{"N": 1, "C": 64, "H": 9, "W": 9, "K": 8, "R": 3, "S": 3} | changes)  # type: ignore[arg-type]
    found = FAMILY.unsupported(problem, H200)
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_it_needs_hopper() -> None:
    supported = [arch for arch, spec in GPU_MODELS.items() if FAMILY.unsupported(HEADLINE, spec) is None]
    assert supported == ["sm_90a"]


def test_the_headlines_launch_by_hand() -> None:
    problem = replace(HEADLINE, epilogue=Epilogue.parse("scale_channel+bias"))
    c = config()
    assert FAMILY.legal(c, problem, H200) is None
    launch = FAMILY.launch(c, problem, H200)
    # tiles of 8 x 24 outputs: 20 * 4 of each image, more than there are multiprocessors
    assert (launch.grid, launch.block) == (132, 3 * 128)
    # 9 taps of 32 filters; four halos of 10 x 26 pixels, of which each starts at a multiple of 1024 bytes; eleven
    # barriers: four full, four empty, one for the weights, two turns
    assert launch.smem_bytes == 9 * 32 * 128 + 4 * 33 * 1024 + 8 * 11
    activation, filter, *names = launch.arguments
    assert names == ["output", "scale", "bias"]
    assert activation == TensorMap(
        operand="activation",
        element_bytes=2,
        extents=(64, 160, 92, 16),
        strides=(128, 160 * 128, 92 * 160 * 128),
        box=(64, 10, 26, 1),
        swizzle=128,
    )
    # KRSC as (c, odd, lane, pair, tap): eight filters a lane
    assert filter == TensorMap(
        operand="filter",
        element_bytes=2,
        extents=(64, 2, 4, 4, 9),
        strides=(9 * 128, 8 * 9 * 128, 2 * 9 * 128, 128),
        box=(64, 2, 4, 4, 1),
        swizzle=128,
    )


def test_maps_of_stride_2_and_of_odd_numbers_of_filters_by_hand() -> None:
    problem = ConvProblem(N=2, C=64, H=20, W=30, K=13, R=3, S=3, stride=2, padding=1, dtype="s8")
    c = config(stack=1, cta_n=16, chunk_bytes=64, consumers=1, turns=0, stages=2, orient=1)
    assert FAMILY.legal(c, problem, H200) is None
    activation, filter, output = FAMILY.launch(c, problem, H200).arguments
    assert output == "output"
    # the fast axis is H: even rows, then odd ones; 8 outputs at stride 2 reach 9 of each parity with a tap at -1
    assert activation == TensorMap(
        operand="activation",
        element_bytes=1,
        extents=(64, 10, 2, 30, 2),
        strides=(2 * 30 * 64, 30 * 64, 64, 20 * 30 * 64),
        box=(64, 9, 2, 17, 1),
        swizzle=64,
    )
    assert filter == TensorMap(
        operand="filter", element_bytes=1, extents=(64, 13, 9), strides=(9 * 64, 64), box=(64, 16, 1), swizzle=64
    )
    # 8 x 8 outputs a tile: 2 x 2 of each of two images
    assert FAMILY.launch(c, problem, H200).grid == 2 * 2 * 2
    # the fast axis is W: pairs of pixels in rows of 128 bytes
    along = config(stack=1, cta_n=16, chunk_bytes=64, consumers=1, turns=0, stages=2, orient=0)
    assert FAMILY.legal(along, problem, H200) is None
    assert FAMILY.launch(along, problem, H200).arguments[0] == TensorMap(
        operand="activation",
        element_bytes=1,
        extents=(2 * 64, 15, 20, 2),
        strides=(2 * 64, 30 * 64, 20 * 30 * 64),
        box=(2 * 64, 9, 17, 1),
        swizzle=128,
    )


def test_a_products_registers_must_be_there_before_any_are_reassigned() -> None:
    wide = ConvProblem(N=2, C=32, H=30, W=33, K=208, R=1, S=1)
    c = config(stack=1, cta_n=208, chunk_bytes=64, consumers=3, stages=3)
    said = "a product of 208 columns needs more than 128 registers a thread"
    assert FAMILY.legal(c, wide, H200) == said
    assert FAMILY.legal(Config.of(FAMILY.name, dict(c.knobs) | {"consumers": 2}), wide, H200) is None
    family = IgemmWgmma()
    for other in family.configs(replace(wide, K=207), H200):
        if other["cta_n"] == 208:
            assert other["consumers"] < 3
            three = Config.of(family.name, dict(other.knobs) | {"consumers": 3, "rows": 1, "pingpong": 0})
            assert family.legal(three, replace(wide, K=207), H200) == said


def test_weights_beside_which_collected_pixels_find_no_room_are_streamed() -> None:
    # 156,672 bytes of weights and two tiles of 30,720 fit into 232,448, but not 17,920 of collected pixels too
    odd = ConvProblem(N=1, C=192, H=56, W=56, K=129, R=3, S=1, padding=(1, 0), epilogue=Epilogue(out_dtype=DType.F32))
    for layer, streamed in ((odd, {1}), (replace(odd, K=136), {0})):
        tiles = [c for c in FAMILY.configs(layer, H200) if (c["cta_n"], c["stack"]) == (136, 1)]
        assert {c["streamed"] for c in tiles} == streamed


def test_taps_stacked_along_both_axes_by_hand() -> None:
    c = config(stack=2, stages=6, stack_fast=1)
    activation = FAMILY.launch(c, HEADLINE, H200).arguments[0]
    # eight adjacent pixels meet six outputs
    assert isinstance(activation, TensorMap)
    assert activation.box == (64, 8, 18, 1)
    assert "Wgmma<f16, 192>" in FAMILY.source(c, HEADLINE, H200).text
    assert FAMILY.launch(c, replace(HEADLINE, N=1, H=16), H200).grid == 27
    for changes, reason in (
        ({"stride": (1, 2)}, "only where there are several, at stride 1"),
        ({"S": 1, "padding": (1, 0)}, "only where there are several, at stride 1"),
        ({"dilation": (1, 3), "padding": (1, 3)}, "of eight pixels 2 would be outputs"),
    ):
        assert reason in str(FAMILY.legal(c, replace(HEADLINE, **changes), H200))  # type: ignore[arg-type]


def test_slabs_by_hand() -> None:
    c = config(stages=3, slabs=1)
    launch = FAMILY.launch(c, HEADLINE, H200)
    activation = launch.arguments[0]
    # five input rows of eight groups, three lines apart: rows 0 and 3 are in nine lines of one slab
    assert isinstance(activation, TensorMap)
    assert (activation.box, activation.steps) == ((64, 10, 25, 1), (1, 1, 3, 1))
    # weights; three tiles of three slabs of 90 pixels, in whole KiB; six full barriers a slab: 2 consumers, 3 stages
    assert launch.smem_bytes == 9 * 32 * 128 + 3 * 34 * 1024 + 8 * (3 * 6 + 3 + 1 + 2)
    whole = FAMILY.launch(config(stages=3), HEADLINE, H200).arguments[0]
    assert isinstance(whole, TensorMap)
    assert (whole.box, whole.steps) == ((64, 10, 26, 1), None)
    for knobs, layer in (
        ({"stack": 1}, HEADLINE),
        ({"stack": 1}, replace(HEADLINE, stride=(2, 1), dilation=(2, 1), padding=(2, 1))),
        # no output meets the odd lines
        ({"stack": 2}, replace(HEADLINE, R=1, stride=(2, 1), padding=(0, 1))),
    ):
        changed = Config.of(FAMILY.name, dict(c.knobs) | knobs)
        assert "several lines apart and need them all" in str(FAMILY.legal(changed, layer, H200))
    assert FAMILY.legal(config(stack=1, slabs=1), replace(HEADLINE, stride=(2, 1)), H200) is None


@pytest.mark.parametrize("orient", [0, 1])
def test_some_product_waits_for_every_slab(orient: int) -> None:
    found = 0
    for stack, stride, taps in itertools.product((1, 2, 3, 4), (1, 2), range(1, 8)):
        r, s = (1, taps) if orient else (taps, 1)
        layer = ConvProblem(N=1, C=64, H=80, W=80, K=8, R=r, S=s, stride=(1, stride) if orient else (stride, 1))
        slabs = {c["slabs"] for c in FAMILY.configs(layer, H200) if (c["orient"], c["stack"]) == (orient, stack)}
        rows, spread = range((stack - 1) * stride + taps), stack * stride
        met = {i % spread for i in rows if any(0 <= i - o * stride < taps for o in range(stack))}
        several = len({i % spread for i in rows}) > 1
        assert slabs == ({0, 1} if several and met == {i % spread for i in rows} else {0}), (stack, stride, taps)
        found += 1 in slabs
    assert found > 20


def test_streamed_weights_by_hand() -> None:
    c = config(stack=2, cta_n=64, stages=2, turns=0, streamed=1)
    assert FAMILY.legal(c, WIDE, H200) is None
    # each of two entries holds a halo of 10 x 18 pixels and 9 taps of 64 filters, both of 64 channels; a tile's four
    # entries go to one of two consumers, so eight barriers tell them apart; two empty ones, one unused, two turns
    assert FAMILY.launch(c, WIDE, H200).smem_bytes == 2 * (23 * 1024 + 9 * 64 * 128) + 8 * (8 + 2 + 1 + 2)
    for knobs, reason in (
        ({"streamed": 0}, "bytes of weights and two halo tiles are more than"),
        ({"turns": 1}, "come in turn by themselves"),
        ({"stages": 3}, "bytes of shared memory are more than"),
    ):
        changed = Config.of(FAMILY.name, dict(c.knobs) | knobs)
        assert reason in str(FAMILY.legal(changed, WIDE, H200))
    deep = ConvProblem(N=1, C=4096, H=9, W=9, K=8, R=3, S=3, padding=1)
    changed = config(stack=1, cta_n=8, stages=3, turns=0, streamed=1)
    assert FAMILY.legal(changed, deep, H200) == "384 barriers are too many"


@pytest.mark.parametrize("text", ["identity", "scale_channel+bias+relu"])
@pytest.mark.parametrize("problem", LAYERS, ids=str)
def test_compiles_within_the_predicted_resources(problem: ConvProblem, text: str) -> None:
    problem = replace(problem, epilogue=Epilogue.parse(text).resolved(problem.dtype))
    configs = FAMILY.configs(problem, H200)
    chosen = list(dict.fromkeys([*configs[:2], *random.Random(4).sample(configs, 2)]))
    compiler = compiler_for(H200)
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(lambda c: compiler.compile(FAMILY.source(c, problem, H200)), chosen))
    for c, kernel in zip(chosen, compiled, strict=True):
        launch = FAMILY.launch(c, problem, H200)
        assert kernel.registers is not None
        assert kernel.registers * launch.block <= 65536, c
        assert launch.smem_bytes + (kernel.smem_static_bytes or 0) <= H200.smem_per_cta, c
        # otherwise every product waits for the one before
        assert "serializ" not in kernel.log, c
    assert [kernel.spill_bytes for kernel in compiled[:2]] == [0, 0]
