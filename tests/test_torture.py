"""Every fault of the fault table, once each; scripts/torture-store brings them about many times."""

from __future__ import annotations

import random

import pytest
import torture

CASES = [(fault, kind) for fault in torture.FAULTS for kind in fault.kinds]


@pytest.mark.parametrize(("fault", "kind"), CASES, ids=[f"{kind}: {fault.name}" for fault, kind in CASES])
def test_a_fault_does_no_harm(fault: torture.Fault, kind: str, request: pytest.FixtureRequest) -> None:
    draw = random.Random(f"{fault.name} {kind}")
    try:
        if kind == "PostgreSQL":
            fault.bring(request.getfixturevalue("postgresql"), draw)
            return
        with torture.place(kind) as location:
            fault.bring(location, draw)
    except torture.Unavailable as reason:
        pytest.skip(str(reason))
