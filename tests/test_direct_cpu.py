"""direct_cpu: every edge shape and every knob value against the reference, and what it reads, refuses and predicts."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from conftest import EDGE_PROBLEMS

from autotune import Config, ConvProblem, DeviceSpec, DType, Epilogue
from autotune.backends import Operands
from autotune.backends.cpu import CpuBackend, CpuCompiler, devices
from autotune.families.direct_cpu import DirectCpu

FAMILY = DirectCpu()
KNOBS = [knob.name for knob in FAMILY.knobs]
GUARD = 256

# synthetic devices: what is legal and predicted there is the same on every machine
AVX512 = DeviceSpec(
    kind="cpu",
    name="avx512",
    arch="x86-64-avx512",
    sm_count=2,
    l2_bytes=32 << 20,
    vector_bytes=64,
    bytes_per_s=50e9,
    rates=((DType.F32, 500e9),),
)
AVX2 = replace(AVX512, name="avx2", arch="x86-64-avx2", vector_bytes=32, rates=((DType.F32, 250e9),))
NEON = replace(AVX512, name="neon", arch="aarch64-neon", vector_bytes=16, rates=((DType.F32, 120e9),))
HEADLINE = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1, dtype="f32")


@pytest.fixture(scope="module")
def spec():
    (device,) = devices()
    assert device.spec is not None, device.reason
    return device.spec


def config(**knobs):
    return Config.of(
        "direct_cpu", {"pixels": 1, "k_vectors": 1, "lanes": 4, "c_block": 0, "rows": 1, "k_tiles": 0} | knobs
    )


def guarded(backend, nbytes, offset=0):
    """A poisoned buffer between guard bands, ``offset`` bytes from an aligned address, and the whole of it."""
    whole = backend.allocate(GUARD + offset + nbytes + GUARD)
    backend.fill(whole, 0xFF)
    return whole[GUARD + offset : GUARD + offset + nbytes], whole


class Checker:
    """A problem's operands and reference, to run configs on."""

    def __init__(self, problem, spec, offset=0):
        self.problem, self.spec, self.offset = problem, spec, offset
        # the spec may be synthetic; what compiles is this machine's compiler
        self.backend, self.compiler = CpuBackend(spec), CpuCompiler(devices()[0].spec)
        # the bands around the inputs are NaN too: an element read from there shows in the output
        self.inputs, self.whole = {}, {}
        for seed, name in enumerate(problem.operands, 7):
            shape, dtype = problem.operand(name)
            self.inputs[name], self.whole[name] = guarded(self.backend, 4 * math.prod(shape), offset)
            self.backend.randomize(self.inputs[name], dtype, seed, 1.0 if name == "activation" else 0.5)
        self.before = {name: whole.copy() for name, whole in self.whole.items()}
        self.expected = self.backend.reference(problem, **self.inputs)

    def check(self, chosen, compiled=None):
        assert FAMILY.legal(chosen, self.problem, self.spec) is None
        compiled = compiled or self.compiler.compile(FAMILY.source(chosen, self.problem, self.spec))
        launch = FAMILY.launch(chosen, self.problem, self.spec)
        kernel = self.backend.load(compiled, launch)
        output, output_whole = guarded(self.backend, self.problem.output_bytes, self.offset)
        workspace, workspace_whole = guarded(self.backend, launch.workspace_bytes)
        operands = Operands(**self.inputs, output=output, workspace=workspace)
        # twice: the second launch finds the workspace as the first left it
        for _ in range(2):
            self.backend.fill(output, 0xFF)
            kernel(operands)
            found = self.backend.compare(self.problem, output, self.expected)
            assert found.mismatches == 0, f"{self.problem} {chosen}: {found}"
        for whole, body in ((output_whole, output), (workspace_whole, workspace)):
            start = body.ctypes.data - whole.ctypes.data
            assert self.backend.is_filled(whole[:start], 0xFF), chosen
            assert self.backend.is_filled(whole[start + body.size :], 0xFF), chosen
        assert all((whole == self.before[name]).all() for name, whole in self.whole.items())

    def check_all(self, configs):
        sources = [FAMILY.source(chosen, self.problem, self.spec) for chosen in configs]
        with ThreadPoolExecutor(2) as pool:
            for chosen, compiled in zip(configs, pool.map(self.compiler.compile, sources), strict=True):
                self.check(chosen, compiled)


def some_configs(problem, spec):
    """Default, smallest and largest register tile, and two drawn at random, one of them in several tasks and blocks."""
    configs = FAMILY.configs(problem, spec)

    def size(chosen):
        return chosen["pixels"] * chosen["k_vectors"] * chosen["lanes"]

    drawn = random.Random(str(problem))
    split = [c for c in configs if c["c_block"] or c["k_tiles"]] or configs
    picked = [configs[0], min(configs, key=size), max(configs, key=size), drawn.choice(configs), drawn.choice(split)]
    return list(dict.fromkeys(picked))


@pytest.mark.parametrize("name", EDGE_PROBLEMS("f32"))
def test_edge_shapes_agree_with_the_reference(name, spec):
    problem = EDGE_PROBLEMS("f32")[name]
    Checker(problem, spec).check_all(some_configs(problem, spec))


EPILOGUES = [
    "bias",
    "relu",
    "residual",
    "scale_tensor",
    "bias+relu",
    "scale_channel+residual",
    "scale_tensor+bias+residual",
    "scale_channel+bias+residual+relu",
]


@pytest.mark.parametrize("text", EPILOGUES)
def test_epilogues_agree_with_the_reference(text, spec):
    # a tail of filters, depthwise, a flat layer, groups
    for name in ("c13-k5", "c91-k21", "depthwise-odd", "pointwise", "grouped"):
        problem = replace(EDGE_PROBLEMS("f32")[name], epilogue=Epilogue.parse(text))
        configs = FAMILY.configs(problem, spec)
        drawn = random.Random(text + name)
        Checker(problem, spec).check_all(list(dict.fromkeys([configs[0], drawn.choice(configs)])))


@pytest.mark.parametrize("groups", [1, 2])
def test_an_epilogue_is_applied_once_to_the_sum_of_all_blocks_of_channels(groups, spec):
    problem = ConvProblem(
        **{"N": 1, "C": 300 * groups, "H": 5, "W": 7, "K": 21 * groups, "R": 2, "S": 2, "groups": groups},
        **{"dtype": "f32", "epilogue": Epilogue.parse("scale_channel+bias+residual+relu")},
    )
    # two blocks, and more than two: a first, a final and one that is neither
    for c_block in (256, 64):
        Checker(problem, spec).check(next(c for c in FAMILY.configs(problem, spec) if c["c_block"] == c_block))


def test_relu_keeps_nan(spec):
    problem = ConvProblem(N=1, C=4, H=1, W=3, K=20, R=1, S=1, dtype="f32", epilogue=Epilogue(activation="relu"))
    backend, chosen = CpuBackend(spec), FAMILY.default(problem, spec)
    launch = FAMILY.launch(chosen, problem, spec)
    kernel = backend.load(CpuCompiler(spec).compile(FAMILY.source(chosen, problem, spec)), launch)
    activation = np.repeat(np.array([np.nan, -1, 2], np.float32), 4)
    buffers = {"activation": activation, "filter": np.ones(80, np.float32), "output": np.zeros(60, np.float32)}
    workspace = backend.allocate(launch.workspace_bytes)
    kernel(Operands(**{name: array.view(np.uint8) for name, array in buffers.items()}, workspace=workspace))
    np.testing.assert_array_equal(buffers["output"].reshape(3, 20), np.repeat([[np.nan], [0], [8]], 20, axis=1))


# layers of which each makes other knob values legal
COVER = [
    ConvProblem(N=2, C=300, H=5, W=29, K=72, R=3, S=3, padding=1, dtype="f32"),
    ConvProblem(N=1, C=270, H=17, W=30, K=20, R=1, S=2, dtype="f32"),
    ConvProblem(N=3, C=65, H=9, W=9, K=150, R=1, S=1, dtype="f32"),
]


@pytest.mark.parametrize(("knob", "value"), [(k.name, value) for k in FAMILY.knobs for value in k.candidates])
def test_every_knob_value_agrees_with_the_reference(knob, value, checkers):
    """On a device of 512-bit vectors: a compiler for narrower ones splits them, so that this runs everywhere."""
    drawn = random.Random(f"{knob}{value}")
    checker = drawn.choice([c for c in checkers if any(x[knob] == value for x in FAMILY.configs(c.problem, c.spec))])
    fitting = [c for c in FAMILY.configs(checker.problem, checker.spec) if c[knob] == value]
    checker.check(drawn.choice(fitting))


@pytest.fixture(scope="module")
def checkers(spec):
    wide = replace(spec, arch="x86-64-avx512", vector_bytes=64)
    return [Checker(problem, wide) for problem in COVER]


@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads_gives_the_same_bits(threads, spec):
    problem = ConvProblem(N=2, C=20, H=11, W=13, K=24, R=3, S=3, padding=1, dtype="f32")
    chosen = next(c for c in FAMILY.configs(problem, spec) if c["k_tiles"] == 1 and c["rows"] == 2)
    outputs = []
    for cores in (2, threads):
        checker = Checker(problem, replace(spec, sm_count=cores))
        checker.check(chosen)
        launch = FAMILY.launch(chosen, problem, checker.spec)
        kernel = checker.backend.load(checker.compiler.compile(FAMILY.source(chosen, problem, checker.spec)), launch)
        output, workspace = np.empty(problem.output_bytes, np.uint8), checker.backend.allocate(launch.workspace_bytes)
        kernel(Operands(**checker.inputs, output=output, workspace=workspace))
        outputs.append(output)
    assert (outputs[0] == outputs[1]).all()


@pytest.mark.parametrize("name", ["plain-3x3", "c91-k21", "pointwise", "depthwise-odd"])
def test_operands_need_no_more_alignment_than_their_elements(name, spec):
    problem = EDGE_PROBLEMS("f32")[name]
    Checker(problem, spec, offset=4).check(FAMILY.configs(problem, spec)[0])


def test_an_empty_batch_writes_nothing(spec):
    problem = EDGE_PROBLEMS("f32")["empty-batch"]
    assert problem.output_bytes == 0
    for empty in (problem, ConvProblem(N=0, C=8, H=5, W=5, K=8, R=1, S=1, dtype="f32")):
        Checker(empty, spec).check(FAMILY.default(empty, spec))


def test_more_than_2_to_the_31_elements(spec):
    stride_h, stride_w = 8199, 8191
    problem = ConvProblem(
        N=1, C=8, H=16400, W=16384, K=5, R=3, S=3, padding=1, stride=(stride_h, stride_w), dtype="f32"
    )
    elements = problem.activation_bytes // 4
    assert elements > 2**31
    # pages that are never written take no memory
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    activation = np.frombuffer(mmap.mmap(-1, problem.activation_bytes, flags=flags), np.uint8)
    image = activation.view(np.float32).reshape(problem.activation_shape)[0]
    generator = np.random.Generator(np.random.PCG64(3))
    filters = generator.standard_normal(problem.filter_shape, dtype=np.float32)
    expected = np.zeros((problem.P, problem.Q, problem.K))
    for p in range(problem.P):
        for q in range(problem.Q):
            for r in range(3):
                for s in range(3):
                    h, w = p * stride_h + r - 1, q * stride_w + s - 1
                    if 0 <= h < problem.H and 0 <= w < problem.W:
                        image[h, w] = generator.standard_normal(8, dtype=np.float32)
                        expected[p, q] += filters[:, r, s].astype(float) @ image[h, w].astype(float)
    # the last output row reads from beyond the limit
    assert ((problem.P - 1) * stride_h - 1) * problem.W * problem.C > 2**31
    assert np.abs(expected[-1]).min() > 0
    chosen = FAMILY.configs(problem, spec)[0]
    launch, backend = FAMILY.launch(chosen, problem, spec), CpuBackend(spec)
    kernel = backend.load(CpuCompiler(spec).compile(FAMILY.source(chosen, problem, spec)), launch)
    output, workspace = backend.allocate(problem.output_bytes), backend.allocate(launch.workspace_bytes)
    kernel(
        Operands(activation=activation, filter=filters.reshape(-1).view(np.uint8), output=output, workspace=workspace)
    )
    found = output.view(np.float32).reshape(expected.shape)
    assert np.abs(found - expected).max() < 1e-4


def test_nothing_beside_the_operands_is_read(spec):
    """In a process of its own, with the operands at the very ends of pages whose neighbours may not be touched."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["plain-3x3", "asymmetric-padding", "pointwise", "c91-k21", "depthwise-odd"]


def fenced(nbytes, at_end):
    """Bytes that begin or end at a page that may not be touched."""
    page = mmap.PAGESIZE
    inside = -(-nbytes // page) * page
    area = mmap.mmap(-1, inside + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    for fence in (start, start + page + inside):
        assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(fence), ctypes.c_size_t(page), 0) == 0
    whole = np.frombuffer(area, np.uint8, count=inside, offset=page)
    return whole[inside - nbytes :] if at_end else whole[:nbytes]


def run_between_fences():
    spec = devices()[0].spec
    for name in ("plain-3x3", "asymmetric-padding", "pointwise", "c91-k21", "depthwise-odd"):
        epilogue = Epilogue.parse("scale_channel+bias+residual" if name.startswith(("c91", "depth")) else "identity")
        problem = replace(EDGE_PROBLEMS("f32")[name], epilogue=epilogue)
        checker = Checker(problem, spec)
        for chosen in some_configs(problem, spec):
            launch = FAMILY.launch(chosen, problem, spec)
            kernel = checker.backend.load(checker.compiler.compile(FAMILY.source(chosen, problem, spec)), launch)
            for at_end in (False, True):
                inputs = {name: fenced(array.size, at_end) for name, array in checker.inputs.items()}
                for operand, array in inputs.items():
                    array[:] = checker.inputs[operand]
                output = fenced(problem.output_bytes, at_end)
                # to a multiple of the alignment that the caller promises
                workspace = fenced(-(-launch.workspace_bytes // 256) * 256, at_end)
                kernel(Operands(**inputs, output=output, workspace=workspace))
                assert checker.backend.compare(problem, output, checker.expected).mismatches == 0
        print(name)


# What is legal


def test_the_headline_layer_has_many_distinct_programs():
    for device in (AVX512, AVX2, NEON):
        configs = FAMILY.configs(HEADLINE, device)
        assert len({FAMILY.source(c, HEADLINE, device).text for c in configs}) == len(configs) >= 100


def test_no_two_configs_of_a_flat_layer_are_the_same_program():
    problem = ConvProblem(N=2, C=24, H=7, W=7, K=40, R=1, S=1, dtype="f32")
    configs = FAMILY.configs(problem, AVX512)
    texts = {FAMILY.source(c, problem, AVX512).text.replace(f"#define rows {c['rows']}\n", "") for c in configs}
    assert len(texts) == len(configs) > 20


@pytest.mark.parametrize("name", EDGE_PROBLEMS("f32"))
@pytest.mark.parametrize("device", [AVX512, AVX2, NEON], ids=lambda device: device.name)
def test_every_edge_shape_has_configs_on_every_cpu(name, device):
    problem = EDGE_PROBLEMS("f32")[name]
    configs = FAMILY.configs(problem, device)
    assert configs
    assert all(FAMILY.legal(c, problem, device) is None for c in configs[:5])
    assert all(c["lanes"] * 4 <= device.vector_bytes for c in configs)


@pytest.mark.parametrize(
    ("knobs", "device", "reason"),
    [
        (
            {"pixels": 16, "k_vectors": 2, "lanes": 16},
            AVX512,
            "a tile of 16 pixels by 2 vectors needs more than 32 vector",
        ),
        ({"pixels": 7, "k_vectors": 2, "lanes": 8}, AVX2, "a tile of 7 pixels by 2 vectors needs more than 16 vector"),
        ({"lanes": 16}, AVX2, "a vector of this CPU has 8 lanes, not 16"),
        ({"lanes": 8}, AVX512, "8 lanes pad 32 filters no less than 16 do"),
        ({"k_vectors": 3, "lanes": 16}, AVX512, "32 filters of a group fill fewer than 3 vectors of 16"),
        ({"c_block": 64, "lanes": 16}, AVX512, "a group has 64 channels: one block of 64 is all of them"),
        ({"k_tiles": 2, "lanes": 16}, AVX512, "2 tiles of filters are all of them"),
        ({"k_tiles": 3, "lanes": 16}, AVX512, "k_tiles=3 is not one of 0, 1, 2, 4"),
    ],
)
def test_illegal_configs_say_why(knobs, device, reason):
    said = FAMILY.legal(config(**knobs), HEADLINE, device)
    assert said is not None
    assert said.startswith(reason)
    assert "\n" not in said


def test_the_limits_of_registers_are_reached():
    assert FAMILY.legal(config(pixels=14, k_vectors=2, lanes=16), HEADLINE, AVX512) is None
    assert FAMILY.legal(config(pixels=6, k_vectors=2, lanes=8), HEADLINE, AVX2) is None
    assert FAMILY.legal(config(pixels=14, k_vectors=2, lanes=4), HEADLINE, NEON) is None


def test_rows_are_bounded_by_the_image_and_by_what_they_stage():
    small = ConvProblem(N=1, C=64, H=7, W=7, K=32, R=3, S=3, padding=1, dtype="f32")
    assert FAMILY.legal(config(lanes=16, rows=8), small, AVX512) is None
    assert FAMILY.legal(config(lanes=16, rows=16), small, AVX512) == "16 rows make the same tasks as 8"
    wide = ConvProblem(N=1, C=256, H=64, W=4096, K=32, R=3, S=3, padding=1, dtype="f32")
    assert FAMILY.legal(config(lanes=16), wide, AVX512) is None
    said = FAMILY.legal(config(lanes=16, rows=2), wide, AVX512)
    assert said == f"2 rows stage {4 * 4098 * 256 * 4} bytes a thread, more than {8 << 20}"


def test_workspace_by_hand():
    # 3 input rows of 162 pixels for 2 threads, and 32 filters of 576 taps
    assert FAMILY.launch(config(lanes=16), HEADLINE, AVX512).workspace_bytes == 4 * (2 * 3 * 162 * 64 + 32 * 576)
    # nothing is staged without padding at the sides; 21 filters are padded to 24
    bare = ConvProblem(N=1, C=5, H=9, W=9, K=21, R=3, S=1, padding=(1, 0), dtype="f32")
    assert FAMILY.launch(config(lanes=8), bare, AVX512).workspace_bytes == 4 * 24 * 15


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "f16"}, "direct_cpu computes f32 (--dtype f32), not f16"),
        ({"dtype": "s8"}, "direct_cpu computes f32 (--dtype f32), not s8"),
        ({"layout": "nchw"}, "direct_cpu computes nhwc (--layout nhwc), not nchw"),
        ({"epilogue": Epilogue(out_dtype="f16")}, "direct_cpu stores f32, not f16"),
    ],
)
def test_what_it_cannot_compute_is_refused_in_one_line(changes, reason):
    problem = ConvProblem(**{"N": 1, "C": 8, "H": 5, "W": 5, "K": 8, "R": 3, "S": 3, "dtype": "f32"} | changes)
    assert FAMILY.unsupported(problem, AVX512) == reason
    assert FAMILY.configs(problem, AVX512) == ()


# What is predicted


def test_the_default_fills_the_vectors_and_hides_the_latency():
    for device, lanes in ((AVX512, 16), (AVX2, 8), (NEON, 4)):
        default = FAMILY.default(HEADLINE, device)
        assert default["lanes"] == lanes
        assert default["pixels"] * default["k_vectors"] >= 8


def test_a_tile_with_too_few_sums_is_predicted_to_be_slow():
    single = FAMILY.predict_us(config(lanes=16), HEADLINE, AVX512)
    good = FAMILY.predict_us(config(lanes=16, pixels=14, k_vectors=2, rows=4), HEADLINE, AVX512)
    # one sum waits for its own latency: 8 slots for one multiply-add
    assert 6 < single / good < 12
    roofline = 1e6 * HEADLINE.flops / 500e9
    assert roofline < good < 1.3 * roofline


def test_one_task_is_predicted_to_leave_other_cores_idle():
    problem = ConvProblem(N=1, C=64, H=8, W=56, K=32, R=3, S=3, padding=1, dtype="f32")
    whole = FAMILY.predict_us(config(lanes=16, pixels=14, k_vectors=2, rows=8), problem, AVX512)
    halves = FAMILY.predict_us(config(lanes=16, pixels=14, k_vectors=2, rows=4), problem, AVX512)
    assert 1.5 < whole / halves < 2.1


if __name__ == "__main__":
    run_between_fences()
