"""Kernel families: one module each, registered here."""

from __future__ import annotations

from collections.abc import Sequence

from autotune.device import DeviceSpec
from autotune.families.direct_cpu import DirectCpu
from autotune.families.family import Family, Knob, Launch, Source, TensorMap
from autotune.families.halo_mma import HaloMma
from autotune.families.halo_wgmma import HaloWgmma
from autotune.families.igemm_mma import IgemmMma
from autotune.families.igemm_wgmma import IgemmWgmma
from autotune.problem import ConvProblem

FAMILIES: tuple[Family, ...] = (HaloWgmma(), IgemmWgmma(), HaloMma(), IgemmMma(), DirectCpu())

__all__ = [
    "FAMILIES",
    "DirectCpu",
    "Family",
    "HaloMma",
    "HaloWgmma",
    "IgemmMma",
    "IgemmWgmma",
    "Knob",
    "Launch",
    "Source",
    "TensorMap",
    "Unsupported",
    "family_named",
    "supporting",
    "why_unsupported",
]


class Unsupported(ValueError):
    """No kernel family can run the layer on the device; one line with each family's reason."""


def family_named(name: str, families: Sequence[Family] = FAMILIES) -> Family | None:
    """The registered family of that name, or None (a row may come from a version that had others)."""
    return next((family for family in families if family.name == name), None)


def supporting(problem: ConvProblem, device: DeviceSpec, families: Sequence[Family] = FAMILIES) -> list[Family]:
    """The families of which some config can run the layer on the device."""
    mine = [family for family in families if family.kind == device.kind and not family.unsupported(problem, device)]
    return [family for family in mine if family.configs(problem, device)]


def why_unsupported(problem: ConvProblem, device: DeviceSpec, families: Sequence[Family] = FAMILIES) -> str:
    """One line: why no family can run the layer on the device, each reason once with the families that give it."""
    # by what is said of the families, or of none of them
    given: dict[str, list[str]] = {}
    for family in families:
        if family.kind == device.kind:
            said = family.unsupported(problem, device) or f"{family.name} has no legal config"
            reason = said.removeprefix(f"{family.name} ")
            given.setdefault(reason, []).extend([family.name] if reason != said else [])
    reasons = [f"{', '.join(names)}{':' * (len(names) > 1)} {why}".lstrip() for why, names in given.items()]
    return f"no kernel for {problem} on {device.name}: " + ("; ".join(reasons) or f"no family runs on {device.kind}")
