"""How a layer was run and what came of it: config, status, measurement, trial and record, as values."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem

HARNESS_VERSION = 1  # raised when times of older versions are no longer comparable


@dataclass(frozen=True, slots=True)
class Config:
    """One choice of every knob of a kernel family, in the family's order."""

    family: str
    knobs: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, family: str, knobs: Mapping[str, int] | Iterable[tuple[str, int]]) -> Config:
        pairs = knobs.items() if isinstance(knobs, Mapping) else knobs
        return cls(family, tuple((str(name), int(value)) for name, value in pairs))

    def __getitem__(self, knob: str) -> int:
        for name, value in self.knobs:
            if name == knob:
                return value
        raise KeyError(f"{self.family} has no knob {knob}")

    @property
    def name(self) -> str:
        """Family and every knob, as in ``igemm_mma-cta128x64x32-warp64x32-stages4-...``."""
        parts: list[str] = []
        last = ""
        for knob, value in self.knobs:
            found = _AXIS.fullmatch(knob)
            if found and found[1] == last:
                parts[-1] += f"x{value}"
            else:
                parts.append(f"{found[1] if found and found[1] in _TILES else knob}{value}")
            last = found[1] if found and found[1] in _TILES else ""
        return "-".join([self.family, *parts])

    def __str__(self) -> str:
        return self.name


_AXIS = re.compile(r"(\w+)_[mnk]")
_TILES = ("cta", "warp")  # knob groups that are written as one extent


class Status(StrEnum):
    """What became of a trial; the set is closed."""

    CORRECT = "correct"
    COMPILE = "compile"  # the compiler refused it, crashed or took too long
    CONSTRAINTS = "constraints"  # compiled, but the device refused it at load or launch
    RUNTIME = "runtime"  # it faulted while running
    CORRECTNESS = "correctness"  # it ran and its output was wrong
    TIMEOUT = "timeout"  # it did not end


# what every database takes, so that a table read from one can be written to another
LARGEST_INTEGER = 2**31 - 1
_ENDLESS_US = 1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """Times of one config. time_us: median over the samples. spread_us: interquartile range. samples: their number.

    launches: kernel launches in one sample. condition: ``cold-graph`` (rotating buffers beyond the last-level cache,
    CUDA graph) or ``cold-loop`` (the same without a graph).
    """

    time_us: float
    spread_us: float
    samples: int
    launches: int
    condition: str

    def __post_init__(self) -> None:
        if not (0 < self.time_us < _ENDLESS_US and 0 <= self.spread_us < _ENDLESS_US):
            raise ValueError(f"{self.time_us} us with a spread of {self.spread_us} us is not a time")
        if not (1 <= self.samples <= LARGEST_INTEGER and 1 <= self.launches <= LARGEST_INTEGER):
            raise ValueError(f"{self.samples} samples of {self.launches} launches are not a measurement")


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What a measured time depends on besides layer, device and config.

    kernel_digest: SHA-256 of the kernel source with every header it includes. compiler, driver: names with versions.
    clock_mhz, temperature_c: read after timing, None where the device does not tell. created_at: UTC, ISO 8601.
    """

    kernel_digest: str
    compiler: str
    driver: str
    harness: int = HARNESS_VERSION
    clock_mhz: int | None = None
    temperature_c: int | None = None
    created_at: str

    def __post_init__(self) -> None:
        for name in ("harness", "clock_mhz", "temperature_c"):
            if abs(getattr(self, name) or 0) > LARGEST_INTEGER:
                raise ValueError(f"{name} has more than 32 bits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A config tried on a problem and a device. measurement is present exactly when the status is correct.

    detail: one line that says why it failed. compile_s: seconds of compilation (0 from the cache).
    registers, spill_bytes: per thread, from the compiler's log where it has one.
    """

    problem: ConvProblem
    device: DeviceSpec
    config: Config
    status: Status
    provenance: Provenance
    measurement: Measurement | None = None
    detail: str = ""
    compile_s: float = 0.0
    registers: int | None = None
    spill_bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.status is Status.CORRECT) != (self.measurement is not None):
            raise ValueError(f"a trial is measured exactly when it is correct: {self.config} is {self.status}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """The best known config of a layer on a device model. verified: its output was compared with the reference."""

    problem: ConvProblem
    device: DeviceSpec
    config: Config
    measurement: Measurement
    provenance: Provenance
    verified: bool = True

    @classmethod
    def of(cls, trial: Trial) -> Record:
        """The record that a correct trial makes; ValueError for one that is not."""
        if trial.measurement is None:
            raise ValueError(f"{trial.config} is {trial.status}: no record")
        return cls(
            problem=trial.problem,
            device=trial.device,
            config=trial.config,
            measurement=trial.measurement,
            provenance=trial.provenance,
        )

    @property
    def family(self) -> str:
        return self.config.family

    @property
    def time_us(self) -> float:
        """Median time of one launch in microseconds."""
        return self.measurement.time_us
