"""The verb ``query``: the best known config of a layer, without compiling or measuring."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli.options import AsJson, Database, DeviceText, usable_device
from autotune.cli.output import Failure, notice, print_facts, print_json
from autotune.device import DeviceSpec, roofline_us
from autotune.problem import ConvProblem
from autotune.trial import Config, Record

if TYPE_CHECKING:
    from autotune.store import Store


def query(
    problem: ConvProblem,
    device: DeviceText = "auto",
    exact: Annotated[bool, typer.Option("--exact", help="Exit with 1 unless this very layer is tuned.")] = False,
    db: Database = None,
    as_json: AsJson = False,
) -> None:
    """Tell the best known config of a layer.

    And how it matched: exact (this layer was tuned), nearest (a similar layer was) or default. Measures nothing.
    """
    from autotune.dispatch import Dispatcher

    chosen = usable_device(device)
    assert chosen.spec is not None
    with _opened(db) as store, warnings.catch_warnings(record=True) as caught:
        choice = Dispatcher(store, device=chosen.id).select(problem)
    # that the layer is not tuned is said below
    for warning in caught:
        if not str(warning.message).endswith(choice.why):
            notice(str(warning.message))
    if exact and choice.match != "exact":
        raise Failure(f"{problem} is not tuned on {chosen.spec.name}: the match is {choice.match} ({choice.why})")
    # another layer's time says nothing about this one
    record = choice.record if choice.match == "exact" else None
    if as_json:
        print_json(choice_object(problem, chosen.spec, choice.match, choice.config, record, choice.why))
        return
    facts = {"layer": str(problem), "device": chosen.spec.key, "match": f"{choice.match}: {choice.why}"}
    facts["config"] = choice.config.name
    if record is not None:
        facts["time"] = f"{record.time_us:.1f} us, {share_of_roofline(record)}"
    print_facts(facts)


def _opened(db: str | None) -> Store:
    """The database; where none was named and there is none yet an empty one, beneath which lie the shipped tables."""
    from autotune.store import NoDatabase, Store

    try:
        return Store(db, create=False)
    except NoDatabase as error:
        if db is not None:
            raise
        notice(f"{error} yet")
        return Store(":memory:")


def choice_object(
    problem: ConvProblem, device: DeviceSpec, match: str, config: Config, record: Record | None, why: str
) -> dict[str, object]:
    """What ``--json`` prints of a choice; time_us is null where this layer was not measured with this config."""
    return {
        "layer": str(problem),
        "device": device.key,
        "match": match,
        "family": config.family,
        "config": config.name,
        "knobs": dict(config.knobs),
        "time_us": None if record is None else record.time_us,
        "verified": record is not None and record.verified,
        "why": why,
    }


def share_of_roofline(record: Record) -> str:
    """``61 % of the roofline (556.1 us)``."""
    floor_us = roofline_us(record.problem, record.device)
    return f"{floor_us / record.time_us:.0%} of the roofline ({floor_us:.1f} us)"
