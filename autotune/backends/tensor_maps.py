"""Launches of kernels that take tensor maps: the maps are encoded for the operands' addresses and passed by value."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from autotune.backends.backend import ConstraintsError, Operands
from autotune.families.family import Launch, TensorMap

_MAPS = 4096  # encoded maps kept: operands that come back at their addresses need no new one
_SMALL_TENSOR_BYTES = 1 << 17
_SMALL_TENSOR_BIT = 1 << 21


def launcher(kernel: Any, launch: Launch, stream_key: Callable[[], int]) -> Callable[[Operands], None]:
    """Enqueues ``kernel`` (a cuda.core kernel) on the stream whose handle ``stream_key`` returns.

    Calling it raises ConstraintsError when an operand cannot be described or the launch is refused.
    """
    import numpy
    from cuda.bindings import driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = launch.block, 1, 1
    config.sharedMemBytes = launch.smem_bytes
    function = driver.CUfunction(int(kernel.handle))

    def value(argument: str | TensorMap, operands: Operands) -> Any:
        if isinstance(argument, TensorMap):
            return _encoded(argument, getattr(operands, argument.operand).data.ptr)
        array = getattr(operands, argument)
        return numpy.array([0 if array is None else array.data.ptr], numpy.uint64)

    def enqueue(operands: Operands) -> None:
        values = [value(argument, operands) for argument in launch.arguments]
        addresses = numpy.array([v.ctypes.data for v in values], numpy.uint64)
        config.hStream = driver.CUstream(stream_key())
        (status,) = driver.cuLaunchKernelEx(config, function, addresses.ctypes.data, 0)
        if int(status) != 0:
            raise ConstraintsError(f"launch refused: {status.name}")

    return enqueue


@lru_cache(maxsize=_MAPS)
def _encoded(tensor: TensorMap, address: int) -> Any:
    """The 128 bytes that describe a tensor at an address."""
    import numpy
    from cuda.bindings import driver

    types = driver.CUtensorMapDataType
    swizzles = driver.CUtensorMapSwizzle
    # zeros are zeros in every type of one size, so that unsigned integers stand for all
    data_type = {1: types.CU_TENSOR_MAP_DATA_TYPE_UINT8, 2: types.CU_TENSOR_MAP_DATA_TYPE_UINT16}[tensor.element_bytes]
    swizzle = {
        32: swizzles.CU_TENSOR_MAP_SWIZZLE_32B,
        64: swizzles.CU_TENSOR_MAP_SWIZZLE_64B,
        128: swizzles.CU_TENSOR_MAP_SWIZZLE_128B,
    }[tensor.swizzle]
    rank = len(tensor.extents)
    extents = [driver.cuuint64_t(extent) for extent in tensor.extents]
    strides = [driver.cuuint64_t(stride) for stride in tensor.strides]
    steps = [driver.cuuint32_t(step) for step in tensor.steps or (1,) * rank]
    how = (
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        swizzle,
        # a slice's channels need not be followed by the next ones at once
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if tensor.corners is None:
        box = [driver.cuuint32_t(extent) for extent in tensor.box]
        status, encoded = driver.cuTensorMapEncodeTiled(data_type, rank, address, extents, strides, box, steps, *how)
    else:
        (lower, upper), (channels, pixels) = tensor.corners, tensor.box
        status, encoded = driver.cuTensorMapEncodeIm2col(
            data_type, rank, address, extents, strides, list(lower), list(upper), channels, pixels, steps, *how
        )
    if int(status) != 0:
        raise ConstraintsError(f"the tensor map of the {tensor.operand} is refused: {status.name}")
    words = numpy.array([int(word) for word in encoded.opaque], numpy.uint64)
    # drivers up to 13.1 set a bit for small tensors that the copy engine misreads
    if max(e * s for e, s in zip(tensor.extents[1:], tensor.strides, strict=True)) < _SMALL_TENSOR_BYTES:
        words[1] &= numpy.uint64(~_SMALL_TENSOR_BIT & (2**64 - 1))
    return words
