"""The verb ``tune``: search, record, print the winner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, Database, DeviceText, usable_device
from autotune.cli.output import Failure, notice, print_facts, print_json, print_table
from autotune.cli.query import choice_object, share_of_roofline
from autotune.cli.stale import renew_stale
from autotune.cli.tables import fastest_first, trial_object
from autotune.problem import ConvProblem
from autotune.trial import Record, Status, Trial

if TYPE_CHECKING:
    from autotune.search import Progress, Result

_RUNNERS_UP = 5


def tune(
    problem: ConvProblem | None,
    device: DeviceText = "auto",
    trials: Annotated[
        int,
        typer.Option(min=1, metavar="N", help="Distinct configs that the layer shall have, earlier runs included."),
    ] = 64,
    seconds: Annotated[
        float | None, typer.Option(metavar="S", help="Start no trial after S seconds. [default: no limit]")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, metavar="I", help="Seed of the search.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Measure anew and replace the record.")] = False,
    stale: Annotated[
        bool,
        typer.Option(
            "--stale",
            help="Verify and time again the best few of the layer if its kernel source, compiler or driver changed;"
            " without a layer, of every such layer. No new config is tried.",
        ),
    ] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Find a layer's fastest config and record it.

    Every trial is recorded, failed ones too; the same command again measures nothing more. The fastest few are timed
    again in turn; of those that are then within the noise, the one predicted to be fastest wins.
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise typer.BadParameter(f"{seconds:g} is no time to spend", param_hint="'--seconds'")
    if problem is not None and problem.N == 0:
        raise Failure("nothing to measure: the batch is empty")
    if stale and force:
        raise typer.BadParameter("it measures everything anew, --stale only what changed", param_hint="'--force'")
    from autotune.search import tune as search
    from autotune.store import Store

    chosen = usable_device(device)
    assert chosen.spec is not None
    with Store(db, create=not stale) as store:
        if stale:
            renew_stale(store, chosen, problem, as_json)
            return
        assert problem is not None
        try:
            with _progress(trials) as progress:
                result = search(
                    problem,
                    store=store,
                    device=chosen.id,
                    trials=trials,
                    seconds=seconds,
                    seed=seed,
                    force=force,
                    progress=progress,
                )
        except KeyboardInterrupt:
            kept = len(store.trial_names(problem, chosen.spec))
            raise Failure(f"interrupted: {kept} trials of this layer are kept; the same command goes on") from None
    if as_json:
        best = result.best
        value = choice_object(problem, best.device, "exact", best.config, best, _outcome(result))
        every = [trial_object(trial) for trial in fastest_first(result.trials)]
        print_json(value | {"measured": result.measured, "renewed": result.renewed or None, "trials": every})
    else:
        _print(result, store.url)


def _outcome(result: Result) -> str:
    return f"fastest of {len(result.trials)} configs tried"


def _print(result: Result, database: str) -> None:
    best = result.best
    statuses = Counter(trial.status for trial in result.trials)
    counts = ", ".join(f"{statuses[status]} {status}" for status in Status if statuses[status])
    now = f"{result.measured} measured now" if result.measured else "found in the database, nothing measured now"
    if result.renewed:
        now = f"found in the database, the best few timed again ({result.renewed})"
    print_facts(
        {
            "layer": str(best.problem),
            "device": best.device.key,
            "database": database,
            "trials": f"{len(result.trials)} configs: {counts}; {now}",
            "winner": best.config.name,
            "time": f"{best.time_us:.1f} us, {share_of_roofline(best)}",
        }
    )
    print()
    behind = [t for t in fastest_first(result.trials) if t.measurement is not None and t.config != best.config]
    ranking: list[Record | Trial] = [best, *behind[:_RUNNERS_UP]]
    print_table(
        ("rank", "time_us", "spread_us", "of winner", "config"),
        [_row(rank, ranked, best.time_us) for rank, ranked in enumerate(ranking, 1)],
        numbers=("rank", "time_us", "spread_us", "of winner"),
    )


def _row(rank: int, ranked: Record | Trial, best_us: float) -> tuple[str, ...]:
    assert ranked.measurement is not None
    time_us, spread_us = ranked.measurement.time_us, ranked.measurement.spread_us
    return str(rank), f"{time_us:.1f}", f"{spread_us:.1f}", f"{best_us / time_us:.0%}", ranked.config.name


@contextmanager
def _progress(trials: int) -> Iterator[Callable[[Progress], None]]:
    """Shows how far the search is, on stderr: a bar on a terminal, else a line a quarter of the way."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Quarters().show
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    # rarely refreshed: on the cpu the bar shares cores with what is being timed
    with Bar(*columns, console=console, transient=True, refresh_per_second=2) as bar:
        task = bar.add_task("", total=trials)
        yield lambda now: bar.update(task, completed=now.done, total=now.total, description=_best(now))


class _Quarters:
    """Prints a line when another quarter of the trials is done."""

    def __init__(self) -> None:
        self._quarter = 0

    def show(self, now: Progress) -> None:
        quarter = 4 * now.done // now.total
        if quarter > self._quarter:
            self._quarter = quarter
            notice(f"{now.done}/{now.total} trials, {_best(now)}")


def _best(now: Progress) -> str:
    if now.best is None or now.best.measurement is None:
        return "none correct so far"
    return f"best {now.best.measurement.time_us:.1f} us: {now.best.config.name}"
