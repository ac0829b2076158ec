"""What the system says about its CPU: model, cores that may be used, last-level cache, clock."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")
_CPU = Path("/sys/devices/system/cpu/cpu0")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_LAST_LEVEL_BYTES = 32 << 20  # where the system does not tell


def _cpuinfo() -> dict[str, str]:
    """The facts of the first core, by their names in /proc/cpuinfo; empty where there is no such file."""
    try:
        first = _CPUINFO.read_text(errors="replace").split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def name() -> str:
    """The model without trademarks and frequencies; with family and model number where it has no number itself."""
    facts = _cpuinfo()
    arm = f"{platform.machine()} {facts['CPU implementer']}-{facts['CPU part']}" if "CPU part" in facts else ""
    told = facts.get("model name") or arm or platform.processor() or platform.machine()
    told = re.sub(r"\((R|TM|C)\)|\bCPU\b|\b\d+-Core\b|\bProcessor\b|@.*", " ", told, flags=re.IGNORECASE)
    told = " ".join(told.split())
    # a virtual machine may hide the model's number
    if "cpu family" in facts and not re.search(r"\d", told):
        told += f" family {facts['cpu family']} model {facts['model']}"
    return told


def identity() -> str:
    """Digest of what decides which instructions a compiler uses for this CPU."""
    facts = _cpuinfo()
    names = ("model name", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
    told = [facts.get(name, "") for name in names]
    return hashlib.sha256("\0".join([platform.machine(), platform.processor(), *told]).encode()).hexdigest()[:16]


def cores() -> int:
    """Cores that this process may use: its affinity, and a whole-number share of its control group's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
    except (OSError, ValueError):
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))


def last_level_bytes() -> int:
    """Size of the last-level cache, 32 MiB where the system does not tell."""
    found = []
    for index in (_CPU / "cache").glob("index*"):
        try:
            level, size = (index / "level").read_text(), (index / "size").read_text().strip()
        except OSError:
            continue
        unit = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(size[-1:], 0)
        if unit and size[:-1].isdigit():
            found.append((int(level), int(size[:-1]) * unit))
    return max(found)[1] if found else _LAST_LEVEL_BYTES


def clock_mhz() -> int | None:
    """The clock now, of the first core or else of the fastest; None where the system does not tell."""
    try:
        return int((_CPU / "cpufreq" / "scaling_cur_freq").read_text()) // 1000
    except (OSError, ValueError):
        pass  # a virtual machine has none
    try:
        told = re.findall(r"^cpu MHz\s*:\s*([\d.]+)", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return round(max(map(float, told))) if told else None
