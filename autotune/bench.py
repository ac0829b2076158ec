"""Our tuned kernels against rivals: the same layers, buffers and run, timed in turn."""

from __future__ import annotations

import json
import math
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autotune.backends import Backend, NoDevice, compiler_for, find, open_backend
from autotune.backends.cudnn import Cudnn
from autotune.device import roofline_us
from autotune.families import FAMILIES, Family, family_named
from autotune.measure.failures import FAILURES
from autotune.measure.harness import Harness, Loaded
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.search import tune
from autotune.trial import Config

if TYPE_CHECKING:
    from autotune.store import Store

_FINALISTS = 6  # plans of a rival that are timed in turn with ours, by their first times


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """A named layer of a suite."""

    name: str
    problem: ConvProblem


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One layer's result. Times are medians in microseconds of launches with a cold last-level cache.

    ours_us: the tuned config, default_us: the config used untuned, rival_us: the rival's best plan (None when it has
    none), all timed in turn. floor_us: the sustained roofline. tune_seconds: of the search from what the store held.
    compile_s: median of a config's compilation.
    """

    layer: str
    dtype: str
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
    epilogue: str = "identity"

    @property
    def speedup(self) -> float | None:
        """How many times faster than the rival."""
        return None if self.rival_us is None else self.rival_us / self.ours_us


def layers_of(path: Path, dtype: DType, epilogue: Epilogue | None = None) -> list[Layer]:
    """The layers of a suite file: a JSON object with ``layers``, each with name, N, C, H, W, K, R, S, and geometry.

    All in this dtype and with this epilogue, the identity if None.
    """
    fields = ("N", "C", "H", "W", "K", "R", "S", "stride", "padding", "dilation", "groups")
    try:
        listed = json.loads(path.read_text())["layers"]
        return [
            Layer(
                name=item["name"], problem=ConvProblem(**{f: item[f] for f in fields}, dtype=dtype, epilogue=epilogue)
            )
            for item in listed
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not a suite of layers: {error!r}") from error


def compare(
    layer: Layer, store: Store, device: str, trials: int, seed: int = 0, families: Sequence[Family] = FAMILIES
) -> Row:
    """Tune a layer, then time its winner, the default and the rival's plans in turn on the same operand sets."""
    problem = layer.problem
    start = time.monotonic()
    result = tune(problem, store=store, device=device, trials=trials, seed=seed, families=families)
    seconds = time.monotonic() - start
    backend = open_backend(find(device))
    harness = Harness(backend, problem, secrets.randbits(31))
    default = _default(backend, problem, families)
    ours = [_loaded(harness, backend, problem, config) for config in (result.best.config, default)]
    firsts = [harness.verify(loaded).median_us for loaded in ours]
    rival, plans = _rival(harness, problem)
    timed = harness.interleaved([*zip(ours, firsts, strict=True), *plans])
    times = [samples.median_us for samples in timed]
    return Row(
        layer=layer.name,
        dtype=str(problem.dtype),
        ours_us=round(times[0], 2),
        default_us=round(times[1], 2),
        rival_us=round(min(times[2:]), 2) if times[2:] else None,
        rival=rival,
        floor_us=round(roofline_us(problem, backend.spec), 2),
        family=result.best.family,
        config=result.best.config.name,
        trials=len(result.trials),
        tune_seconds=round(seconds, 1),
        epilogue=str(problem.epilogue),
        compile_s=round(statistics.median([t.compile_s for t in result.trials if t.compile_s] or [0.0]), 3),
    )


def run(
    layers: Sequence[Layer],
    store: Store,
    device: str,
    *,
    trials: int,
    out: Path,
    command: str = "",
    seconds: float | None = None,
    families: Sequence[Family] = FAMILIES,
    progress: Callable[[Row], None] | None = None,
) -> list[Row]:
    """Compare layer after layer and write the table after each; layers that ``out`` already holds are not run again.

    seconds: start no layer later than that. The file is a JSON object: device, date, command, and ``rows``.
    """
    start = time.monotonic()
    rows = read(out) if out.exists() else []
    done = {(row.layer, row.dtype, row.epilogue) for row in rows}
    for layer in layers:
        if (layer.name, str(layer.problem.dtype), str(layer.problem.epilogue)) in done:
            continue
        if seconds is not None and time.monotonic() - start > seconds:
            break
        row = compare(layer, store, device, trials, families=families)
        rows.append(row)
        write(out, rows, device, command)
        if progress is not None:
            progress(row)
    return rows


def read(path: Path) -> list[Row]:
    """The rows of a file that ``run`` wrote."""
    return [Row(**row) for row in json.loads(path.read_text())["rows"]]


def write(path: Path, rows: Sequence[Row], device: str, command: str) -> None:
    """Write rows as JSON, whole or not at all."""
    spec = find(device).spec
    assert spec is not None
    about = {"device": spec.name, "date": datetime.now(UTC).date().isoformat(), "command": command}
    text = json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1)
    scratch = path.with_suffix(".part")
    scratch.write_text(text + "\n")
    scratch.replace(path)


def markdown(rows: Sequence[Row]) -> str:
    """A table for people, with the geometric mean of the speedups."""
    head = "| layer | dtype | epilogue | floor us | rival us | ours us | speedup "
    head += "| default us | trials | tuning s | config |"
    lines = [head, "|---" * head.count(" | ") + "|---|"]
    for row in rows:
        rival = "-" if row.rival_us is None else f"{row.rival_us:.1f}"
        ratio = "-" if row.speedup is None else f"{row.speedup:.2f}"
        lines.append(
            f"| {row.layer} | {row.dtype} | {row.epilogue} | {row.floor_us:.1f} | {rival} | {row.ours_us:.1f} "
            f"| {ratio} | {row.default_us:.1f} | {row.trials} | {row.tune_seconds:.1f} | `{row.config}` |"
        )
    mean = geometric_mean([row.speedup for row in rows if row.speedup is not None])
    if mean is not None:
        lines.append(f"\nGeometric mean of the speedups: {mean:.2f} over {len(rows)} layers.")
    return "\n".join(lines) + "\n"


def geometric_mean(values: Sequence[float]) -> float | None:
    """None for no values."""
    return math.exp(sum(math.log(v) for v in values) / len(values)) if values else None


def _default(backend: Backend, problem: ConvProblem, families: Sequence[Family]) -> Config:
    defaults = [(f, f.default(problem, backend.spec)) for f in families if f.kind == backend.spec.kind]
    legal = [(f.predict_us(c, problem, backend.spec), c) for f, c in defaults if c is not None]
    return min(legal, key=lambda found: found[0])[1]


def _loaded(harness: Harness, backend: Backend, problem: ConvProblem, config: Config) -> Loaded:
    family = family_named(config.family)
    assert family is not None
    compiled = compiler_for(backend.spec).compile(family.source(config, problem, backend.spec))
    return harness.load(compiled, family.launch(config, problem, backend.spec))


def _rival(harness: Harness, problem: ConvProblem) -> tuple[str, list[tuple[Loaded, float]]]:
    """The rival's name, and its fastest plans by their first times; none where it is absent or has no plan."""
    try:
        cudnn = Cudnn(problem)
    except (NoDevice, ValueError) as error:
        return str(error), []
    plans = sorted(_plans(harness, cudnn), key=lambda plan: plan[1])
    return cudnn.version, plans[:_FINALISTS]


def _plans(harness: Harness, cudnn: Any) -> Iterator[tuple[Loaded, float]]:
    for _, kernel in cudnn:
        loaded = harness.foreign(kernel)
        try:
            yield loaded, harness.verify(loaded).median_us
        # a plan that fails here is of no use to a user either; cuDNN's own errors are RuntimeErrors
        except (*FAILURES, RuntimeError):
            continue
