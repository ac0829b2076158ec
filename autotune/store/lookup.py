"""Which device of a database a text means."""

from __future__ import annotations

import re
from collections.abc import Iterable

from autotune.device import Device, DeviceSpec

AnyDevice = str | Device | DeviceSpec


def device_key(device: AnyDevice, known: Iterable[DeviceSpec]) -> str:
    """The key of a device given as a spec, a listed device or a text.

    A text is a device's key or name, ``cpu``, ``cuda`` or ``cuda:I`` (any CUDA device fits: numbers belong to machines,
    not to databases), or ``auto`` (CUDA if there is one, else cpu). ValueError, in one line, unless exactly one of the
    ``known`` devices fits the text, or when a listed device cannot be used.
    """
    if isinstance(device, DeviceSpec):
        return device.key
    if isinstance(device, Device):
        if device.spec is None:
            raise ValueError(f"{device.id} cannot be used: {device.reason}")
        return device.spec.key
    known = list(known)
    fitting = _fitting(device, known)
    if len(fitting) == 1:
        return fitting[0].key
    if fitting:
        raise ValueError(f"device {device!r} could be {' or '.join(_names(fitting))}: name one")
    raise ValueError(f"no device {device!r} in the database: it has {', '.join(_names(known)) or 'none'}")


def _fitting(text: str, known: list[DeviceSpec]) -> list[DeviceSpec]:
    kinds = [["cuda"], ["cpu"]] if text == "auto" else [[re.sub(r"^cuda:\d+$", "cuda", text)]]
    attempts = [
        [spec for spec in known if spec.key == text],
        [spec for spec in known if text.casefold() in (spec.key.casefold(), spec.name.casefold())],
        *([spec for spec in known if spec.kind in kind] for kind in kinds),
    ]
    return next((found for found in attempts if found), [])


def _names(specs: list[DeviceSpec]) -> list[str]:
    return sorted(repr(spec.key) for spec in specs)
