"""Compares one launch of a kernel with the reference, in the process that is going to use it."""

from __future__ import annotations

from autotune.backends import Backend, Kernel, Operands
from autotune.backends.operands import drawn
from autotune.problem import ConvProblem

_FLOAT_POISON = 0xFF  # NaN
_INTEGER_POISON = 0x7F


def disproof(backend: Backend, problem: ConvProblem, kernel: Kernel, workspace_bytes: int, seed: int) -> str | None:
    """Why a kernel is not to be used, in one line: what one launch on random inputs got wrong. None when it is right.

    Takes the memory of one more set of operands and of the reference, and the time of the reference, on the caller's
    current stream, and waits for the device. Raises DeviceFault when the launch faulted.
    """
    try:
        inputs = drawn(backend, problem, seed)
        output = backend.allocate(problem.output_bytes)
        workspace = backend.allocate(workspace_bytes) if workspace_bytes else None
        if workspace is not None:
            backend.fill(workspace, 0)
        backend.fill(output, _INTEGER_POISON if problem.out_dtype.is_integer else _FLOAT_POISON)
        kernel(Operands(**inputs, output=output, workspace=workspace))
        backend.synchronize()
        found = backend.compare(problem, output, backend.reference(problem, **inputs))
    except MemoryError:
        return "there is too little memory to verify it"
    if not found.mismatches:
        return None
    elements = problem.output_bytes // problem.out_dtype.bytes
    return f"{found.mismatches} of {elements} elements are wrong, the worst by {found.worst:.3g}"
