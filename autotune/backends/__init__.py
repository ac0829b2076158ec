"""Backends: the only place that touches a device or a compiler."""

from __future__ import annotations

import re

from autotune.backends.backend import (
    Backend,
    Comparison,
    CompiledKernel,
    CompileError,
    Compiler,
    ConstraintsError,
    DeviceFault,
    Kernel,
    NoDevice,
    Operands,
)
from autotune.device import Device, DeviceSpec

__all__ = [
    "Backend",
    "Comparison",
    "CompileError",
    "CompiledKernel",
    "Compiler",
    "ConstraintsError",
    "DeviceFault",
    "Kernel",
    "NoDevice",
    "Operands",
    "compiler_for",
    "devices",
    "find",
    "open_backend",
]


def devices() -> list[Device]:
    """Every device of this machine, CUDA devices first; one that cannot be used carries the reason."""
    from autotune.backends import cpu, cuda

    return [*cuda.devices(), *cpu.devices()]


def find(device: str | Device | DeviceSpec = "auto") -> Device:
    """The device meant by ``auto`` (first usable CUDA device, else cpu), ``cpu``, ``cuda``, ``cuda:I``, or a listed
    device.

    NoDevice, in one line, when it is absent or cannot be used; ValueError when the text has another form.
    """
    if isinstance(device, Device):
        device = device.id
    listed = devices()
    if isinstance(device, DeviceSpec):
        for entry in listed:
            # measured rates differ a little from run to run: the key says whether it is the same model
            if entry.spec is not None and (entry.spec.kind, entry.spec.key) == (device.kind, device.key):
                return entry
        raise NoDevice(f"{device.key} is not a device of this machine")
    if device == "auto":
        for entry in listed:
            if entry.spec is not None:
                return entry
        raise NoDevice("no device can be used: " + "; ".join(f"{d.id}: {d.reason}" for d in listed))
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise ValueError(f"unknown device {device!r}: use auto, cpu or cuda:I")
    wanted = "cuda:0" if device == "cuda" else device
    for entry in listed:
        if entry.id == wanted or (entry.id == "cuda" and wanted.startswith("cuda")):
            if entry.spec is None:
                raise NoDevice(f"{wanted} cannot be used: {entry.reason}")
            return entry
    raise NoDevice(f"{wanted} is not a device of this machine: it has {', '.join(d.id for d in listed)}")


def open_backend(device: Device) -> Backend:
    """The backend of a device that ``find`` returned."""
    from autotune.backends import cpu, cuda

    if device.spec is None:
        raise NoDevice(f"{device.id} cannot be used: {device.reason}")
    return cpu.CpuBackend(device.spec) if device.spec.kind == "cpu" else cuda.CudaBackend(device)


def compiler_for(spec: DeviceSpec) -> Compiler:
    """The compiler for a device model; NoDevice when it is not installed. Needs no device."""
    from autotune.backends import cpu, cuda

    return cpu.CpuCompiler(spec) if spec.kind == "cpu" else cuda.CudaCompiler(spec)
