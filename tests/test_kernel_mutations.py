"""The deliberate faults of kernels: each still applies, the tracked results are theirs, and the host finds a sample."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
from host_execution import HostFault, HostMachine
from kernel_mutations import Mutation, mutations, suite

from autotune.families import FAMILIES, family_named
from autotune.resources import folder

RESULTS = Path(__file__).resolve().parent.parent / "docs" / "results" / "mutations.json"
MUTATED = sorted({mutation.family for mutation in mutations() if mutation.file == f"{mutation.family}.cuh"})
SAMPLE = 3  # of each family
HOW_TO = "run scripts/mutate-kernels after a change of kernels or mutations"


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: f"{mutation.file}: {mutation.name}")
def test_applies_to_the_present_sources(mutation: Mutation, tmp_path: Path) -> None:
    changed = tmp_path / "kernels"
    shutil.copytree(folder("kernels"), changed)
    mutation.apply(changed)
    assert (changed / mutation.file).read_text() != (folder("kernels") / mutation.file).read_text()


def test_every_family_has_faults() -> None:
    assert set(MUTATED) == {family.name for family in FAMILIES if family.kind == "cuda"}


def test_tracked_results_are_of_these_mutations() -> None:
    rows = json.loads(RESULTS.read_text())
    assert {tuple(row) for row in rows} == {("mutation", "family", "caught", "by")}
    assert [(r["family"], r["mutation"]) for r in rows] == [(m.family, m.name) for m in mutations()], HOW_TO
    assert len(rows) >= 20
    assert sum(row["caught"] for row in rows) >= 0.9 * len(rows)
    assert all(bool(row["by"]) == row["caught"] for row in rows)


@pytest.mark.parametrize("name", MUTATED)
def test_the_host_finds_a_sample(name: str, tmp_path: Path) -> None:
    mine = [mutation for mutation in mutations() if mutation.file == f"{name}.cuh"]
    caught = {(row["family"], row["mutation"]): row["caught"] for row in json.loads(RESULTS.read_text())}
    family = family_named(name)
    assert family is not None
    cases = suite(family)
    for index, mutation in enumerate(random.Random(name).sample(mine, SAMPLE)):
        kernels = tmp_path / str(index) / "kernels-changed"
        shutil.copytree(folder("kernels"), kernels)
        mutation.apply(kernels)
        machine = HostMachine(kernels.parent, kernels)
        assert any(is_wrong(machine, case) for case in cases) == caught[name, mutation.name], mutation.name


def is_wrong(machine: HostMachine, case: object) -> bool:
    try:
        machine.check(case, seed=1)  # type: ignore[arg-type]
    except HostFault:
        return True
    return False
