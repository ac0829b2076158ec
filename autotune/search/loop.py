"""The search: ask for a config, compile, verify, time and record it, tell the sampler, until the budget is met."""

from __future__ import annotations

import math
import operator
import secrets
import time
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, SupportsIndex

from autotune.backends import find
from autotune.device import Device, DeviceSpec
from autotune.families import FAMILIES, Family
from autotune.freshness import Freshness
from autotune.measure import Limits, Workbench
from autotune.problem import ConvProblem
from autotune.search.finalists import settle
from autotune.search.ledger import Ledger
from autotune.search.priors import first_proposals
from autotune.search.renewal import renew
from autotune.search.result import Progress, Result
from autotune.search.space import Space

if TYPE_CHECKING:
    from autotune.store import Store


def tune(
    problem: ConvProblem,
    *,
    store: Store,
    device: str | Device | DeviceSpec = "auto",
    trials: int = 64,
    seconds: float | None = None,
    seed: int = 0,
    force: bool = False,
    families: Sequence[Family] | None = None,
    progress: Callable[[Progress], None] | None = None,
    limits: Limits | None = None,
) -> Result:
    """Find a layer's fastest config on a device and record it, with every trial.

    trials: how many distinct configs the layer shall have recorded on this device model, earlier runs and failures
    included (all, if there are fewer); only what is missing is measured, and where nothing is missing but the record is
    stale or not verified, its best few: see ``renew``. seconds: start no trial later than that, but
    at least one. seed: of the search; inputs are drawn anew in every run. force: measure ``trials`` configs anew, those
    recorded earlier first, and replace the record at the end. families: in place of the registered ones. progress:
    called after every trial. limits: when a child is killed.

    Raises ValueError for a bad budget, a bad seed or an empty batch, Unsupported when no family can run the layer,
    NoValidConfig when nothing correct was found, NoDevice when the device or its compiler cannot be used, StoreError.
    """
    trials = _integer("trials", trials, 1)
    seed = _integer("seed", seed, 0, below=2**32)
    if seconds is not None and (
        isinstance(seconds, bool) or not isinstance(seconds, Real) or not 0 < seconds < math.inf
    ):
        raise ValueError(f"seconds must be a positive number, not {seconds!r}")
    if problem.N == 0:
        raise ValueError("nothing to measure: the batch is empty (N = 0)")
    start = time.monotonic()
    target = find(device)
    assert target.spec is not None
    registry = FAMILIES if families is None else tuple(families)
    space = Space(problem, target.spec, registry)
    ledger = Ledger(store, problem, target.spec, trials, force)
    total = len(ledger.counted) + min(ledger.left, len(space) - sum(t.config in space for t in ledger.counted))
    present = store.best(problem, target.spec)
    distrusted = present and Freshness(registry, [target]).why_distrusted(present)
    if total == len(ledger.counted) and present is not None:
        if distrusted:
            return renew(present, distrusted, store=store, device=target, families=registry, limits=limits)
        return ledger.result(present)
    if total == len(ledger.counted) and ledger.best is None:
        raise ledger.nothing_valid()
    earlier = [trial.config for trial in ledger.recorded] if force else []
    first = first_proposals(space, store, problem, target.spec, trials, earlier)

    with Workbench(target, problem, registry, secrets.randbits(31), limits) as bench:
        # imported while the children start
        from autotune.search.sampler import Sampler

        sampler = Sampler(space, seed, first, ledger.counted)
        while True:
            theirs = ledger.refresh()
            for trial in theirs:
                bench.drop(trial.config)
                sampler.tell(trial)
            if theirs:
                sampler.diverge()
            over = seconds is not None and ledger.measured and time.monotonic() - start > seconds
            if over or not ledger.left:
                bench.cancel()
            while not over and bench.wants_more and bench.unfinished < ledger.left and (config := sampler.ask()):
                bench.submit(config)
            measured = bench.next(ledger.best_us)
            if measured is None:
                break
            if ledger.commit(measured):
                sampler.tell(measured)
                if progress is not None:
                    progress(ledger.progress(total))
        winner = settle(bench, ledger, space, space.predict_us)
    if winner is None:
        raise ledger.nothing_valid()
    return ledger.close(winner, legal=space, outdated=bool(distrusted))


def _integer(name: str, value: SupportsIndex, least: int, below: float = math.inf) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex):
        raise ValueError(f"{name} must be an integer, not {value!r}")
    number = operator.index(value)
    if not least <= number < below:
        raise ValueError(
            f"{name} must be at least {least}{f' and below {below}' if below < math.inf else ''}, not {number}"
        )
    return number
