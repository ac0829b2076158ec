"""Trials: names with every knob, statuses, and what is refused as a measurement."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError, replace

import pytest

from autotune.device import DeviceSpec
from autotune.problem import ConvProblem, DType
from autotune.trial import Config, Measurement, Provenance, Record, Status, Trial

PROBLEM = ConvProblem(N=1, C=4, H=8, W=8, K=8, R=3, S=3, dtype="f32")
SPEC = DeviceSpec(
    kind="cpu", name="Test CPU", arch="x", sm_count=2, l2_bytes=1 << 20, bytes_per_s=1e10, rates=((DType.F32, 1e11),)
)
CONFIG = Config.of("fam", {"cta_m": 128, "cta_n": 64, "cta_k": 32, "warp_m": 64, "warp_n": 32, "stages": 4})
PROVENANCE = Provenance(kernel_digest="d", compiler="c", driver="v", created_at="2026-01-01T00:00:00+00:00")
MEASUREMENT = Measurement(time_us=12.5, spread_us=0.5, samples=5, launches=10, condition="cold-loop")


def trial(status: Status, measurement: Measurement | None) -> Trial:
    return Trial(
        problem=PROBLEM,
        device=SPEC,
        config=CONFIG,
        status=status,
        provenance=PROVENANCE,
        measurement=measurement,
    )


def test_a_name_holds_family_and_every_knob() -> None:
    assert CONFIG.name == str(CONFIG) == "fam-cta128x64x32-warp64x32-stages4"


@pytest.mark.parametrize(
    ("knobs", "name"),
    [
        ({"rows": 4, "cols": 8}, "f-rows4-cols8"),
        ({"block_m": 4, "block_n": 8}, "f-block_m4-block_n8"),
        ({"cta_m": 4, "stages": 2, "cta_n": 8}, "f-cta4-stages2-cta8"),
        ({}, "f"),
    ],
)
def test_a_name_joins_only_neighbouring_extents_of_one_tile(knobs: dict[str, int], name: str) -> None:
    assert Config.of("f", knobs).name == name


def test_configs_are_equal_when_their_knobs_are() -> None:
    other = Config.of("fam", list(CONFIG.knobs))
    assert other == CONFIG
    assert hash(other) == hash(CONFIG)
    assert pickle.loads(pickle.dumps(CONFIG)) == CONFIG
    assert Config.of("fam2", CONFIG.knobs) != CONFIG


def test_a_knob_is_read_by_name() -> None:
    assert CONFIG["stages"] == 4
    with pytest.raises(KeyError, match="fam has no knob split_k"):
        CONFIG["split_k"]


def test_the_statuses_are_the_closed_set() -> None:
    assert [str(s) for s in Status] == ["correct", "compile", "constraints", "runtime", "correctness", "timeout"]


@pytest.mark.parametrize("status", [s for s in Status if s is not Status.CORRECT])
def test_a_failed_trial_has_no_measurement(status: Status) -> None:
    assert trial(status, None).measurement is None
    with pytest.raises(ValueError, match="measured exactly when it is correct"):
        trial(status, MEASUREMENT)


def test_a_correct_trial_has_a_measurement() -> None:
    assert trial(Status.CORRECT, MEASUREMENT).measurement == MEASUREMENT
    with pytest.raises(ValueError, match="measured exactly when it is correct"):
        trial(Status.CORRECT, None)


@pytest.mark.parametrize("time_us", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_time_is_never_a_result(time_us: float) -> None:
    with pytest.raises(ValueError, match="is not a time"):
        trial(Status.CORRECT, replace(MEASUREMENT, time_us=time_us))


def test_values_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        trial(Status.COMPILE, None).status = Status.CORRECT  # type: ignore[misc]


def test_a_record_gives_its_family_and_time() -> None:
    record = Record(problem=PROBLEM, device=SPEC, config=CONFIG, measurement=MEASUREMENT, provenance=PROVENANCE)
    assert (record.family, record.time_us, record.verified) == ("fam", 12.5, True)
