"""The store's contract, on every kind of database that the tests can have: what goes in comes out, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from store_samples import CPU, GPU, config, failure, layer, many_records, measurement, record, trial

from autotune.device import Device
from autotune.problem import ConvProblem, DType, Epilogue
from autotune.store import MergeReport, NoDatabase, Store, StoreError
from autotune.trial import Config, Status


@pytest.fixture(params=["file", "memory", "postgresql"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    location = {"file": tmp_path / "tuning.db", "memory": "sqlite://"}.get(request.param)
    with Store(location or request.getfixturevalue("postgresql")) as opened:
        yield opened
        assert opened.check() == []


def test_an_empty_store_has_nothing(store: Store) -> None:
    assert store.trials(layer(), GPU) == []
    assert store.trial_names(layer(), GPU) == set()
    assert store.best(layer(), GPU) is None
    assert store.records() == []


def test_a_database_that_has_to_be_there_is_not_made(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    path, url = tmp_path / "new" / "tuning.db", request.getfixturevalue("postgresql")
    for location, reason in ((path, "there is no database"), (url, "there is no tuning database: it has no tables")):
        with pytest.raises(NoDatabase, match=f": {reason}$"):
            Store(location, create=False)
        with Store(location) as made:
            made.offer(record())
        with Store(location, create=False) as found:
            assert found.records() == [record()]
    assert [one.name for one in tmp_path.iterdir()] == ["new"]


def test_trials_come_back_as_they_went_in_and_in_order(store: Store) -> None:
    failures = [failure(3 + i, status) for i, status in enumerate(set(Status) - {Status.CORRECT})]
    added = [trial(2), trial(0, time_us=0.1 + 0.2), *failures, trial(1, time_us=5e-324)]
    for one in added:
        store.add_trial(one)
    store.add_trial(trial(0, problem=layer(1)))
    store.add_trial(trial(0, device=CPU))
    assert store.trials(layer(), GPU) == added
    assert [one.config.knobs for one in store.trials(layer(), GPU)] == [one.config.knobs for one in added]
    assert store.trial_names(layer(), GPU) == {one.config.name for one in added}
    assert store.trials(layer(1), GPU) == [trial(0, problem=layer(1))]
    assert store.trials(layer(), CPU) == [trial(0, device=CPU)]


def test_a_trial_of_the_same_config_replaces_the_earlier_one_in_its_place(store: Store) -> None:
    for one in (trial(0), failure(1), trial(2)):
        store.add_trial(one)
    store.add_trial(trial(1, time_us=3.5))
    store.add_trial(failure(0, Status.TIMEOUT))
    assert store.trials(layer(), GPU) == [failure(0, Status.TIMEOUT), trial(1, time_us=3.5), trial(2)]


def test_a_log_that_is_not_text_does_not_stop_a_run(store: Store) -> None:
    store.add_trial(replace(failure(), detail="bad \udcff\0 byte"))
    assert store.trials(layer(), GPU)[0].detail == "bad \\udcff byte"


def test_a_config_of_a_family_that_no_longer_exists_is_read(store: Store) -> None:
    gone = Config.of("gone", {"b": 3, "a": -1})
    store.add_trial(replace(trial(), config=gone))
    store.offer(replace(record(), config=gone))
    assert store.trials(layer(), GPU)[0].config == gone
    assert store.best(layer(), GPU) == replace(record(), config=gone)


def test_offer_keeps_the_faster(store: Store) -> None:
    assert store.offer(record(10.0, 0))
    assert not store.offer(record(10.0, 0))
    assert not store.offer(record(10.0, 1))
    assert not store.offer(record(10.5, 1))
    assert store.best(layer(), GPU) == record(10.0, 0)
    assert store.offer(record(9.5, 1))
    assert store.best(layer(), GPU) == record(9.5, 1)
    # other layers and devices have their own
    assert store.offer(record(20.0, 2, problem=layer(1)))
    assert store.offer(record(30.0, 3, device=CPU))
    assert store.best(layer(), GPU) == record(9.5, 1)


def test_offer_puts_verified_and_newer_harness_before_the_time(store: Store) -> None:
    unverified = replace(record(1.0), verified=False)
    newer = replace(record(20.0), provenance=replace(record().provenance, harness=2))
    assert store.offer(unverified)
    assert store.offer(record(10.0))
    assert not store.offer(unverified)
    assert store.offer(newer)
    assert not store.offer(record(5.0))
    assert store.best(layer(), GPU) == newer


def test_replace_takes_the_slower_too(store: Store) -> None:
    store.offer(record(10.0, 0))
    store.replace(record(12.0, 1))
    assert store.best(layer(), GPU) == record(12.0, 1)
    store.replace(record(7.0, 2, problem=layer(1)))
    assert store.best(layer(1), GPU) == record(7.0, 2, problem=layer(1))


def test_records_are_sorted_by_device_and_layer(store: Store) -> None:
    problems = [layer(i) for i in (11, 2, 0, 1)]
    for problem in problems:
        store.offer(record(problem=problem, device=GPU))
    store.offer(record(device=CPU))
    gpu = [record(problem=problem) for problem in sorted(problems, key=str)]
    assert store.records() == [record(device=CPU), *gpu]
    assert store.records(GPU) == gpu
    assert store.records("cpu") == [record(device=CPU)]


def test_a_device_is_found_by_key_name_kind_and_auto(store: Store) -> None:
    store.offer(record(device=CPU))
    assert store.best(layer(), "auto") == record(device=CPU)
    store.offer(record(device=GPU))
    for text in ("NVIDIA H200 x132", "NVIDIA H200", "nvidia h200", "cuda", "cuda:0", "cuda:3", "auto"):
        assert store.best(layer(), text) == record(device=GPU), text
    assert store.best(layer(), "cpu") == record(device=CPU)
    assert store.best(layer(), Device(id="cuda:1", spec=GPU)) == record(device=GPU)
    with pytest.raises(
        ValueError, match=r"^no device 'H100' in the database: it has 'Example CPU @ 2.50GHz x4', 'NVIDIA"
    ):
        store.best(layer(), "H100")
    with pytest.raises(ValueError, match=r"^cuda:0 cannot be used: no driver$"):
        store.best(layer(), Device(id="cuda:0", reason="no driver"))
    smaller = replace(GPU, sm_count=66)
    store.offer(record(device=smaller))
    for text in ("cuda", "auto", "NVIDIA H200"):
        with pytest.raises(ValueError, match=r"'NVIDIA H200 x132' or 'NVIDIA H200 x66': name one$"):
            store.trials(layer(), text)
    assert store.best(layer(), "NVIDIA H200 x66") == record(device=smaller)


def test_a_device_text_in_an_empty_store_is_refused(store: Store) -> None:
    with pytest.raises(ValueError, match=r"^no device 'auto' in the database: it has none$"):
        store.trial_names(layer(), "auto")


def test_what_a_device_model_can_do_is_what_was_last_stated(store: Store) -> None:
    better = replace(GPU, bytes_per_s=4.5e12)
    store.offer(record(10.0))
    store.add_trial(trial(device=better))
    assert store.best(layer(), GPU) == record(10.0, device=better)
    assert len(store.records()) == 1


@pytest.mark.parametrize(
    "bad",
    [
        {"time_us": float("nan")},
        {"time_us": float("inf")},
        {"time_us": 0.0},
        {"time_us": -1.0},
        {"spread_us": float("inf")},
        {"spread_us": -1.0},
        {"samples": 0},
        {"launches": 0},
    ],
)
def test_the_tables_refuse_what_is_not_a_time(store: Store, bad: dict[str, float]) -> None:
    unlikely = measurement(1.0)
    for name, value in bad.items():
        # past the constructor, which refuses some of them
        object.__setattr__(unlikely, name, value)
    with pytest.raises(StoreError, match="constraint") as caught:
        store.replace(replace(record(), measurement=unlikely))
    assert "\n" not in str(caught.value)
    assert store.records() == []


def test_an_integer_that_no_table_takes_is_an_error_of_the_store(store: Store) -> None:
    with pytest.raises(StoreError, match=r"(too large|out of range)"):
        store.add_trial(replace(trial(), registers=2**70))
    assert store.trials(layer(), GPU) == []


def test_what_a_value_may_be_every_table_takes(store: Store) -> None:
    largest = replace(measurement(9e29), spread_us=9e29, samples=2**31 - 1, launches=2**31 - 1)
    made = {"harness": 2**31 - 1, "clock_mhz": 2**31 - 1, "temperature_c": 1 - 2**31}
    kept = replace(record(), measurement=largest, provenance=replace(record().provenance, **made))
    store.replace(kept)
    assert store.best(layer(), GPU) == kept
    for wrong in (2**31, -(2**31)):
        with pytest.raises(ValueError, match="clock_mhz has more than 32 bits"):
            replace(record().provenance, clock_mhz=wrong)
    with pytest.raises(ValueError, match="samples of"):
        replace(largest, samples=2**31)


def test_threads_share_a_store(store: Store) -> None:
    errors: list[BaseException] = []

    def work(thread: int) -> None:
        try:
            for i in range(10):
                store.add_trial(trial(i, problem=layer(thread), time_us=10.0 + i))
                store.offer(record(50.0 - 10 * (thread % 4) + i, thread))
                assert store.trial_names(layer(thread), GPU) == {config(k).name for k in range(i + 1)}
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    best = store.best(layer(), GPU)
    assert best is not None
    assert best.time_us == 20.0


def test_a_limit_counts_other_configs(store: Store) -> None:
    assert store.add_trial(trial(0), limit=2)
    assert store.add_trial(failure(1), limit=2)
    assert not store.add_trial(trial(2), limit=2)
    # one that is there already is replaced
    assert store.add_trial(trial(1, time_us=3.0), limit=2)
    assert store.add_trial(trial(2, problem=layer(1)), limit=1)
    assert store.add_trial(trial(2, device=CPU), limit=1)
    assert store.trials(layer(), GPU) == [trial(0), trial(1, time_us=3.0)]
    assert store.add_trial(trial(2))
    assert not store.add_trial(trial(3), limit=0)


def test_a_record_is_offered_with_its_trial_or_not_at_all(store: Store) -> None:
    assert store.add_trial(trial(0), limit=1, record=record(10.0, 0))
    assert store.best(layer(), GPU) == record(10.0, 0)
    assert store.add_trial(trial(0), limit=1, record=record(11.0, 0))
    assert store.best(layer(), GPU) == record(10.0, 0)
    assert not store.add_trial(trial(1), limit=1, record=record(5.0, 1))
    assert store.best(layer(), GPU) == record(10.0, 0)
    assert store.add_trial(trial(1), limit=2, record=record(5.0, 1))
    assert store.best(layer(), GPU) == record(5.0, 1)


def test_a_limit_that_threads_share_is_kept(store: Store) -> None:
    added: list[bool] = []

    def work(thread: int) -> None:
        for i in range(5):
            added.append(store.add_trial(trial(5 * thread + i), limit=7))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(added), sum(added), len(store.trials(layer(), GPU))) == (40, 7, 7)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = Store(tmp_path / "tuning.db")
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.best(layer(), GPU)


# Keys

_SIZES = st.integers(1, 40)
_ALIASES = {DType.F16: ("f16", "float16", "half"), DType.F32: ("f32", "float32"), DType.S8: ("s8", "int8")}


@st.composite
def _spelt_twice(draw: st.DrawFn) -> tuple[ConvProblem, ConvProblem]:
    """The same layer written in two ways."""
    dtype = draw(st.sampled_from(sorted(_ALIASES)))
    sizes = {name: draw(_SIZES) for name in ("N", "C", "K")}
    sizes |= {name: draw(st.integers(7, 40)) for name in ("H", "W")}
    sizes |= {name: draw(st.integers(1, 3)) for name in ("R", "S")}
    stride, padding, dilation = draw(st.integers(1, 3)), draw(st.integers(0, 3)), draw(st.integers(1, 3))
    plain = ConvProblem(
        **sizes, stride=stride, padding=padding, dilation=dilation, dtype=str(dtype), layout="nhwc", epilogue=Epilogue()
    )
    other = ConvProblem(
        **{name: draw(st.sampled_from([int, np.int64, np.int32]))(size) for name, size in sizes.items()},
        stride=draw(st.sampled_from([[stride, stride], np.array([stride, stride]), np.int8(stride)])),
        padding=draw(st.sampled_from([(padding, padding), [padding] * 4])),
        # along a filter axis of extent 1 the dilation means nothing
        dilation=tuple(dilation if sizes[axis] > 1 else draw(st.integers(1, 9)) for axis in ("R", "S")),
        groups=np.int64(1),
        dtype=draw(st.sampled_from([*_ALIASES[dtype], np.dtype(_ALIASES[dtype][1])])),
        layout=draw(st.sampled_from(["nhwc", "NHWC"])),
        epilogue=draw(st.sampled_from([None, Epilogue(out_dtype=DType.S32 if dtype is DType.S8 else dtype)])),
    )
    return plain, other


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pair=_spelt_twice())
def test_one_layer_written_in_two_ways_is_one_key(shared_store: Store, pair: tuple[ConvProblem, ConvProblem]) -> None:
    plain, other = pair
    shared_store.add_trial(trial(0, problem=plain, time_us=1.0))
    shared_store.add_trial(trial(0, problem=other, time_us=2.0))
    shared_store.replace(record(3.0, problem=plain))
    shared_store.replace(record(4.0, problem=other))
    assert shared_store.trials(plain, GPU) == [trial(0, problem=plain, time_us=2.0)]
    assert shared_store.best(plain, GPU) == record(4.0, problem=other)
    assert [one for one in shared_store.records() if one.problem == plain] == [record(4.0, problem=plain)]


@pytest.fixture(scope="module")
def shared_store() -> Iterator[Store]:
    with Store(":memory:") as opened:
        yield opened


_CHANGES = {
    "N": st.integers(1, 40),
    **{name: st.sampled_from(range(4, 80, 4)) for name in ("C", "K")},
    "groups": st.sampled_from([1, 2, 4]),
    **{name: st.integers(7, 40) for name in ("H", "W")},
    **{name: st.integers(1, 3) for name in ("R", "S")},
    **{name: st.tuples(st.integers(1, 3), st.integers(1, 3)) for name in ("stride", "dilation")},
    "padding": st.tuples(*[st.integers(0, 3)] * 4),
    "dtype": st.sampled_from([DType.F16, DType.BF16, DType.F32, DType.S8]),
    "layout": st.sampled_from(["nhwc", "nchw"]),
    "bias": st.booleans(),
    "residual": st.booleans(),
    "activation": st.sampled_from(["identity", "relu"]),
    "scale": st.sampled_from(["none", "tensor", "channel"]),
    "out_dtype": st.sampled_from([DType.F16, DType.F32]),
}
_EPILOGUE = ("bias", "residual", "activation", "scale", "out_dtype")


def _problem_of(fields: dict[str, object]) -> ConvProblem:
    plain = {name: value for name, value in fields.items() if name not in _EPILOGUE}
    return ConvProblem(**plain, epilogue=Epilogue(**{name: fields[name] for name in _EPILOGUE}))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_field_differs_is_another_key(shared_store: Store, data: st.DataObject) -> None:
    fields = {name: data.draw(values, label=name) for name, values in _CHANGES.items()}
    changed = data.draw(st.sampled_from(sorted(_CHANGES)), label="changed")
    other = fields | {changed: data.draw(_CHANGES[changed], label="to")}
    base, different = _problem_of(fields), _problem_of(other)
    means_nothing = changed == "dilation" and all(
        fields["dilation"][axis] == other["dilation"][axis] or fields["RS"[axis]] == 1 for axis in (0, 1)
    )
    same = fields[changed] == other[changed] or means_nothing
    assert (str(base) == str(different)) == (base == different) == same
    assert ConvProblem.parse(str(base)) == base
    shared_store.replace(record(1.0, problem=base))
    shared_store.replace(record(2.0, problem=different))
    assert shared_store.best(different, GPU) == record(2.0, problem=different)
    assert shared_store.best(base, GPU) == record(2.0 if same else 1.0, problem=base)


_BASE = {"N": 2, "C": 8, "H": 9, "W": 9, "K": 8, "R": 3, "S": 3, "padding": 1, "dtype": "s8"}


@pytest.mark.parametrize(
    "change",
    [
        *({name: value} for name, value in {"N": 3, "C": 4, "H": 10, "W": 10, "K": 4, "R": 2, "S": 2}.items()),
        *({"stride": stride} for stride in ((2, 1), (1, 2))),
        *({"padding": tuple(1 + (i == side) for i in range(4))} for side in range(4)),
        *({"dilation": dilation} for dilation in ((2, 1), (1, 2))),
        *({"groups": 2}, {"dtype": "f16"}, {"dtype": "bf16"}, {"layout": "nchw"}),
        *({"epilogue": Epilogue(**e)} for e in ({"bias": True}, {"residual": True}, {"activation": "relu"})),
        *({"epilogue": Epilogue(scale=scale, out_dtype=DType.S32)} for scale in ("tensor", "channel")),
        *({"epilogue": Epilogue(out_dtype=dtype)} for dtype in (DType.F32, DType.S8)),
    ],
    ids=str,
)
def test_every_field_of_a_layer_is_part_of_the_key(store: Store, change: dict[str, object]) -> None:
    base, changed = ConvProblem(**_BASE), ConvProblem(**_BASE | change)
    store.offer(record(1.0, problem=base))
    assert store.best(changed, GPU) is None
    store.offer(record(2.0, problem=changed))
    assert store.best(base, GPU) == record(1.0, problem=base)
    assert store.best(changed, GPU) == record(2.0, problem=changed)


# Merging


def test_merge_counts_what_it_did(store: Store) -> None:
    assert store.merge([record(10.0, 0), record(5.0, problem=layer(1))]) == MergeReport(
        added=2, replaced=0, unchanged=0, conflicts=0
    )
    again = [record(10.0, 0), record(4.0, problem=layer(1)), record(6.0, problem=layer(1)), record(1.0, device=CPU)]
    assert store.merge(again) == MergeReport(added=1, replaced=1, unchanged=1, conflicts=2)
    assert store.records() == [record(1.0, device=CPU), record(10.0, 0), record(4.0, problem=layer(1))]
    assert store.merge([]) == MergeReport(added=0, replaced=0, unchanged=0, conflicts=0)


def test_merge_breaks_ties_by_what_is_written(store: Store) -> None:
    later = replace(record(10.0, 0), provenance=replace(record().provenance, created_at="2026-01-01T00:00:00+00:00"))
    for one in (record(10.0, 2), later, record(10.0, 1), record(10.0, 0)):
        store.merge([one])
    assert store.records() == [record(10.0, 0)]


def test_a_device_described_in_several_ways_is_described_in_the_same_one_everywhere(store: Store) -> None:
    described = [replace(GPU, l2_bytes=size) for size in (20, 9, 30)]
    store.merge([record(10.0, device=spec) for spec in described[:2]])
    assert store.records() == [record(10.0, device=described[1])]
    # no conflict: a record is of the model, whatever is known about it
    assert store.merge([record(10.0, device=described[2])]) == MergeReport(
        added=0, replaced=0, unchanged=1, conflicts=0
    )
    assert store.records() == [record(10.0, device=described[1])]
    store.merge([record(11.0, problem=layer(1), device=replace(GPU, l2_bytes=91))])
    assert [one.device.l2_bytes for one in store.records()] == [91, 91]


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_merges_changes_nothing(seed: int) -> None:
    base = many_records(60, seed)
    # the same layers in every table, other winners, and one device described differently
    tables = [
        [
            replace(one, config=config(i), device=replace(one.device, bytes_per_s=one.device.bytes_per_s + i))
            for one in base
        ]
        for i in range(3)
    ]
    tables = [
        [replace(one, measurement=measurement(1.0 + (7 * i + 3 * k) % 5)) for k, one in enumerate(table)]
        for i, table in enumerate(tables)
    ]
    outcomes = []
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        with Store(":memory:") as store:
            conflicts = [store.merge(tables[i]).conflicts for i in order]
            outcomes.append((store.records(), conflicts[0]))
    with Store(":memory:") as store:
        store.merge([one for table in tables for one in table])
        at_once = store.records()
    assert [records for records, _ in outcomes] == [at_once] * 3
    assert len(at_once) == len({(one.problem, one.device.key) for one in base})
