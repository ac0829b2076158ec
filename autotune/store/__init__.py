"""The store: every trial and every layer's winner, in SQLite or PostgreSQL."""

from __future__ import annotations

from autotune.store.engine import NoDatabase, StoreError, UnreadableRow
from autotune.store.merging import MergeReport
from autotune.store.models import SCHEMA_VERSION
from autotune.store.store import Store

__all__ = ["SCHEMA_VERSION", "MergeReport", "NoDatabase", "Store", "StoreError", "UnreadableRow"]
