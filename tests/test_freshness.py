"""Freshness: a row is stale when its kernel source, compiler or driver is not the present one, and says which."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from store_samples import CPU

from autotune.backends import NoDevice, cache, compiler_for, find
from autotune.device import Device, DeviceSpec
from autotune.families import DirectCpu
from autotune.freshness import Freshness
from autotune.problem import ConvProblem
from autotune.store import Store, exchange
from autotune.trial import Config, Measurement, Provenance, Record, Status, Trial

LAYER = ConvProblem(N=1, C=8, H=8, W=8, K=8, R=3, S=3, padding=1, dtype="f32")
FAMILY = DirectCpu()


@pytest.fixture
def here() -> DeviceSpec:
    spec = find("cpu").spec
    assert spec is not None
    return spec


@pytest.fixture
def fresh(here: DeviceSpec) -> Record:
    """A record as it would be written now."""
    config = FAMILY.configs(LAYER, here)[0]
    compiler = compiler_for(here)
    return Record(
        problem=LAYER,
        device=here,
        config=config,
        measurement=Measurement(time_us=5.0, spread_us=0.1, samples=5, launches=10, condition="cold-loop"),
        provenance=Provenance(
            kernel_digest=compiler.digest(FAMILY.source(config, LAYER, here)),
            compiler=compiler.version,
            driver="driver 1",
            created_at="2026-01-02T03:04:05+00:00",
        ),
    )


def changed(record: Record, **provenance: str) -> Record:
    return replace(record, provenance=replace(record.provenance, **provenance))


def test_what_was_written_now_is_fresh(fresh: Record) -> None:
    assert Freshness().why_stale(fresh) is None
    another = replace(fresh.device, name="another")
    given = [Device(id="cpu", spec=fresh.device, driver="driver 1"), Device(id="cuda:0", spec=another, driver="x")]
    assert Freshness(devices=[*given, Device(id="cuda:1", reason="broken")]).why_stale(fresh) is None


def test_every_change_is_named(fresh: Record) -> None:
    said = fresh.provenance
    judge = Freshness(devices=[Device(id="cpu", spec=fresh.device, driver="driver 2")]).why_stale
    assert judge(fresh) == "the driver was driver 1, now driver 2"
    # what is not known has not changed
    assert judge(changed(fresh, driver="")) is None
    assert Freshness(devices=[Device(id="cpu", spec=fresh.device)]).why_stale(fresh) is None
    judge = Freshness().why_stale
    assert judge(changed(fresh, driver="driver 0")) is None
    assert judge(changed(fresh, kernel_digest="ab" * 32)) == "the kernel source changed"
    assert judge(changed(fresh, compiler="cc 1")) == f"the compiler was cc 1, now {said.compiler}"
    assert judge(changed(fresh, compiler="cc 1", kernel_digest="")) == (
        f"the kernel source changed; the compiler was cc 1, now {said.compiler}"
    )
    gone = replace(fresh, config=Config.of("gone", {"x": 1}))
    assert judge(gone) == "no kernel family is called gone"
    # a config that is not legal any more does not keep its source from being compared
    odd = replace(fresh, config=Config.of("direct_cpu", {"pixels": 999}))
    assert judge(odd) is None
    assert judge(changed(odd, kernel_digest="")) == "the kernel source changed"


def test_failures_are_judged_like_records(fresh: Record) -> None:
    failed = Trial(
        problem=LAYER, device=fresh.device, config=fresh.config, status=Status.COMPILE, provenance=fresh.provenance
    )
    assert Freshness().why_stale(failed) is None
    failed = replace(failed, provenance=replace(failed.provenance, compiler="cc 1"))
    assert str(Freshness().why_stale(failed)).startswith("the compiler was cc 1, now ")


def test_a_changed_kernel_file_is_noticed(fresh: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in cache.include_directories():
        for path in directory.iterdir():
            if path.is_file():
                (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(cache, "include_directories", lambda: (tmp_path,))
    assert Freshness().why_stale(fresh) is None
    (tmp_path / "direct_cpu.c").write_text((tmp_path / "direct_cpu.c").read_text() + "\n// one line more\n")
    assert Freshness().why_stale(fresh) == "the kernel source changed"


def test_without_a_compiler_for_the_device_nothing_is_known(fresh: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = changed(replace(fresh, device=CPU), compiler="cc 1", kernel_digest="")
    assert Freshness().why_stale(elsewhere) is None
    assert Freshness().current(LAYER, CPU) is None
    with pytest.raises(NoDevice, match="is not this machine's CPU"):
        compiler_for(CPU)

    def missing(_: DeviceSpec) -> None:
        raise NoDevice("no C compiler")

    monkeypatch.setattr("autotune.freshness.compiler_for", missing)
    assert Freshness().why_stale(changed(fresh, compiler="cc 1")) is None


def test_current_is_what_fresh_rows_say(fresh: Record) -> None:
    said = fresh.provenance
    assert Freshness().current(LAYER, fresh.device) == {"direct_cpu": (said.kernel_digest, said.compiler)}
    assert Freshness().current(replace_dtype(LAYER), fresh.device) == {}


def test_a_fresh_record_wins_a_merge_whatever_the_order(fresh: Record, tmp_path: Path) -> None:
    faster = replace(changed(fresh, compiler="cc 1"), measurement=replace(fresh.measurement, time_us=1.0))
    exports = []
    for order in ((fresh, faster), (faster, fresh)):
        with Store(":memory:") as store:
            for number, one in enumerate(order):
                with Store(":memory:") as other:
                    other.offer(one)
                    exchange.write(other, "jsonl", tmp_path / f"{number}.jsonl")
                exchange.import_files(store, [tmp_path / f"{number}.jsonl"], Freshness().why_stale)
            assert store.records() == [fresh]
            exports.append(exchange.export_rows(store, "jsonl"))
    assert exports[0] == exports[1]
    # of two stale ones the faster
    slower = changed(fresh, compiler="cc 2")
    with Store(":memory:") as store:
        assert store.merge([slower, faster], Freshness().why_stale).conflicts == 1
        assert store.records() == [faster]


def replace_dtype(problem: ConvProblem) -> ConvProblem:
    return ConvProblem(**{name: getattr(problem, name) for name in ("N", "C", "H", "W", "K", "R", "S")}, dtype="s8")
