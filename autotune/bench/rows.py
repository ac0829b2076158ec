"""What a benchmark found: one row a layer, in a file that says on what device, when and by what command."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from autotune.problem import ConvProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer's result. Times are medians in microseconds of launches with a cold last-level cache.

    ours_us: the tuned config, default_us: the config used untuned, rival_us: the best of ``rivals`` (None when there is
    none), all timed in turn; rival: its name, or why there is none. rivals: each by its fastest plan. rival_plans:
    plans that were timed, rival_left: those that time did not suffice for or that were behind, rival_skipped: those
    that failed, by reason. floor_us: the sustained roofline. tune_seconds: of the search from what the store held.
    compile_s: median of a config's compilation. problem: the layer's canonical text.
    """

    layer: str
    dtype: str
    epilogue: str
    problem: str
    ours_us: float
    default_us: float
    rival_us: float | None
    rival: str
    floor_us: float
    family: str
    config: str
    trials: int
    tune_seconds: float
    compile_s: float
    rivals: dict[str, float] = field(default_factory=dict)
    rival_plans: int = 0
    rival_left: int = 0
    rival_skipped: dict[str, int] = field(default_factory=dict)
    driver: str = ""
    date: str = ""
    command: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster than the rival."""
        return None if self.rival_us is None else self.rival_us / self.ours_us

    @property
    def key(self) -> tuple[str, str, str]:
        """That of the layer: see ``Layer.key``."""
        return self.layer, self.dtype, self.epilogue


@dataclass(slots=True, kw_only=True)
class Table:
    """Rows of one device model; in a file, a JSON object: device, date, command and ``rows``."""

    device: str
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> Table:
        """The table that ``write`` wrote; ValueError, in one line, for another file."""
        try:
            data = json.loads(path.read_text())
            rows = [Row(**row) for row in data["rows"]]
            for row in rows:
                ConvProblem.parse(row.problem)
            return cls(device=data["device"], rows=rows)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is not a benchmark's table: {error!r}") from error

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all. Its date is the last row's, its command every row's, in turn."""
        commands = dict.fromkeys(row.command for row in self.rows)
        about = {
            "device": self.device,
            "date": max(row.date for row in self.rows),
            "command": " && ".join(commands),
        }
        text = json.dumps(about | {"rows": [asdict(row) for row in self.rows]}, indent=1)
        scratch = path.with_suffix(".part")
        scratch.write_text(text + "\n")
        scratch.replace(path)
