"""Every path through the CUDA families' epilogues: outputs on the host, and code without spills."""

from __future__ import annotations

import os
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from gpu_models import GPU_MODELS
from host_execution import Case, HostMachine

from autotune.backends import compiler_for
from autotune.families import FAMILIES, Family
from autotune.problem import ConvProblem, DType, Epilogue

LAYER = {"N": 1, "C": 64, "H": 8, "W": 8, "K": 64, "R": 3, "S": 3, "padding": 1}
# text, input and output dtype
EPILOGUES = [
    *(("bias+relu", d, d) for d in ("f16", "bf16")),
    *(("scale_channel+bias+residual+relu", d, d) for d in ("f16", "bf16")),
    ("residual", "f16", "f16"),
    ("scale_tensor+bias+residual", "f16", "f32"),
    ("relu", "bf16", "f32"),
    ("scale_channel+bias+relu", "s8", "s8"),
    ("scale_tensor", "s8", "s8"),
    ("identity", "s8", "s8"),
    ("scale_channel+bias+residual+relu", "s8", "f32"),
    ("scale_tensor+bias+relu", "s8", "f16"),
    ("bias+residual+relu", "s8", "s32"),
]
# adjacent filters of a thread: as many as there can be, fewer, one by one
SHAPES = (
    {"N": 2, "C": 16, "H": 9, "W": 11, "K": 64, "R": 3, "S": 3, "padding": 1},
    {"N": 1, "C": 32, "H": 6, "W": 7, "K": 24, "R": 2, "S": 2},
    {"N": 1, "C": 16, "H": 5, "W": 9, "K": 13, "R": 3, "S": 1, "stride": (2, 1)},
)
GROUPED = {"N": 1, "C": 18, "H": 6, "W": 5, "K": 14, "R": 3, "S": 3, "groups": 2}


def problem_of(shape: dict[str, object], text: str, dtype: str, out: str) -> ConvProblem:
    return ConvProblem(**shape, dtype=dtype, epilogue=Epilogue.parse(text, DType.of(out)))  # type: ignore[arg-type]


# families that have epilogues at all
WITH = [
    family
    for family in FAMILIES
    if family.kind == "cuda" and not family.unsupported(problem_of(LAYER, "bias", "f16", "f16"), GPU_MODELS["sm_90a"])
]


def test_the_families_with_epilogues() -> None:
    assert {"igemm_mma", "halo_wgmma"} <= {family.name for family in WITH}


def cases(family: Family, text: str, dtype: str, out: str) -> list[Case]:
    """One config at random of each shape; where there are groups and other devices, one of each too."""
    # few multiprocessors: blocks walk over several tiles
    on = [(shape, replace(GPU_MODELS["sm_90a"], sm_count=3)) for shape in SHAPES]
    on += [(shape, GPU_MODELS["sm_75"]) for shape in (SHAPES[1], GROUPED)]
    found = []
    for shape, spec in on:
        problem = problem_of(shape, text, dtype, out)
        configs = family.configs(problem, spec)
        found += [Case(family, c, problem, spec) for c in random.Random(str(problem)).sample(configs, bool(configs))]
    assert len(found) >= 3
    return found


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> HostMachine:
    return HostMachine(tmp_path_factory.mktemp("host"))


@pytest.mark.parametrize(("text", "dtype", "out"), EPILOGUES)
@pytest.mark.parametrize("family", WITH, ids=lambda family: family.name)
def test_outputs_are_right(family: Family, text: str, dtype: str, out: str, machine: HostMachine) -> None:
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda case: machine.check(case, seed=1), cases(family, text, dtype, out)))


@pytest.mark.parametrize("family", WITH, ids=lambda family: family.name)
def test_the_launch_names_what_the_epilogue_reads(family: Family) -> None:
    spec = GPU_MODELS["sm_90a"]
    for text, names in (
        ("identity", ()),
        ("relu", ()),
        ("bias", ("bias",)),
        ("scale_tensor+residual", ("scale", "residual")),
        ("scale_channel+bias+residual+relu", ("scale", "bias", "residual")),
    ):
        problem = problem_of(LAYER, text, "f16", "f16")
        config = family.configs(problem, spec)[0]
        arguments = family.launch(config, problem, spec).arguments
        plain = family.launch(config, problem_of(LAYER, "identity", "f16", "f16"), spec).arguments
        assert arguments == (*plain, *names)


@pytest.mark.parametrize(
    ("text", "dtype", "out", "reason"),
    [
        ("bias", "f16", "bf16", "f16 or f32 from f16, not bf16"),
        ("scale_tensor", "f16", "s8", "not s8"),
        ("scale_channel+residual", "s8", "s8", "a scale of its own"),
        ("bias", "s8", "f16", "an f16 output of s8 needs a scale"),
    ],
)
@pytest.mark.parametrize("family", WITH, ids=lambda family: family.name)
def test_epilogues_without_meaning_are_refused(family: Family, text: str, dtype: str, out: str, reason: str) -> None:
    found = family.unsupported(problem_of(LAYER, text, dtype, out), GPU_MODELS["sm_90a"])
    assert reason in str(found)
    assert "\n" not in str(found)


@pytest.mark.parametrize(("text", "dtype", "out"), EPILOGUES[:4] + EPILOGUES[7:8] + EPILOGUES[10:11])
@pytest.mark.parametrize("family", WITH, ids=lambda family: family.name)
def test_favoured_configs_do_not_spill(family: Family, text: str, dtype: str, out: str) -> None:
    spec = GPU_MODELS["sm_90a"]
    problem = problem_of({"N": 16, "C": 64, "H": 92, "W": 160, "K": 32, "R": 3, "S": 3, "padding": 1}, text, dtype, out)
    compiler = compiler_for(spec)
    for config in family.configs(problem, spec)[:2]:
        kernel = compiler.compile(family.source(config, problem, spec))
        assert kernel.spill_bytes == 0, config
        assert kernel.registers is not None
        assert kernel.registers * family.launch(config, problem, spec).block <= 65536, config
