"""What runs in a child process: answers requests of its parent, one at a time, until the parent is gone.

Started as ``python -m autotune.measure.child FD PARENT``: FD is the child's end of a socket pair. A request is a tuple
of its name and its arguments; an answer is ``("done", value)``, ``("failed", exception)`` for what a candidate or a
device can cause, or ``("bug", traceback)``. Nothing is imported that the requests at hand do not need.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from autotune.backends.backend import CompiledKernel, NoDevice
from autotune.device import Device, DeviceSpec
from autotune.families.family import Launch, Source
from autotune.measure.failures import FAILURES
from autotune.problem import ConvProblem

if TYPE_CHECKING:
    from autotune.measure.harness import Measured

_PR_SET_PDEATHSIG = 1


class Compiling:
    """Requests of a compile child."""

    def __init__(self, spec: DeviceSpec) -> None:
        from autotune.backends import compiler_for

        self._compiler = compiler_for(spec)

    def ready(self) -> str:
        """The compiler's name and version."""
        return self._compiler.version

    def compile(self, source: Source) -> CompiledKernel:
        return self._compiler.compile(source)


class Measuring:
    """Requests of the device child."""

    def __init__(self, device: Device, problem: ConvProblem, seed: int) -> None:
        from autotune.backends import open_backend
        from autotune.measure.harness import Harness

        self._backend = open_backend(device)
        try:
            self._harness = Harness(self._backend, problem, seed)
        except MemoryError as error:
            raise NoDevice(f"{device.id} has too little memory to measure {problem}") from error

    def ready(self) -> str:
        """The driver's name and version."""
        return self._backend.driver

    def run(self, compiled: CompiledKernel, launch: Launch, best_us: float | None) -> Measured:
        return self._harness.run(compiled, launch, best_us)

    def retime(self, candidates: list[tuple[CompiledKernel, Launch]]) -> list[Measured | Exception]:
        return self._harness.retime(candidates)


def main() -> None:
    """Serve until the parent closes its end. The first request, ``start``, names the role and its arguments."""
    connection = Connection(int(sys.argv[1]))
    # raised where the child is waiting for a compiler, which is then killed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    _die_with(int(sys.argv[2]))
    roles = {"compiling": Compiling, "measuring": Measuring}
    server: Any = None
    while True:
        try:
            name, *arguments = connection.recv()
        except EOFError:
            return
        try:
            if name == "start":
                role, *arguments = arguments
                server = roles[role](*arguments)
                answer = ("done", server.ready())
            else:
                answer = ("done", getattr(server, name)(*arguments))
        except (*FAILURES, NoDevice) as failure:
            answer = ("failed", failure)
        except Exception:
            answer = ("bug", traceback.format_exc())
        connection.send(answer)


def _die_with(parent: int) -> None:
    # a request that never returns would otherwise outlive a parent that was killed
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit(1)


if __name__ == "__main__":
    main()
