"""The options that several verbs share, LAYER-OPTIONS above all, and how their text becomes values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any

import typer

from autotune.cli.output import Failure, notice
from autotune.device import Device
from autotune.problem import ACTIVATIONS, INPUT_DTYPES, SCALES, ConvProblem, DType, Epilogue, Layout

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Database = Annotated[
    str | None,
    typer.Option(
        "--db",
        metavar="PATH|URL",
        help="Tuning database. [default: AUTOTUNE_DB, else tuning.db in the user data directory]",
    ),
]
DeviceText = Annotated[
    str,
    typer.Option("--device", metavar="auto|cpu|cuda:I", help="Device; auto is the first CUDA device, else cpu."),
]


def stated_layer(
    *,
    layer: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The layer's canonical text, instead of the options below.")
    ] = None,
    input: Annotated[str | None, typer.Option(metavar="NxCxHxW", help="Extents of the activation.")] = None,
    filters: Annotated[str | None, typer.Option(metavar="K", help="Number of filters.")] = None,
    kernel: Annotated[str | None, typer.Option(metavar="RxS", help="Height and width of a filter.")] = None,
    stride: Annotated[str | None, typer.Option(metavar="A|AxB", help="Vertical and horizontal. [default: 1]")] = None,
    padding: Annotated[
        str | None, typer.Option(metavar="A|AxB|T,B,L,R", help="Zeros around the activation. [default: 0]")
    ] = None,
    dilation: Annotated[str | None, typer.Option(metavar="A|AxB", help="Distance of taps. [default: 1]")] = None,
    groups: Annotated[str | None, typer.Option(metavar="G", help="Groups of channels. [default: 1]")] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="|".join(INPUT_DTYPES), help="Type of activation and filter. [default: f16]")
    ] = None,
    layout: Annotated[str | None, typer.Option(metavar="nhwc|nchw", help="Memory order. [default: nhwc]")] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Add a vector of K values.")] = False,
    residual: Annotated[bool, typer.Option("--residual", help="Add a tensor of the output's shape.")] = False,
    activation: Annotated[
        str | None, typer.Option(metavar="|".join(ACTIVATIONS), help="Applied last. [default: identity]")
    ] = None,
    scale: Annotated[
        str | None, typer.Option(metavar="|".join(SCALES), help="Factor of the accumulator. [default: none]")
    ] = None,
    out_dtype: Annotated[
        str | None,
        typer.Option(
            metavar="D", help="Type of the output. [default: the input's; s8: s32 without a scale, s8 with one]"
        ),
    ] = None,
) -> ConvProblem:
    """The layer that the options state; its parameters are LAYER-OPTIONS, the device apart.

    A value that cannot be read is wrong usage; a layer that cannot exist is a Failure.
    """
    given = [f"--{name.replace('_', '-')}" for name, value in locals().items() if value not in (None, False)]
    if layer is not None:
        if len(given) > 1:
            raise _usage("--layer", f"it states the whole layer: leave out {', '.join(given[1:])}")
        try:
            return ConvProblem.parse(layer)
        except ValueError as error:
            raise _usage("--layer", str(error)) from None
    n, c, h, w = _integers("--input", input, "NxCxHxW", f"{_N}(x{_N}){{3}}")
    (k,) = _integers("--filters", filters, "a whole number", _N)
    r, s = _integers("--kernel", kernel, "RxS", f"{_N}x{_N}")
    try:
        return ConvProblem(
            N=n,
            C=c,
            H=h,
            W=w,
            K=k,
            R=r,
            S=s,
            stride=_integers("--stride", _or(stride, "1"), "A or AxB", _PAIR),
            padding=_integers("--padding", _or(padding, "0"), "A, AxB or T,B,L,R", f"{_PAIR}|{_N}(,{_N}){{3}}"),
            dilation=_integers("--dilation", _or(dilation, "1"), "A or AxB", _PAIR),
            groups=_integers("--groups", _or(groups, "1"), "a whole number", _N)[0],
            dtype=_choice("--dtype", _or(dtype, "f16"), INPUT_DTYPES),
            layout=_choice("--layout", _or(layout, "nhwc"), tuple(Layout)),
            epilogue=Epilogue(
                bias=bias,
                residual=residual,
                activation=_choice("--activation", _or(activation, "identity"), ACTIVATIONS),
                scale=_choice("--scale", _or(scale, "none"), SCALES),
                out_dtype=None if out_dtype is None else DType(_choice("--out-dtype", out_dtype, tuple(DType))),
            ),
        )
    except ValueError as error:
        raise Failure(str(error)) from None


_N = r"-?\d{1,18}"
_PAIR = f"{_N}(x{_N})?"


def takes_layer(verb: Callable[..., None], unless: str | None = None) -> Callable[..., None]:
    """Give a verb LAYER-OPTIONS in place of its parameter ``problem``.

    unless: the verb's flag with which no layer need be stated; ``problem`` is None where none is.
    """
    options = inspect.signature(stated_layer, eval_str=True).parameters
    own = [p for p in inspect.signature(verb, eval_str=True).parameters.values() if p.name != "problem"]
    parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*options.values(), *own)]

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        stated = {name: values.pop(name) for name in options}
        none = unless is not None and values[unless] and not any(stated.values())
        verb(problem=None if none else stated_layer(**stated), **values)

    # typer reads both
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def usable_device(text: str) -> Device:
    """The device of this machine that ``--device`` names, NoDevice if absent; says on stderr what ``auto`` chose."""
    from autotune.backends import find

    try:
        device = find(text)
    except ValueError as error:
        raise _usage("--device", str(error)) from None
    if text == "auto" and device.spec is not None:
        notice(f"device: {device.id} ({device.spec.name})")
    return device


def _or(text: str | None, default: str) -> str:
    """The option's text, the empty one too, else the default."""
    return default if text is None else text


def _usage(option: str, message: str) -> typer.BadParameter:
    return typer.BadParameter(message, param_hint=f"'{option}'")


def _integers(option: str, text: str | None, form: str, pattern: str) -> tuple[int, ...]:
    if text is None:
        raise _usage(option, f"give it as {form}, or the whole layer as --layer TEXT")
    if not re.fullmatch(pattern, text, re.ASCII | re.IGNORECASE):
        raise _usage(option, f"{text!r} is not {form}")
    return tuple(int(number) for number in re.split("[x,]", text.lower()))


def _choice(option: str, text: str, choices: tuple[str, ...]) -> str:
    """The choice that ``text`` spells; a dtype may be spelt by its aliases."""
    wanted = text.lower()
    if isinstance(choices[0], DType):
        with contextlib.suppress(ValueError):  # said below, with this option's choices
            wanted = DType.of(wanted)
    if wanted not in choices:
        raise _usage(option, f"{text!r} is not one of {', '.join(choices)}")
    return wanted
