"""The cpu backend: kernels built by the system's C compiler, called through ctypes on NumPy arrays."""

from __future__ import annotations

import ctypes
import itertools
import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autotune import reference
from autotune.backends import cache, cpu_model
from autotune.backends.backend import (
    Backend,
    Comparison,
    CompiledKernel,
    Compiler,
    ConstraintsError,
    Kernel,
    NoDevice,
    Operands,
)
from autotune.backends.host import host
from autotune.device import Device, DeviceSpec
from autotune.families.family import Launch, Source
from autotune.problem import ConvProblem, DType
from autotune.reference import STORAGE

Bytes = NDArray[np.uint8]

_ALIGNMENT = 256
_OMP_PAUSE_SOFT = 1

# by address, for each OpenMP library that kernels brought along: ends the idle threads of the calling thread
_pauses: dict[int, Callable[[int], int]] = {}


def _end_idle_threads() -> None:
    for pause in _pauses.values():
        pause(_OMP_PAUSE_SOFT)


# GNU OpenMP would wait in a forked child for threads that only its parent has, for ever
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_end_idle_threads)


def devices() -> list[Device]:
    """One entry, ``cpu``; without a C compiler it carries the reason."""
    try:
        return [Device(id="cpu", spec=host().spec, driver=_driver())]
    except NoDevice as reason:
        return [Device(id="cpu", reason=str(reason))]


def _driver() -> str:
    return f"{platform.system()} {platform.release()}"


class CpuCompiler(Compiler):
    """The system's C compiler for this machine's CPU; NoDevice where there is none, and for any other CPU."""

    def __init__(self, spec: DeviceSpec) -> None:
        self._host = host()
        if spec.key != self._host.spec.key:
            raise NoDevice(f"{spec.key} is not this machine's CPU: nothing can be compiled for it here")
        self.version = self._host.version

    def compile(self, source: Source) -> CompiledKernel:
        return self._host.compile(source)

    def digest(self, source: Source) -> str:
        return cache.digest(source)


class CpuBackend(Backend):
    """The CPU. A launch has ended when its call returns."""

    condition = "cold-loop"

    def __init__(self, spec: DeviceSpec) -> None:
        self.spec = spec
        self.driver = _driver()

    def load(self, compiled: CompiledKernel, launch: Launch) -> Kernel:
        try:
            library = ctypes.CDLL(compiled.path)
            function = getattr(library, compiled.entry)
        except (OSError, AttributeError) as error:
            raise ConstraintsError(f"load refused: {error}") from None
        if pause := getattr(library, "omp_pause_resource_all", None):
            _pauses[ctypes.cast(pause, ctypes.c_void_p).value or 0] = pause
        function.argtypes = [ctypes.c_void_p] * len(launch.arguments)
        function.restype = None
        names = [str(argument) for argument in launch.arguments]

        def run(operands: Operands) -> None:
            arrays = [getattr(operands, name) for name in names]
            function(*[None if array is None else array.ctypes.data for array in arrays])

        return run

    def allocate(self, nbytes: int) -> Bytes:
        whole = np.empty(nbytes + _ALIGNMENT, np.uint8)
        start = -whole.ctypes.data % _ALIGNMENT
        return whole[start : start + nbytes]

    def fill(self, buffer: Any, byte: int) -> None:
        buffer.fill(byte)

    def copy(self, target: Any, source: Any) -> None:
        np.copyto(target, source)

    def is_filled(self, buffer: Any, byte: int) -> bool:
        return bool((buffer == byte).all())

    def is_same(self, one: Any, other: Any) -> bool:
        # by words of 8 bytes, which NumPy compares several times faster than bytes
        words = one.size // 8 * 8
        return bool(np.array_equal(one[:words].view(np.uint64), other[:words].view(np.uint64))) and bool(
            np.array_equal(one[words:], other[words:])
        )

    def randomize(self, buffer: Any, dtype: DType, seed: int, deviation: float, mean: float = 0.0) -> None:
        generator = np.random.Generator(np.random.PCG64(seed))
        elements = buffer.view(STORAGE[dtype])
        if dtype is DType.S8:
            elements[:] = generator.integers(-128, 128, elements.size, dtype=np.int8)
        else:
            values = generator.standard_normal(elements.size, dtype=np.float32)
            values *= np.float32(deviation)
            values += np.float32(mean)
            elements[:] = reference.encode(dtype, values)

    def reference(
        self,
        problem: ConvProblem,
        activation: Any,
        filter: Any,
        *,
        scale: Any | None = None,
        bias: Any | None = None,
        residual: Any | None = None,
    ) -> reference.Expected:
        def array(name: str, buffer: Any) -> Any:
            shape, dtype = problem.operand(name)
            return None if buffer is None else buffer.view(STORAGE[dtype]).reshape(shape)

        return reference.conv2d(
            problem,
            array("activation", activation),
            array("filter", filter),
            scale=array("scale", scale),
            bias=array("bias", bias),
            residual=array("residual", residual),
        )

    def compare(self, problem: ConvProblem, output: Any, expected: Any) -> Comparison:
        elements = output.view(STORAGE[problem.out_dtype]).reshape(problem.output_shape)
        mismatches, worst = reference.compare(problem, elements, expected)
        return Comparison(mismatches=mismatches, worst=worst)

    def time(self, kernel: Kernel, operands: Sequence[Operands], launches: int, samples: int) -> list[float]:
        times_us = []
        # goes on where the last sample ended, so that a sample finds none of its operands in the cache
        turn = itertools.cycle(operands)
        for _ in range(samples):
            start = time.perf_counter()
            for chosen in itertools.islice(turn, launches):
                kernel(chosen)
            times_us.append((time.perf_counter() - start) * 1e6 / launches)
        return times_us

    def synchronize(self) -> None:
        """Nothing to wait for: a launch has ended when its call returns."""

    def clocks(self) -> tuple[int | None, int | None]:
        return cpu_model.clock_mhz(), None

    def bytes_of(self, name: str, array: Any, problem: ConvProblem) -> Bytes:
        shape, dtype = problem.operand(name)
        try:
            viewed = np.asarray(array)
        # whatever a foreign array raises when it cannot be seen as a NumPy array (another device, gradients)
        except Exception as error:
            raise ValueError(f"{name} is no NumPy array and cannot be viewed as one: {error}".splitlines()[0]) from None
        if viewed.shape != shape or not _holds(viewed.dtype, dtype):
            wanted = f"{dtype} of shape {shape}"
            raise ValueError(f"{name} must be {wanted}, not {viewed.dtype.name} of shape {viewed.shape}")
        if name == "output":
            # a copy would take the result and be thrown away
            if not (viewed.flags.carray and viewed.dtype.isnative):
                raise ValueError("output must be a contiguous, aligned and writable array")
            return viewed.reshape(-1).view(np.uint8)
        native = viewed.astype(viewed.dtype.newbyteorder("="), copy=False)
        return np.require(native, requirements=["C", "A"]).reshape(-1).view(np.uint8)

    def new_output(self, problem: ConvProblem) -> NDArray[Any]:
        return np.empty(problem.output_shape, STORAGE[problem.out_dtype])

    def constant(self, value: float) -> NDArray[np.float32]:
        return np.array([value], np.float32)

    def is_capturing(self) -> bool:
        return False

    def stream_key(self) -> int:
        return threading.get_ident()


def _holds(found: np.dtype[Any], dtype: DType) -> bool:
    """True for the dtype as NumPy spells it, and for bf16 as its bit patterns or as an extension dtype of that name."""
    return found.newbyteorder("=") == STORAGE.get(dtype) or (dtype is DType.BF16 and found.name == "bfloat16")
