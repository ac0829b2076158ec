"""The contract of a kernel family: its knobs, what is legal, how it is launched, how long it should take."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem
from autotune.trial import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Knob:
    """One parameter of a family. candidates: its values, ascending. meaning: one line, with the unit.

    pipeline: True where it leaves a block's products as they are, and only says how work on them overlaps or is shared.
    """

    name: str
    candidates: tuple[int, ...]
    meaning: str
    pipeline: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What the compiler gets. stem: of the file in kernels/ that ``text`` includes. entry: the function's name."""

    language: str  # "cuda" or "c"
    stem: str
    text: str
    entry: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A kernel parameter that describes an operand to the GPU's tensor copy engine (from sm_90 on), passed by value.

    extents: of up to five axes, innermost first, in elements. strides: of all axes but the first, in bytes, multiples
    of 16. box: what one copy brings, in elements. swizzle: bytes of a shared-memory row whose 16-byte chunks are
    permuted (32, 64, 128). What a box holds outside the extents is written as zeros. steps: from an element of every
    axis that is brought to the next one, at most 8; n elements of a box are then n / step, rounded up.

    With corners the copy is one of im2col: the box is (channels, pixels), corners are the offsets (w, h) of the first
    base pixel from the image's first and of the last from its last, steps those between base pixels along every axis.
    """

    operand: str
    element_bytes: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    swizzle: int
    corners: tuple[tuple[int, int], tuple[int, int]] | None = None
    steps: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a compiled config is run. On cuda: grid and block (x only), dynamic shared memory; on cpu both are 1.

    workspace_bytes: device memory beyond the operands, which the caller provides, 256-byte aligned and zeroed once
    when it is allocated; a kernel leaves its counters at zero. arguments: the kernel's parameters in order: pointers,
    each one of ``activation``, ``filter``, ``output``, ``workspace`` and the epilogue's operands, or tensor maps.
    """

    grid: int
    block: int
    smem_bytes: int = 0
    workspace_bytes: int = 0
    arguments: tuple[str | TensorMap, ...] = ("activation", "filter", "output", "workspace")


class Family(ABC):
    """A kernel family. Instances carry no state, are equal when of one class, and can be pickled by reference."""

    name: ClassVar[str]  # also the stem of its file in kernels/ and of its module
    kind: ClassVar[str]  # the DeviceSpec.kind it runs on
    knobs: ClassVar[tuple[Knob, ...]]

    @abstractmethod
    def unsupported(self, problem: ConvProblem, device: DeviceSpec) -> str | None:
        """Why no config of this family can run the layer on the device, in one line; None when some can."""

    @abstractmethod
    def illegal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        """Why this config cannot run a supported layer, in one line; None when it can. Stated here and nowhere else."""

    @abstractmethod
    def source(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Source:
        """The translation unit of a legal config."""

    @abstractmethod
    def launch(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> Launch:
        """How a legal config is launched."""

    @abstractmethod
    def predict_us(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> float:
        """Rough time in microseconds, used only to order legal configs."""

    def choices(self, problem: ConvProblem, device: DeviceSpec) -> Iterable[tuple[int, ...]]:
        """Knob values worth a look by ``illegal``: all combinations, unless a family can skip whole groups of them."""
        return itertools.product(*(knob.candidates for knob in self.knobs))

    def legal(self, config: Config, problem: ConvProblem, device: DeviceSpec) -> str | None:
        """Why ``config`` cannot run ``problem`` on ``device``, whatever its source; None when it can."""
        if config.family != self.name:
            return f"{config.family} is not {self.name}"
        if device.kind != self.kind:
            return f"{self.name} runs on {self.kind}, not on {device.kind}"
        names = tuple(knob.name for knob in self.knobs)
        if tuple(name for name, _ in config.knobs) != names:
            return f"{self.name} has the knobs {', '.join(names)}"
        for knob, (_, value) in zip(self.knobs, config.knobs, strict=True):
            if value not in knob.candidates:
                return f"{knob.name}={value} is not one of {', '.join(map(str, knob.candidates))}"
        return self.unsupported(problem, device) or self.illegal(config, problem, device)

    def configs(self, problem: ConvProblem, device: DeviceSpec) -> tuple[Config, ...]:
        """Every legal config, best prediction first (ties in the order of the knobs)."""
        return _configs(self, problem, device)

    def default(self, problem: ConvProblem, device: DeviceSpec) -> Config | None:
        """The config to use untuned: the best prediction; None when nothing is legal."""
        configs = self.configs(problem, device)
        return configs[0] if configs else None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))


@lru_cache(maxsize=256)
def _configs(family: Family, problem: ConvProblem, device: DeviceSpec) -> tuple[Config, ...]:
    if device.kind != family.kind or family.unsupported(problem, device):
        return ()
    names = [knob.name for knob in family.knobs]
    choices = family.choices(problem, device)
    every = (Config(family.name, tuple(zip(names, values, strict=True))) for values in choices)
    found = [config for config in every if family.illegal(config, problem, device) is None]
    return tuple(sorted(found, key=lambda config: family.predict_us(config, problem, device)))


def constants(struct: str, values: Mapping[str, int | bool | str]) -> str:
    """A C++ struct that is a template's parameter: numbers become ``static constexpr`` members, texts type aliases."""
    lines = [
        f"  using {name} = {value};"
        if isinstance(value, str)
        else f"  static constexpr {_ctype(value)} {name} = {value:d};"
        for name, value in values.items()
    ]
    return "\n".join([f"struct {struct} {{", *lines, "};"])


def _ctype(value: int | bool) -> str:
    if isinstance(value, bool):
        return "bool"
    return "int" if -(2**31) <= value < 2**31 else "long long"
