"""Rows whose kernel source, compiler or driver changed: ``db stale`` lists them, ``tune --stale`` renews them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import typer

from autotune.cli.options import AsJson, Database
from autotune.cli.output import notice, one_line, print_json, print_table
from autotune.cli.query import choice_object
from autotune.device import Device
from autotune.problem import ConvProblem

if TYPE_CHECKING:
    from autotune.search import Result
    from autotune.store import Store
    from autotune.trial import Record


def stale(db: Database = None, as_json: AsJson = False) -> None:
    """List records whose kernel source, compiler or driver changed, and count such trials.

    And why. They still serve, once verified; autotune tune --stale renews those of this machine's devices. Of a device
    whose compiler is not installed here, no record is stale; of one that is not here, the driver is not looked at.
    """
    from autotune.backends import devices
    from autotune.freshness import Freshness
    from autotune.store import Store

    with Store(db, create=False) as store:
        records, trials, url = store.records(shipped=False), store.provenances(), store.url
    judge = Freshness(devices=devices())
    found = [(record, why) for record in records if (why := judge.why_stale(record))]
    counts: Counter[tuple[str, str, str]] = Counter()
    for trial, count in trials:
        if why := judge.why_stale(trial):
            counts[trial.device.key, trial.config.family, why] += count
    stale_trials, total = counts.total(), sum(count for _, count in trials)
    if as_json:
        listed = [choice_object(r.problem, r.device, "exact", r.config, r, why) for r, why in found]
        reasons = [
            {"device": device, "family": family, "trials": count, "why": why}
            for (device, family, why), count in sorted(counts.items())
        ]
        counted = {"records": len(records), "trials": total, "stale_trials": stale_trials}
        print_json({"db": url, "stale": listed, **counted, "trials_by_reason": reasons})
        return
    if found:
        table = [(record.device.key, str(record.problem), record.config.name, why) for record, why in found]
        print_table(("device", "layer", "config", "why"), table)
    if counts:
        if found:
            typer.echo()
        table = [(device, family, f"{count} trials", why) for (device, family, why), count in sorted(counts.items())]
        print_table(("device", "family", "trials", "why"), table)
    notice(f"{url}: {len(found)} of {len(records)} records and {stale_trials} of {total} trials are stale")


def renew_stale(store: Store, device: Device, problem: ConvProblem | None, as_json: bool) -> None:
    """Renew the stale records of a device, or that of one layer, and print what became of each.

    Exits with 1 when one could not be renewed.
    """
    from autotune.freshness import Freshness
    from autotune.search import NoValidConfig, Unsupported, renew

    assert device.spec is not None
    judge = Freshness(devices=[device])
    own = [record for record in store.records(shipped=False) if record.device.key == device.spec.key]
    records = own if problem is None else [one for one in [store.best(problem, device.spec)] if one is not None]
    outdated = [(one, why) for one in records if (why := judge.why_distrusted(one))]
    renewed: list[tuple[Record, Result]] = []
    failed: list[tuple[Record, str]] = []
    for record, why in outdated:
        try:
            renewed.append((record, renew(record, why, store=store, device=device)))
        except (NoValidConfig, Unsupported) as error:
            failed.append((record, one_line(error)))
        notice(f"{len(renewed) + len(failed)}/{len(outdated)} layers: {record.problem}")
    if as_json:
        objects = [choice_object(r.problem, r.device, "exact", r.config, r, why) for r, why in _outcomes(renewed)]
        failures = [{"layer": str(record.problem), "reason": reason} for record, reason in failed]
        print_json({"records": len(records), "renewed": objects, "failed": failures})
    else:
        lines = [
            (f"{old.time_us:.1f}", f"{new.best.time_us:.1f}", new.best.config.name, str(old.problem), new.renewed)
            for old, new in renewed
        ]
        lines += [(f"{old.time_us:.1f}", "-", old.config.name, str(old.problem), reason) for old, reason in failed]
        if lines:
            print_table(("was us", "is us", "config", "layer", "why"), lines, numbers=("was us", "is us"))
        known = "record is" if len(records) == 1 else "records are"
        notice(f"{len(outdated)} of {len(records)} {known} stale: {len(renewed)} renewed, {len(failed)} failed")
    if failed:
        raise typer.Exit(1)


def _outcomes(renewed: list[tuple[Record, Result]]) -> list[tuple[Record, str]]:
    return [(result.best, f"renewed: {result.renewed}") for _, result in renewed]
