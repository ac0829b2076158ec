"""Runs CUDA kernels without a GPU: compiles their unmodified sources for the host and checks what they compute."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from autotune import reference
from autotune.backends.operands import spread
from autotune.device import DeviceSpec
from autotune.families import Family, Launch, Source, TensorMap
from autotune.problem import ConvProblem, DType
from autotune.resources import folder
from autotune.trial import Config

SHIM = Path(__file__).resolve().parent / "host"
# dynamic shared memory of the largest device, and some more that a launch must not touch
_CAPACITY = 256 << 10
_DYNAMIC = re.compile(r"extern\s+__shared__\s+__align__\((\d+)\)\s+char\s+(\w+)\[\]")
_CLUSTER = re.compile(r"__cluster_dims__\((\d+), 1, 1\)")
# accesses are reported to the machine, arithmetic that C++ does not define ends the run with its line
_KERNEL_FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fno-exceptions", "-fno-optimize-sibling-calls", "-w"),
    *("-fsanitize=thread", "-fsanitize=bounds,shift,signed-integer-overflow,alignment"),
    "-fsanitize-undefined-trap-on-error",
)
_MACHINE_FLAGS = ("-std=c++17", "-O3", "-march=native")
_LOCK = threading.Lock()

Array = np.ndarray[Any, np.dtype[Any]]


class HostFault(AssertionError):
    """A kernel is wrong; one line says what, with source lines, the thread and the block."""


@dataclass(frozen=True, slots=True)
class Case:
    """One config of a family on one layer and one device model."""

    family: Family
    config: Config
    problem: ConvProblem
    spec: DeviceSpec

    def __str__(self) -> str:
        return f"{self.config} on {self.problem}, {self.spec.arch} with {self.spec.sm_count} multiprocessors"


class HostMachine:
    """Compiles and runs kernels. directory: for what is built. kernels: the folder of sources, by default the
    project's. RuntimeError when there is no C++ compiler or it refuses the machine or a kernel."""

    def __init__(self, directory: Path, kernels: Path | None = None) -> None:
        self._directory = directory
        # the kernels with ptx.cuh replaced, in one folder, since an include is looked up beside its includer first
        self._sources = directory / "kernels"
        self._sources.mkdir()
        kernels = kernels or folder("kernels")
        for path in (*kernels.glob("*.cuh"), *kernels.glob("include/*.cuh"), *SHIM.glob("*.cuh")):
            link = self._sources / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())

    def check(self, case: Case, seed: int) -> None:
        """Run the case on random operands and compare with the reference; HostFault when anything is wrong."""
        problem, drawn = case.problem, operands(case.problem, seed)
        content = self.run(
            case.family.source(case.config, problem, case.spec),
            case.family.launch(case.config, problem, case.spec),
            case.spec,
            inputs={name: array.tobytes() for name, array in drawn.items()},
            output_bytes=problem.output_bytes,
            seed=seed,
        )
        found = np.frombuffer(content, reference.STORAGE[problem.out_dtype]).reshape(problem.output_shape)
        expected = reference.conv2d(problem, **drawn)
        mismatches, worst = reference.compare(problem, found, expected)
        if mismatches:
            error = np.abs(reference.decode(problem.out_dtype, found) - expected.value)
            at = np.unravel_index(np.nan_to_num(error, nan=np.inf).argmax(), error.shape)
            where = ", ".join(map(str, at))
            raise HostFault(f"{mismatches} of {found.size} outputs are wrong, by {worst:g} at [n, p, q, k] = [{where}]")

    def run(
        self,
        source: Source,
        launch: Launch,
        spec: DeviceSpec,
        *,
        inputs: Mapping[str, bytes],
        output_bytes: int,
        seed: int,
        timeout_s: int = 60,
    ) -> bytes:
        """The output after as many launches as can differ: two where a workspace carries state over.

        seed: of the order in which blocks and warps take turns. timeout_s: of computing, not on the wall.
        HostFault when the machine finds anything wrong.
        """
        with tempfile.TemporaryDirectory(dir=self._directory) as directory:
            scratch = Path(directory)
            kernel = self._compile(scratch, source, spec)
            buffers = {operand: ("input", content) for operand, content in inputs.items()}
            buffers["output"] = ("output", b"\xa5" * output_bytes)
            buffers["workspace"] = ("workspace", bytes(launch.workspace_bytes))
            texts = []
            for name, (use, content) in buffers.items():
                (scratch / name).write_bytes(content)
                texts.append(f"{name}:{use}:{len(content)}:{scratch / name}")
            alignment, dynamic = _dynamic(source)
            launches = 2 if launch.workspace_bytes else 1
            shape = (launch.grid, launch.block, launch.smem_bytes, alignment, spec.sm * 10, _cluster(source))
            numbers = (*shape, seed, launches, timeout_s)
            parameters = map(_parameter, launch.arguments)
            command = [_driver(), kernel, dynamic, *numbers, *texts, "--", *parameters]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
            last = done.stdout.rpartition("\n")[0].rpartition("\n")[2]
            if last != "ok":
                reason = last.removeprefix("fault ") or f"the machine ended with {done.returncode}: {done.stderr}"
                raise HostFault(_with_lines(kernel, reason))
            return (scratch / "output").read_bytes()

    def _compile(self, scratch: Path, source: Source, spec: DeviceSpec) -> Path:
        _, dynamic = _dynamic(source)
        text = scratch / f"{source.stem}.cpp"
        text.write_text(
            f"{source.text}\n"
            f"__attribute__((aligned(1024))) thread_local char {dynamic}[{_CAPACITY}];\n"
            f'extern "C" const unsigned long dynamic_capacity = {_CAPACITY};\n'
            f'extern "C" void run_kernel(void* const* arguments) {{ host::call({source.entry}, arguments); }}\n'
        )
        unlinked, kernel = scratch / "kernel.o", scratch / "kernel.so"
        include = ("-include", str(SHIM / "cuda.hpp"), f"-I{self._sources}", f"-D__CUDA_ARCH__={spec.sm * 10}")
        _build([*_compiler(), *_KERNEL_FLAGS, *include, "-c", str(text), "-o", str(unlinked)])
        # without the sanitizer's library: the machine takes its place
        _build([*_compiler(), "-shared", str(unlinked), "-o", str(kernel)])
        return kernel


def operands(problem: ConvProblem, seed: int) -> dict[str, Array]:
    """Random operands by name, drawn as measurement draws them and held as the reference takes them."""
    rng = np.random.default_rng(seed)
    drawn = {}
    for name, (mean, deviation) in spread(problem).items():
        shape, dtype = problem.operand(name)
        if dtype is DType.S8:
            drawn[name] = rng.integers(-128, 128, shape, dtype=np.int8)
        else:
            drawn[name] = reference.encode(dtype, rng.normal(mean, deviation, shape).astype(np.float32))
    return drawn


def _dynamic(source: Source) -> tuple[int, str]:
    """Alignment and name of the kernel's dynamic shared memory, as its text declares it, if it does."""
    found = _DYNAMIC.search(source.text)
    return (int(found[1]), found[2]) if found else (16, "no_dynamic_memory")


def _cluster(source: Source) -> int:
    """How many blocks form a cluster, as the kernel's text says."""
    found = _CLUSTER.search(source.text)
    return int(found[1]) if found else 1


def _parameter(argument: str | TensorMap) -> str:
    """A kernel's parameter as the driver takes it."""
    if isinstance(argument, str):
        return argument
    m = argument
    steps = m.steps or (1,) * len(m.extents)
    lists = ((m.element_bytes,), m.extents, m.strides, m.box, (m.swizzle,), sum(m.corners or (), ()), steps)
    return f"{m.operand}=" + ";".join(",".join(map(str, numbers)) for numbers in lists)


@cache
def _compiler() -> tuple[str, ...]:
    named = os.environ.get("CXX")
    if named:
        return tuple(shlex.split(named))
    found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    if found is None:
        raise RuntimeError("no C++ compiler: install g++ or clang (apt-get install g++, dnf install gcc-c++)")
    return (found,)


def _driver() -> Path:
    """The program that runs a kernel's library, built once a process."""
    with _LOCK:
        return _built_driver()[1]


@cache
def _built_driver() -> tuple[tempfile.TemporaryDirectory[str], Path]:
    # the directory lives as long as this process
    directory = tempfile.TemporaryDirectory(prefix="conv-autotune-host-")
    parts = [(source, Path(directory.name) / f"{source.stem}.o") for source in sorted(SHIM.glob("*.cpp"))]

    def compile_part(part: tuple[Path, Path]) -> None:
        _build([*_compiler(), *_MACHINE_FLAGS, "-c", str(part[0]), "-o", str(part[1])])

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_part, parts))
    driver = Path(directory.name) / "driver"
    _build([*_compiler(), "-rdynamic", *(str(part) for _, part in parts), "-o", str(driver), "-ldl", "-pthread"])
    return directory, driver


def _build(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}\n{done.stdout}{done.stderr}")


def _with_lines(kernel: Path, text: str) -> str:
    """The text with every ``{offset}`` replaced by its source line: the kernel's own, not that of a wrapper."""
    wrappers = {path.name for path in SHIM.iterdir()}

    def line(found: re.Match[str]) -> str:
        command = ["addr2line", "-i", "-e", str(kernel), found[1]]
        try:
            chain = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        # a compiler may come without it
        except (OSError, subprocess.CalledProcessError):
            return f"offset {found[1]}"
        lines = [Path(entry.partition(" ")[0]).name for entry in chain]
        own = [entry for entry in lines if entry.partition(":")[0] not in wrappers]
        return next((entry for entry in own if ".cuh:" in entry), (own or lines)[0])

    return re.sub(r"\{(0x[0-9a-f]+)\}", line, text)
