"""Renews a record whose kernel, compiler or driver changed: its best few trials are verified and timed again."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from autotune.backends import find
from autotune.device import Device, DeviceSpec
from autotune.families import FAMILIES, Family
from autotune.measure import Limits, Workbench
from autotune.search.finalists import settle
from autotune.search.ledger import Ledger
from autotune.search.result import Result
from autotune.search.space import Space
from autotune.trial import Record

if TYPE_CHECKING:
    from autotune.store import Store


def renew(
    record: Record,
    why: str,
    *,
    store: Store,
    device: str | Device | DeviceSpec,
    families: Sequence[Family] | None = None,
    limits: Limits | None = None,
) -> Result:
    """Verify and time the best four trials of a record's layer again and make the winner the record.

    That takes seconds, unlike a search. A trial that fails now is recorded as failed, and those behind it move up. A
    record of a config that was never tried here, an imported one for instance, is tried first.

    why: what the result says in ``renewed``. Raises NoValidConfig when nothing that was tried works any more, after
    which the record is not verified; else as ``tune``.
    """
    target = find(device)
    assert target.spec is not None
    registry = FAMILIES if families is None else tuple(families)
    space = Space(record.problem, target.spec, registry)
    ledger = Ledger(store, record.problem, target.spec, budget=0, force=False)
    with Workbench(target, record.problem, registry, secrets.randbits(31), limits) as bench:
        if record.config in space and all(trial.config != record.config for trial in ledger.counted):
            # imported or shipped: it was never tried here
            (tried,) = bench.retime([record.config])
            ledger.update(tried)
        # however far apart they were: another source or compiler may have changed that
        winner = settle(bench, ledger, space, space.predict_us, within=math.inf)
    if winner is None:
        store.distrust(record)
        raise ledger.nothing_valid()
    return replace(ledger.close(winner, legal=space), renewed=why)
