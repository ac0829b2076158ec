"""Family igemm_mma without a GPU: legality, launch geometry, and what its compiler says of a mistake."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from conftest import EDGE_PROBLEMS
from gpu_models import GPU_MODELS

from autotune.backends import compiler_for
from autotune.families import IgemmMma
from autotune.problem import ConvProblem, Epilogue
from autotune.trial import Config

FAMILY = IgemmMma()
H200 = GPU_MODELS["sm_90a"]
HEADLINE = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1)
WIDE = ConvProblem(N=16, C=64, H=92, W=160, K=128, R=3, S=3, padding=1)


def config(**knobs: int) -> Config:
    """A legal config of the headline layer with some knobs changed."""
    usual = {"cta_m": 128, "cta_n": 32, "cta_k": 64, "warp_m": 32, "warp_n": 32, "stages": 3, "staging": 1, "ahead": 0}
    return Config.of(FAMILY.name, usual | {"split_k": 1, "raster_group": 1} | knobs)


def test_every_config_is_legal_and_named_once() -> None:
    configs = FAMILY.configs(HEADLINE, H200)
    assert len(configs) > 1000
    assert len({c.name for c in configs}) == len(configs)
    for c in random.Random(1).sample(configs, 100):
        assert FAMILY.legal(c, HEADLINE, H200) is None


def test_choices_skip_only_what_is_illegal() -> None:
    """The enumeration prunes by groups; a sample of all combinations shows that it loses nothing."""
    rng = random.Random(2)
    found = set(FAMILY.configs(HEADLINE, H200))
    for _ in range(4000):
        c = Config.of(FAMILY.name, {knob.name: rng.choice(knob.candidates) for knob in FAMILY.knobs})
        assert (FAMILY.legal(c, HEADLINE, H200) is None) == (c in found), c


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({}, None),
        ({"warp_m": 128, "warp_n": 64}, "not made of 128x64 warps"),
        ({"cta_k": 16}, "uses half"),
        ({"cta_n": 64, "warp_n": 32}, "covers all 32 filters"),
        ({"cta_n": 128}, "covers all 32 filters"),
        ({"stages": 3, "staging": 0}, "has 2 stages"),
        ({"raster_group": 8}, "changes nothing with one column"),
        ({"split_k": 8}, "too few for split_k=8"),
        ({"split_k": 2}, "need no split_k=2"),
        ({"cta_m": 100}, "cta_m=100 is not one of"),
    ],
)
def test_legality_states_its_reason(knobs: dict[str, int], reason: str | None) -> None:
    found = FAMILY.legal(config(**knobs), HEADLINE, H200)
    assert found is None if reason is None else reason in str(found), found


def test_limits_of_older_devices_are_kept() -> None:
    assert "cp.async needs sm_80" in str(FAMILY.legal(config(), HEADLINE, GPU_MODELS["sm_75"]))
    big = config(cta_m=256, cta_n=128, warp_m=64, warp_n=64, stages=3)
    assert FAMILY.legal(big, WIDE, H200) is None
    assert "shared memory" in str(FAMILY.legal(big, WIDE, GPU_MODELS["sm_86"]))
    assert all(c["staging"] == 0 for c in FAMILY.configs(HEADLINE, GPU_MODELS["sm_75"]))
    assert "needs sm_80 for bf16" in str(
        FAMILY.unsupported(replace(HEADLINE, dtype="bf16", epilogue=None), GPU_MODELS["sm_75"])
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "f32"}, "(--dtype f16)"),
        ({"layout": "nchw"}, "nhwc"),
        ({"epilogue": Epilogue(out_dtype="s8")}, "not s8"),  # type: ignore[arg-type]
        ({"dtype": "s8", "epilogue": Epilogue(out_dtype="bf16")}, "not bf16"),  # type: ignore[arg-type]
        ({"dtype": "s8", "epilogue": Epilogue(out_dtype="f16", bias=True)}, "needs a scale"),  # type: ignore[arg-type]
        ({"dtype": "s8", "epilogue": Epilogue(scale="channel", residual=True)}, "a scale of its own"),
        ({"dtype": "s8", "C": 16384}, "can overflow"),
    ],
)
def test_unsupported_layers_are_refused_in_one_line(changes: dict[str, object], reason: str) -> None:
    problem = ConvProblem(**{"N": 1, "C": 64, "H": 9, "W": 9, "K": 8, "R": 3, "S": 3} | changes)  # type: ignore[arg-type]
    found = FAMILY.unsupported(problem, H200)
    assert found is not None
    assert reason in found
    assert "\n" not in found


def test_launch_covers_every_output() -> None:
    problem = ConvProblem(N=3, C=16, H=10, W=11, K=48, R=3, S=3, padding=1, groups=2)
    c = config(cta_m=64, cta_n=16, cta_k=16, warp_m=32, warp_n=16, stages=2, split_k=2)
    assert FAMILY.legal(c, problem, H200) is None
    launch = FAMILY.launch(c, problem, H200)
    # 330 pixels in 6 tiles, 24 filters in 2, two groups, two splits
    assert (launch.grid, launch.block) == (6 * 2 * 2 * 2, 64)
    # the ring of slices needs less than the f16 tile on its way out, whose rows are padded by 16 bytes
    assert launch.smem_bytes == max(2 * (64 + 16) * 16 * 2, 64 * (16 * 2 + 16))
    # one counter a tile, rounded up to 256 bytes, then the splits' float32 tiles
    assert launch.workspace_bytes == 256 + 6 * 2 * 2 * 2 * 64 * 16 * 4


@pytest.mark.parametrize("name", [n for n in EDGE_PROBLEMS("f16") if n != "empty-batch"])
@pytest.mark.parametrize("dtype", ["f16", "s8"])
def test_every_edge_layer_has_a_config_on_every_device(name: str, dtype: str) -> None:
    for spec in GPU_MODELS.values():
        assert FAMILY.default(EDGE_PROBLEMS(dtype)[name], spec) is not None


def test_wide_offsets_only_where_needed() -> None:
    large = ConvProblem(N=1, C=64, H=6000, W=6000, K=8, R=3, S=3)
    for problem, wide in ((HEADLINE, 0), (large, 1)):
        default = FAMILY.default(problem, H200)
        assert default is not None
        assert f"static constexpr bool wide = {wide};" in FAMILY.source(default, problem, H200).text


def test_the_log_of_a_refused_source_names_the_line() -> None:
    from autotune.backends import CompileError

    source = FAMILY.source(config(), HEADLINE, H200)
    with pytest.raises(CompileError, match=r"^.*igemm_mma.cuh.*static assertion failed"):
        compiler_for(H200).compile(replace(source, text=source.text.replace("cta_m = 128", "cta_m = 120")))
