"""A child process that answers one request at a time and can be killed at any moment."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from autotune.measure.failures import ChildDied, ChildTimeout, one_line

_STDERR_BYTES = 2000


class Worker:
    """A child of one role; ``start`` is asked by the constructor and answered like any other request.

    It is a new interpreter that runs ``autotune.measure.child``, not a fork and not a re-run of the caller's script: it
    shares no thread, no device context and no lock with its parent, and the script needs no ``__main__`` guard. It has
    a process group of its own, so that a compiler that it started dies with it, and ends when its parent does.
    """

    def __init__(self, limit_s: float, role: str, *arguments: Any) -> None:
        ours, theirs = socket.socketpair()
        # a file, not a pipe: a child that says much must not block on a parent that is not reading
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by ``kill``
        path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "autotune.measure.child", str(theirs.fileno()), str(os.getpid())],
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._stderr,
            start_new_session=True,
        )
        theirs.close()
        self.connection = Connection(ours.detach())
        self.ask(limit_s, "start", role, *arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def seconds_left(self) -> float:
        """Until the present request's deadline."""
        return self._deadline - time.monotonic()

    def ask(self, limit_s: float, name: str, *arguments: Any) -> None:
        """Send a request that must be answered within ``limit_s`` seconds."""
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s
        try:
            self.connection.send((name, *arguments))
        except OSError:
            # the child is dead: ``answer`` will say so
            return

    def answer(self) -> Any:
        """The answer, once ``connection`` is readable or the deadline has passed.

        Raises what the child raised (one of ``FAILURES``, or NoDevice); ChildDied or ChildTimeout, after which it
        must be killed; and RuntimeError, with the child's traceback, for a bug.
        """
        if not wait([self.connection], max(0.0, self.seconds_left)):
            raise ChildTimeout(f"no answer within {self._limit_s:g} s")
        try:
            kind, value = self.connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            raise ChildDied(self._last_words()) from None
        if kind == "failed":
            assert isinstance(value, Exception)
            raise value
        if kind == "bug":
            raise RuntimeError(f"in a child process:\n{value}")
        return value

    def kill(self, grace_s: float = 0.0) -> None:
        """End the child and whatever is in its process group. Harmless when it is dead.

        grace_s: how long it may take to end what it started in other process groups, such as a compiler.
        """
        if grace_s and self._process.returncode is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_s)
        if self._process.returncode is None:
            # not yet waited for, so that the process group cannot have become another's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self.connection.close()
        self._stderr.close()

    def _last_words(self) -> str:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        end = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_BYTES))
        said = self._stderr.read().decode(errors="replace").strip()
        return f"{end}: {one_line(said.splitlines()[-1])}" if said else end
