"""What all tests share: a private cache and database, a server, the gpu marker, the layer shapes that break kernels."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import postgres_server
import pytest
import random_cases
from hypothesis import settings

from autotune.problem import ConvProblem

_PRIVATE = pytest.StashKey[Path]()
_SKIPPED = pytest.StashKey[str]()
_NO_SERVER = pytest.StashKey[int]()

# shapes of every kind that a kernel has got wrong somewhere; small enough for the reference and for host emulation
_EDGES: dict[str, dict[str, object]] = {
    "plain-3x3": {"N": 2, "C": 16, "H": 12, "W": 20, "K": 32, "R": 3, "S": 3, "padding": 1},
    "empty-batch": {"N": 0, "C": 8, "H": 5, "W": 5, "K": 8, "R": 3, "S": 3, "padding": 1},
    "one-output": {"N": 1, "C": 7, "H": 3, "W": 3, "K": 9, "R": 3, "S": 3},
    "one-by-one": {"N": 1, "C": 1, "H": 1, "W": 1, "K": 1, "R": 1, "S": 1},
    "even-2x2": {"N": 1, "C": 8, "H": 9, "W": 11, "K": 16, "R": 2, "S": 2},
    "even-4x4-stride2": {"N": 1, "C": 5, "H": 10, "W": 10, "K": 8, "R": 4, "S": 4, "stride": 2, "padding": 1},
    "row-1x7": {"N": 1, "C": 12, "H": 6, "W": 17, "K": 16, "R": 1, "S": 7, "padding": (0, 3)},
    "column-7x1": {"N": 1, "C": 12, "H": 17, "W": 6, "K": 16, "R": 7, "S": 1, "padding": (3, 0)},
    "asymmetric-padding": {"N": 2, "C": 8, "H": 8, "W": 9, "K": 8, "R": 3, "S": 3, "padding": (0, 2, 3, 1)},
    "padding-beyond-filter": {"N": 1, "C": 4, "H": 4, "W": 5, "K": 8, "R": 3, "S": 3, "padding": 4},
    "unequal-strides": {"N": 1, "C": 8, "H": 13, "W": 19, "K": 8, "R": 3, "S": 3, "stride": (2, 3), "padding": 1},
    "unequal-dilations": {"N": 1, "C": 8, "H": 15, "W": 14, "K": 8, "R": 3, "S": 3, "dilation": (3, 2), "padding": 2},
    "stride-and-dilation": {
        **{"N": 1, "C": 6, "H": 16, "W": 15, "K": 12, "R": 3, "S": 2},
        **{"stride": (3, 2), "dilation": (2, 3), "padding": (1, 2, 0, 3)},
    },
    "stride-beyond-filter": {"N": 1, "C": 8, "H": 14, "W": 15, "K": 8, "R": 2, "S": 2, "stride": 5},
    "image-below-filter": {"N": 2, "C": 8, "H": 2, "W": 3, "K": 8, "R": 5, "S": 5, "padding": 2},
    "image-below-dilated-filter": {
        **{"N": 1, "C": 8, "H": 4, "W": 5, "K": 8, "R": 3, "S": 3},
        **{"dilation": 6, "padding": 6},
    },
    "pointwise": {"N": 2, "C": 24, "H": 7, "W": 7, "K": 40, "R": 1, "S": 1},
    "pointwise-stride2": {"N": 2, "C": 16, "H": 9, "W": 8, "K": 24, "R": 1, "S": 1, "stride": 2},
    "pointwise-stride2-large": {"N": 1, "C": 16, "H": 40, "W": 37, "K": 16, "R": 1, "S": 1, "stride": 2},
    "pointwise-padding": {"N": 1, "C": 8, "H": 5, "W": 6, "K": 8, "R": 1, "S": 1, "padding": (1, 2)},
    "pointwise-stride-padding": {"N": 1, "C": 8, "H": 5, "W": 6, "K": 8, "R": 1, "S": 1, "stride": 3, "padding": 1},
    "fully-connected": {"N": 5, "C": 64, "H": 1, "W": 1, "K": 40, "R": 1, "S": 1},
    "stem-7x7-c3": {"N": 1, "C": 3, "H": 23, "W": 21, "K": 24, "R": 7, "S": 7, "stride": 2, "padding": 3},
    "c1-k1": {"N": 2, "C": 1, "H": 9, "W": 9, "K": 1, "R": 3, "S": 3, "padding": 1},
    "c1-k21": {"N": 1, "C": 1, "H": 8, "W": 9, "K": 21, "R": 3, "S": 3, "padding": 1},
    "c5-k3": {"N": 1, "C": 5, "H": 7, "W": 10, "K": 3, "R": 3, "S": 3, "padding": 1},
    "c13-k5": {"N": 1, "C": 13, "H": 9, "W": 7, "K": 5, "R": 3, "S": 3, "padding": 1},
    "c21-k13": {"N": 1, "C": 21, "H": 6, "W": 9, "K": 13, "R": 3, "S": 3, "padding": 1},
    "c91-k21": {"N": 1, "C": 91, "H": 6, "W": 5, "K": 21, "R": 3, "S": 3, "padding": 1},
    "c3-k91": {"N": 1, "C": 3, "H": 9, "W": 11, "K": 91, "R": 3, "S": 3, "padding": 1},
    "deep": {"N": 1, "C": 200, "H": 4, "W": 5, "K": 72, "R": 3, "S": 3, "padding": 1},
    "depthwise": {"N": 2, "C": 24, "H": 9, "W": 11, "K": 24, "R": 3, "S": 3, "padding": 1, "groups": 24},
    "depthwise-odd": {"N": 1, "C": 13, "H": 9, "W": 8, "K": 13, "R": 5, "S": 3, "padding": (2, 1), "groups": 13},
    "depthwise-stride2": {
        **{"N": 1, "C": 32, "H": 11, "W": 12, "K": 32, "R": 3, "S": 3},
        **{"stride": 2, "padding": (0, 1, 0, 1), "groups": 32},
    },
    "depthwise-multiplier": {"N": 1, "C": 7, "H": 8, "W": 9, "K": 21, "R": 3, "S": 3, "padding": 1, "groups": 7},
    "grouped": {"N": 2, "C": 32, "H": 8, "W": 9, "K": 48, "R": 3, "S": 3, "padding": 1, "groups": 4},
    "grouped-odd": {"N": 1, "C": 15, "H": 8, "W": 7, "K": 21, "R": 3, "S": 3, "stride": 2, "padding": 1, "groups": 3},
    "grouped-pointwise": {"N": 1, "C": 24, "H": 6, "W": 7, "K": 40, "R": 1, "S": 1, "groups": 2},
}


def EDGE_PROBLEMS(dtype: str, layout: str = "nhwc") -> dict[str, ConvProblem]:
    """The edge shapes as problems in a dtype and layout, by name."""
    return {name: ConvProblem(**shape, dtype=dtype, layout=layout) for name, shape in _EDGES.items()}  # type: ignore[arg-type]


def pytest_configure(config: pytest.Config) -> None:
    # no deadline: a time on the wall says nothing on a busy machine; no database: tests leave nothing behind
    settings.register_profile("tests", deadline=None, database=None)
    settings.load_profile("tests")
    private = config.stash[_PRIVATE] = Path(tempfile.mkdtemp(prefix="conv-autotune-tests-"))
    # inherited by every process that a test starts, so that no test touches the user's files
    os.environ["AUTOTUNE_CACHE"] = str(private / "cache")
    os.environ["AUTOTUNE_DB"] = str(private / "tuning.db")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_PRIVATE], ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_gpu() if marked else None
    if reason:
        config.stash[_SKIPPED] = f"{len(marked)} GPU tests were skipped: {reason}"
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=f"needs an NVIDIA GPU: {reason}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    random_cases.report(terminalreporter)
    notice = config.stash.get(_SKIPPED, None)
    if notice:
        terminalreporter.write_line(notice, yellow=True, bold=True)
    skipped = config.stash.get(_NO_SERVER, 0)
    if skipped:
        reason = postgres_server.why_missing()
        terminalreporter.write_line(f"{skipped} PostgreSQL tests were skipped: {reason}", yellow=True, bold=True)


@pytest.fixture(autouse=True)
def no_shipped_tables(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A database holds what the test put into it, whatever tables the package ships by now."""
    monkeypatch.setattr("autotune.store.shipped.tables", lambda: tmp_path_factory.getbasetemp() / "no-tables")


@pytest.fixture
def postgresql(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a new and empty database on a real server; where none can be started the test is skipped.

    With CI set in the environment it fails instead.
    """
    reason = postgres_server.why_missing()
    if reason is not None:
        if os.environ.get("CI"):
            pytest.fail(f"no PostgreSQL server, and CI is set: {reason}")
        stash = request.config.stash
        stash[_NO_SERVER] = stash.get(_NO_SERVER, 0) + 1
        pytest.skip(f"no PostgreSQL server: {reason}")
    with postgres_server.new_database() as url:
        yield url


def _no_gpu() -> str | None:
    from autotune.backends import devices

    listed = [device for device in devices() if device.id.startswith("cuda")]
    if any(device.spec for device in listed):
        return None
    return "; ".join(device.reason or device.id for device in listed) or "no CUDA device is listed"
