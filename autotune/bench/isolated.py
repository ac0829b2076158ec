"""A database whose layers know nothing of each other, so that each is tuned as from an empty one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autotune.problem import ConvProblem
from autotune.store import Store, shipped
from autotune.trial import Record


class IsolatedStore(Store):
    """Neither shipped tables lie beneath it nor do winners of other layers guide a search."""

    def best(self, problem: ConvProblem, device: Any) -> Record | None:
        """The record of a layer on a device in this very database, or None."""
        found = super().best(problem, device)
        return None if found is None or shipped.is_shipped(found) else found

    def similar(self, *_: Any, **__: Any) -> Iterator[tuple[float, Record]]:
        """Nothing."""
        return iter(())
