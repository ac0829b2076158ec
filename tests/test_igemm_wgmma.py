"""The family igemm_wgmma without a GPU: what its knobs demand, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from gpu_models import GPU_MODELS

from autotune.families import IgemmWgmma
from autotune.problem import ConvProblem
from autotune.trial import Config

FAMILY = IgemmWgmma()
H200 = GPU_MODELS["sm_90a"]
HEAD = ConvProblem(N=8, C=256, H=80, W=80, K=255, R=1, S=1)


def config(**knobs: int) -> Config:
    """A legal config of the layer above, with some knobs changed."""
    usual = {"rows": 1, "cta_n": 256, "chunk_bytes": 128, "consumers": 2, "pingpong": 1, "stages": 8}
    return Config.of(FAMILY.name, usual | {"split_k": 1, "cluster": 1, "even": 0, "resident": 1} | knobs)


def test_resident_filters_leave_the_ring_to_pixels() -> None:
    # eight stages of 64 pixels; 256 filters in four slices; 33 vectors a row of eight collected pixels of eight warps
    expected = 8 * 64 * 128 + 4 * 256 * 128 + 8 * 8 * 33 * 16 + 8 * (2 * 8 + 2)
    assert FAMILY.launch(config(), HEAD, H200).smem_bytes == expected
    streamed = FAMILY.launch(config(stages=4, resident=0), HEAD, H200).smem_bytes
    assert streamed == 4 * (64 + 256) * 128 + 8 * 8 * 33 * 16 + 8 * (2 * 4 + 2)


@pytest.mark.parametrize(
    ("knobs", "layer", "reason"),
    [
        ({}, HEAD, None),
        ({"stages": 10}, HEAD, "bytes of shared memory are more than"),
        ({"cta_n": 128}, HEAD, "filters stay where a block has several tiles of all filters"),
        ({"split_k": 2}, HEAD, "800 tiles need no split_k"),
        ({"cluster": 2, "stages": 4}, HEAD, "filters stay where"),
        # 100 tiles, one a block
        ({}, replace(HEAD, N=1), "filters stay where"),
        ({"stages": 2}, replace(HEAD, C=512), "bytes of shared memory are more than"),
        # 800 tiles in seven rounds of 132 blocks: 924 tiles of 55.4 pixels
        ({"even": 1}, HEAD, None),
        # 1056 tiles are eight whole rounds
        ({"even": 1}, replace(HEAD, N=11, H=64, W=96), "even tiles would have 64 of 64 pixels"),
    ],
)
def test_legality_states_its_reason(knobs: dict[str, int], layer: ConvProblem, reason: str | None) -> None:
    found = FAMILY.legal(config(**knobs), layer, H200)
    assert found is None if reason is None else reason in str(found), found


def test_even_tiles_by_hand() -> None:
    # 51,200 pixels over 924 tiles, in eights
    assert "tile_m = 56" in FAMILY.source(config(even=1), HEAD, H200).text
    assert "tile_m = 64" in FAMILY.source(config(), HEAD, H200).text
