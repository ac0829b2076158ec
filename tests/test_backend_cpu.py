"""The cpu backend: compilers that fail, lack something or hang; the measured device; buffers, timing, arrays."""

from __future__ import annotations

import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from autotune import ConvProblem, Device, DType
from autotune.backends import (
    CompileError,
    ConstraintsError,
    NoDevice,
    Operands,
    backend,
    cache,
    cpu,
    cpu_model,
    find,
    host,
)
from autotune.families import Launch, Source
from autotune.families.direct_cpu import DirectCpu

PROBLEM = ConvProblem(N=1, C=8, H=6, W=7, K=12, R=3, S=3, padding=1, dtype="f32")
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)

ADD = Source(
    language="c",
    stem="add",
    text="void add(const float *a, const float *b, float *out) { out[0] = a[0] + b[0]; }\n",
    entry="add",
)


@pytest.fixture(scope="module")
def device():
    return find("cpu")


@pytest.fixture
def cpu_backend(device):
    return cpu.CpuBackend(device.spec)


@pytest.fixture
def wrapped_compiler(tmp_path, monkeypatch):
    """Makes CC a script that runs some lines of shell before the compiler, with a cache of its own."""

    def wrap(lines):
        script = tmp_path / "wrapped cc"
        script.write_text(f'#!/bin/sh\n{lines}\nexec {COMPILER} "$@"\n')
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("CC", f"'{script}'")
        monkeypatch.setattr(cache, "directory", lambda: tmp_path)
        host._host.cache_clear()

    yield wrap
    host._host.cache_clear()


def run_layer(spec):
    """Compile and run the default config of a small layer; its number of wrong elements."""
    family, runner = DirectCpu(), cpu.CpuBackend(spec)
    config = family.default(PROBLEM, spec)
    launch = family.launch(config, PROBLEM, spec)
    kernel = runner.load(cpu.CpuCompiler(spec).compile(family.source(config, PROBLEM, spec)), launch)
    activation, filters, output, workspace = map(
        runner.allocate,
        (PROBLEM.activation_bytes, PROBLEM.filter_bytes, PROBLEM.output_bytes, launch.workspace_bytes),
    )
    runner.randomize(activation, DType.F32, 1, 1.0)
    runner.randomize(filters, DType.F32, 2, 0.1)
    runner.fill(output, 0xFF)
    kernel(Operands(activation=activation, filter=filters, output=output, workspace=workspace))
    return runner.compare(PROBLEM, output, runner.reference(PROBLEM, activation, filters)).mismatches


# Compilers


def test_the_device_of_this_machine(device):
    spec = device.spec
    assert device == Device(id="cpu", spec=spec, driver=f"{platform.system()} {platform.release()}")
    assert spec.kind == "cpu"
    assert spec.name
    assert spec.sm_count == cpu_model.cores()
    assert spec.vector_bytes == {"x86-64-avx512": 64, "x86-64-avx2": 32}.get(spec.arch, 16)
    # a core does at least one vector multiply-add a clock of 1 GHz, and no more than four at 6 GHz
    per_core = spec.rate(DType.F32) / spec.sm_count
    assert spec.vector_bytes / 2 * 1e9 < per_core < spec.vector_bytes / 2 * 4 * 6e9
    assert 1e9 < spec.bytes_per_s < 5e12
    assert spec.l2_bytes >= 1 << 18


def test_without_a_compiler_the_device_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (listed,) = cpu.devices()
    reason = "no C compiler: install gcc or clang (apt-get install gcc, dnf install gcc), or set CC"
    assert listed == Device(id="cpu", reason=reason)
    with pytest.raises(NoDevice, match=f"^cpu cannot be used: {re.escape(reason)}$"):
        find("cpu")


@pytest.mark.parametrize(
    ("cc", "reason"),
    [
        ("/nowhere/cc -m64", "CC is '/nowhere/cc -m64', which is not a command"),
        ("'unclosed", 'CC is "\'unclosed", which is not a command'),
    ],
)
def test_an_unusable_cc_is_named(cc, reason, monkeypatch):
    monkeypatch.setenv("CC", cc)
    assert cpu.devices() == [Device(id="cpu", reason=reason)]


def test_a_command_that_cannot_be_started_is_no_compiler(tmp_path, monkeypatch):
    (tmp_path / "cc").write_text("neither a binary nor a script")
    (tmp_path / "cc").chmod(0o700)
    monkeypatch.setenv("CC", str(tmp_path / "cc"))
    assert cpu.devices() == [Device(id="cpu", reason=f"{tmp_path}/cc --version failed: error: Exec format error")]


def test_a_compiler_that_writes_nothing_has_refused(device, wrapped_compiler):
    wrapped_compiler('case "$*" in *add-*) exit 0;; esac')
    with pytest.raises(CompileError, match=r"^the compiler ended with 0 and wrote nothing$"):
        cpu.CpuCompiler(device.spec).compile(ADD)


def test_a_command_without_a_version_is_no_compiler(wrapped_compiler):
    wrapped_compiler("echo unknown option >&2; exit 3")
    (listed,) = cpu.devices()
    assert listed.reason is not None
    assert listed.reason.endswith("wrapped cc' --version failed: unknown option")


def test_a_command_that_compiles_nothing_is_named(wrapped_compiler):
    wrapped_compiler('case "$*" in *--version*|*-dM*) ;; *) echo "cannot find -lc" >&2; exit 1;; esac')
    (listed,) = cpu.devices()
    assert listed.reason is not None
    assert listed.reason.endswith("cannot build a shared library: cannot find -lc")
    assert "\n" not in listed.reason


def test_a_compiler_without_openmp_serves_one_core(wrapped_compiler):
    wrapped_compiler('case "$*" in *-fopenmp*) echo "error: no openmp" >&2; exit 1;; esac')
    (listed,) = cpu.devices()
    assert listed.spec.sm_count == 1
    assert "-fopenmp" not in host.host().flags
    assert run_layer(listed.spec) == 0


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the baseline of this architecture is another")
def test_a_compiler_without_march_native_gets_the_baseline(wrapped_compiler):
    wrapped_compiler('case "$*" in *=native*) echo "error: unknown argument" >&2; exit 1;; esac')
    (listed,) = cpu.devices()
    assert listed.spec.arch == "x86-64"
    assert listed.spec.vector_bytes == 16
    assert not any("native" in flag for flag in host.host().flags)
    assert run_layer(listed.spec) == 0


def test_a_refused_source_gives_its_first_error(device):
    compiler = cpu.CpuCompiler(device.spec)
    broken = Source(language="c", stem="broken", text="#warning note\nint f( { return x; }\n", entry="f")
    with pytest.raises(CompileError) as caught:
        compiler.compile(broken)
    first, *log = str(caught.value).splitlines()
    assert "error:" in first
    assert len(log) > 1


def test_a_hanging_compiler_is_killed_with_its_children(device, wrapped_compiler, tmp_path, monkeypatch):
    told = tmp_path / "child"
    wrapped_compiler(f'case "$*" in *endless-*) sleep 1000 & echo $! > {told}; wait;; esac')
    compiler = cpu.CpuCompiler(device.spec)
    monkeypatch.setattr(host, "COMPILE_TIMEOUT_S", 1.0)
    source = Source(language="c", stem="endless", text="int f(void) { return 1; }\n", entry="f")
    with pytest.raises(CompileError, match="took more than 1 s and was killed"):
        compiler.compile(source)
    child = int(told.read_text())
    for _ in range(100):
        # gone, or a zombie that nobody waits for
        state = Path(f"/proc/{child}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return
        time.sleep(0.05)
    pytest.fail("the compiler's child lives on")


def test_the_compiler_states_its_version(device):
    compiler = cpu.CpuCompiler(device.spec)
    told = subprocess.run([COMPILER, "--version"], capture_output=True, text=True, check=True).stdout
    assert compiler.version == told.splitlines()[0].strip() or "CC" in os.environ
    kernel = compiler.compile(ADD)
    assert kernel.compiler == compiler.version
    assert kernel.entry == "add"
    assert kernel.digest == compiler.digest(ADD)
    assert compiler.compile(ADD).compile_s == 0.0


def test_the_cpu_is_in_the_key_of_its_binaries(device, monkeypatch):
    here = host.host()
    other = host.Host(command=here.command, version=here.version, flags=here.flags, identity="other", spec=here.spec)
    assert other.compile(ADD).path != here.compile(ADD).path


# The measured device


def test_processes_that_start_together_agree_on_the_device(tmp_path):
    code = "from autotune.backends import host; print(repr(host.host()))"
    environment = os.environ | {"AUTOTUNE_CACHE": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    told = {process.communicate(timeout=60)[0] for process in started}
    assert len(told) == 1
    assert next(iter(told)).startswith("Host(command=")
    assert len(list(tmp_path.glob("cpu-*.json"))) == 1


def test_a_remembered_device_is_not_measured_again(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "directory", lambda: tmp_path)
    measured = []

    def measure(path, cores):
        measured.append(cores)
        return 3e9 * cores, 1e9

    monkeypatch.setattr(host, "_measure", measure)
    try:
        found = []
        for damage in (None, "", "{}", "not json", None):
            host._host.cache_clear()
            (record,) = tmp_path.glob("cpu-*.json") if found else (None,)
            if damage is not None:
                record.write_text(damage)
            found.append(host.host())
        cores = cpu_model.cores()
        assert len(set(found)) == 1
        assert found[0].spec.rates == ((DType.F32, 3e9 * cores),)
        # at first, and after each damage
        assert measured == [cores] * 4
    finally:
        host._host.cache_clear()


def test_a_stored_device_is_found_though_its_rates_differ(device):
    stored = host.DeviceSpec(
        kind="cpu",
        name=device.spec.name,
        arch=device.spec.arch,
        sm_count=device.spec.sm_count,
        l2_bytes=1,
        bytes_per_s=1.0,
        rates=((DType.F32, 1.0),),
    )
    assert find(stored) == device
    with pytest.raises(NoDevice, match="another x1 is not a device of this machine"):
        find(host.DeviceSpec(kind="cpu", name="another", arch="", sm_count=1, l2_bytes=1, bytes_per_s=1.0, rates=()))


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        ("model name\t: AMD EPYC 9654 96-Core Processor\ncpu family\t: 25\nmodel\t\t: 17\n", "AMD EPYC 9654"),
        ("model name\t: Intel(R) Xeon(R) Platinum 8480+\ncpu family\t: 6\nmodel\t: 143\n", "Intel Xeon Platinum 8480+"),
        ("model name\t: Intel(R) Core(TM) i7-8700K CPU @ 3.70GHz\ncpu family: 6\nmodel: 158\n", "Intel Core i7-8700K"),
        (
            "model name\t: AMD EPYC\ncpu family\t: 26\nmodel\t\t: 2\n\nmodel name : other\n",
            "AMD EPYC family 26 model 2",
        ),
        ("BogoMIPS: 50\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n", f"{os.uname().machine} 0x41-0xd40"),
    ],
)
def test_model_names_are_normalised(facts, name, tmp_path, monkeypatch):
    (tmp_path / "cpuinfo").write_text(facts)
    monkeypatch.setattr(cpu_model, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpu_model.name() == name


def test_the_identity_follows_the_instructions_that_the_cpu_has(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_model, "_CPUINFO", tmp_path / "cpuinfo")
    told = []
    for flags in ("fma avx2", "fma avx2 avx512f", "fma avx2"):
        (tmp_path / "cpuinfo").write_text(f"model name: X 1\nflags: {flags}\ncpu MHz: {len(told)}\n")
        told.append(cpu_model.identity())
    assert told[0] == told[2] != told[1]


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("?", 4)])
def test_cores_follow_the_quota_of_the_control_group(quota, cores, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(cpu_model, "_CPU_MAX", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", {0: {0, 1, 2, 5}}.get, raising=False)
    assert cpu_model.cores() == cores


def test_the_last_level_cache_is_that_of_the_highest_level(tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_model, "_CPU", tmp_path)
    assert cpu_model.last_level_bytes() == 32 << 20
    for index, (level, size) in enumerate((("1", "48K"), ("3", "96M"), ("2", "1024K"), ("4", ""))):
        (tmp_path / "cache" / f"index{index}").mkdir(parents=True)
        (tmp_path / "cache" / f"index{index}" / "level").write_text(level)
        (tmp_path / "cache" / f"index{index}" / "size").write_text(f"{size}\n")
    assert cpu_model.last_level_bytes() == 96 << 20


@pytest.mark.parametrize(
    ("macros", "arch"),
    [
        ({"__x86_64__", "__AVX2__", "__FMA__", "__AVX512F__"}, ("x86-64-avx512", 64)),
        ({"__x86_64__", "__AVX2__", "__FMA__"}, ("x86-64-avx2", 32)),
        ({"__x86_64__", "__AVX2__"}, ("x86-64", 16)),
        ({"__aarch64__"}, ("aarch64-neon", 16)),
    ],
    ids=str,
)
def test_the_architecture_is_what_the_compiler_generates_code_for(macros, arch):
    assert host._arch(frozenset(macros)) == arch


# Buffers and launches


@pytest.mark.parametrize("nbytes", [0, 1, 255, 4096, 1_000_003])
def test_buffers_are_aligned_and_can_be_filled_copied_and_compared(nbytes, cpu_backend):
    one, other = cpu_backend.allocate(nbytes), cpu_backend.allocate(nbytes)
    assert one.size == nbytes
    assert one.dtype == np.uint8
    # an empty array has no address to align
    assert nbytes == 0 or one.ctypes.data % 256 == other.ctypes.data % 256 == 0
    cpu_backend.fill(one, 0xA5)
    assert cpu_backend.is_filled(one, 0xA5)
    assert cpu_backend.is_filled(one, 0xA4) == (nbytes == 0)
    cpu_backend.copy(other, one)
    assert cpu_backend.is_same(one, other)
    for index in {0, nbytes // 2, nbytes - 1} if nbytes else ():
        other[index] ^= 1
        assert not cpu_backend.is_filled(other, 0xA5)
        assert not cpu_backend.is_same(one, other)
        other[index] ^= 1


@pytest.mark.parametrize(("dtype", "held"), [("f32", np.float32), ("f16", np.float16)])
def test_random_floats_have_the_deviation_and_follow_the_seed(dtype, held, cpu_backend):
    buffers = [cpu_backend.allocate(200_000) for _ in range(3)]
    for buffer, seed in zip(buffers, (1, 1, 2), strict=True):
        cpu_backend.randomize(buffer, DType.of(dtype), seed, 0.25)
    values = buffers[0].view(held).astype(float)
    assert abs(values.mean()) < 0.01
    assert values.std() == pytest.approx(0.25, rel=0.02)
    assert (buffers[0] == buffers[1]).all()
    assert (buffers[0] != buffers[2]).any()


def test_random_integers_cover_the_whole_range(cpu_backend):
    buffer = cpu_backend.allocate(100_000)
    cpu_backend.randomize(buffer, DType.S8, 5, 1.0)
    found, counts = np.unique(buffer.view(np.int8), return_counts=True)
    assert found.tolist() == list(range(-128, 128))
    assert counts.min() > 250


def test_random_bf16_are_floats(cpu_backend):
    buffer = cpu_backend.allocate(100_000)
    cpu_backend.randomize(buffer, DType.BF16, 5, 2.0)
    values = (buffer.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    assert values.std() == pytest.approx(2.0, rel=0.02)


def test_arguments_are_passed_by_name(device, cpu_backend):
    compiled = cpu.CpuCompiler(device.spec).compile(ADD)
    launch = Launch(grid=1, block=1, arguments=("filter", "activation", "output"))
    kernel = cpu_backend.load(compiled, launch)
    one, two, out = (np.array([value], np.float32).view(np.uint8) for value in (1, 2, 0))
    kernel(Operands(activation=one, filter=two, output=out))
    assert out.view(np.float32)[0] == 3


def test_what_cannot_be_loaded_breaks_a_constraint(device, cpu_backend, tmp_path):
    compiled = cpu.CpuCompiler(device.spec).compile(ADD)
    launch = Launch(grid=1, block=1)
    (tmp_path / "text.so").write_text("no library")
    for path, entry in ((compiled.path, "absent"), (str(tmp_path / "text.so"), "add"), ("/nowhere/x.so", "add")):
        other = backend.CompiledKernel(path=path, entry=entry, digest="", compiler="", compile_s=0.0)
        with pytest.raises(ConstraintsError, match=r"^load refused: ."):
            cpu_backend.load(other, launch)


FORKING = """
import os, signal
from autotune.backends import find
from test_backend_cpu import run_layer

spec = find("cpu").spec
assert run_layer(spec) == 0
child = os.fork()
if not child:
    signal.alarm(20)
    os._exit(run_layer(spec))
assert os.waitpid(child, 0)[1] == 0, "the child hung or computed something else"
assert run_layer(spec) == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_runs_kernels_and_so_does_its_parent():
    subprocess.run([sys.executable, "-c", FORKING], check=True, cwd=Path(__file__).parent)


def test_timing_takes_the_operands_in_turn(cpu_backend):
    seen = []
    operands = [Operands(activation=index, filter=None, output=None) for index in range(3)]

    def kernel(chosen):
        seen.append(chosen.activation)
        time.sleep(0.002)

    times = cpu_backend.time(kernel, operands, launches=2, samples=4)
    assert seen == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(times) == 4
    # microseconds a launch: a sleep is never shorter than asked for
    assert min(times) >= 2000


def test_the_clock_is_read_where_the_system_tells(cpu_backend, tmp_path, monkeypatch):
    monkeypatch.setattr(cpu_model, "_CPU", tmp_path)
    monkeypatch.setattr(cpu_model, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpu_backend.clocks() == (None, None)
    (tmp_path / "cpuinfo").write_text("cpu MHz\t\t: 2596.122\n\ncpu MHz\t\t: 3100.7\n")
    assert cpu_backend.clocks() == (3101, None)
    (tmp_path / "cpufreq").mkdir()
    (tmp_path / "cpufreq" / "scaling_cur_freq").write_text("3400123\n")
    assert cpu_backend.clocks() == (3400, None)


# The caller's arrays


def activation_array():
    return np.arange(np.prod(PROBLEM.activation_shape), dtype=np.float32).reshape(PROBLEM.activation_shape)


def test_a_contiguous_array_is_viewed_not_copied(cpu_backend):
    array = activation_array()
    found = cpu_backend.bytes_of("activation", array, PROBLEM)
    assert found.dtype == np.uint8
    assert found.ctypes.data == array.ctypes.data
    assert found.size == PROBLEM.activation_bytes


def test_arrays_in_other_forms_are_copied(cpu_backend):
    array = activation_array()
    wanted = array.tobytes()
    transposed = np.ascontiguousarray(array.transpose(0, 3, 1, 2)).transpose(0, 2, 3, 1)
    shifted = np.zeros(array.nbytes + 1, np.uint8)[1:].view(np.float32).reshape(array.shape)
    shifted[...] = array
    sliced = np.repeat(array, 2, axis=2)[:, :, ::2]
    reversed_twice = array[:, ::-1].copy()[:, ::-1]
    for other in (transposed, shifted, sliced, reversed_twice, array.astype(">f4"), array.astype("<f4")):
        found = cpu_backend.bytes_of("activation", other, PROBLEM)
        assert found.tobytes() == wanted
        assert found.ctypes.data % 4 == 0
        assert found.flags.c_contiguous


def test_anything_that_numpy_can_view_is_taken(cpu_backend):
    class Foreign:
        def __init__(self, array):
            self.__array_interface__ = array.__array_interface__
            self.kept = array

    array = activation_array()
    array.flags.writeable = False
    assert cpu_backend.bytes_of("activation", Foreign(array), PROBLEM).tobytes() == array.tobytes()


def test_bf16_is_taken_as_its_bit_patterns(cpu_backend):
    problem = ConvProblem(N=1, C=2, H=1, W=1, K=1, R=1, S=1, dtype="bf16")
    bits = np.array([0x3F80, 0x4000], np.uint16).reshape(1, 1, 1, 2)
    assert cpu_backend.bytes_of("activation", bits, problem).view(np.uint16).tolist() == [0x3F80, 0x4000]
    assert cpu_backend.new_output(problem).dtype == np.uint16


def test_wrong_arrays_are_refused_in_one_line(cpu_backend):
    class Elsewhere:
        def __array__(self, dtype=None, copy=None):
            raise TypeError("lives on another device\nsecond line")

    good = activation_array()
    for name, array, message in (
        (
            "activation",
            good[..., :7],
            "activation must be f32 of shape (1, 6, 7, 8), not float32 of shape (1, 6, 7, 7)",
        ),
        (
            "activation",
            good.astype(float),
            "activation must be f32 of shape (1, 6, 7, 8), not float64 of shape (1, 6, 7, 8)",
        ),
        ("filter", good, "filter must be f32 of shape (12, 3, 3, 8), not float32 of shape (1, 6, 7, 8)"),
        ("output", good, "output must be f32 of shape (1, 6, 7, 12), not float32 of shape (1, 6, 7, 8)"),
        (
            "activation",
            Elsewhere(),
            "activation is no NumPy array and cannot be viewed as one: lives on another device",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            cpu_backend.bytes_of(name, array, PROBLEM)


def test_an_output_is_never_a_copy(cpu_backend):
    output = cpu_backend.new_output(PROBLEM)
    assert output.shape == PROBLEM.output_shape
    assert output.dtype == np.float32
    assert cpu_backend.bytes_of("output", output, PROBLEM).ctypes.data == output.ctypes.data
    readonly = output.copy()
    readonly.flags.writeable = False
    strided = np.empty((1, 6, 7, 24), np.float32)[..., ::2]
    for other in (readonly, strided, output.astype(">f4")):
        with pytest.raises(ValueError, match=r"^output must be a contiguous, aligned and writable array$"):
            cpu_backend.bytes_of("output", other, PROBLEM)


def test_threads_are_streams_of_their_own(cpu_backend):
    keys = [cpu_backend.stream_key(), cpu_backend.stream_key()]
    thread = threading.Thread(target=lambda: keys.append(cpu_backend.stream_key()))
    thread.start()
    thread.join()
    assert keys[0] == keys[1] != keys[2]
