"""The contract of a backend: compile, load, launch, and the few device operations that measurement needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autotune.device import DeviceSpec
from autotune.families.family import Launch, Source
from autotune.problem import ConvProblem, DType


class CompileError(Exception):
    """The compiler refused a source; the message's first line says why, the rest is its log."""


class ConstraintsError(Exception):
    """A compiled config was refused by the device at load or launch (too much shared memory, too many registers)."""


class DeviceFault(Exception):
    """The device faulted while a kernel ran; its context may be lost."""


class NoDevice(Exception):
    """The device or its software is absent; one line with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledKernel:
    """A compiled source, as a file of the cache; crosses processes. digest: SHA-256 of source and included files."""

    path: str
    entry: str
    digest: str
    compiler: str
    compile_s: float
    registers: int | None = None
    spill_bytes: int | None = None
    smem_static_bytes: int | None = None
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operands:
    """The arrays of one launch, by the names that ``Launch.arguments`` uses; each is the backend's own array type."""

    activation: Any
    filter: Any
    output: Any
    workspace: Any | None = None
    scale: Any | None = None
    bias: Any | None = None
    residual: Any | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """An output against the reference. mismatches: elements outside the tolerance or NaN. worst: the largest error."""

    mismatches: int
    worst: float


# A loaded kernel: enqueues one launch on these operands and, on cuda, on the current stream.
Kernel = Callable[[Operands], None]


class Compiler(ABC):
    """Compiles sources for a device model; needs no device."""

    version: str  # name and version, part of the cache key and of every trial's provenance

    @abstractmethod
    def compile(self, source: Source) -> CompiledKernel:
        """Compile, or take from the cache; CompileError when the compiler refuses."""

    @abstractmethod
    def digest(self, source: Source) -> str:
        """SHA-256 of the source's kernel file and every header it includes, without the config's own text."""


class Backend(ABC):
    """One device, in one process. Arrays are NumPy's on cpu and CuPy's on cuda; raw buffers have dtype uint8."""

    spec: DeviceSpec
    condition: str  # Measurement.condition of what ``time`` returns
    driver: str  # name and version, provenance

    @abstractmethod
    def load(self, compiled: CompiledKernel, launch: Launch) -> Kernel:
        """Make a compiled kernel callable; ConstraintsError when the device refuses it."""

    @abstractmethod
    def allocate(self, nbytes: int) -> Any:
        """An uninitialised uint8 array of the device, its start aligned to 256 bytes."""

    @abstractmethod
    def fill(self, buffer: Any, byte: int) -> None:
        """Set every byte of a contiguous uint8 array."""

    @abstractmethod
    def copy(self, target: Any, source: Any) -> None:
        """Copy a contiguous uint8 array into another of the same size."""

    def permute(self, target: Any, source: Any, shape: Sequence[int], axes: Sequence[int], element_bytes: int) -> None:
        """Copy the elements of a buffer of ``shape`` into another of the same size, its axes in the order ``axes``."""
        elements = f"u{element_bytes}"
        permuted = source.view(elements).reshape(shape).transpose(axes)
        target.view(elements).reshape(permuted.shape)[...] = permuted

    @abstractmethod
    def is_filled(self, buffer: Any, byte: int) -> bool:
        """True when every byte of a contiguous uint8 array still has this value."""

    @abstractmethod
    def is_same(self, one: Any, other: Any) -> bool:
        """True when two uint8 arrays of one size, both aligned to 16 bytes, hold the same bytes."""

    @abstractmethod
    def randomize(self, buffer: Any, dtype: DType, seed: int, deviation: float, mean: float = 0.0) -> None:
        """Fill a buffer with elements of ``dtype``: normal with this standard deviation; s8: uniform, -128..127."""

    @abstractmethod
    def reference(
        self,
        problem: ConvProblem,
        activation: Any,
        filter: Any,
        *,
        scale: Any | None = None,
        bias: Any | None = None,
        residual: Any | None = None,
    ) -> Any:
        """The layer computed slowly and obviously right from uint8 buffers; an opaque value for ``compare``."""

    @abstractmethod
    def compare(self, problem: ConvProblem, output: Any, expected: Any) -> Comparison:
        """Compare a uint8 output buffer with ``reference``'s value, by the tolerance of ``reference.tolerance``."""

    @abstractmethod
    def time(self, kernel: Kernel, operands: Sequence[Operands], launches: int, samples: int) -> list[float]:
        """Microseconds a launch, one value for each of ``samples`` runs of ``launches`` launches over the operands."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for the device; DeviceFault when it faulted."""

    @abstractmethod
    def clocks(self) -> tuple[int | None, int | None]:
        """Clock in MHz and temperature in degrees Celsius now, None where unknown."""

    # What a dispatcher needs of the caller's arrays

    @abstractmethod
    def bytes_of(self, name: str, array: Any, problem: ConvProblem) -> Any:
        """The caller's operand ``name`` as the flat uint8 array that ``Kernel`` takes.

        A non-contiguous or misaligned array is copied; ValueError, in one line, for a wrong shape, dtype or device.
        """

    @abstractmethod
    def new_output(self, problem: ConvProblem) -> Any:
        """A new array for the layer's output, in the caller's array type, shape and dtype."""

    @abstractmethod
    def constant(self, value: float) -> Any:
        """A new float32 array of one element, in the caller's array type, written when the call returns."""

    @abstractmethod
    def is_capturing(self) -> bool:
        """True while the caller's current stream is being captured into a graph: no kernel can be loaded then."""

    @abstractmethod
    def stream_key(self) -> int:
        """Identifies the caller's current stream: workspaces are not shared between streams."""
