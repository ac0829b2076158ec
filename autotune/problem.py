"""What is to be computed: a convolution layer and its epilogue, as values that need no other package."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, SupportsIndex

IntPair = SupportsIndex | Sequence[SupportsIndex]


class DType(StrEnum):
    """Element type of a tensor, by its canonical spelling."""

    F16 = "f16"
    BF16 = "bf16"
    TF32 = "tf32"
    F32 = "f32"
    S8 = "s8"
    E4M3 = "e4m3"
    S32 = "s32"

    @property
    def bytes(self) -> int:
        """Bytes of one element in memory (tf32 is stored as f32)."""
        return _DTYPE_BYTES[self]

    @property
    def is_integer(self) -> bool:
        return self in (DType.S8, DType.S32)

    @classmethod
    def of(cls, value: object) -> DType:
        """The dtype meant by a name, a common alias, or a NumPy, CuPy or torch dtype; ValueError otherwise."""
        name = getattr(value, "name", None) or getattr(value, "__name__", None) or str(value)
        text = str(value if isinstance(value, str) else name).lower().removeprefix("torch.")
        if text in _DTYPE_ALIASES:
            return _DTYPE_ALIASES[text]
        raise ValueError(f"unknown dtype {value!r}: use one of {', '.join(INPUT_DTYPES)}")


_DTYPE_BYTES = {
    DType.F16: 2,
    DType.BF16: 2,
    DType.TF32: 4,
    DType.F32: 4,
    DType.S8: 1,
    DType.E4M3: 1,
    DType.S32: 4,
}
_DTYPE_ALIASES = {str(d): d for d in DType} | {
    "float16": DType.F16,
    "half": DType.F16,
    "fp16": DType.F16,
    "bfloat16": DType.BF16,
    "float32": DType.F32,
    "float": DType.F32,
    "fp32": DType.F32,
    "int8": DType.S8,
    "i8": DType.S8,
    "int32": DType.S32,
    "i32": DType.S32,
    "float8_e4m3fn": DType.E4M3,
    "fp8": DType.E4M3,
}
INPUT_DTYPES = (DType.F16, DType.BF16, DType.TF32, DType.F32, DType.S8, DType.E4M3)


class Layout(StrEnum):
    """Memory order. nhwc: activation NHWC, filter KRSC, output NPQK. nchw: NCHW, KCRS, NKPQ."""

    NHWC = "nhwc"
    NCHW = "nchw"


ACTIVATIONS = ("identity", "relu")
SCALES = ("none", "tensor", "channel")


@dataclass(frozen=True, slots=True, kw_only=True)
class Epilogue:
    """What happens to the accumulator before it is stored: ``y = activation(scale * acc + bias + residual)``.

    bias: a float32 vector of K values is added. residual: a tensor of the output's shape, layout and dtype is added.
    activation: one of ``ACTIVATIONS``; relu keeps NaN. scale: ``none``, ``tensor`` (one float32) or ``channel`` (K
    float32 values), multiplied first. out_dtype: the output's element type; None means the input's (s8: s32 without a
    scale, s8 with one).

    Arithmetic is float32, in this order: ``t = fma(float32(acc), scale, bias)``, rounded once, with a scale of 1 and a
    bias of 0 where there is none; ``t = t + float32(residual)``; ``t = activation(t)``; t is rounded to nearest even,
    ties to even, as the output's dtype. s8 and s32 outputs saturate.

    s8 inputs accumulate exactly in s32, so that their outputs are defined to the bit; with the identity an s32 output
    is the accumulator itself. An f16 output of s8 needs a scale, as sums overflow it. A residual of an s8 output would
    be added as ``float32(residual) * residual_scale``; there is no field for that scale yet, so it is undefined.

    Raises ValueError for an unknown activation, scale or dtype. Which epilogues a kernel can run is the family's say.
    """

    bias: bool = False
    residual: bool = False
    activation: str = "identity"
    scale: str = "none"
    out_dtype: DType | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "bias", bool(self.bias))
        object.__setattr__(self, "residual", bool(self.residual))
        object.__setattr__(self, "activation", str(self.activation).lower())
        object.__setattr__(self, "scale", str(self.scale).lower())
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {self.activation!r}: use one of {', '.join(ACTIVATIONS)}")
        if self.scale not in SCALES:
            raise ValueError(f"unknown scale {self.scale!r}: use one of {', '.join(SCALES)}")
        if self.out_dtype is not None:
            object.__setattr__(self, "out_dtype", DType.of(self.out_dtype))

    @property
    def is_identity(self) -> bool:
        """True when the accumulator is only converted to the output's dtype."""
        return not (self.bias or self.residual or self.activation != "identity" or self.scale != "none")

    @property
    def operands(self) -> tuple[str, ...]:
        """The operands that it reads, in the order applied: of ``scale``, ``bias``, ``residual``."""
        read = {"scale": self.scale != "none", "bias": self.bias, "residual": self.residual}
        return tuple(name for name, is_read in read.items() if is_read)

    def undefined(self, dtype: DType) -> str | None:
        """Why this epilogue (its output dtype resolved) has no meaning for inputs of ``dtype``; None when it has."""
        if self.out_dtype is DType.S8 and self.residual:
            return "a residual of an s8 output needs a scale of its own, which cannot be stated yet (--out-dtype f32)"
        if dtype is DType.S8 and self.out_dtype is DType.F16 and self.scale == "none":
            return "an f16 output of s8 needs a scale (--scale channel), as sums overflow it"
        return None

    def resolved(self, dtype: DType) -> Epilogue:
        """The same epilogue with its output dtype spelt out for inputs of ``dtype``."""
        if self.out_dtype is not None:
            return self
        if dtype is DType.S8:
            return replace(self, out_dtype=DType.S32 if self.scale == "none" else DType.S8)
        return replace(self, out_dtype=DType.F32 if dtype is DType.TF32 else dtype)

    def __str__(self) -> str:
        """Canonical text without the output dtype: ``identity``, or parts joined by ``+`` in the order applied."""
        parts = [f"scale_{self.scale}"] if self.scale != "none" else []
        parts += ["bias"] * self.bias + ["residual"] * self.residual
        parts += [self.activation] if self.activation != "identity" else []
        return "+".join(parts) or "identity"

    @classmethod
    def parse(cls, text: str, out_dtype: DType | None = None) -> Epilogue:
        """Inverse of ``str``; ValueError names the part that is not understood."""
        values: dict[str, Any] = {}
        for part in [] if text == "identity" else text.split("+"):
            if part in ("bias", "residual"):
                values[part] = True
            elif part.startswith("scale_"):
                values["scale"] = part.removeprefix("scale_")
            else:
                values["activation"] = part
        return cls(**values, out_dtype=out_dtype)


# beyond every memory, and such that 64-bit arithmetic on indices, bytes and float64 copies cannot overflow
_SIZE_LIMIT = 2**31
_BYTES_LIMIT = 2**59


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name} must be an integer, not {value!r}") from None
    if number >= _SIZE_LIMIT:
        raise ValueError(f"{name} must be below 2**31")
    return number


def _integers(name: str, value: object, lengths: tuple[int, ...]) -> tuple[int, ...]:
    if isinstance(value, str | bytes):
        raise ValueError(f"{name} must be an integer or {' or '.join(map(str, lengths))} of them, not {value!r}")
    # an array is no Sequence; one without axes is a number
    if isinstance(value, Sequence) or getattr(value, "ndim", 0) > 0:
        items = tuple(_integer(name, v) for v in value)  # type: ignore[attr-defined]
        if len(items) not in lengths:
            raise ValueError(f"{name} must be an integer or {' or '.join(map(str, lengths))} of them, not {value!r}")
        return items
    return (_integer(name, value),)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvProblem:
    """A two-dimensional convolution layer (cross-correlation, forward) with its epilogue; a hashable value.

    N, C, H, W: batch, input channels, height, width. K, R, S: filters, filter height and width.
    stride, dilation: int or (h, w). padding: int, (h, w) or (top, bottom, left, right), zeros. groups divides C and K;
    the filter then has C / groups channels. dtype: of activation and filter. layout: see ``Layout``.

    Equal when they mean the same layer: spellings are normalised, the output dtype is resolved, and the dilation of a
    filter axis of extent 1, which changes nothing, is 1.

    Raises ValueError, in one line, for a size below 1 (N may be 0), a negative padding, groups that do not divide,
    an output extent below 1, a number from 2**31 on or a tensor of 2**59 bytes or more.
    """

    N: int
    C: int
    H: int
    W: int
    K: int
    R: int
    S: int
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int, int, int] = (0, 0, 0, 0)
    dilation: tuple[int, int] = (1, 1)
    groups: int = 1
    dtype: DType = DType.F16
    layout: Layout = Layout.NHWC
    epilogue: Epilogue = Epilogue()
    _key: tuple[object, ...] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __init__(
        self,
        *,
        N: SupportsIndex,
        C: SupportsIndex,
        H: SupportsIndex,
        W: SupportsIndex,
        K: SupportsIndex,
        R: SupportsIndex,
        S: SupportsIndex,
        stride: IntPair = 1,
        padding: IntPair = 0,
        dilation: IntPair = 1,
        groups: SupportsIndex = 1,
        dtype: object = DType.F16,
        layout: str = Layout.NHWC,
        epilogue: Epilogue | None = None,
    ) -> None:
        put = object.__setattr__
        for name, value in (("N", N), ("C", C), ("H", H), ("W", W), ("K", K), ("R", R), ("S", S), ("groups", groups)):
            number = _integer(name, value)
            if number < (0 if name == "N" else 1):
                raise ValueError(f"{name} must be at least {0 if name == 'N' else 1}, not {number}")
            put(self, name, number)
        for name, pairs in (("stride", stride), ("dilation", dilation)):
            pair = _integers(name, pairs, (1, 2))
            if min(pair) < 1:
                raise ValueError(f"{name} must be at least 1, not {min(pair)}")
            put(self, name, (pair[0], pair[-1]))
        put(self, "dilation", (1 if self.R == 1 else self.dilation[0], 1 if self.S == 1 else self.dilation[1]))
        pads = _integers("padding", padding, (1, 2, 4))
        if min(pads) < 0:
            raise ValueError(f"padding must not be negative, not {min(pads)}")
        put(self, "padding", pads if len(pads) == 4 else (pads[0], pads[0], pads[-1], pads[-1]))
        put(self, "dtype", DType.of(dtype))
        if self.dtype not in INPUT_DTYPES:
            raise ValueError(f"{self.dtype} is not an input dtype: use one of {', '.join(INPUT_DTYPES)}")
        try:
            put(self, "layout", Layout(str(layout).lower()))
        except ValueError:
            raise ValueError(f"unknown layout {layout!r}: use nhwc or nchw") from None
        if epilogue is not None and not isinstance(epilogue, Epilogue):
            raise ValueError(f"epilogue must be an Epilogue, not {epilogue!r} (Epilogue.parse reads a text)")
        put(self, "epilogue", (epilogue if epilogue is not None else Epilogue()).resolved(self.dtype))
        for name, size in (("C", self.C), ("K", self.K)):
            if size % self.groups:
                raise ValueError(f"groups must divide {name}: {self.groups} does not divide {size}")
        for name, extent in (("P", self.P), ("Q", self.Q)):
            if extent < 1:
                raise ValueError(f"output extent {name} is {extent}: the filter reaches beyond the padded input")
        pixels = (self.H + sum(self.padding[:2])) * (self.W + sum(self.padding[2:]))
        sizes = {"padded activation": self.N * self.C * pixels * self.dtype.bytes, "filter": self.filter_bytes}
        for name, nbytes in (sizes | {"output": self.output_bytes}).items():
            if nbytes >= _BYTES_LIMIT:
                raise ValueError(f"the {name} has {nbytes:.1e} bytes: a tensor must be smaller than 2**59")
        put(self, "_key", tuple(getattr(self, name) for name in _FIELDS))
        put(self, "_hash", hash(self._key))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, ConvProblem):
            return NotImplemented
        return self._hash == other._hash and self._key == other._key

    def __reduce__(self) -> tuple[Any, ...]:
        # the cached hash of strings differs from process to process: build anew
        return (ConvProblem.parse, (str(self),))

    @property
    def P(self) -> int:
        """Output height."""
        return _extent(self.H, self.R, self.stride[0], self.padding[0] + self.padding[1], self.dilation[0])

    @property
    def Q(self) -> int:
        """Output width."""
        return _extent(self.W, self.S, self.stride[1], self.padding[2] + self.padding[3], self.dilation[1])

    @property
    def out_dtype(self) -> DType:
        """Element type of the output."""
        assert self.epilogue.out_dtype is not None
        return self.epilogue.out_dtype

    @property
    def activation_shape(self) -> tuple[int, int, int, int]:
        n, c, h, w = self.N, self.C, self.H, self.W
        return (n, h, w, c) if self.layout is Layout.NHWC else (n, c, h, w)

    @property
    def filter_shape(self) -> tuple[int, int, int, int]:
        k, c, r, s = self.K, self.C // self.groups, self.R, self.S
        return (k, r, s, c) if self.layout is Layout.NHWC else (k, c, r, s)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        n, k, p, q = self.N, self.K, self.P, self.Q
        return (n, p, q, k) if self.layout is Layout.NHWC else (n, k, p, q)

    @property
    def operands(self) -> tuple[str, ...]:
        """The names of what a kernel reads: activation, filter and the epilogue's operands."""
        return ("activation", "filter", *self.epilogue.operands)

    def operand(self, name: str) -> tuple[tuple[int, ...], DType]:
        """Shape and dtype of an operand or of ``output``; that of a scale for the whole tensor is (1,)."""
        if name in ("activation", "filter"):
            return (self.activation_shape if name == "activation" else self.filter_shape), self.dtype
        if name in ("scale", "bias"):
            return (1 if name == "scale" and self.epilogue.scale == "tensor" else self.K,), DType.F32
        return self.output_shape, self.out_dtype

    @property
    def activation_bytes(self) -> int:
        return self.N * self.C * self.H * self.W * self.dtype.bytes

    @property
    def filter_bytes(self) -> int:
        return self.K * (self.C // self.groups) * self.R * self.S * self.dtype.bytes

    @property
    def output_bytes(self) -> int:
        return self.N * self.K * self.P * self.Q * self.out_dtype.bytes

    @property
    def flops(self) -> int:
        """Operations of the layer, a multiply-add counted as two, taps on padding included."""
        return 2 * self.N * self.P * self.Q * self.K * (self.C // self.groups) * self.R * self.S

    @property
    def min_bytes(self) -> int:
        """Compulsory memory traffic: each operand of layer and epilogue read once, the output written once."""
        e = self.epilogue
        operands = 4 * self.K * e.bias + 4 * {"none": 0, "tensor": 1, "channel": self.K}[e.scale]
        residual = self.output_bytes if e.residual else 0
        return self.activation_bytes + self.filter_bytes + self.output_bytes + operands + residual

    def __str__(self) -> str:
        """Canonical text, accepted by ``parse``: every field, always in the same order, safe in a shell."""
        (sh, sw), (dh, dw) = self.stride, self.dilation
        pads = ".".join(map(str, self.padding))
        return (
            f"n{self.N}c{self.C}h{self.H}w{self.W}-k{self.K}r{self.R}s{self.S}-stride{sh}x{sw}-pad{pads}-dil{dh}x{dw}"
            f"-g{self.groups}-{self.dtype}-{self.layout}-{self.epilogue}-{self.out_dtype}"
        )

    @classmethod
    def parse(cls, text: str) -> ConvProblem:
        """The problem that ``str`` wrote; ValueError when the text has another form."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"not a layer's canonical text: {text!r} (like {_EXAMPLE})")
        f = found.groupdict()
        return cls(
            **{name: int(f[name]) for name in ("N", "C", "H", "W", "K", "R", "S")},
            stride=(int(f["sh"]), int(f["sw"])),
            padding=tuple(int(p) for p in f["pad"].split(".")),
            dilation=(int(f["dh"]), int(f["dw"])),
            groups=int(f["g"]),
            dtype=f["dtype"],
            layout=f["layout"],
            epilogue=Epilogue.parse(f["epilogue"], DType.of(f["out"])),
        )


def _extent(size: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    return (size + padding - dilation * (taps - 1) - 1) // stride + 1


_FIELDS = tuple(f for f in ConvProblem.__slots__ if not f.startswith("_"))
_TEXT = re.compile(
    r"n(?P<N>\d+)c(?P<C>\d+)h(?P<H>\d+)w(?P<W>\d+)-k(?P<K>\d+)r(?P<R>\d+)s(?P<S>\d+)-stride(?P<sh>\d+)x(?P<sw>\d+)"
    r"-pad(?P<pad>\d+\.\d+\.\d+\.\d+)-dil(?P<dh>\d+)x(?P<dw>\d+)-g(?P<g>\d+)-(?P<dtype>\w+)-(?P<layout>\w+)"
    r"-(?P<epilogue>[\w+]+)-(?P<out>\w+)"
)
_EXAMPLE = "n16c64h92w160-k32r3s3-stride1x1-pad1.1.1.1-dil1x1-g1-f16-nhwc-identity-f16"
