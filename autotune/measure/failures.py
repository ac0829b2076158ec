"""What can go wrong with a candidate, and the one place that says which status it becomes."""

from __future__ import annotations

from autotune.backends.backend import CompileError, ConstraintsError, DeviceFault
from autotune.trial import Status


class WrongOutput(Exception):
    """A kernel's output differs from the reference, or it wrote where it must not.

    damaged: memory beside the output was overwritten, so that the process cannot be trusted with another candidate.
    """

    def __init__(self, reason: str, damaged: bool = False) -> None:
        super().__init__(reason, damaged)
        self.reason = reason
        self.damaged = damaged

    def __str__(self) -> str:
        return self.reason


class ChildDied(Exception):
    """A child process ended without an answer; one line with its signal or exit code."""


class ChildTimeout(Exception):
    """A child process did not answer in time and was killed; one line with the limit."""


FAILURES = (CompileError, ConstraintsError, DeviceFault, WrongOutput, ChildDied, ChildTimeout)


def classify(failure: Exception, compiling: bool) -> Status:
    """The status of a candidate that failed, while it was compiled or later; anything but ``FAILURES`` is a bug."""
    if compiling or isinstance(failure, CompileError):
        return Status.COMPILE
    if isinstance(failure, ConstraintsError):
        return Status.CONSTRAINTS
    if isinstance(failure, WrongOutput):
        return Status.CORRECTNESS
    if isinstance(failure, ChildTimeout):
        return Status.TIMEOUT
    if isinstance(failure, DeviceFault | ChildDied):
        return Status.RUNTIME
    raise TypeError(f"{type(failure).__name__} is no failure of a candidate") from failure


def leaves_child_healthy(failure: Exception) -> bool:
    """False when the process that reported the failure must be replaced before the next candidate."""
    if isinstance(failure, WrongOutput):
        return not failure.damaged
    return isinstance(failure, CompileError | ConstraintsError)


def one_line(text: object, limit: int = 300) -> str:
    """The first non-empty line of a text, cut to ``limit`` characters."""
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    return lines[0][:limit] if lines else ""
