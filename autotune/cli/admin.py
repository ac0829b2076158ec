"""The verbs about the machine and the database: ``devices``, ``db check`` and ``db upgrade``."""

from __future__ import annotations

import typer

from autotune.cli.options import AsJson, Database
from autotune.cli.output import print_json, print_table
from autotune.device import Device


def devices(as_json: AsJson = False) -> None:
    """List this machine's devices, with the reason why one cannot be used."""
    from autotune import backends

    found = backends.devices()
    if as_json:
        print_json({"devices": [_device_object(device) for device in found]})
        return
    print_table(("device", "compiled for", "model"), [_device_row(device) for device in found])


def check(db: Database = None, as_json: AsJson = False) -> None:
    """Check integrity, schema version and every row.

    Exits with 1 when there is a defect.
    """
    from autotune.store import Store

    with Store(db, create=False) as store:
        defects = store.check()
        if as_json:
            print_json({"db": store.url, "defects": defects})
        else:
            print("\n".join(defects) or f"{store.url}: sound")
    if defects:
        raise typer.Exit(1)


def upgrade(db: Database = None, as_json: AsJson = False) -> None:
    """Bring a database to this version's schema.

    As every verb does that opens it. What it was is kept: a file's copy lies beside it, a server has it in another
    schema.
    """
    from autotune.store import SCHEMA_VERSION, Store

    with Store(db, create=False) as store:
        before, url = store.upgraded_from, store.url
    if as_json:
        print_json({"db": url, "schema": SCHEMA_VERSION, "upgraded_from": before})
    elif before is None:
        print(f"{url}: schema {SCHEMA_VERSION}, nothing to do")
    else:
        print(f"{url}: upgraded from schema {before} to {SCHEMA_VERSION}")


def _device_row(device: Device) -> tuple[str, str, str]:
    if device.spec is None:
        return device.id, "-", f"cannot be used: {device.reason}"
    return device.id, device.spec.arch, device.spec.key


def _device_object(device: Device) -> dict[str, object]:
    usable: dict[str, object] = {"id": device.id, "usable": device.spec is not None, "reason": device.reason}
    if device.spec is None:
        return usable
    spec = device.spec
    return usable | {
        "device": spec.key,
        "kind": spec.kind,
        "name": spec.name,
        "arch": spec.arch,
        "compute_capability": list(spec.compute_capability),
        "sm_count": spec.sm_count,
        "smem_per_cta": spec.smem_per_cta,
        "l2_bytes": spec.l2_bytes,
    }
