"""Every CUDA family on an NVIDIA GPU, against the device's reference; and that one against NumPy's."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from conftest import EDGE_PROBLEMS
from host_execution import Case
from hypothesis import HealthCheck, Phase, given, seed, settings
from random_cases import CUDA_FAMILIES, GPU, SEED, Coverage, cases, cases_with

from autotune import ConvProblem, Epilogue, reference
from autotune.backends import Backend, CompiledKernel, Compiler, compiler_for, find, open_backend
from autotune.backends.operands import drawn
from autotune.device import DeviceSpec
from autotune.families import Family
from autotune.measure.harness import Harness
from autotune.problem import DType

pytestmark = pytest.mark.gpu

PAIRS = 200  # of config and layer, at least, of each family
DRAWN = 300  # some come twice
RUNS = 100  # that have to give the same bits
THREADS = 16  # that compile


@pytest.fixture(scope="module")
def backend() -> Backend:
    opened = open_backend(find("cuda"))
    # two operand sets are enough to be right
    opened.spec = replace(opened.spec, l2_bytes=1)
    return opened


@pytest.fixture(scope="module")
def compiler(backend: Backend) -> Compiler:
    return compiler_for(backend.spec)


@pytest.fixture(scope="module")
def values() -> Counter[tuple[str, str, int]]:
    return Counter()


@pytest.fixture
def coverage(values: Counter[tuple[str, str, int]], request: pytest.FixtureRequest) -> Coverage:
    return Coverage(f"CUDA kernels on the GPU, seed {SEED} (AUTOTUNE_TEST_SEED)", values, request.node)


def problems(dtype: str) -> list[ConvProblem]:
    return [problem for problem in EDGE_PROBLEMS(dtype).values() if problem.N]


def check(backend: Backend, case: Case, compiled: CompiledKernel, harness: Harness) -> None:
    """One config against the reference, with poisoned outputs and guard bands."""
    try:
        harness.verify(harness.load(compiled, case.family.launch(case.config, case.problem, case.spec)))
    except Exception as error:
        raise AssertionError(f"{case}: {error}") from error


def verify(backend: Backend, compiler: Compiler, found: Iterable[Case], number: int) -> None:
    """Checks cases, those of a layer on the same operands; number: the seed of those."""
    chosen = sorted(set(found), key=str)

    def compiled(case: Case) -> CompiledKernel:
        return compiler.compile(case.family.source(case.config, case.problem, case.spec))

    with ThreadPoolExecutor(THREADS) as pool:
        kernels = dict(zip(chosen, pool.map(compiled, chosen), strict=True))
    for problem in dict.fromkeys(case.problem for case in chosen):
        harness = Harness(backend, problem, number)
        for case, kernel in kernels.items():
            if case.problem == problem:
                check(backend, case, kernel, harness)


def some_configs(family: Family, problem: ConvProblem, spec: DeviceSpec, rng: random.Random, count: int) -> list[Case]:
    """The favourite of a layer, others at random, and one for each number of blocks that share a sum."""
    configs = family.configs(problem, spec)
    chosen = [*configs[:1], *rng.sample(configs, min(count, len(configs)))]
    for shares in sorted({config["split_k"] for config in configs if "split_k" in dict(config.knobs)} - {1}):
        chosen.append(rng.choice([config for config in configs if config["split_k"] == shares]))
    return [Case(family, config, problem, spec) for config in dict.fromkeys(chosen)]


@pytest.mark.parametrize("dtype", ["f16", "bf16", "s8"])
@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_edge_layers_are_right_in_random_configs(
    backend: Backend, compiler: Compiler, family: Family, dtype: str
) -> None:
    found, rng = [], random.Random(dtype)
    for shape in problems(dtype):
        # a family that needs channels in units of 16 bytes gets the shape with more of them
        wider = replace(shape, C=-(-shape.C // 16) * 16) if shape.groups == 1 else shape
        problem = shape if family.configs(shape, backend.spec) else wider
        found += some_configs(family, problem, backend.spec, rng, 1)
    assert len({case.problem for case in found}) >= 20
    verify(backend, compiler, found, SEED)


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_random_layers_are_right_in_random_configs(
    backend: Backend, compiler: Compiler, family: Family, coverage: Coverage
) -> None:
    compiled: dict[Case, Future[CompiledKernel]] = {}
    with ThreadPoolExecutor(THREADS) as pool:

        @seed(SEED)
        @settings(max_examples=DRAWN, phases=(Phase.generate,), suppress_health_check=list(HealthCheck))
        @given(cases(family, (backend.spec,), GPU))
        def draw(case: Case) -> None:
            if case not in compiled:
                source = family.source(case.config, case.problem, case.spec)
                compiled[case] = pool.submit(compiler.compile, source)

        draw()
        assert len(compiled) >= PAIRS
        for number, (case, kernel) in enumerate(compiled.items()):
            check(backend, case, kernel.result(), Harness(backend, case.problem, number))
            coverage.note(case)


@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_every_value_of_every_knob_is_right(
    backend: Backend, compiler: Compiler, family: Family, coverage: Coverage
) -> None:
    """Runs what the test above has left out; everything where that ran in another process."""
    rng = random.Random(SEED)
    for number in range(500):
        missing = coverage.missing(family)
        if not missing:
            return
        found = cases_with(missing, family, (backend.spec,), GPU, rng)
        verify(backend, compiler, found, number)
        for case in found:
            coverage.note(case)
    pytest.fail(f"no layer tried has a legal config with {missing}")


# text, input and output dtype
EPILOGUES = [
    *((text, d, d) for text in ("bias+relu", "residual", "scale_channel+bias+residual+relu") for d in ("f16", "bf16")),
    ("scale_tensor+bias+residual", "f16", "f32"),
    ("relu", "bf16", "f32"),
    ("scale_channel+bias+relu", "s8", "s8"),
    ("scale_tensor+bias", "s8", "s8"),
    ("identity", "s8", "s8"),
    ("scale_channel+bias+residual+relu", "s8", "f32"),
    ("scale_tensor+bias+relu", "s8", "f16"),
    ("bias+residual+relu", "s8", "s32"),
]
# adjacent filters of a thread: as many as there can be, fewer, one by one; two tiles of filters
FILTERS = (64, 24, 13, 200)


@pytest.mark.parametrize(("text", "dtype", "out"), EPILOGUES)
@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_epilogues_are_right(
    backend: Backend, compiler: Compiler, family: Family, text: str, dtype: str, out: str
) -> None:
    epilogue = Epilogue.parse(text, DType.of(out))
    layer = {"N": 3, "C": 32, "H": 21, "W": 27, "R": 3, "S": 3, "padding": 1, "dtype": dtype, "epilogue": epilogue}
    problems = [ConvProblem(**layer, K=filters) for filters in FILTERS]  # type: ignore[arg-type]
    if family.unsupported(problems[0], backend.spec):
        pytest.skip(str(family.unsupported(problems[0], backend.spec)))
    rng = random.Random(text)
    found = [case for problem in problems for case in some_configs(family, problem, backend.spec, rng, 2)]
    verify(backend, compiler, found, SEED)


@pytest.mark.parametrize("dtype", ["f16", "bf16", "s8"])
@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_float32_outputs_are_right(backend: Backend, compiler: Compiler, family: Family, dtype: str) -> None:
    problem = ConvProblem(
        **{"N": 2, "C": 32, "H": 13, "W": 17, "K": 40, "R": 3, "S": 3, "padding": 1, "dtype": dtype},  # type: ignore[arg-type]
        epilogue=Epilogue(out_dtype=DType.F32),
    )
    verify(backend, compiler, some_configs(family, problem, backend.spec, random.Random(dtype), 4), SEED)


def agrees_with_numpy(backend: Backend, problem: ConvProblem, seed: int) -> None:
    buffers = drawn(backend, problem, seed)
    value, magnitude = backend.reference(problem, **buffers)
    host = {}
    for name, buffer in buffers.items():
        shape, dtype = problem.operand(name)
        host[name] = buffer.get().view(reference.STORAGE[dtype]).reshape(shape)
    expected = reference.conv2d(problem, **host)
    if expected.magnitude is None:
        assert np.array_equal(value.get().view(np.float64), expected.value.ravel()), problem
        return
    assert np.allclose(value.get().view(np.float64), expected.value.ravel(), rtol=1e-12, atol=1e-9), problem
    assert np.allclose(magnitude.get().view(np.float32), expected.magnitude.ravel(), rtol=1e-3, atol=1e-6), problem


@pytest.mark.parametrize("dtype", ["f16", "bf16", "s8"])
def test_the_devices_reference_agrees_with_numpys(backend: Backend, dtype: str) -> None:
    for index, problem in enumerate(problems(dtype)):
        agrees_with_numpy(backend, problem, index)


@pytest.mark.parametrize(("text", "dtype", "out"), EPILOGUES)
def test_the_devices_reference_of_epilogues_agrees_with_numpys(
    backend: Backend, text: str, dtype: str, out: str
) -> None:
    epilogue = Epilogue.parse(text, DType.of(out))
    for number, name in enumerate(("plain-3x3", "grouped", "c13-k5")):
        agrees_with_numpy(backend, replace(EDGE_PROBLEMS(dtype)[name], epilogue=epilogue), number)


@pytest.fixture
def released() -> Iterator[None]:
    """Gives the device's memory back: other processes test too."""
    yield
    import cupy

    cupy.get_default_memory_pool().free_all_blocks()


# in an image, in a batch of smaller images, in an output
@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(N=1, C=64, H=5800, W=5800, K=8, R=1, S=1),
        ConvProblem(N=66, C=128, H=504, W=513, K=8, R=3, S=1, padding=1, dtype="s8"),
        ConvProblem(N=1, C=16, H=5800, W=5800, K=64, R=1, S=1, dtype="s8", epilogue=Epilogue(scale="channel")),
    ],
    ids=["image", "batch", "output"],
)
def test_more_than_2_31_elements(backend: Backend, compiler: Compiler, problem: ConvProblem, released: None) -> None:
    assert max(math.prod(problem.activation_shape), math.prod(problem.output_shape)) > 2**31
    rng = random.Random(7)
    found = [case for family in CUDA_FAMILIES for case in some_configs(family, problem, backend.spec, rng, 2)]
    assert {case.family for case in found} == set(CUDA_FAMILIES)
    verify(backend, compiler, found, SEED)


@pytest.mark.parametrize("dtype", ["f16", "s8"])
@pytest.mark.parametrize("family", CUDA_FAMILIES, ids=lambda family: family.name)
def test_outputs_are_the_same_bits_in_every_run(
    backend: Backend, compiler: Compiler, family: Family, dtype: str
) -> None:
    # sums that several blocks share are the ones that could differ
    problem = ConvProblem(N=1, C=256, H=14, W=14, K=256, R=3, S=3, padding=1, dtype=dtype)
    harness = Harness(backend, problem, SEED)
    found = some_configs(family, problem, backend.spec, random.Random(dtype), 6)
    assert len(found) >= 4
    for case in found:
        compiled = compiler.compile(family.source(case.config, problem, backend.spec))
        loaded = harness.load(compiled, family.launch(case.config, problem, backend.spec))
        operands, outputs = loaded.operands[0], set()
        for run in range(RUNS):
            backend.fill(operands.output, run)
            loaded.kernel(operands)
            outputs.add(operands.output.get().tobytes())
        assert len(outputs) == 1, case
