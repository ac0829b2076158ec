"""A small right kernel and its broken siblings: every way in which a candidate can fail, as one knob of a family."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from autotune.families import Family, Knob, Launch, Source
from autotune.problem import ConvProblem, DType
from autotune.trial import Config, Status


@dataclass(frozen=True)
class Fault:
    """What a kernel does wrong. status: what must become of it.

    first: statements before the loop over outputs. skip: an expression of ``i`` and ``COUNT``, true for outputs that
    are not written. top: lines before the kernel.
    """

    name: str
    status: Status
    detail: str = ""
    first: str = ""
    skip: str = "0"
    top: str = ""


# opening a pipe that nobody writes to never returns: a compiler that includes it hangs
_NEVER = Path(tempfile.gettempdir()) / f"conv-autotune-never-{os.getpid()}.h"

FAULTS = (
    Fault("none", Status.CORRECT),
    Fault("returns_at_once", Status.CORRECTNESS, "elements are wrong", first="return;"),
    Fault("skips_the_last_tile", Status.CORRECTNESS, "elements are wrong", skip="i >= COUNT - 8"),
    Fault("one_element_is_wrong", Status.CORRECTNESS, "1 of ", first="one = COUNT / 2;"),
    Fault("writes_behind_the_output", Status.CORRECTNESS, "wrote after the output", first="output[COUNT + 3] = 1;"),
    Fault("writes_before_the_output", Status.CORRECTNESS, "wrote before the output", first="output[-2] = 1;"),
    Fault("writes_into_the_input", Status.CORRECTNESS, "wrote into the activation", first="input[5] = input[5] + 1;"),
    Fault("reads_address_0", Status.RUNTIME, first="output[0] = *(volatile Output *)0;"),
    Fault("never_ends", Status.TIMEOUT, "no answer within", first="for (;;) *(volatile Output *)output = 0;"),
    Fault("does_not_compile", Status.COMPILE, "this is wrong", top="#error this is wrong"),
    Fault("hangs_the_compiler", Status.COMPILE, "no answer within", top=f"#include <{_NEVER}>"),
)


@dataclass(frozen=True)
class Dialect:
    """What the kernel's text needs to say in a device's language."""

    kind: str
    language: str
    dtype: DType
    element: str
    output: str
    signature: str
    start: str
    step: str
    launch: Launch


CPU = Dialect(
    kind="cpu",
    language="c",
    dtype=DType.F32,
    element="float",
    output="float",
    signature="void",
    start="0",
    step="1",
    launch=Launch(grid=1, block=1),
)
CUDA = Dialect(
    kind="cuda",
    language="cuda",
    dtype=DType.S8,
    element="signed char",
    output="int",
    signature='extern "C" __global__ void',
    start="blockIdx.x * blockDim.x + threadIdx.x",
    step="gridDim.x * blockDim.x",
    launch=Launch(grid=8, block=128),
)

_TEXT = """
{top}
typedef {element} Element;
typedef {output} Output;
enum {{ {names} }};
{signature} faulty(const Element *activation, const Element *filter, Output *output, void *workspace) {{
  long one = -1;
  Element *input = (Element *)activation;
  (void)input, (void)workspace;
  {first}
  for (long i = {start}; i < COUNT; i += {step}) {{
    if ({skip}) continue;
    long k = i % K, q = i / K % Q, p = i / K / Q % P, n = i / K / Q / P;
    Output sum = 0;
    for (int again = 0; again < EFFORT; ++again) {{
      sum = 0;
      for (int r = 0; r < R; ++r)
        for (int s = 0; s < S; ++s)
          for (int c = 0; c < C; ++c)
            sum += (Output)activation[((n * H + p + r) * W + q + s) * C + c] * filter[((k * R + r) * S + s) * C + c];
      *(volatile Output *)(output + i) = i == one ? sum + 1000 : sum;
    }}
  }}
}}
"""


class Faulty(Family):
    """An unpadded dense convolution of stride 1, right for ``fault`` 0. effort: how often it does its work.

    Subclasses state the dialect.
    """

    name = "faulty"
    dialect: ClassVar[Dialect]
    knobs = (
        Knob(name="fault", candidates=tuple(range(len(FAULTS))), meaning="index of a fault"),
        Knob(name="effort", candidates=(1, 60), meaning="repetitions"),
    )

    def unsupported(self, problem: ConvProblem, *_: object) -> str | None:
        plain = (problem.stride, problem.padding, problem.dilation, problem.groups) == ((1, 1), (0, 0, 0, 0), (1, 1), 1)
        return None if plain and problem.dtype is self.dialect.dtype else "only the plainest layer"

    def illegal(self, config: Config, *_: object) -> str | None:
        return "one effort is enough to fail" if config["fault"] and config["effort"] > 1 else None

    def source(self, config: Config, problem: ConvProblem, *_: object) -> Source:
        fault, d = FAULTS[config["fault"]], self.dialect
        sizes = {n: getattr(problem, n) for n in ("C", "H", "W", "K", "R", "S", "P", "Q")}
        sizes |= {"COUNT": problem.N * problem.P * problem.Q * problem.K, "EFFORT": config["effort"]}
        text = _TEXT.format(
            **{"top": fault.top, "first": fault.first, "skip": fault.skip, "element": d.element, "output": d.output},
            **{"signature": d.signature, "start": d.start, "step": d.step},
            names=", ".join(f"{name} = {value}" for name, value in sizes.items()),
        )
        return Source(language=d.language, stem="faulty", text=text, entry="faulty")

    def launch(self, *_: object) -> Launch:
        return self.dialect.launch

    def predict_us(self, config: Config, *_: object) -> float:
        # the worst and a fault that kills the child come first
        return 100.0 - config["effort"] + (config["fault"] * 7 + 3) % 11


class FaultyCpu(Faulty):
    """The C version."""

    kind = "cpu"
    dialect = CPU


class FaultyCuda(Faulty):
    """The CUDA version."""

    kind = "cuda"
    dialect = CUDA


def make_the_compiler_hang() -> None:
    """Make what ``hangs_the_compiler`` includes."""
    if not _NEVER.exists():
        os.mkfifo(_NEVER)


def let_the_compiler_go() -> None:
    _NEVER.unlink(missing_ok=True)
