"""Whether a stored row still speaks of the kernel that would be built now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autotune.backends import Compiler, NoDevice, compiler_for
from autotune.device import Device, DeviceSpec
from autotune.families import FAMILIES, Family, family_named, supporting
from autotune.problem import ConvProblem
from autotune.trial import Config, Record, Trial


class Freshness:
    """Compares rows with the kernel sources and compilers of this installation, each of which is read once.

    families: those that rows may name. devices: those whose drivers are looked at; a change from or to a driver that is
    not known is not seen. Where the compiler for a device is not installed, nothing can be said about its rows: none is
    stale.
    """

    def __init__(self, families: Sequence[Family] = FAMILIES, devices: Iterable[Device] = ()) -> None:
        self._families = families
        self._drivers = {device.spec.key: device.driver for device in devices if device.spec is not None}
        self._compilers: dict[DeviceSpec, Compiler | None] = {}
        self._digests: dict[tuple[str, DeviceSpec], str] = {}

    def why_stale(self, row: Trial | Record) -> str | None:
        """What changed since the row was written, in one line; None when nothing is known to have."""
        compiler = self._compiler(row.device)
        if compiler is None:
            return None
        family = family_named(row.config.family, self._families)
        if family is None:
            return f"no kernel family is called {row.config.family}"
        digest = self._digest(family, row.config, row.problem, row.device, compiler)
        if digest is None:
            return f"no config of {family.name} is legal for the layer"
        said, driver = row.provenance, self._drivers.get(row.device.key)
        changes = [
            "the kernel source changed" if digest != said.kernel_digest else "",
            f"the compiler was {said.compiler}, now {compiler.version}" if compiler.version != said.compiler else "",
            f"the driver was {said.driver}, now {driver}" if driver and said.driver not in ("", driver) else "",
        ]
        return "; ".join(filter(None, changes)) or None

    def why_distrusted(self, record: Record) -> str | None:
        """Why a record has to be verified before it serves, in one line: it is stale, or was never found correct."""
        return self.why_stale(record) or (None if record.verified else "it is not verified")

    def current(self, problem: ConvProblem, device: DeviceSpec) -> dict[str, tuple[str, str]] | None:
        """What rows of each family that can run a layer say when they are not stale: kernel digest and compiler.

        None where nothing can be said.
        """
        compiler = self._compiler(device)
        if compiler is None:
            return None
        found = {}
        for family in supporting(problem, device, self._families):
            config = family.default(problem, device)
            digest = config and self._digest(family, config, problem, device, compiler)
            if digest:
                found[family.name] = (digest, compiler.version)
        return found

    def _compiler(self, device: DeviceSpec) -> Compiler | None:
        if device not in self._compilers:
            try:
                self._compilers[device] = compiler_for(device)
            except NoDevice:
                self._compilers[device] = None
        return self._compilers[device]

    def _digest(
        self, family: Family, config: Config, problem: ConvProblem, device: DeviceSpec, compiler: Compiler
    ) -> str | None:
        # of the family's own file and what that includes: the same for every config and layer
        key = family.name, device
        if key not in self._digests:
            legal = config if family.legal(config, problem, device) is None else family.default(problem, device)
            if legal is None:
                return None
            self._digests[key] = compiler.digest(family.source(legal, problem, device))
        return self._digests[key]
