"""Finds, checks and remembers the fastest kernel for each convolution layer.

The names below are loaded on first use: ``import autotune`` itself needs no GPU, no driver, no compiler and little
time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from autotune.device import Device, DeviceSpec
from autotune.problem import ConvProblem, DType, Epilogue, Layout
from autotune.trial import Config, Measurement, Record, Status, Trial

if TYPE_CHECKING:
    from autotune.backends import devices
    from autotune.dispatch import Dispatcher
    from autotune.search import tune
    from autotune.store import Store

__version__ = "0.1.0"
__all__ = [
    "Config",
    "ConvProblem",
    "DType",
    "Device",
    "DeviceSpec",
    "Dispatcher",
    "Epilogue",
    "Layout",
    "Measurement",
    "Record",
    "Status",
    "Store",
    "Trial",
    "devices",
    "tune",
]

_LAZY = {
    "Store": "autotune.store",
    "Dispatcher": "autotune.dispatch",
    "tune": "autotune.search",
    "devices": "autotune.backends",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'autotune' has no attribute {name!r}")
