"""Every CUDA family compiled for every architecture it runs on: resources as predicted, instructions that must be."""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
from gpu_models import GPU_MODELS

from autotune.backends import CompiledKernel, Compiler, compiler_for
from autotune.backends import cache as binaries
from autotune.families import FAMILIES, Family, Source
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.resources import folder
from autotune.trial import Config

REGISTERS = 65536  # of a multiprocessor
# legality tells "about" how many registers a thread needs, and may be 24 short, which the compiler keeps in memory
SPILL_BYTES = 96
CONFIGS = 6  # of a layer on an architecture
# vectors of 16 bytes, tall filters, vectors of fewer bytes, single elements, groups, few filters and an epilogue
SHAPES = (
    {"C": 64, "K": 128},
    {"C": 32, "K": 64, "R": 5, "S": 5, "padding": 2},
    {"C": 20, "K": 24},
    {"C": 3, "K": 13},
    {"C": 32, "K": 64, "groups": 4},
    {"C": 16, "K": 32, "epilogue": Epilogue(scale="channel", bias=True, activation="relu")},
)
DTYPES = (DType.F16, DType.BF16, DType.S8)
# what a wrapper in ptx.cuh must become
INSTRUCTIONS = {
    "ptx::Mma<": r"\bmma\.sync\.aligned\.",
    "ptx::ldmatrix_x4": r"\bldmatrix\.sync\.aligned\.m8n8\.x4\.",
    "ptx::cp_async<": r"\bcp\.async\.c[ag]\.shared\.global",
    "ptx::cp_async_wait": r"\bcp\.async\.wait_group",
    "ptx::Wgmma<": r"\bwgmma\.mma_async\.sync\.aligned\.m64n\d+k\d+\.",
    "ptx::copy_box": r"\bcp\.async\.bulk\.tensor\.[35]d\.shared::cluster\.global",
    "ptx::multicast_box": r"\bcp\.async\.bulk\.tensor\.[35]d\.shared::cluster\.global.*multicast::cluster",
    "ptx::sync_cluster": r"\bbarrier\.cluster\.arrive\.release;\s+barrier\.cluster\.wait\.acquire",
    "ptx::barrier_arrive(empty, u32(lane))": r"\bmapa\.shared::cluster\.u32.*\s+mbarrier\.arrive\.shared::cluster\.b64",
    "ptx::stream_box": r"\bcp\.async\.bulk\.tensor\.[45]d\.shared::cluster\.global.*cache_hint",
    "ptx::prefetch_pixels": r"\bcp\.async\.bulk\.prefetch\.tensor\.4d\.L2\.global\.im2col",
    "ptx::copy_pixels": r"\bcp\.async\.bulk\.tensor\.4d\.shared::cluster\.global\.im2col",
    "ptx::barrier_wait": r"\bmbarrier\.try_wait\.parity",
    "ptx::claim_registers": r"\bsetmaxnreg\.inc",
    "ptx::release_registers": r"\bsetmaxnreg\.dec",
}
NEED_SM80 = {"ptx::cp_async<", "ptx::cp_async_wait"}
CELLS = [
    pytest.param(family, arch, id=f"{family.name}-{arch}")
    for family in FAMILIES
    if family.kind == "cuda"
    for arch, spec in GPU_MODELS.items()
    if family.unsupported(ConvProblem(N=1, C=64, H=8, W=8, K=64, R=3, S=3, padding=1), spec) is None
]


def layers(arch: str) -> Iterator[ConvProblem]:
    """Each shape, in another dtype than on the architecture before."""
    for index, shape in enumerate(SHAPES):
        dtype = DTYPES[(index + list(GPU_MODELS).index(arch)) % len(DTYPES)]
        yield ConvProblem(**{"N": 2, "H": 14, "W": 15, "R": 3, "S": 3, "padding": 1, "dtype": dtype} | shape)  # type: ignore[arg-type]


def chosen(family: Family, problem: ConvProblem, arch: str) -> list[Config]:
    """The default, and configs that have the least and the greatest value of knobs, those with most extremes first."""
    configs = family.configs(problem, GPU_MODELS[arch])
    if not configs:
        return []
    extremes = {
        (knob.name, bound(config[knob.name] for config in configs)) for knob in family.knobs for bound in (min, max)
    }
    found, missing = [configs[0]], extremes - set(configs[0].knobs)
    pool = random.Random(f"{family.name} {problem} {arch}").sample(configs, min(len(configs), 400))
    while missing and len(found) < CONFIGS:
        best = max(pool, key=lambda config: len(missing & set(config.knobs)))
        if not missing & set(best.knobs):
            break
        found.append(best)
        missing -= set(best.knobs)
    return found


# made one after the other: the compiler's library cannot be imported by two threads at once
@cache
def compiler(arch: str) -> Compiler:
    return compiler_for(GPU_MODELS[arch])


@pytest.mark.parametrize(("family", "arch"), CELLS)
def test_resources_are_as_predicted(family: Family, arch: str) -> None:
    spec, compile_for = GPU_MODELS[arch], compiler(arch)
    cases = [(config, problem) for problem in layers(arch) for config in chosen(family, problem, arch)]
    assert cases

    def compiled(case: tuple[Config, ConvProblem]) -> CompiledKernel:
        return compile_for.compile(family.source(*case, spec))

    wrong, spilled = [], []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for (config, problem), kernel in zip(cases, pool.map(compiled, cases), strict=True):
            launch = family.launch(config, problem, spec)
            assert kernel.registers is not None
            assert kernel.smem_static_bytes is not None
            # registers are handed out to warps, 8 of a thread at a time
            if -(-kernel.registers // 8) * 8 * launch.block > REGISTERS:
                wrong.append(f"{config} on {problem}: {kernel.registers} registers of {launch.block} threads")
            if launch.smem_bytes + kernel.smem_static_bytes > spec.smem_per_cta:
                smem = f"{launch.smem_bytes} + {kernel.smem_static_bytes} bytes"
                wrong.append(f"{config} on {problem}: {smem} of shared memory")
            if (kernel.spill_bytes or 0) > SPILL_BYTES:
                spilled.append(f"{config} on {problem}: {kernel.spill_bytes} bytes are spilled")
    assert not wrong, "\n".join(wrong)
    assert not spilled, "\n".join(spilled)


@pytest.mark.parametrize(("family", "arch"), [cell for cell in CELLS if cell.values[1] in ("sm_80", "sm_90a")])
def test_configs_meant_to_be_fast_do_not_spill(family: Family, arch: str) -> None:
    spec, compile_for = GPU_MODELS[arch], compiler(arch)
    layers = [ConvProblem(N=16, C=64, H=92, W=160, K=filters, R=3, S=3, padding=1) for filters in (32, 128)]
    layers.append(ConvProblem(N=8, C=256, H=14, W=14, K=256, R=3, S=3, padding=1, dtype="s8"))
    cases = [(config, problem) for problem in layers for config in family.configs(problem, spec)[:4]]
    assert cases
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        kernels = pool.map(lambda case: compile_for.compile(family.source(*case, spec)), cases)
        spilled = [f"{c} on {p}" for (c, p), kernel in zip(cases, kernels, strict=True) if kernel.spill_bytes != 0]
    assert not spilled, "\n".join(spilled)


@pytest.mark.parametrize(("family", "arch"), CELLS)
def test_instructions_are_there(family: Family, arch: str) -> None:
    spec = GPU_MODELS[arch]
    kernel = (folder("kernels") / f"{family.name}.cuh").read_text()
    needed = {wrapper for wrapper in INSTRUCTIONS if wrapper in kernel and (spec.sm >= 80 or wrapper not in NEED_SM80)}
    assert needed
    missing = set(needed)
    for problem in layers(arch):
        for config in chosen(family, problem, arch):
            text = ptx(family.source(config, problem, spec), arch)
            missing -= {wrapper for wrapper in missing if re.search(INSTRUCTIONS[wrapper], text)}
            if not missing:
                return
    pytest.fail(f"no config has what {', '.join(sorted(missing))} stand for")


def ptx(source: Source, arch: str) -> str:
    """What NVRTC makes of a source before its assembler; cuda.core asks for a driver here."""
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        assert int(result[0]) == 0, result[0]
        return result[1] if len(result) > 1 else None

    includes = [f"-I{directory}" for directory in binaries.include_directories()]
    options = [option.encode() for option in (f"-arch={arch.replace('sm', 'compute')}", "-std=c++17", *includes)]
    program = checked(nvrtc.nvrtcCreateProgram(source.text.encode(), b"kernel.cu", 0, [], []))
    checked(nvrtc.nvrtcCompileProgram(program, len(options), options))
    text = bytes(checked(nvrtc.nvrtcGetPTXSize(program)))
    checked(nvrtc.nvrtcGetPTX(program, text))
    checked(nvrtc.nvrtcDestroyProgram(program))
    return text.decode()
