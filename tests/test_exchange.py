"""Tuning tables as files: exports come back unchanged, merges depend on no order, bad files are refused whole."""

from __future__ import annotations

import csv
import errno
import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from store_samples import CPU, GPU, layer, many_records, record, trial

from autotune.device import roofline_us
from autotune.store import MergeReport, Store, StoreError, exchange
from autotune.trial import Record


def table_of(records: list[Record], fmt: str = "jsonl") -> str:
    """The export of a store that merged these records."""
    with Store(":memory:") as store:
        store.merge(records)
        return exchange.export_rows(store, fmt)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_export_import_export_is_byte_identical(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    with Store(tmp_path / "a.db") as store:
        store.merge(many_records(10_500, seed=1))
        exchange.write(store, "jsonl", first)
        before = store.records()
    assert len(before) > 10_000
    with Store(tmp_path / "b.db" if kind == "sqlite" else request.getfixturevalue("postgresql")) as store:
        report = exchange.import_files(store, [first])
        exchange.write(store, "jsonl", second)
        assert store.records() == before
    assert report == MergeReport(added=len(before), replaced=0, unchanged=0, conflicts=0)
    assert second.read_bytes() == first.read_bytes()
    lines = first.read_text().splitlines()
    assert len(lines) == len(before)
    assert lines == sorted(lines)
    assert all(line == json.dumps(json.loads(line), sort_keys=True) for line in lines[::100])


def test_a_table_imported_again_changes_nothing(tmp_path: Path) -> None:
    table = tmp_path / "table.jsonl"
    with Store(":memory:") as store:
        store.merge(many_records(200, seed=1))
        before = store.records()
        exchange.write(store, "jsonl", table)
        assert exchange.import_files(store, [table, table]) == MergeReport(
            added=0, replaced=0, unchanged=len(before), conflicts=0
        )
        assert store.records() == before


def test_tables_merged_in_both_orders_are_identical(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"
    records = many_records(300, seed=2)
    # every layer of the one is in the other, with another device description, and each wins about half of the time
    rivals = [
        replace(
            mine,
            measurement=replace(mine.measurement, time_us=mine.time_us * (0.5 if i % 2 else 1.5)),
            device=replace(mine.device, l2_bytes=1 + i % 3),
        )
        for i, mine in enumerate(records)
    ]
    one.write_text(table_of(records))
    other.write_text(table_of(rivals))
    exports = []
    for order in ([one, other], [other, one]):
        with Store(":memory:") as store:
            for path in order:
                exchange.import_files(store, [path])
            exports.append([exchange.export_rows(store, fmt) for fmt in exchange.FORMATS])
        with Store(":memory:") as store:
            exchange.import_files(store, order)
            exports.append([exchange.export_rows(store, fmt) for fmt in exchange.FORMATS])
    assert exports == [exports[0]] * 4
    assert exports[0][0] not in (one.read_text(), other.read_text())


def test_a_line_holds_everything_and_says_it_for_readers() -> None:
    entry = json.loads(table_of([record(10.1)]))
    assert entry == {
        "format": 1,
        "problem": "n1c16h14w14-k32r3s3-stride1x1-pad1.1.1.1-dil1x1-g1-f16-nhwc-identity-f16",
        "layer": {
            **{"n": 1, "c": 16, "h": 14, "w": 14, "k": 32, "r": 3, "s": 3, "stride_h": 1, "stride_w": 1},
            **{"pad_top": 1, "pad_bottom": 1, "pad_left": 1, "pad_right": 1, "dilation_h": 1, "dilation_w": 1},
            **{"groups": 1, "dtype": "f16", "layout": "nhwc", "epilogue": "identity", "out_dtype": "f16"},
        },
        "device": "NVIDIA H200 x132",
        "device_spec": {
            **{"kind": "cuda", "name": "NVIDIA H200", "arch": "sm_90a", "compute_capability": [9, 0], "sm_count": 132},
            **{"smem_per_cta": 232448, "smem_per_sm": 233472, "l2_bytes": 62914560, "vector_bytes": 0},
            **{"bytes_per_s": 4.2e12, "rates": [["f16", 7e14], ["f32", 5e13]]},
        },
        "config": "igemm_mma-cta128x64x32-stages1-raster_group4",
        "family": "igemm_mma",
        "knobs": [["cta_m", 128], ["cta_n", 64], ["cta_k", 32], ["stages", 1], ["raster_group", 4]],
        "verified": True,
        "time_us": 10.1,
        "spread_us": 0.125,
        "samples": 25,
        "launches": 10,
        "condition": "cold-graph",
        "provenance": {
            **{"kernel_digest": "ab" * 32, "compiler": "nvrtc 13.0", "driver": "580.95", "harness": 1},
            **{"clock_mhz": 1980, "temperature_c": 41, "created_at": "2025-01-02T03:04:05+00:00"},
        },
    }


def test_csv_has_one_line_a_record_in_order() -> None:
    records = [record(10.1), record(0.1 + 0.2, 3, problem=layer(1)), replace(record(7.0, device=CPU), verified=False)]
    found = list(csv.DictReader(table_of(records, "csv").splitlines()))
    assert [line["device"] for line in found] == [CPU.key, GPU.key, GPU.key]
    assert [line["problem"] for line in found] == [str(layer(0)), str(layer(0)), str(layer(1))]
    assert [float(line["time_us"]) for line in found] == [7.0, 10.1, 0.1 + 0.2]
    assert [line["verified"] for line in found] == ["false", "true", "true"]
    assert [float(line["roofline_us"]) for line in found] == [
        roofline_us(layer(0), CPU),
        roofline_us(layer(0), GPU),
        roofline_us(layer(1), GPU),
    ]
    assert found[2]["config"] == "igemm_mma-cta128x64x32-stages4-raster_group4"
    assert (found[2]["n"], found[2]["pad_right"], found[2]["clock_mhz"]) == ("2", "1", "1980")


def test_markdown_is_a_table_with_shares_of_the_roofline() -> None:
    odd = replace(GPU, name="A|B")
    fast = record(2 * roofline_us(layer(), odd), device=odd)
    slow = replace(record(1000.0, problem=layer(1)), verified=False)
    assert table_of([slow, fast], "markdown").splitlines() == [
        "| device | layer | config | time in us | of the roofline |",
        "| --- | --- | --- | ---: | ---: |",
        f"| A\\|B x132 | {layer()} | {fast.config} | {fast.time_us:.2f} | 50% |",
        f"| NVIDIA H200 x132 | {layer(1)} | {slow.config} (not verified) | 1000.00 | 0% |",
    ]


def test_an_empty_store_exports_empty_tables(tmp_path: Path) -> None:
    assert table_of([], "jsonl") == ""
    assert table_of([], "csv").count("\n") == 1
    assert table_of([], "markdown").count("\n") == 2
    (tmp_path / "empty.jsonl").touch()
    with Store(":memory:") as store:
        assert exchange.import_files(store, [tmp_path / "empty.jsonl"]).added == 0
        with pytest.raises(ValueError, match=r"^unknown format 'xml': use one of jsonl, csv, markdown, header$"):
            exchange.export_rows(store, "xml")


def test_the_two_zeros_are_one(tmp_path: Path) -> None:
    plain, negative = tmp_path / "plain.jsonl", tmp_path / "negative.jsonl"
    for path, zero in ((plain, 0.0), (negative, -0.0)):
        path.write_text(json.dumps(entry(spread_us=zero)) + "\n")
    for order in ([plain, negative], [negative, plain]):
        with Store(":memory:") as store:
            assert exchange.import_files(store, order).conflicts == 0
            assert '"spread_us": 0.0' in exchange.export_rows(store, "jsonl")


# Reading


def entry(**changes: Any) -> dict[str, Any]:
    """A good line as an object, with keys changed or, where None, removed."""
    values = json.loads(table_of([record()])) | changes
    return {name: value for name, value in values.items() if value is not None}


def test_keys_of_later_versions_are_ignored(tmp_path: Path) -> None:
    good = entry()
    path = tmp_path / "later.jsonl"
    later = entry(
        mood="good",
        device_spec=good["device_spec"] | {"tensor_memory": 5},
        provenance=good["provenance"] | {"operator": {"name": "x"}},
    )
    path.write_text("\ufeff" + json.dumps(later) + "\r\n\r\n")
    with Store(":memory:") as store:
        assert exchange.import_files(store, [path]).added == 1
        assert store.records() == [record()]


def _nested(part: str, **changes: Any) -> Callable[[], dict[str, Any]]:
    return lambda: entry(**{part: entry()[part] | changes})


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON: a table is what export --format jsonl writes"),
        ("device,problem,n", "not JSON: a table is what export --format jsonl writes"),
        ("[" * 100_000, "not JSON: a table is what export --format jsonl writes"),
        ("[]", "not a JSON object"),
        (lambda: entry(format=2), "format 2 is newer than 1, the newest that this version reads"),
        (lambda: entry(format=None), "format is missing"),
        (lambda: entry(time_us=None), "time_us is missing"),
        (lambda: entry(time_us="fast"), "time_us must be a number, not 'fast'"),
        (lambda: entry(time_us=float("nan")), "nan us with a spread of 0.125 us is not a time"),
        (lambda: entry(time_us=float("inf")), "inf us with a spread of 0.125 us is not a time"),
        (lambda: entry(time_us=0), "0.0 us with a spread of 0.125 us is not a time"),
        (lambda: entry(spread_us=-1), "10.1 us with a spread of -1.0 us is not a time"),
        (lambda: entry(samples=True), "samples must be an integer, not True"),
        (lambda: entry(launches=0), "25 samples of 0 launches are not a measurement"),
        (lambda: entry(verified=1), "verified must be true or false, not 1"),
        (lambda: entry(knobs={"cta_m": 1}), "knobs must be an array, not {'cta_m': 1}"),
        (lambda: entry(knobs=[["cta_m", 1.5]]), "a knob must be a name and an integer, not ['cta_m', 1.5]"),
        (lambda: entry(config="fast"), f"config is 'fast' where its parts say '{record().config}'"),
        (lambda: entry(device="H100"), "device is 'H100' where its parts say 'NVIDIA H200 x132'"),
        (lambda: entry(problem="n1"), "not a layer's canonical text: 'n1' (like "),
        (
            lambda: entry(problem=str(layer()).replace("-g1-", "-g3-")),
            "groups must divide C: 3 does not divide 16",
        ),
        (_nested("provenance", harness="1"), "harness must be an integer, not '1'"),
        (_nested("provenance", clock_mhz=1.5), "clock_mhz must be an integer or null, not 1.5"),
        (_nested("device_spec", name=5), "name must be a text, not 5"),
        (_nested("device_spec", rates=[["f17", 1.0]]), "device_spec does not describe a device: ValueError("),
        (_nested("device_spec", rates=[["s8", 1.0]]), "device_spec does not describe a device: KeyError("),
        *(
            (_nested("device_spec", **change), "device_spec does not describe a device: sm_count and rates must be ")
            for change in (
                *({"sm_count": count} for count in (0, -1, 2**31)),
                *({"bytes_per_s": rate} for rate in (0, -1.0, float("inf"), float("nan"))),
                *({"rates": [["f32", 1.0], ["f16", rate]]} for rate in (0, -1.0, float("inf"), float("nan"))),
            )
        ),
        (_nested("device_spec", rates=[["f32", 10**400]]), "device_spec does not describe a device: OverflowError("),
        (_nested("device_spec", sm_count="132"), "sm_count must be an integer, not '132'"),
        (lambda: entry(time_us=10**400), "time_us has more than 64 bits"),
        (lambda: entry(knobs=[["cta_m", 2**63]]), "cta_m has more than 64 bits"),
        (lambda: entry(samples=2**31), f"{2**31} samples of "),
        (lambda: entry(samples=7, launches=2**31), f"7 samples of {2**31} launches"),
        (lambda: entry(time_us=1e30), "1e+30 us with a spread of "),
        (lambda: entry(time_us=1, spread_us=1e30), "1.0 us with a spread of 1e+30 us is not a time"),
        (_nested("provenance", harness=2**31), "harness has more than 32 bits"),
        (_nested("provenance", clock_mhz=2**31), "clock_mhz has more than 32 bits"),
        (_nested("provenance", temperature_c=-(2**31)), "temperature_c has more than 32 bits"),
        (_nested("provenance", driver="driver\0"), "driver holds a NUL character"),
        (lambda: entry(condition="cold\0"), "condition holds a NUL character"),
        (_nested("device_spec", name="H200\0"), "name holds a NUL character"),
        (lambda: entry(knobs=[["a", 1], ["a", 2]], config="igemm_mma-a1-a2"), "a knob is given twice"),
    ],
)
def test_a_malformed_line_is_named_and_nothing_is_imported(
    tmp_path: Path, line: str | Callable[[], dict[str, Any]], reason: str
) -> None:
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad one.jsonl"
    good.write_text(table_of(many_records(5, seed=3)))
    text = line if isinstance(line, str) else json.dumps(line())
    bad.write_text(table_of([record()]) + "\n" + text + "\n")
    with Store(":memory:") as store:
        store.add_trial(trial())
        with pytest.raises(StoreError) as caught:
            exchange.import_files(store, [good, bad])
        assert str(caught.value).startswith(f"{bad}:3: {reason}")
        assert "\n" not in str(caught.value)
        assert store.records() == []


def test_a_record_that_the_tables_refuse_takes_the_whole_import_back(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    others = (entry(), entry(clock_mhz=1), entry(problem=str(layer(1)), time_us=7.0))
    path.write_text("".join(json.dumps(one) + "\n" for one in others))
    with Store(":memory:") as store:
        with store._transaction(writes=True) as connection:
            connection.exec_driver_sql(
                "CREATE TRIGGER refuse BEFORE INSERT ON record WHEN NEW.time_us = 7 "
                "BEGIN SELECT RAISE(ABORT, 'no record of 7 us'); END"
            )
        with pytest.raises(StoreError, match=r"^sqlite://: .*no record of 7 us"):
            exchange.import_files(store, [path])
        assert store.records() == []
        assert store.check() == []


def test_a_text_that_is_no_utf_8_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    broken = entry(provenance=entry()["provenance"] | {"driver": "\ud800"})
    path.write_text("".join(json.dumps(one) + "\n" for one in (entry(), broken)))
    with (
        Store(":memory:") as store,
        pytest.raises(StoreError, match=r"table\.jsonl:2: driver is no UTF-8 text$"),
    ):
        exchange.import_files(store, [path])


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    with Store(":memory:") as store:
        for path, reason in (
            (tmp_path / "none.jsonl", "No such file or directory"),
            (tmp_path, "Is a directory"),
            (binary, "not a text in UTF-8"),
        ):
            with pytest.raises(StoreError) as caught:
                exchange.import_files(store, [str(path)])
            assert str(caught.value) == f"{path}: {reason}"


# Writing


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "out" / "table.jsonl"
    (tmp_path / "out").mkdir()
    path.write_text("old")
    link = tmp_path / "link"
    link.symlink_to(path)
    before = os.umask(0o022)
    try:
        with Store(":memory:") as store:
            store.offer(record())
            exchange.write(store, "jsonl", link)
    finally:
        os.umask(before)
    assert path.read_text() == table_of([record()])
    assert link.is_symlink()
    assert [one.name for one in path.parent.iterdir()] == ["table.jsonl"]
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with Store(":memory:") as store:
        for path, reason in (
            (tmp_path / "none" / "table.csv", "No such file or directory"),
            (tmp_path / "folder", "Is a directory"),
        ):
            with pytest.raises(StoreError) as caught:
                exchange.write(store, "csv", path)
            assert str(caught.value) == f"{path}: {reason}"
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


def test_a_disk_that_fills_up_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    path = tmp_path / "table.csv"
    path.write_text("old")
    monkeypatch.setattr(os, "fsync", full)
    with Store(":memory:") as store, pytest.raises(StoreError, match=r"table\.csv: No space left on device$"):
        exchange.write(store, "csv", path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_pipe_is_written_through(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(path.read_text()))
    reader.start()
    with Store(":memory:") as store:
        store.offer(record())
        exchange.write(store, "csv", path)
    reader.join(timeout=30)
    assert read == [table_of([record()], "csv")]
    assert stat.S_ISFIFO(path.stat().st_mode)
