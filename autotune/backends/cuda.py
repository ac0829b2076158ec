"""The CUDA backend: NVRTC and launches through cuda.core, arrays, streams and graphs through CuPy."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from autotune.backends import cache as binaries
from autotune.backends.backend import (
    Backend,
    Comparison,
    CompiledKernel,
    CompileError,
    Compiler,
    ConstraintsError,
    DeviceFault,
    Kernel,
    NoDevice,
    Operands,
)
from autotune.backends.tensor_maps import launcher
from autotune.device import Device, DeviceSpec
from autotune.families.family import Launch, Source
from autotune.problem import ACTIVATIONS, ConvProblem, DType, Layout
from autotune.reference import tolerances

_INSTALL = "pip install 'conv-autotune[cuda13]' (or [cuda12] for a driver before 580)"

# Sustained rates measured on the model: bytes/s of a large copy (read + write), operations/s on random data.
_MEASURED = {
    "NVIDIA H200": (
        4.28e12,
        (
            (DType.F16, 790e12),
            (DType.BF16, 790e12),
            (DType.S8, 1580e12),
            (DType.E4M3, 1580e12),
            (DType.TF32, 395e12),
            (DType.F32, 60e12),
        ),
    ),
}
# Dense f16 operations a clock of one multiprocessor, by compute capability (CUDA C++ Programming Guide, arithmetic
# throughput); four fifths of the product of these and the clock are taken as sustained.
_F16_PER_CLOCK = {75: 1024, 80: 2048, 86: 1024, 89: 1024, 90: 4096, 100: 8192, 103: 8192, 120: 1024}


def devices() -> list[Device]:
    """One entry for each CUDA device, or one entry ``cuda`` with the reason why there is none."""
    try:
        from cuda import core
    except ImportError as error:
        return [Device(id="cuda", reason=f"cuda.core is not installed ({error}): {_INSTALL}")]
    try:
        found = core.Device.get_all_devices()
    # the driver's absence is reported by an exception class that is not public
    except Exception as error:
        return [Device(id="cuda", reason=f"no usable NVIDIA driver: {str(error).splitlines()[0]}")]
    if not found:
        return [Device(id="cuda", reason="the NVIDIA driver sees no device")]
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        return [Device(id=f"cuda:{d.device_id}", reason=f"CuPy is not installed ({error}): {_INSTALL}") for d in found]
    driver = _driver(core)
    return [Device(id=f"cuda:{d.device_id}", spec=_spec(d), driver=driver) for d in found]


def _driver(core: Any) -> str:
    """The driver's version; empty where the library that tells it is missing, as in some containers."""
    try:
        return "driver " + ".".join(map(str, core.system.get_kernel_mode_driver_version()))
    # the library's errors are of classes that are not public
    except Exception:
        return ""


def _spec(device: Any) -> DeviceSpec:
    p = device.properties
    major, minor = p.compute_capability_major, p.compute_capability_minor
    clock_hz, sms = p.clock_rate * 1e3, p.multiprocessor_count
    rates: tuple[tuple[DType, float], ...]
    if device.name in _MEASURED:
        bytes_per_s, rates = _MEASURED[device.name]
    else:
        bytes_per_s = 0.9 * 2 * p.memory_clock_rate * 1e3 * p.global_memory_bus_width / 8
        sm = major * 10 + minor
        f16 = (
            0.8
            * sms
            * clock_hz
            * _F16_PER_CLOCK.get(sm, _F16_PER_CLOCK[max(k for k in _F16_PER_CLOCK if k <= max(sm, 75))])
        )
        rates = ((DType.F16, f16), (DType.BF16, f16), (DType.S8, 2 * f16), (DType.F32, 0.8 * sms * clock_hz * 256))
    return DeviceSpec(
        kind="cuda",
        name=device.name,
        arch=f"sm_{major}{minor}" + ("a" if major >= 9 else ""),
        compute_capability=(major, minor),
        sm_count=sms,
        smem_per_cta=p.max_shared_memory_per_block_optin,
        smem_per_sm=p.max_shared_memory_per_multiprocessor,
        l2_bytes=p.l2_cache_size,
        bytes_per_s=bytes_per_s,
        rates=rates,
    )


class CudaCompiler(Compiler):
    """NVRTC for one architecture; works without a GPU and without a driver."""

    def __init__(self, spec: DeviceSpec) -> None:
        try:
            from cuda import core
            from cuda.bindings import nvrtc
        except ImportError as error:
            raise NoDevice(f"cuda.core is not installed ({error}): {_INSTALL}") from None
        self._core = core
        self._arch = spec.arch
        _, major, minor = nvrtc.nvrtcVersion()
        self.version = f"nvrtc {major}.{minor}"

    def digest(self, source: Source) -> str:
        return binaries.digest(source)

    def compile(self, source: Source) -> CompiledKernel:
        options = (self._arch, "-std=c++17", "-lineinfo")

        def build(target: Path) -> CompiledKernel:
            log = io.StringIO()
            try:
                program = self._core.Program(
                    source.text,
                    "c++",
                    self._core.ProgramOptions(
                        name=source.stem,
                        arch=self._arch,
                        std="c++17",
                        lineinfo=True,
                        include_path=[str(d) for d in binaries.include_directories()],
                        ptxas_options=["-v"],
                    ),
                )
                code = program.compile("cubin", logs=log).code
            # NVRTC's errors are of a class that is not public; whatever it is, the source did not compile
            except Exception as error:
                raise CompileError(_first_error(f"{error}\n{log.getvalue()}")) from error
            target.write_bytes(code)
            text = log.getvalue()
            return CompiledKernel(
                path="",
                entry=source.entry,
                digest="",
                compiler=self.version,
                compile_s=0.0,
                registers=_number(r"Used (\d+) registers", text),
                spill_bytes=_number(r"(\d+) bytes spill stores", text),
                smem_static_bytes=_number(r"(\d+) bytes smem", text) or 0,
                log=text,
            )

        return binaries.compiled(source, self.version, options, ".cubin", build)


def _number(pattern: str, text: str) -> int | None:
    """The largest number that the pattern finds (a module may hold several functions), or None."""
    return max((int(found) for found in re.findall(pattern, text)), default=None)


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = next((line for line in lines if "error" in line.lower() and "compilation log" not in line), lines[0])
    return "\n".join([first, *lines])


class CudaBackend(Backend):
    """One CUDA device. Everything is enqueued on CuPy's current stream of the calling thread."""

    condition = "cold-graph"

    def __init__(self, device: Device) -> None:
        import cupy
        from cuda import core
        from cuda.bindings import driver

        assert device.spec is not None
        self.spec = device.spec
        self.index = int(device.id.partition(":")[2] or 0)
        self._cupy, self._core, self._driver = cupy, core, driver
        self._compiler = CudaCompiler(device.spec)
        self._device = core.Device(self.index)
        with self._current():
            pass
        self.driver = device.driver

    @contextmanager
    def _current(self) -> Iterator[None]:
        """Makes this device current in both libraries for the calling thread."""
        with self._cupy.cuda.Device(self.index):
            self._device.set_current()
            yield

    def load(self, compiled: CompiledKernel, launch: Launch) -> Kernel:
        with self._current():
            kernel = self._function(compiled.path, compiled.entry, launch.smem_bytes)
        if not all(isinstance(argument, str) for argument in launch.arguments):
            return launcher(kernel, launch, self.stream_key)
        run = self._core.launch
        config = self._core.LaunchConfig(grid=launch.grid, block=launch.block, shmem_size=launch.smem_bytes)
        names = [str(argument) for argument in launch.arguments]
        stream_of = self._stream

        def enqueue(operands: Operands) -> None:
            pointers = [0 if (array := getattr(operands, name)) is None else array.data.ptr for name in names]
            try:
                run(stream_of(), config, kernel, *pointers)
            except Exception as error:
                raise ConstraintsError(f"launch refused: {_line(error)}") from error

        return enqueue

    def _function(self, path: str, entry: str, smem_bytes: int = 0) -> Any:
        try:
            kernel = self._core.ObjectCode.from_cubin(Path(path).read_bytes()).get_kernel(entry)
            # beyond 48 KiB, static shared memory included, a kernel needs leave
            if smem_bytes > 40 * 1024:
                attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                handle = self._driver.CUkernel(int(kernel.handle))
                (status,) = self._driver.cuKernelSetAttribute(
                    attribute, smem_bytes, handle, self._driver.CUdevice(self.index)
                )
                if int(status) != 0:
                    raise ConstraintsError(f"{smem_bytes} bytes of shared memory are refused: {status.name}")
        except OSError as error:
            raise ConstraintsError(f"the binary cannot be read: {error}") from error
        except ConstraintsError:
            raise
        # the driver's errors are of a class that is not public
        except Exception as error:
            raise ConstraintsError(f"load refused: {_line(error)}") from error
        return kernel

    def _stream(self) -> Any:
        return _wrapped_stream(self._core, self.stream_key())

    def stream_key(self) -> int:
        return int(self._cupy.cuda.get_current_stream(self.index).ptr)

    def is_capturing(self) -> bool:
        return bool(self._cupy.cuda.get_current_stream(self.index).is_capturing())

    def allocate(self, nbytes: int) -> Any:
        with self._current():
            return self._cupy.empty(nbytes, self._cupy.uint8)

    def fill(self, buffer: Any, byte: int) -> None:
        if buffer.nbytes:
            self._cupy.cuda.runtime.memsetAsync(buffer.data.ptr, byte, buffer.nbytes, self.stream_key())

    def copy(self, target: Any, source: Any) -> None:
        if target.nbytes:
            # 3: device to device
            self._cupy.cuda.runtime.memcpyAsync(target.data.ptr, source.data.ptr, target.nbytes, 3, self.stream_key())

    def permute(self, target: Any, source: Any, shape: Sequence[int], axes: Sequence[int], element_bytes: int) -> None:
        with self._current():
            super().permute(target, source, shape, axes, element_bytes)

    def is_filled(self, buffer: Any, byte: int) -> bool:
        if not buffer.nbytes:
            return True
        others = self._zeros(1)
        self._run(
            "count_other_bytes", DType.S8, DType.S32, buffer.nbytes, buffer, _s64(buffer.nbytes), _s32(byte), others
        )
        return int(self._host(others)[0]) == 0

    def is_same(self, one: Any, other: Any) -> bool:
        if not one.nbytes:
            return True
        differences = self._zeros(1)
        self._run("count_differences", DType.S8, DType.S32, one.nbytes, one, other, _s64(one.nbytes), differences)
        return int(self._host(differences)[0]) == 0

    def randomize(self, buffer: Any, dtype: DType, seed: int, deviation: float, mean: float = 0.0) -> None:
        count = buffer.nbytes // dtype.bytes
        if count:
            drawn = (_s64(count), _u64(seed), _f32(deviation), _f32(mean))
            self._run("randomize", dtype, _RANDOMIZED[dtype], count, buffer, *drawn)

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
        p = problem
        if p.layout is not Layout.NHWC:
            raise ValueError(f"the device's reference works in nhwc, not {p.layout}")
        count = p.N * p.P * p.Q * p.K
        value, magnitude = self.allocate(8 * count), self.allocate(4 * count)
        sizes = (
            p.N,
            p.C,
            p.H,
            p.W,
            p.K,
            p.R,
            p.S,
            p.P,
            p.Q,
            p.groups,
            *p.stride,
            p.padding[0],
            p.padding[2],
            *p.dilation,
        )
        operands = (activation, filter, *(0 if array is None else array for array in (scale, bias, residual)))
        modes = (_s32(p.epilogue.scale == "channel"), _s32(ACTIVATIONS.index(p.epilogue.activation)))
        self._run("reference", p.dtype, p.out_dtype, count, *operands, *modes, value, magnitude, *map(_s64, sizes))
        return value, magnitude

    def compare(self, problem: ConvProblem, output: Any, expected: Any) -> Comparison:
        p = problem
        relative, slack, absolute = tolerances(p)
        count = p.N * p.P * p.Q * p.K
        found = self._zeros(2)
        bounds = (_f64(relative), _f64(slack), _f64(absolute))
        self._run("compare", p.dtype, p.out_dtype, count, output, *expected, _s64(count), *bounds, found[:1], found[1:])
        host = self._host(found)
        return Comparison(mismatches=int(host[0]), worst=float(host[1:].view("f8")[0]))

    def time(self, kernel: Kernel, operands: Sequence[Operands], launches: int, samples: int) -> list[float]:
        cuda = self._cupy.cuda
        with self._current(), self._faults():
            stream = cuda.Stream(non_blocking=True)
            with stream:
                stream.begin_capture()
                for i in range(launches):
                    kernel(operands[i % len(operands)])
                graph = stream.end_capture()
                graph.launch(stream)
                times = []
                for _ in range(samples):
                    start, end = cuda.Event(), cuda.Event()
                    start.record(stream)
                    graph.launch(stream)
                    end.record(stream)
                    end.synchronize()
                    times.append(cuda.get_elapsed_time(start, end) * 1e3 / launches)
        return times

    def synchronize(self) -> None:
        with self._faults():
            self._cupy.cuda.runtime.streamSynchronize(self.stream_key())

    def clocks(self) -> tuple[int | None, int | None]:
        try:
            system = self._device.to_system_device()
            return int(system.get_clock("sm").get_current_mhz()), int(system.temperature.get_sensor())
        # NVML may be absent or forbid the reading; a clock is information, not a need
        except Exception:
            return None, None

    def bytes_of(self, name: str, array: Any, problem: ConvProblem) -> Any:
        cupy = self._cupy
        shape, dtype = problem.operand(name)
        if not isinstance(array, cupy.ndarray):
            raise ValueError(f"{name} must be a CuPy array, not {type(array).__name__}")
        if array.device.id != self.index:
            raise ValueError(f"{name} is on cuda:{array.device.id}, the dispatcher on cuda:{self.index}")
        if array.shape != shape:
            raise ValueError(f"{name} has the shape {array.shape}, the layer needs {shape}")
        if DType.of(array.dtype) is not dtype:
            raise ValueError(f"{name} has the dtype {array.dtype}, the layer needs {dtype}")
        if not array.flags.c_contiguous or array.data.ptr % 16:
            array = array.copy(order="C")
        return array.reshape(-1).view(cupy.uint8)

    def new_output(self, problem: ConvProblem) -> Any:
        with self._current():
            return self._cupy.empty(problem.output_shape, _array_dtype(problem.out_dtype))

    def constant(self, value: float) -> Any:
        if self.is_capturing():
            raise RuntimeError(
                "a number cannot reach the device while its stream is being captured: give an array of it"
            )
        with self._current():
            array = self._cupy.empty(1, self._cupy.float32)
            array.set(_array_of(value))
            # other streams may read it next
            self.synchronize()
        return array

    def _zeros(self, words: int) -> Any:
        buffer = self.allocate(8 * words)
        self.fill(buffer, 0)
        return buffer.view(self._cupy.uint64)

    def _host(self, array: Any) -> Any:
        with self._faults():
            return array.get(stream=self._cupy.cuda.get_current_stream(self.index))

    def _run(self, entry: str, element: DType, output: DType, count: int, *arguments: Any) -> None:
        """Enqueue a kernel of kernels/harness.cuh over ``count`` elements."""
        with self._current():
            kernel = self._harness(entry, element, output)
            blocks = max(1, min(-(-count // 256), 16 * self.spec.sm_count))
            values = [a.data.ptr if isinstance(a, self._cupy.ndarray) else a for a in arguments]
            self._core.launch(self._stream(), self._core.LaunchConfig(grid=blocks, block=256), kernel, *values)

    @cache  # noqa: B019 - a backend lives as long as its process
    def _harness(self, entry: str, element: DType, output: DType) -> Any:
        text = f'#include "types.cuh"\nusing Element = {element};\nusing Output = {output};\n#include "harness.cuh"\n'
        compiled = self._compiler.compile(Source(language="cuda", stem="harness", text=text, entry=entry))
        return self._function(compiled.path, entry)

    @contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except (self._cupy.cuda.runtime.CUDARuntimeError, self._cupy.cuda.driver.CUDADriverError) as error:
            raise DeviceFault(_line(error)) from error


# an output dtype that the harness's kernels know for each dtype that is drawn
_RANDOMIZED = {d: DType.S32 if d is DType.S8 else d for d in (DType.F16, DType.BF16, DType.F32, DType.S8, DType.S32)}


def _line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


@lru_cache(maxsize=256)
def _wrapped_stream(core: Any, handle: int) -> Any:
    """A cuda.core stream for a stream handle; 0 and 2 are the legacy and the per-thread default stream."""
    if handle in (0, 1):
        return core.LEGACY_DEFAULT_STREAM
    return core.PER_THREAD_DEFAULT_STREAM if handle == 2 else core.Stream.from_handle(handle)


def _array_dtype(dtype: DType) -> Any:
    import numpy

    names = {DType.F16: "float16", DType.F32: "float32", DType.TF32: "float32", DType.S8: "int8", DType.S32: "int32"}
    if dtype is DType.BF16:
        import ml_dtypes

        return numpy.dtype(ml_dtypes.bfloat16)
    return numpy.dtype(names[dtype])


def _array_of(value: float) -> Any:
    import numpy

    return numpy.array([value], numpy.float32)


def _scalar(kind: str) -> Any:
    def convert(value: float) -> Any:
        import numpy

        return getattr(numpy, kind)(value)

    return convert


_s32, _s64, _u64, _f32, _f64 = map(_scalar, ("int32", "int64", "uint64", "float32", "float64"))
