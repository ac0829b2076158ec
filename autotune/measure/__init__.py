"""Measurement: verification, timing, and the child processes that survive what candidates do."""

from autotune.measure.workbench import Limits, Workbench

__all__ = ["Limits", "Workbench"]
