"""Finds the folders ``kernels`` and ``db``: beside the package in a checkout, inside it in an installed wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """The folder ``kernels`` or ``db``; FileNotFoundError names both places searched."""
    places = (_PACKAGE / name, _PACKAGE.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(f"{name} is missing: looked in {' and '.join(map(str, places))}")
