"""Which of two records of one layer and device is the better one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from autotune.trial import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeReport:
    """What a merge did, counted in pairs of layer and device; the same whatever the order of the tables.

    added: there was no record. replaced: a better one came. unchanged: the present one stayed, or came again.
    conflicts: records that lost to a different one of the same layer and device, present ones included.
    """

    added: int
    replaced: int
    unchanged: int
    conflicts: int


def demerit(record: Record) -> tuple[bool, int, str, float]:
    """Smaller is better: verified, then the newest harness, then the condition, then the time.

    Times of different harnesses or conditions do not compare, so these come first, ``cold-graph`` before ``cold-loop``.
    """
    measured = record.measurement
    return (not record.verified, -record.provenance.harness, measured.condition, measured.time_us)


def winner(records: Iterable[Record], is_stale: Callable[[Record], object] | None = None) -> Record:
    """The best record: one that is not stale, then the least demerit; equal ones are told apart by what they say."""
    records = list(records)
    if len(records) == 1:
        return records[0]
    return min(
        records,
        key=lambda one: (is_stale is not None and bool(is_stale(one)), demerit(one), one.config.name, repr(one)),
    )
