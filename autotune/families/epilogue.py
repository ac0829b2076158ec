"""What an epilogue adds to a CUDA kernel's text and launch; what it computes is in kernels/include/epilogue.cuh."""

from __future__ import annotations

from autotune.problem import SCALES, ConvProblem, DType

# output dtypes by the input's
_OUTPUTS = {
    DType.F16: (DType.F16, DType.F32),
    DType.BF16: (DType.BF16, DType.F32),
    DType.S8: (DType.S32, DType.F32, DType.S8, DType.F16),
}


def unsupported(family: str, problem: ConvProblem) -> str | None:
    """Why the epilogue cannot compute this layer's output, in one line; None when it can."""
    outputs = _OUTPUTS[problem.dtype]
    if problem.out_dtype not in outputs:
        return f"{family} writes {' or '.join(outputs)} from {problem.dtype}, not {problem.out_dtype}"
    return problem.epilogue.undefined(problem.dtype)


def members(problem: ConvProblem) -> dict[str, int | bool | str]:
    """Members of the kernel's Problem struct, by the names that epilogue.cuh reads, with the types of its elements."""
    e = problem.epilogue
    return {
        "Element": problem.dtype.value,
        "Output": problem.out_dtype.value,
        "Activation": e.activation.capitalize(),
        "scale": SCALES.index(e.scale),
        "bias": e.bias,
        "residual": e.residual,
    }


def parameters(problem: ConvProblem) -> str:
    """C++ parameters of the operands that the epilogue reads, to follow a kernel's own, in the launch's order."""
    types = {"scale": "const f32*", "bias": "const f32*", "residual": "const Kernel::Output*"}
    return "".join(f", {types[name]} {name}" for name in problem.epilogue.operands)


def value(problem: ConvProblem) -> str:
    """The C++ expression of an ``Epilogue<Problem>`` made of these parameters."""
    read = problem.epilogue.operands
    names = (name if name in read else "nullptr" for name in ("scale", "bias", "residual"))
    return f"Epilogue<Problem>{{{', '.join(names)}}}"
