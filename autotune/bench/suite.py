"""Suites: named layers, with what a rival that is not at hand took on them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autotune.problem import ConvProblem, DType, Epilogue


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A named layer of a suite.

    cutlass_per_cudnn: CUTLASS's time over cuDNN's on this layer in one earlier run, where both are known.
    """

    name: str
    problem: ConvProblem
    cutlass_per_cudnn: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """What a table holds one row of: layer, dtype, epilogue."""
        return self.name, str(self.problem.dtype), str(self.problem.epilogue)


def layers_of(path: Path, dtype: DType, epilogue: Epilogue | None = None) -> list[Layer]:
    """The layers of a suite file: a JSON object with ``layers``, each with name, N, C, H, W, K, R, S, and geometry.

    All in this dtype and with this epilogue, the identity if None. ValueError, in one line, for another file.
    """
    fields = ("N", "C", "H", "W", "K", "R", "S", "stride", "padding", "dilation", "groups")
    try:
        listed = json.loads(path.read_text())["layers"]
        layers = []
        for item in listed:
            problem = ConvProblem(**{f: item[f] for f in fields}, dtype=dtype, epilogue=epilogue)
            layers.append(Layer(name=item["name"], problem=problem, cutlass_per_cudnn=_ratio(item, problem)))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a suite of layers: {error!r}") from error
    return layers


def is_dense(problem: ConvProblem) -> bool:
    """True for the layers of which means are taken: ungrouped, with at least 32 channels."""
    return problem.groups == 1 and problem.C >= 32


def _ratio(item: dict[str, Any], problem: ConvProblem) -> float | None:
    e = problem.epilogue
    if problem.dtype is not DType.S8 or e.scale == "none" or not e.bias or e.residual or e.activation != "relu":
        return None
    cutlass = (item.get("other_us") or {}).get("cutlass_s8_bias_relu")
    cudnn = (item.get("cudnn_us") or {}).get("s8_scale_bias_relu")
    return cutlass / cudnn if cutlass and cudnn else None
