"""Similar layers: in the order of their likeness, the trusted ones first, whatever the database and however many."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from store_samples import CPU, GPU, many_records, record

from autotune.problem import ConvProblem, Epilogue
from autotune.store import Store, engine
from autotune.store.similar import Current, rank
from autotune.trial import Record

BASE = {"N": 2, "C": 16, "H": 14, "W": 14, "K": 32, "R": 3, "S": 3, "padding": 1}
PROBLEM = ConvProblem(**BASE)
CURRENT = {"igemm_mma": ("ab" * 32, "nvrtc 13.0"), "family_0": ("ab" * 32, "nvrtc 13.0")}


@pytest.fixture(params=["sqlite", "postgresql"])
def store(request: pytest.FixtureRequest) -> Iterator[Store]:
    location = request.getfixturevalue("postgresql") if request.param == "postgresql" else ":memory:"
    with Store(location) as opened:
        yield opened


def expected(records: list[Record], problem: ConvProblem, current: Current | None, any_epilogue: bool) -> list[Record]:
    """What Python makes of all records at once."""
    alike = [
        one
        for one in records
        if one.problem.dtype is problem.dtype
        and one.problem != problem
        and (any_epilogue or (one.problem.layout, one.problem.epilogue) == (problem.layout, problem.epilogue))
    ]
    return sorted(alike, key=lambda one: rank(one, problem, current))


def test_only_the_device_and_kind_asked_for(store: Store) -> None:
    alike = ConvProblem(**BASE | {"N": 4})
    others = [
        ConvProblem(**BASE, dtype="bf16"),
        ConvProblem(**BASE, layout="nchw"),
        ConvProblem(**BASE, epilogue=Epilogue(bias=True)),
        ConvProblem(**BASE, epilogue=Epilogue(out_dtype="f32")),
    ]
    store.merge([record(problem=problem) for problem in (PROBLEM, alike, *others)])
    store.merge([record(problem=ConvProblem(**BASE | {"N": 8}), device=CPU)])
    assert [one.problem for _, one in store.similar(PROBLEM, GPU)] == [alike]
    assert {one.problem for _, one in store.similar(PROBLEM, GPU, any_epilogue=True)} == {alike, *others[1:]}
    assert list(store.similar(PROBLEM, replace(GPU, sm_count=7))) == []


def test_the_distance_is_of_what_kernels_care_about(store: Store) -> None:
    changed = {"K": 64, "stride": 2, "R": 1}
    store.merge([record(problem=ConvProblem(**BASE | {name: value})) for name, value in changed.items()])
    found = {one.problem: round(apart, 3) for apart, one in store.similar(PROBLEM, GPU)}
    assert found == {
        ConvProblem(**BASE | {"K": 64}): 0.693,
        # both strides, and a quarter of the pixels
        ConvProblem(**BASE | {"stride": 2}): 2.773,
        # a filter of one row, and two more rows of the output
        ConvProblem(**BASE | {"R": 1}): 1.232,
    }


@pytest.mark.parametrize("any_epilogue", [False, True])
@pytest.mark.parametrize("current", [None, CURRENT])
def test_the_database_orders_as_python_does(store: Store, current: Current | None, any_epilogue: bool) -> None:
    draw = random.Random(3)
    stated = [
        replace(
            one,
            device=GPU,
            provenance=replace(one.provenance, kernel_digest=draw.choice(["ab", "cd"]) * 32, compiler="nvrtc 13.0"),
        )
        for one in many_records(600, 11)
    ]
    store.merge(stated)
    records = store.records()
    # more than one page of them, an empty batch among them
    problem = next(one.problem for one in records if one.problem.N == 1 and one.problem.epilogue.is_identity)
    wanted = expected(records, problem, current, any_epilogue)
    assert len(wanted) > (100 if any_epilogue else 2)
    found = list(store.similar(problem, GPU, current=current, any_epilogue=any_epilogue))
    assert sorted((one for _, one in found), key=repr) == sorted(wanted, key=repr)
    ranks = [[rank(one, problem, current)[:2] for one in ones] for ones in ([one for _, one in found], wanted)]
    # the same distance summed in another order may differ in the last bit, and come before its equal
    assert ranks[0] == [(untrusted, pytest.approx(apart)) for untrusted, apart in ranks[1]]
    assert [apart for apart, _ in found] == [apart for _, apart in ranks[0]]
    if current is not None and any_epilogue:
        trusted = [
            one.verified and one.family in CURRENT and one.provenance.kernel_digest == "ab" * 32 for one in wanted
        ]
        assert trusted == sorted(trusted, reverse=True)
        assert len(set(trusted)) == 2


def test_no_more_are_read_than_asked_for(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.merge([record(problem=ConvProblem(**BASE | {"N": 3 + i})) for i in range(200)])
    decoded = []
    parse = ConvProblem.parse
    monkeypatch.setattr(ConvProblem, "parse", staticmethod(lambda text: decoded.append(text) or parse(text)))
    assert [one.problem.N for _, one in islice(store.similar(PROBLEM, GPU), 3)] == [3, 4, 5]
    assert len(decoded) == 16
    assert [one.problem.N for _, one in store.similar(PROBLEM, GPU)] == list(range(3, 203))


def test_a_library_without_logarithms_is_helped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_has_logarithm", lambda: False)
    with Store(tmp_path / "tuning.db") as store:
        store.merge([record(problem=ConvProblem(**BASE | {"N": n})) for n in (16, 4, 3)])
        assert [one.problem.N for _, one in store.similar(PROBLEM, GPU)] == [3, 4, 16]
