"""Runs CUDA kernels without a GPU: compiles their unmodified sources for the host and checks what they compute."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from autotune import reference
from autotune.device import DeviceSpec
from autotune.families import Family
from autotune.families.family import Launch, Source, TensorMap
from autotune.problem import ConvProblem, DType
from autotune.resources import folder
from autotune.trial import Config

SHIM = Path(__file__).resolve().parent / "host"
# dynamic shared memory of the largest device, and some more that a launch must not touch
_CAPACITY = 256 << 10
_DYNAMIC = re.compile(r"extern\s+__shared__\s+__align__\((\d+)\)\s+char\s+(\w+)\[\]")
_TIMEOUT_S = 60
# accesses are reported to the machine, arithmetic that C++ does not define ends the run with its line
_FLAGS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fno-exceptions", "-fno-optimize-sibling-calls", "-w"),
    *("-fsanitize=thread", "-fsanitize=bounds,shift,signed-integer-overflow", "-fsanitize-undefined-trap-on-error"),
)


class HostFault(AssertionError):
    """A kernel is wrong; the message says what, with source lines, the thread and the block."""


@dataclass(frozen=True, slots=True)
class Case:
    """One config of a family on one layer and one device model."""

    family: Family
    config: Config
    problem: ConvProblem
    spec: DeviceSpec

    def __str__(self) -> str:
        return f"{self.config} on {self.problem} for {self.spec.arch}"


class HostMachine:
    """Compiles and runs cases. directory: for everything built. kernels: the folder of sources, the project's unless
    given. RuntimeError when there is no C++ compiler or it refuses the machine itself."""

    def __init__(self, directory: Path, kernels: Path | None = None) -> None:
        self._directory = directory
        self._kernels = kernels or folder("kernels")

    @cached_property
    def _compiler(self) -> tuple[str, ...]:
        named = os.environ.get("CXX")
        if named:
            return tuple(shlex.split(named))
        found = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
        if found is None:
            raise RuntimeError("no C++ compiler: install g++ or clang (apt-get install g++, dnf install gcc-c++)")
        return (found,)

    @cached_property
    def _driver(self) -> Path:
        """The program that runs a kernel's library."""
        driver = self._directory / "driver"
        sources = sorted(map(str, SHIM.glob("*.cpp")))
        flags = ("-std=c++17", "-O3", "-march=native", "-rdynamic")
        self._build([*self._compiler, *flags, *sources, "-o", str(driver), "-ldl"])
        return driver

    @cached_property
    def _sources(self) -> Path:
        """The kernels with ptx.cuh replaced. A folder, since an include is looked up beside its includer first."""
        staged = self._directory / "kernels"
        staged.mkdir()
        for path in (*self._kernels.glob("*.cuh"), *self._kernels.glob("include/*.cuh"), *SHIM.glob("*.cuh")):
            link = staged / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
        return staged

    def check(self, case: Case, seed: int) -> None:
        """Run the case on random operands and compare with the reference; HostFault when anything is wrong."""
        problem, launch = case.problem, case.family.launch(case.config, case.problem, case.spec)
        activation, filters = operands(problem, seed)
        source = case.family.source(case.config, problem, case.spec)
        with tempfile.TemporaryDirectory(dir=self._directory) as scratch:
            output = self._run(Path(scratch), source, launch, case.spec, problem, (activation, filters), seed)
        found = output.view(reference.STORAGE[problem.out_dtype]).reshape(problem.output_shape)
        expected = reference.conv2d(problem, activation, filters)
        mismatches, worst = reference.compare(problem, found, expected)
        if mismatches:
            wrong = np.abs(reference.decode(problem.out_dtype, found) - expected.value)
            at = np.unravel_index(int(np.nanargmax(np.where(np.isnan(wrong), np.inf, wrong))), wrong.shape)
            raise HostFault(
                f"{mismatches} of {found.size} outputs are wrong, the worst by {worst:g} at [n, p, q, k] = "
                f"[{', '.join(map(str, at))}]"
            )

    def _run(
        self,
        scratch: Path,
        source: Source,
        launch: Launch,
        spec: DeviceSpec,
        problem: ConvProblem,
        inputs: tuple[np.ndarray, np.ndarray],
        seed: int,
    ) -> np.ndarray:
        """The output's bytes after as many launches as can differ: two where a workspace carries state over."""
        kernel = self._compile(scratch, source, spec)
        buffers = {
            "activation": ("input", inputs[0].tobytes()),
            "filter": ("input", inputs[1].tobytes()),
            "output": ("output", b"\xa5" * problem.output_bytes),
            "workspace": ("workspace", bytes(launch.workspace_bytes)),
        }
        texts = []
        for name, (use, content) in buffers.items():
            (scratch / name).write_bytes(content)
            texts.append(f"{name}:{use}:{len(content)}:{scratch / name}")
        texts += ["--", *map(_parameter, launch.arguments)]
        alignment, dynamic = _dynamic(source, self._sources)
        numbers = (launch.grid, launch.block, launch.smem_bytes, alignment, _arch(spec), seed)
        launches = 2 if launch.workspace_bytes else 1
        command = [self._driver, kernel, dynamic, *numbers, launches, _TIMEOUT_S, *texts]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        last = (done.stdout.splitlines() or [f"the driver ended with {done.returncode}: {done.stderr.strip()}"])[-1]
        if last != "ok":
            raise HostFault(self._with_lines(kernel, last.removeprefix("fault ")))
        return np.frombuffer((scratch / "output").read_bytes(), np.uint8)

    def _compile(self, scratch: Path, source: Source, spec: DeviceSpec) -> Path:
        _, dynamic = _dynamic(source, self._sources)
        text = scratch / f"{source.stem}.cpp"
        text.write_text(
            f"{source.text}\n"
            f"__attribute__((aligned(1024))) thread_local char {dynamic}[{_CAPACITY}];\n"
            f'extern "C" const unsigned long dynamic_capacity = {_CAPACITY};\n'
            f'extern "C" void run_kernel(void* const* arguments) {{ host::call({source.entry}, arguments); }}\n'
        )
        unlinked, kernel = scratch / "kernel.o", scratch / "kernel.so"
        include = ("-include", str(SHIM / "cuda.hpp"), f"-I{self._sources}", f"-D__CUDA_ARCH__={_arch(spec)}")
        self._build([*self._compiler, *_FLAGS, *include, "-c", str(text), "-o", str(unlinked)])
        # without the sanitizer's library: the machine takes its place
        self._build([*self._compiler, "-shared", str(unlinked), "-o", str(kernel)])
        return kernel

    @staticmethod
    def _build(command: list[str]) -> None:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")

    @staticmethod
    def _with_lines(kernel: Path, text: str) -> str:
        """The text with ``{offset}`` replaced by source lines, the kernel's own where wrappers are between."""

        def line(found: re.Match[str]) -> str:
            command = ["addr2line", "-i", "-e", str(kernel), found[1]]
            try:
                chain = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            except (OSError, subprocess.CalledProcessError):
                return f"offset {found[1]}"
            files = [entry.split(" ")[0] for entry in chain]
            wrappers = {path.name for path in SHIM.iterdir()}
            own = next((f for f in files if Path(f).name.partition(":")[0] not in wrappers), files[0])
            return Path(own).name

        return re.sub(r"\{(0x[0-9a-f]+|0)\}", line, text)


def operands(problem: ConvProblem, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Random activation and filter, held as the reference takes them."""
    rng = np.random.default_rng(seed)

    def array(shape: tuple[int, ...], deviation: float) -> np.ndarray:
        if problem.dtype is DType.S8:
            return rng.integers(-128, 128, shape, dtype=np.int8)
        return reference.encode(problem.dtype, rng.standard_normal(shape, dtype=np.float32) * np.float32(deviation))

    taps = problem.C // problem.groups * problem.R * problem.S
    return array(problem.activation_shape, 1.0), array(problem.filter_shape, taps**-0.5)


def _parameter(argument: str | TensorMap) -> str:
    """A kernel's parameter as the driver takes it."""
    if isinstance(argument, str):
        return argument
    m = argument
    steps = m.steps or (1,) * len(m.extents)
    lists = ((m.element_bytes,), m.extents, m.strides, m.box, (m.swizzle,), sum(m.corners or (), ()), steps)
    return f"{m.operand}=" + ";".join(",".join(map(str, numbers)) for numbers in lists)


def _arch(spec: DeviceSpec) -> int:
    return spec.sm * 10


def _dynamic(source: Source, sources: Path) -> tuple[int, str]:
    """Alignment and name of the kernel's dynamic shared memory, as its text declares it."""
    found = _DYNAMIC.search(source.text) or _DYNAMIC.search((sources / f"{source.stem}.cuh").read_text())
    if found is None:
        raise RuntimeError(f"{source.stem} declares no `extern __shared__ __align__(...) char name[]`")
    return int(found[1]), found[2]
