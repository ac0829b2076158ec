"""Our tuned kernels against rivals: the same layers, values and run, timed in turn."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.backends import Backend, compiler_for, find, open_backend
from autotune.bench.rivals import contest
from autotune.bench.rows import Row, Table
from autotune.bench.suite import Layer
from autotune.device import roofline_us
from autotune.families import FAMILIES, Family, Unsupported, family_named
from autotune.measure.failures import FAILURES
from autotune.measure.harness import Harness, Loaded
from autotune.problem import ConvProblem
from autotune.search import NoValidConfig, tune
from autotune.trial import Config

if TYPE_CHECKING:
    from autotune.store import Store

RIVAL_SECONDS = 3.5  # in which a rival's plans are tried; with 64 trials of ours, a layer takes about nine


def compare(
    layer: Layer,
    store: Store,
    device: str,
    *,
    trials: int,
    seed: int = 0,
    families: Sequence[Family] = FAMILIES,
    rival_seconds: float = RIVAL_SECONDS,
) -> Row:
    """Tune a layer, then time its winner, the default and the rivals' plans in turn, on operands of the same values."""
    problem = layer.problem
    start = time.monotonic()
    result = tune(problem, store=store, device=device, trials=trials, seed=seed, families=families)
    seconds = time.monotonic() - start
    backend = open_backend(find(device))
    harness = Harness(backend, problem, secrets.randbits(31))
    default = _default(backend, problem, families)
    ours = [_loaded(harness, backend, problem, config) for config in (result.best.config, default)]
    firsts = [harness.verify(loaded).median_us for loaded in ours]
    found = contest(harness, problem, rival_seconds)
    plans = [(plan.loaded, plan.first_us) for plan in found.finalists]
    ours_us, default_us, *plans_us = (
        samples.median_us for samples in harness.interleaved([*zip(ours, firsts, strict=True), *plans])
    )
    # the fastest last, so that it is the one that stays
    timed = sorted(((plan.rival, us) for plan, us in zip(found.finalists, plans_us, strict=True)), key=lambda x: -x[1])
    rivals = dict(timed)
    if rivals and layer.cutlass_per_cudnn is not None:
        rivals["CUTLASS, scaled by cuDNN"] = min(rivals.values()) * layer.cutlass_per_cudnn
    rival = min(rivals, key=lambda name: rivals[name]) if rivals else next(iter(found.skipped), "none has a plan")
    return Row(
        layer=layer.name,
        dtype=str(problem.dtype),
        epilogue=str(problem.epilogue),
        problem=str(problem),
        ours_us=round(ours_us, 2),
        default_us=round(default_us, 2),
        rival_us=round(rivals[rival], 2) if rivals else None,
        rival=rival,
        floor_us=round(roofline_us(problem, backend.spec), 2),
        family=result.best.family,
        config=result.best.config.name,
        trials=len(result.trials),
        tune_seconds=round(seconds, 1),
        compile_s=round(statistics.median([t.compile_s for t in result.trials if t.compile_s] or [0.0]), 3),
        driver=backend.driver,
        rivals={name: round(us, 2) for name, us in rivals.items()},
        rival_plans=found.timed,
        rival_left=found.left,
        rival_skipped=dict(found.skipped),
    )


def run(
    layers: Sequence[Layer],
    store: Store,
    device: str,
    *,
    trials: int,
    out: Path,
    command: str,
    seconds: float | None = None,
    families: Sequence[Family] = FAMILIES,
    rival_seconds: float = RIVAL_SECONDS,
    progress: Callable[[Row], None] | None = None,
    failed: Callable[[Layer, Exception], None] | None = None,
) -> Table:
    """Compare layer after layer and write the table after each; layers that ``out`` already holds are not run again.

    seconds: start no layer later than that. failed: told of a layer that cannot be measured, which is left out.
    ValueError, in one line, when ``out`` is another device's table, or none.
    """
    start = time.monotonic()
    spec = find(device).spec
    assert spec is not None
    table = Table.read(out) if out.exists() else Table(device=spec.name, rows=[])
    if table.device != spec.name:
        raise ValueError(f"{out} is a table of {table.device}, and this is {spec.name}: give another file")
    done = {row.key for row in table.rows}
    for layer in layers:
        if layer.key in done:
            continue
        if seconds is not None and time.monotonic() - start > seconds:
            break
        try:
            row = compare(layer, store, device, trials=trials, families=families, rival_seconds=rival_seconds)
        except (Unsupported, NoValidConfig, MemoryError, *FAILURES) as error:
            if failed is not None:
                failed(layer, error)
            continue
        table.rows.append(replace(row, date=datetime.now(UTC).date().isoformat(), command=command))
        table.write(out)
        if progress is not None:
            progress(row)
    return table


def _default(backend: Backend, problem: ConvProblem, families: Sequence[Family]) -> Config:
    defaults = [(f, f.default(problem, backend.spec)) for f in families if f.kind == backend.spec.kind]
    legal = [(f.predict_us(c, problem, backend.spec), c) for f, c in defaults if c is not None]
    return min(legal, key=lambda found: found[0])[1]


def _loaded(harness: Harness, backend: Backend, problem: ConvProblem, config: Config) -> Loaded:
    family = family_named(config.family)
    assert family is not None
    compiled = compiler_for(backend.spec).compile(family.source(config, problem, backend.spec))
    return harness.load(compiled, family.launch(config, problem, backend.spec))
