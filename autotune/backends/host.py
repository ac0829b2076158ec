"""This machine's CPU and C compiler: found, probed and measured once, then remembered in the cache directory."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from autotune.backends import cache, cpu_model
from autotune.backends.backend import CompiledKernel, CompileError, NoDevice
from autotune.device import DeviceSpec
from autotune.families.family import Source
from autotune.problem import DType

COMPILE_TIMEOUT_S = 60.0
_OPTIMISED = ("-std=gnu11", "-O3", "-ffp-contract=fast", "-shared", "-fPIC")
_SAMPLES = 9
_ITERATIONS = 5_000_000  # of 12 multiply-adds: 5 to 20 ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """command, version: the compiler. flags: what it is told. identity: digest of what ``-march=native`` depends on."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]
    identity: str
    spec: DeviceSpec

    def compile(self, source: Source) -> CompiledKernel:
        """Build a shared library, or take it from the cache; CompileError when the compiler refuses or hangs."""
        return _compile(source, self.command, self.version, self.flags, self.identity)


def host() -> Host:
    """This machine; the same in every process that shares its cache directory. NoDevice where there is no compiler."""
    return _host(os.environ.get("CC", ""), os.environ.get("PATH", ""))


@lru_cache
def _host(cc: str, path: str) -> Host:
    command = _find(cc, path)
    status, text = _run([*command, "--version"])
    if status or not text.strip():
        raise NoDevice(f"{shlex.join(command)} --version failed: {_first_line(text) or status}")
    version, cores, identity = text.splitlines()[0].strip(), cpu_model.cores(), cpu_model.identity()
    key = "\0".join([shlex.join(command), version, str(cores), identity, cache.digest(_roofline(16))])
    record = cache.directory() / f"cpu-{hashlib.sha256(key.encode()).hexdigest()}.json"
    # one process measures, others wait: two at once would measure half the rates
    with _lock(cache.directory() / "cpu.lock"):
        try:
            flags, spec = _read(record)
        except (OSError, ValueError, TypeError, KeyError):
            flags, spec = _probe(command, version, cores, identity)
            _write(record, flags, spec)
    return Host(command=command, version=version, flags=flags, identity=identity, spec=spec)


def _find(cc: str, path: str) -> tuple[str, ...]:
    if cc.strip():
        try:
            command = tuple(shlex.split(cc))
        except ValueError:
            command = (cc,)  # an odd quote: looked up as it stands
        if shutil.which(command[0], path=path) is None:
            raise NoDevice(f"CC is {cc!r}, which is not a command")
        return command
    for name in ("cc", "gcc", "clang"):
        if shutil.which(name, path=path):
            return (name,)
    raise NoDevice("no C compiler: install gcc or clang (apt-get install gcc, dnf install gcc), or set CC")


def _run(command: list[str]) -> tuple[int, str]:
    """Exit status and output; a command that takes too long is killed with what it started, and has failed."""
    try:
        # a session of its own: the compiler proper is a child of the command and must die with it
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"LC_ALL": "C"},
            start_new_session=True,
        )
    except OSError as error:
        return 126, f"error: {error.strerror}"
    with process:
        try:
            output, _ = process.communicate(timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return -signal.SIGKILL, f"error: {command[0]} took more than {COMPILE_TIMEOUT_S:g} s and was killed"
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, output


def _compile(
    source: Source, command: tuple[str, ...], version: str, flags: tuple[str, ...], identity: str
) -> CompiledKernel:
    def build(target: Path) -> CompiledKernel:
        text = target.with_suffix(".c")
        text.write_text(source.text)
        includes = [f"-I{directory}" for directory in cache.include_directories()]
        status, log = _run([*command, *flags, *includes, "-o", str(target), str(text)])
        if status:
            first = next((line for line in log.splitlines() if "error" in line.lower()), _first_line(log))
            raise CompileError(f"{first or f'the compiler ended with {status}'}\n{log}")
        if not target.is_file():
            raise CompileError(f"the compiler ended with 0 and wrote nothing\n{log}")
        return CompiledKernel(path="", entry=source.entry, digest="", compiler=version, compile_s=0.0, log=log)

    options = (*command, *flags, f"cpu={identity}")
    return cache.compiled(source, version, options, ".so", build)


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


# What is remembered: the flags that the compiler takes, and the device with its measured rates


def _probe(command: tuple[str, ...], version: str, cores: int, identity: str) -> tuple[tuple[str, ...], DeviceSpec]:
    native, macros = _native(command)
    arch, vector_bytes = _arch(macros)
    flags = (*_OPTIMISED, *native)
    try:
        compiled = _compile(_roofline(vector_bytes), command, version, flags, identity)
    except CompileError as error:
        reason = _first_line(str(error))
        raise NoDevice(f"{shlex.join(command)} cannot build a shared library: {reason}") from None
    if _has_openmp(command, version, (*flags, "-fopenmp"), identity):
        flags = (*flags, "-fopenmp")
    else:
        # kernels run on one core
        cores = 1
    operations_per_s, bytes_per_s = _measure(compiled.path, cores)
    spec = DeviceSpec(
        kind="cpu",
        name=cpu_model.name(),
        arch=arch,
        sm_count=cores,
        l2_bytes=cpu_model.last_level_bytes(),
        vector_bytes=vector_bytes,
        bytes_per_s=bytes_per_s,
        rates=((DType.F32, operations_per_s),),
    )
    return flags, spec


def _has_openmp(command: tuple[str, ...], version: str, flags: tuple[str, ...], identity: str) -> bool:
    """True when a team of two threads runs: a compiler may know OpenMP and lack its library."""
    text = (
        "int team(void) {\n  int n = 0;\n#pragma omp parallel num_threads(2) reduction(+ : n)\n  n++;\n  return n;\n}\n"
    )
    source = Source(language="c", stem="openmp", text=text, entry="team")
    try:
        return int(ctypes.CDLL(_compile(source, command, version, flags, identity).path).team()) == 2
    except (CompileError, OSError):
        return False


def _native(command: tuple[str, ...]) -> tuple[tuple[str, ...], frozenset[str]]:
    """The flag that makes the compiler use all of this CPU, if it has one, and the macros it then defines."""
    for native in (("-march=native",), ("-mcpu=native",), ()):
        status, text = _run([*command, *native, "-dM", "-E", "-x", "c", os.devnull])
        if status == 0:
            return native, frozenset(re.findall(r"^#define (\w+)", text, re.MULTILINE))
    raise NoDevice(f"{shlex.join(command)} is not a C compiler: {_first_line(text)}")


def _arch(macros: frozenset[str]) -> tuple[str, int]:
    """Architecture and bytes of a vector register that the compiler generates code for."""
    if "__AVX512F__" in macros:
        return "x86-64-avx512", 64
    if {"__AVX2__", "__FMA__"} <= macros:
        return "x86-64-avx2", 32
    if "__x86_64__" in macros:
        return "x86-64", 16
    return ("aarch64-neon" if "__aarch64__" in macros else platform.machine()), 16


def _roofline(vector_bytes: int) -> Source:
    text = f'#define vector_bytes {vector_bytes}\n#include "roofline_cpu.c"\n'
    return Source(language="c", stem="roofline_cpu", text=text, entry="multiply_add")


def _measure(path: str, cores: int) -> tuple[float, float]:
    """Sustained float32 operations a second, and bytes a second of a copy (read plus write), of all cores together."""
    library = ctypes.CDLL(path)
    for function in (library.multiply_add, library.copy):
        function.restype = ctypes.c_int64
    values = [np.array([0.5, 0], np.float32) for _ in range(cores)]
    nbytes = min(max(4 * cpu_model.last_level_bytes(), 64 << 20), 256 << 20) // cores
    buffers = [(np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)) for _ in range(cores)]

    def multiply_add(core: int) -> int:
        return int(library.multiply_add(ctypes.c_int64(_ITERATIONS), ctypes.c_void_p(values[core].ctypes.data)))

    def copy(core: int) -> int:
        source, target = (ctypes.c_void_p(buffer.ctypes.data) for buffer in buffers[core])
        return int(library.copy(ctypes.c_int64(nbytes), source, target))

    return _rate(multiply_add, cores), _rate(copy, cores)


def _rate(work: Callable[[int], int], cores: int) -> float:
    """What ``work`` returns a second, on all cores at once: the median of some samples."""

    def one(core: int) -> float:
        # of the thread, not of the clock on the wall: other processes may use the cores too
        start = time.thread_time()
        return work(core) / (time.thread_time() - start)

    with ThreadPoolExecutor(cores) as pool:
        return statistics.median(sum(pool.map(one, range(cores))) for _ in range(_SAMPLES))


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> tuple[tuple[str, ...], DeviceSpec]:
    stored = json.loads(path.read_text())
    spec = stored["spec"]
    spec["compute_capability"] = tuple(spec["compute_capability"])
    spec["rates"] = tuple((DType(dtype), float(rate)) for dtype, rate in spec["rates"])
    return tuple(stored["flags"]), DeviceSpec(**spec)


def _write(path: Path, flags: tuple[str, ...], spec: DeviceSpec) -> None:
    building = path.with_suffix(f".{os.getpid()}")
    with building.open("w") as handle:
        json.dump({"flags": flags, "spec": asdict(spec)}, handle)
        handle.flush()
        os.fsync(handle.fileno())
    building.replace(path)
