"""cuDNN as a rival: every execution plan of a layer as a kernel that takes the same operands as ours."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

from autotune.backends.backend import ConstraintsError, Kernel, NoDevice, Operands
from autotune.problem import ConvProblem, DType, Layout


class Cudnn:
    """The plans of one layer, its epilogue fused: heuristic modes A, B and fallback, each engine config once.

    Kernels take operands in the layer's layout and run on the stream that is current when they are called. cuDNN rounds
    a scale's product and a bias's sum apart, ours together. NoDevice when the cuDNN frontend is not installed;
    ValueError, in one line, when cuDNN has no plan for the layer.

    neutral_bias: the plans of the layer with a bias of zeros, which is the plans' own: for one without an epilogue they
    compute the same, and are often faster than those without a bias.
    """

    def __init__(self, problem: ConvProblem, *, neutral_bias: bool = False) -> None:
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
        self.layout = problem.layout
        self.name = f"cuDNN {cudnn.backend_version_string()} {problem.layout.upper()}"
        self._own: dict[str, Any] = {}
        if neutral_bias:
            self.name += " with a bias of zeros"
            problem = replace(problem, epilogue=replace(problem.epilogue, bias=True))
            self._own["bias"] = cupy.zeros(problem.K, cupy.float32)
        self._handle = _handle(cudnn)
        self._refusals = (cudnn.cudnnGraphNotSupportedError, RuntimeError)
        try:
            self._graph, self._tensors = self._graph_of(problem, types)
            self._graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.B, cudnn.heur_mode.FALLBACK])
        except self._refusals as error:
            raise ValueError(f"{self.name} has no plan for {problem}: {_line(error)}") from error
        # modes propose the same engine configs, in different order
        names: dict[str, int] = {}
        for index in range(self._graph.get_execution_plan_count()):
            names.setdefault(self._graph.get_plan_name_at_index(index), index)
        self._plans = list(names.values())

    def _graph_of(self, problem: ConvProblem, types: dict[DType, Any]) -> tuple[Any, dict[str, Any]]:
        """The validated graph, and its tensors by the names of ``Operands``."""
        cudnn = self._cudnn
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
        graph.validate()
        graph.build_operation_graph()
        return graph, operands | {"output": y}

    def __len__(self) -> int:
        return len(self._plans)

    def kernel(self, index: int) -> Kernel:
        """Build a plan; ConstraintsError, now or when the kernel is called, for one that cannot be built or run."""
        plan = self._plans[index]
        try:
            self._graph.build_plan_at_index(plan)
            workspace = self._cupy.empty(max(1, self._graph.get_workspace_size_plan_at_index(plan)), self._cupy.uint8)
        except (*self._refusals, MemoryError) as error:
            raise ConstraintsError(_line(error)) from error
        uids = {name: tensor.get_uid() for name, tensor in self._tensors.items()}

        def enqueue(operands: Operands) -> None:
            stream = self._cupy.cuda.get_current_stream().ptr
            arrays = {uid: self._own.get(name, getattr(operands, name)) for name, uid in uids.items()}
            pointers = {uid: array.data.ptr for uid, array in arrays.items()}
            try:
                self._cudnn.set_stream(handle=self._handle, stream=stream)
                self._graph.execute_plan_at_index(pointers, workspace.data.ptr, plan, handle=self._handle)
            except self._refusals as error:
                raise ConstraintsError(_line(error)) from error

        return enqueue


@cache
def _handle(cudnn: Any) -> Any:
    return cudnn.create_handle()


def _line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _strides(layout: Layout, channels: int, height: int, width: int) -> list[int]:
    """Strides, in elements, of the axes (n, c, h, w) of a tensor in memory order ``layout``."""
    if layout is Layout.NHWC:
        return [channels * height * width, 1, width * channels, channels]
    return [channels * height * width, height * width, width, 1]
