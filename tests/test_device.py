"""DeviceSpec: its key, its rates, and the roofline time of a layer on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autotune import ConvProblem, DeviceSpec, DType
from autotune.device import roofline_us

SPEC = DeviceSpec(
    kind="cuda",
    name="NVIDIA Example",
    arch="sm_90a",
    compute_capability=(9, 0),
    sm_count=132,
    l2_bytes=50 << 20,
    bytes_per_s=4e12,
    rates=((DType.F16, 800e12), (DType.F32, 50e12)),
)


def test_key_is_the_model_and_its_multiprocessors():
    assert SPEC.key == "NVIDIA Example x132"
    assert replace(SPEC, sm_count=66).key == "NVIDIA Example x66"
    # rates are measured anew on each machine
    assert replace(SPEC, bytes_per_s=3e12).key == SPEC.key


def test_compute_capability_as_one_number():
    assert SPEC.sm == 90
    assert replace(SPEC, compute_capability=(12, 1)).sm == 121
    assert replace(SPEC, kind="cpu", compute_capability=(0, 0)).sm == 0


def test_rate_is_that_of_f32_where_the_table_has_none():
    assert SPEC.rate(DType.F16) == 800e12
    assert SPEC.rate(DType.TF32) == 50e12


def test_roofline_of_a_layer_bound_by_memory_by_hand():
    # 45,256,704 bytes at 4 TB/s against 8,682,209,280 operations at 800 TFLOP/s
    problem = ConvProblem(N=16, C=64, H=92, W=160, K=32, R=3, S=3, padding=1, dtype="f16")
    assert roofline_us(problem, SPEC) == pytest.approx(11.314176)
    assert roofline_us(problem, replace(SPEC, bytes_per_s=4e15)) == pytest.approx(10.8527616)


def test_roofline_of_a_layer_bound_by_arithmetic_by_hand():
    # 2 * 49 * 512 * 512 * 9 operations at 50 TFLOP/s
    problem = ConvProblem(N=1, C=512, H=7, W=7, K=512, R=3, S=3, padding=1, dtype="f32")
    assert roofline_us(problem, replace(SPEC, bytes_per_s=1e15)) == pytest.approx(4.62422016)


def test_an_empty_batch_still_reads_its_filter():
    problem = ConvProblem(N=0, C=8, H=5, W=5, K=8, R=1, S=1, dtype="f16")
    assert roofline_us(problem, SPEC) == pytest.approx(128 / 4e12 * 1e6)
