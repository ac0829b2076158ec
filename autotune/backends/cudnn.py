"""cuDNN as a rival: every execution plan of a layer as a kernel that takes the same operands as ours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.backends.backend import Kernel, NoDevice, Operands
from autotune.problem import ConvProblem, DType, Layout


class Cudnn:
    """The plans of one layer, its epilogue fused: heuristic modes A, B and fallback, all that can be built.

    Iterating gives (name, kernel) for each plan; a plan that cuDNN cannot build or run raises when called. Kernels
    run on the stream that is current when they are called. cuDNN rounds a scale's product and a bias's sum apart, ours
    together. NoDevice when the cuDNN frontend is not installed; ValueError, in one line, when cuDNN has no plan for the
    layer.
    """

    def __init__(self, problem: ConvProblem) -> None:
        try:
            import cudnn
            import cupy
        except (ImportError, OSError) as error:
            raise NoDevice(
                f"the cuDNN frontend is not installed ({error}): pip install nvidia-cudnn-frontend"
            ) from None
        types = {
            DType.F16: cudnn.data_type.HALF,
            DType.BF16: cudnn.data_type.BFLOAT16,
            DType.F32: cudnn.data_type.FLOAT,
            DType.S8: cudnn.data_type.INT8,
            DType.S32: cudnn.data_type.INT32,
        }
        if problem.dtype is DType.S8 and not problem.epilogue.is_identity and problem.out_dtype is not DType.S8:
            raise ValueError(
                f"cuDNN is no rival for {problem}: its float32 steps differ from ours, and none rounds them"
            )
        self._cudnn, self._cupy = cudnn, cupy
        self.version = f"cuDNN {cudnn.backend_version_string()}"
        self._handle = cudnn.create_handle()
        accumulate = types[DType.S32 if problem.dtype.is_integer else DType.F32]
        fused = not problem.epilogue.is_identity
        graph = cudnn.pygraph(
            io_data_type=types[problem.dtype],
            intermediate_data_type=types[DType.F32] if fused else accumulate,
            compute_data_type=types[DType.F32] if fused else accumulate,
            handle=self._handle,
        )
        p, depth = problem, problem.C // problem.groups
        x = graph.tensor(
            name="x", dim=[p.N, p.C, p.H, p.W], stride=_strides(p.layout, p.C, p.H, p.W), data_type=types[p.dtype]
        )
        w = graph.tensor(
            name="w", dim=[p.K, depth, p.R, p.S], stride=_strides(p.layout, depth, p.R, p.S), data_type=types[p.dtype]
        )
        operands = {"activation": x, "filter": w}
        for name in p.epilogue.operands:
            (count, *_), _ = p.operand(name)
            whole = name == "residual"
            operands[name] = graph.tensor(
                name=name,
                dim=[p.N, p.K, p.P, p.Q] if whole else [1, count, 1, 1],
                stride=_strides(p.layout, p.K, p.P, p.Q) if whole else [count, 1, count, count],
                data_type=types[p.operand(name)[1]],
            )
        y = graph.conv_fprop(
            image=x,
            weight=w,
            pre_padding=[p.padding[0], p.padding[2]],
            post_padding=[p.padding[1], p.padding[3]],
            stride=list(p.stride),
            dilation=list(p.dilation),
            compute_data_type=accumulate,
        )
        for name in p.epilogue.operands:
            y = graph.mul(a=y, b=operands[name]) if name == "scale" else graph.add(a=y, b=operands[name])
        if p.epilogue.activation == "relu":
            y = graph.relu(input=y)
        y.set_output(True).set_data_type(types[p.out_dtype]).set_dim([p.N, p.K, p.P, p.Q])
        y.set_stride(_strides(p.layout, p.K, p.P, p.Q))
        try:
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        except cudnn.cudnnGraphNotSupportedError as error:
            raise ValueError(f"cuDNN has no plan for {problem}: {str(error).splitlines()[0]}") from error
        self._graph, self._tensors = graph, operands | {"output": y}

    def __iter__(self) -> Iterator[tuple[str, Kernel]]:
        for index in range(self._graph.get_execution_plan_count()):
            try:
                self._graph.build_plan_at_index(index)
                workspace = self._cupy.empty(
                    max(1, self._graph.get_workspace_size_plan_at_index(index)), self._cupy.uint8
                )
            # a plan that heuristics propose and that cannot be built is of no use to a user either
            except (self._cudnn.cudnnGraphNotSupportedError, RuntimeError):
                continue
            yield f"plan {index}", self._kernel(index, workspace)

    def _kernel(self, index: int, workspace: Any) -> Kernel:
        uids = {name: tensor.get_uid() for name, tensor in self._tensors.items()}

        def enqueue(operands: Operands) -> None:
            stream = self._cupy.cuda.get_current_stream().ptr
            self._cudnn.set_stream(handle=self._handle, stream=stream)
            pointers = {uid: getattr(operands, name).data.ptr for name, uid in uids.items()}
            self._graph.execute_plan_at_index(pointers, workspace.data.ptr, index, handle=self._handle)

        return enqueue


def _strides(layout: Layout, channels: int, height: int, width: int) -> list[int]:
    """Strides, in elements, of the axes (n, c, h, w) of a tensor in memory order ``layout``."""
    if layout is Layout.NHWC:
        return [channels * height * width, 1, width * channels, channels]
    return [channels * height * width, height * width, width, 1]
