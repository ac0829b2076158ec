"""What the tensor-core families share: layers that none of them can run, and a layer as members of a C++ struct."""

from __future__ import annotations

from autotune.device import DeviceSpec
from autotune.families import epilogue
from autotune.problem import ConvProblem, DType, Layout

# offsets that a kernel counts in 31 bits, less what its last slice or halo may reach beyond a tensor, in elements
OFFSET_LIMIT = 2**31 - 1 - 2**24
_EXTENT_LIMIT = 2**30
_OVERFLOWING_TAPS = 131072  # products of s8, 2**14 each, whose sum may leave s32


def unsupported(family: str, problem: ConvProblem, device: DeviceSpec, *, hopper: bool = False) -> str | None:
    """Why no tensor-core kernel can run the layer, in one line; None when nothing common speaks against it.

    hopper: whether the family needs sm_90, else sm_75 or newer.
    """
    p = problem
    taps = p.C // p.groups * p.R * p.S
    if p.dtype not in (DType.F16, DType.BF16, DType.S8):
        return f"{family} computes f16, bf16 and s8 (--dtype f16), not {p.dtype}"
    if hopper and device.sm != 90:
        return f"{family} needs sm_90"
    if device.sm < 75:
        return f"{family} needs sm_75 or newer"
    if p.dtype is DType.BF16 and device.sm < 80:
        return f"{family} needs sm_80 for bf16 (--dtype f16)"
    if p.layout is not Layout.NHWC:
        return f"{family} works in the layout nhwc (--layout nhwc), not {p.layout}"
    if reason := epilogue.unsupported(family, p):
        return reason
    if p.N == 0:
        return "the batch is empty"
    if p.dtype is DType.S8 and taps >= _OVERFLOWING_TAPS:
        return f"C/groups*R*S is {taps}: from {_OVERFLOWING_TAPS} on an s32 sum can overflow"
    # coordinates and the reduction are counted in 31 bits
    if max(taps, p.H * p.W, p.P * p.Q) >= _EXTENT_LIMIT:
        return "an image or a filter has 2**30 pixels or taps, or more"
    return None


def ungrouped(family: str, problem: ConvProblem, *, chunk_bytes: int = 1) -> str | None:
    """Why a family without groups, which moves channels in units of ``chunk_bytes``, cannot run the layer."""
    p = problem
    if p.groups != 1:
        return f"{family} computes layers without groups"
    if p.C * p.dtype.bytes % chunk_bytes:
        return f"{family} needs a multiple of {chunk_bytes} bytes of channels"
    # tensor maps and grids count each axis in 31 bits
    if max(p.N, p.K) >= _EXTENT_LIMIT:
        return "the batch or the filters are 2**30 or more"
    return None


def members(problem: ConvProblem) -> dict[str, int | bool | str]:
    """Members of the kernel's Problem struct: extents and geometry, and what the epilogue reads."""
    p = problem
    extents = {name: getattr(p, name) for name in ("N", "C", "H", "W", "K", "R", "S", "P", "Q", "groups")}
    geometry = dict(zip(("stride_h", "stride_w"), p.stride, strict=True))
    geometry |= dict(zip(("pad_top", "pad_bottom", "pad_left", "pad_right"), p.padding, strict=True))
    geometry |= dict(zip(("dilation_h", "dilation_w"), p.dilation, strict=True))
    return extents | geometry | epilogue.members(p)


def vector_bytes(size: int) -> int:
    """The widest vector, at most 16 bytes, that divides ``size`` bytes; as in kernels/include/types.cuh."""
    return next(width for width in (16, 8, 4, 2, 1) if size % width == 0)
