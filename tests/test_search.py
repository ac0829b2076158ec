"""The search on replayed tables: budget, resumption, determinism, failures, and what becomes the record."""

from __future__ import annotations

import math
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gpu_models import GPU_MODELS
from replay import PROBLEM, SPEC, Grid, Replay, trial_of

from autotune.backends import compiler_for, find
from autotune.families import Knob, why_unsupported
from autotune.families.direct_cpu import DirectCpu
from autotune.measure.workbench import Workbench
from autotune.measure.worker import Worker
from autotune.problem import ConvProblem, Epilogue
from autotune.search import NoValidConfig, Progress, Space, Unsupported, loop, tune
from autotune.search.finalists import finalists, noise_us, winner
from autotune.search.sampler import Sampler
from autotune.store import Store
from autotune.trial import Config, Measurement, Record, Status

GRID = Grid()
LEGAL = GRID.configs(PROBLEM, SPEC)


def config(tile: int, unroll: int) -> Config:
    return Config.of("grid", {"tile": tile, "unroll": unroll})


def smooth(c: Config) -> float:
    """Best at tile 4, unroll 3, where the prediction does not look first; no two configs alike."""
    return 100 + 10 * abs(math.log2(c["tile"]) - 2) + 7 * abs(c["unroll"] - 3) + 0.01 * c["unroll"]


BEST = config(4, 3)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "tuning.db") as opened:
        yield opened


@pytest.fixture
def replay(monkeypatch: pytest.MonkeyPatch) -> Replay:
    return Replay(monkeypatch, smooth)


def names(store: Store) -> list[str]:
    return [trial.config.name for trial in store.trials(PROBLEM, SPEC)]


# the budget


def test_the_budget_is_exact_and_counts_earlier_runs(store: Store, replay: Replay) -> None:
    assert tune(PROBLEM, store=store, trials=20, families=[GRID]).measured == 20
    assert len(set(names(store))) == 20
    result = tune(PROBLEM, store=store, trials=30, families=[GRID])
    assert (result.measured, len(set(names(store)))) == (10, 30)
    assert len(replay.measured) == len(set(replay.measured)) == 30


def test_the_same_command_again_measures_nothing_and_starts_no_child(store: Store, replay: Replay) -> None:
    first = tune(PROBLEM, store=store, trials=20, families=[GRID])
    again = tune(PROBLEM, store=store, trials=20, families=[GRID])
    fewer = tune(PROBLEM, store=store, trials=5, families=[GRID])
    assert (again.measured, fewer.measured, replay.started) == (0, 0, 1)
    assert again.best == fewer.best == first.best
    assert again.trials == first.trials


def test_all_configs_are_measured_when_there_are_fewer_than_the_budget(store: Store, replay: Replay) -> None:
    result = tune(PROBLEM, store=store, trials=1000, families=[GRID])
    assert sorted(names(store)) == sorted(c.name for c in LEGAL)
    assert (result.measured, len(LEGAL)) == (32, 32)
    assert result.best.config == BEST
    assert tune(PROBLEM, store=store, trials=2000, families=[GRID]).measured == 0
    assert replay.started == 1


def test_only_legal_configs_are_tried(store: Store, replay: Replay) -> None:
    tune(PROBLEM, store=store, trials=1000, families=[GRID])
    assert all(GRID.legal(c, PROBLEM, SPEC) is None for c in replay.measured)


def test_one_trial_measures_the_default(store: Store, replay: Replay) -> None:
    result = tune(PROBLEM, store=store, trials=1, families=[GRID])
    assert replay.measured == [GRID.default(PROBLEM, SPEC)] == [result.best.config]


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        *(({"trials": trials}, f"trials must be an integer, not {trials!r}") for trials in (1.5, 2.0, "3", True, None)),
        *(({"seed": seed}, f"seed must be an integer, not {seed!r}") for seed in (1.5, "a", True, None)),
        *(({"seed": seed}, f"seed must be at least 0 and below 4294967296, not {seed}") for seed in (-1, 2**32)),
        *(({"seconds": seconds}, f"seconds must be a positive number, not {seconds!r}") for seconds in ("5", True)),
    ],
)
def test_what_is_no_number_is_refused_before_anything_is_measured(
    store: Store, replay: Replay, budget: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        tune(PROBLEM, store=store, families=[GRID], **budget)
    assert replay.measured == []


def test_numpy_numbers_are_numbers(store: Store, replay: Replay) -> None:
    result = tune(PROBLEM, store=store, trials=np.int64(2), seed=np.uint32(7), seconds=np.float32(60), families=[GRID])
    assert len(result.trials) == result.measured == 2


@pytest.mark.parametrize("trials", [0, -1])
def test_an_empty_budget_is_refused(store: Store, replay: Replay, trials: int) -> None:
    with pytest.raises(ValueError, match=rf"^trials must be at least 1, not {trials}$"):
        tune(PROBLEM, store=store, trials=trials, families=[GRID])


@pytest.mark.parametrize("seconds", [0.0, -2.0, math.nan, math.inf])
def test_seconds_that_are_no_duration_are_refused(store: Store, replay: Replay, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"^seconds must be a positive number, not "):
        tune(PROBLEM, store=store, seconds=seconds, families=[GRID])


def test_no_trial_starts_after_the_seconds_are_over(
    store: Store, replay: Replay, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: clock[0]))

    def tick(count: int) -> None:
        clock[0] += 1.0

    replay.before_next = tick
    result = tune(PROBLEM, store=store, trials=30, seconds=6.5, families=[GRID])
    assert result.measured == 7
    assert tune(PROBLEM, store=store, trials=30, seconds=0.5, families=[GRID]).measured == 1


def test_an_empty_batch_has_nothing_to_measure(store: Store, replay: Replay) -> None:
    empty = ConvProblem.parse(str(PROBLEM).replace("n2c", "n0c"))
    with pytest.raises(ValueError, match=r"^nothing to measure: the batch is empty \(N = 0\)$"):
        tune(empty, store=store, families=[GRID])
    assert store.trials(empty, SPEC) == []


def test_a_layer_that_no_family_runs_is_refused_with_the_reason(store: Store, replay: Replay) -> None:
    half = ConvProblem(N=2, C=8, H=12, W=12, K=16, R=3, S=3, dtype="f16")
    with pytest.raises(Unsupported, match=r"^no kernel for .* on Replay: .*no f16$"):
        tune(half, store=store, families=[GRID])
    assert replay.started == 0


def test_a_reason_that_several_families_give_is_given_once() -> None:
    nchw = ConvProblem(N=1, C=64, H=9, W=9, K=8, R=3, S=3, layout="nchw")
    said = why_unsupported(nchw, GPU_MODELS["sm_75"])
    assert said.endswith(
        "on a GPU of sm_75: halo_wgmma, igemm_wgmma: needs sm_90; "
        "halo_mma, igemm_mma: works in the layout nhwc (--layout nhwc), not nchw"
    )
    empty = ConvProblem(N=0, C=64, H=9, W=9, K=8, R=3, S=3)
    assert why_unsupported(empty, GPU_MODELS["sm_90a"]).endswith("on a GPU of sm_90a: the batch is empty")


# interruption, resumption, other processes


def test_an_interrupted_search_keeps_its_trials_and_goes_on(store: Store, replay: Replay) -> None:
    def interrupt(count: int) -> None:
        if count == 7:
            raise KeyboardInterrupt

    replay.before_next = interrupt
    with pytest.raises(KeyboardInterrupt):
        tune(PROBLEM, store=store, trials=20, families=[GRID])
    assert replay.left == 1
    assert len(names(store)) == 7
    kept = store.best(PROBLEM, SPEC)
    assert kept is not None
    assert kept.time_us == min(smooth(c) for c in replay.measured)
    replay.before_next = lambda _: None
    assert tune(PROBLEM, store=store, trials=20, families=[GRID]).measured == 13
    assert len(set(names(store))) == 20


def test_a_record_lost_between_two_writes_is_made_from_the_trials(store: Store, replay: Replay) -> None:
    for c in LEGAL:
        store.add_trial(trial_of(c, smooth(c)))
    result = tune(PROBLEM, store=store, trials=20, families=[GRID])
    assert (result.measured, result.best.config) == (0, BEST)
    assert store.best(PROBLEM, SPEC) == result.best


def test_a_new_knob_value_keeps_the_old_measurements(store: Store, replay: Replay) -> None:
    class Small(Grid):
        knobs = (Grid.knobs[0], Knob(name="unroll", candidates=(1, 2, 4), meaning="columns"))

    old = tune(PROBLEM, store=store, trials=100, families=[Small()])
    assert old.measured == 17
    result = tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert result.measured == 32 - 17
    assert len(replay.measured) == len(set(replay.measured)) == 32
    assert result.best.config == BEST


def test_processes_share_the_budget(store: Store, replay: Replay, tmp_path: Path) -> None:
    others = [config(32, 8), config(1, 1), config(2, 2), config(16, 6)]

    def others_record(count: int) -> None:
        if count in (2, 3, 4, 5):
            with Store(tmp_path / "tuning.db") as theirs:
                theirs.add_trial(trial_of(others[count - 2], smooth(others[count - 2])))

    replay.before_next = others_record
    result = tune(PROBLEM, store=store, trials=16, families=[GRID])
    assert len(set(names(store))) == len(result.trials) == 16
    # one of theirs may have been proposed here already when they recorded it
    assert 16 - len(others) <= result.measured <= 16
    assert len(replay.measured) == len(set(replay.measured))


def test_a_budget_used_up_by_others_ends_the_search(store: Store, replay: Replay, tmp_path: Path) -> None:
    def others_record(count: int) -> None:
        if count == 3:
            with Store(tmp_path / "tuning.db") as theirs:
                for c in LEGAL[-20:]:
                    theirs.add_trial(trial_of(c, smooth(c)))

    replay.before_next = others_record
    result = tune(PROBLEM, store=store, trials=23, families=[GRID])
    assert result.measured == 3
    assert len(set(names(store))) == 23


# determinism


def test_the_same_seed_on_the_same_data_proposes_the_same_configs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for i, seed in enumerate((7, 7, 8)):
        replay = Replay(monkeypatch, smooth)
        with Store(tmp_path / f"{i}.db") as store:
            result = tune(PROBLEM, store=store, trials=24, seed=seed, families=[GRID])
        runs.append((replay.measured, result.best.config))
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[2][0]


def test_ties_go_to_the_better_prediction_then_to_the_first_name() -> None:
    flat = [trial_of(c, 50.0) for c in LEGAL]
    predict = {c: GRID.predict_us(c, PROBLEM, SPEC) for c in LEGAL}
    expected = min(LEGAL, key=lambda c: (predict[c], c.name))
    for order in (flat, flat[::-1]):
        assert winner(order, predict.__getitem__).config == expected
        assert winner(order, lambda _: 0.0).config.name == min(c.name for c in LEGAL)


def test_times_within_the_noise_are_ties_and_others_are_not() -> None:
    # interquartile range 4 us of 5 samples: standard error 1.66 us
    fast, near, far = (trial_of(c, t, spread_us=4.0) for c, t in zip(LEGAL, (50.0, 51.6, 51.7), strict=False))
    assert noise_us(Measurement(time_us=50, spread_us=4, samples=5, launches=1, condition="")) == pytest.approx(
        1.661, abs=1e-3
    )
    preferred = {near.config: 0.0, far.config: 0.0, fast.config: 1.0}.__getitem__
    assert winner([fast, near], preferred).config == near.config
    assert winner([fast, far], preferred).config == fast.config


# the record


def test_finalists_are_at_most_four_within_five_percent() -> None:
    times = [100.0, 101.0, 104.9, 105.1, 120.0]
    trials = [trial_of(c, t) for c, t in zip(LEGAL, times, strict=False)]
    failed = trial_of(LEGAL[10], Status.TIMEOUT)
    assert finalists([failed, *trials]) == trials[:3]
    assert finalists([trial_of(c, 100.0 + i) for i, c in enumerate(LEGAL[:6])]) == [
        trial_of(c, 100.0 + i) for i, c in enumerate(LEGAL[:4])
    ]
    assert finalists([failed]) == []


def test_finalists_are_timed_again_together_and_their_winner_is_the_record(store: Store, replay: Replay) -> None:
    close = {config(4, 2): 100.0, config(4, 3): 101.0, config(4, 4): 104.0}
    again = {config(4, 2): 103.0, config(4, 3): 102.0, config(4, 4): 105.0}
    replay.table = lambda c: close.get(c, 200.0 + c["tile"])
    replay.final = again.__getitem__
    result = tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert [sorted(r, key=str) for r in replay.retimed] == [sorted(close, key=str)]
    assert (result.best.config, result.best.time_us) == (config(4, 3), 102.0)
    assert store.best(PROBLEM, SPEC) == result.best
    stored = {t.config: t.measurement.time_us for t in store.trials(PROBLEM, SPEC) if t.measurement}
    assert {c: stored[c] for c in again} == again
    assert len(names(store)) == 32


@pytest.mark.parametrize("times", [1, 2])
def test_disturbed_finalists_are_timed_once_more_or_not_at_all(store: Store, replay: Replay, times: int) -> None:
    close = {config(4, 2): 100.0, config(4, 3): 101.0, config(4, 4): 104.0}
    replay.table = lambda c: close.get(c, 200.0 + c["tile"])

    def disturbed(c: Config) -> float:
        calm = {config(4, 2): 103.0, config(4, 3): 102.0, config(4, 4): 105.0}
        return calm[c] * (30 if len(replay.retimed) <= times else 1)

    replay.final = disturbed
    result = tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert len(replay.retimed) == 2
    expected = (config(4, 3), 102.0) if times == 1 else (config(4, 2), 100.0)
    assert (result.best.config, result.best.time_us) == expected
    stored = {t.config: t.measurement.time_us for t in result.trials if t.measurement}
    assert min(stored.values()) == expected[1]
    assert max(stored.values()) < 300


def test_a_lone_finalist_just_measured_is_not_timed_again(store: Store, replay: Replay) -> None:
    result = tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert replay.retimed == []
    assert result.best.config == BEST


def test_a_finalist_that_fails_now_is_recorded_so_and_the_next_moves_up(store: Store, replay: Replay) -> None:
    replay.table = lambda c: {config(4, 2): 100.0, config(4, 3): 101.0, config(4, 4): 150.0}.get(c, 300.0)
    replay.final = lambda c: Status.CORRECTNESS if c["unroll"] < 4 else 151.0
    result = tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert result.best.config == config(4, 4)
    failed = [t.config for t in store.trials(PROBLEM, SPEC) if t.status is Status.CORRECTNESS]
    assert sorted(failed, key=str) == [config(4, 2), config(4, 3)]


def test_failures_are_recorded_and_counted_and_never_win(store: Store, replay: Replay) -> None:
    statuses = {1: Status.COMPILE, 2: Status.RUNTIME, 16: Status.TIMEOUT, 32: Status.CORRECTNESS}
    replay.table = lambda c: statuses.get(c["tile"], smooth(c))
    result = tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert result.best.config == BEST
    found = {t.config: t.status for t in result.trials}
    assert found == {c: statuses.get(c["tile"], Status.CORRECT) for c in LEGAL}
    assert all(t.detail for t in result.trials if t.status is not Status.CORRECT)


def test_nothing_correct_is_an_error_and_leaves_no_record(store: Store, replay: Replay) -> None:
    replay.table = lambda c: Status.COMPILE if c["tile"] > 4 else Status.CORRECTNESS
    expected = r"^no correct config for .* on Replay x2: 14 compile, 18 correctness \(first: .*: as the table says\)$"
    for _ in range(2):
        with pytest.raises(NoValidConfig, match=expected):
            tune(PROBLEM, store=store, trials=100, families=[GRID])
    assert store.best(PROBLEM, SPEC) is None
    assert (len(names(store)), replay.started) == (32, 1)


def test_force_measures_the_recorded_configs_anew_and_replaces_the_record(store: Store, replay: Replay) -> None:
    first = tune(PROBLEM, store=store, trials=12, families=[GRID])
    earlier = list(replay.measured)
    replay.table = replay.final = lambda c: 1000 - smooth(c)
    result = tune(PROBLEM, store=store, trials=12, force=True, families=[GRID])
    assert result.measured == 12
    assert sorted(replay.measured[12:], key=str) == sorted(earlier, key=str)
    assert result.best.time_us > first.best.time_us
    assert store.best(PROBLEM, SPEC) == result.best
    assert all(t.measurement and t.measurement.time_us == 1000 - smooth(t.config) for t in result.trials)
    assert len(result.trials) == 12
    assert tune(PROBLEM, store=store, trials=14, force=True, families=[GRID]).measured == 14
    assert len(names(store)) == 14


def test_the_old_record_stands_until_force_is_done(store: Store, replay: Replay) -> None:
    first = tune(PROBLEM, store=store, trials=12, families=[GRID])

    def interrupt(count: int) -> None:
        assert store.best(PROBLEM, SPEC) == first.best
        if count == 18:
            raise KeyboardInterrupt

    replay.before_next = interrupt
    replay.table = replay.final = lambda c: smooth(c) / 2
    with pytest.raises(KeyboardInterrupt):
        tune(PROBLEM, store=store, trials=12, force=True, families=[GRID])
    assert store.best(PROBLEM, SPEC) == first.best


def test_an_imported_record_is_tried_and_kept_only_on_its_merits(store: Store, replay: Replay) -> None:
    imported = Record.of(trial_of(BEST, 1.0))
    store.replace(imported)
    result = tune(PROBLEM, store=store, trials=1, families=[GRID])
    assert result.best == imported
    result = tune(PROBLEM, store=store, trials=2, families=[GRID])
    assert replay.measured[1] == BEST
    assert (result.best.config, result.best.time_us) == (BEST, smooth(BEST))


# proposals


def test_winners_of_similar_layers_are_tried_early(store: Store, replay: Replay) -> None:
    similar = ConvProblem(N=4, C=8, H=12, W=12, K=16, R=3, S=3, padding=1, dtype="f32")
    store.replace(Record.of(trial_of(config(1, 8), 50.0, similar)))
    tune(PROBLEM, store=store, trials=2, families=[GRID])
    assert replay.measured == [GRID.default(PROBLEM, SPEC), config(1, 8)]


def test_similar_layers_are_ordered_by_likeness_and_of_one_dtype(store: Store) -> None:
    def layer(**changes: object) -> ConvProblem:
        shape: dict[str, object] = {"N": 2, "C": 8, "H": 12, "W": 12, "K": 16, "R": 3, "S": 3, "padding": 1}
        return ConvProblem(**(shape | {"dtype": "f32"} | changes))  # type: ignore[arg-type]

    near, far, other = layer(K=32), layer(K=512, C=256), layer(dtype="f16", epilogue=Epilogue())
    for c, problem in ((config(1, 2), far), (config(1, 1), near), (config(1, 3), other)):
        store.replace(Record.of(trial_of(c, 50.0, problem)))
    assert [(round(d, 3), r.config) for d, r in store.similar(PROBLEM, SPEC, any_epilogue=True)] == [
        (round(math.log(2), 3), config(1, 1)),
        (round(math.log(32 * 32), 3), config(1, 2)),
    ]


class Pipelined(Grid):
    """Only ``tile`` shapes a tile, and those of at least 4 rows are promising."""

    knobs = (Grid.knobs[0], replace(Grid.knobs[1], pipeline=True))

    def predict_us(self, config: Config, *_: object) -> float:
        return 100 + super().predict_us(config)


def test_favourites_are_the_best_of_promising_tiles_then_others_apart_from_them() -> None:
    space = Space(PROBLEM, SPEC, [Pipelined()])
    chosen = space.favourites(9)
    assert chosen[:4] == [config(32, 1), config(16, 1), config(8, 1), config(4, 1)]
    assert space.favourites(3) == chosen[:3]
    others = chosen[4:]
    assert others == sorted(others, key=space.predict_us)
    assert len(set(chosen)) == 9
    points = [space.point(c) for c in chosen]
    for i in range(4, 9):
        assert min(sum(abs(int(points[i][k]) - int(p[k])) for k in p) for p in points[:i]) >= 2
    assert len(set(space.favourites(1000))) < len(space)


def test_a_variant_is_a_step_of_the_pipeline_away() -> None:
    space = Space(PROBLEM, SPEC, [Pipelined()])
    assert space.variants(config(16, 3)) == [config(16, 2), config(16, 4)]
    space.take(config(16, 2))
    assert space.variants(config(16, 3)) == [config(16, 4)]
    space.take(config(16, 4))
    assert space.variants(config(16, 3)) == []


def test_every_second_proposal_is_a_variant_of_the_fastest() -> None:
    known = [trial_of(c, 5.0 if c == config(16, 4) else 9.0) for c in (config(1, 1), config(16, 4), config(32, 1))]
    sampler = Sampler(Space(PROBLEM, SPEC, [Pipelined()]), 3, [config(2, 1)], known)
    asked = [sampler.ask() for _ in range(4)]
    assert asked[:2] == [config(2, 1), config(16, 3)]
    assert config(16, 6) in asked
    # a faster one is told: a variant of it is next
    sampler.tell(trial_of(config(2, 1), 4.0))
    asked += [sampler.ask(), sampler.ask()]
    assert config(2, 2) in asked


def test_searches_that_diverge_do_not_try_the_same_variants() -> None:
    known = [trial_of(c, 5.0 if c == config(16, 4) else 9.0) for c in (config(1, 1), config(16, 4), config(32, 1))]
    first = set()
    for _ in range(20):
        sampler = Sampler(Space(PROBLEM, SPEC, [Pipelined()]), 3, [], known)
        sampler.diverge()
        first.add(sampler.ask())
    assert first == {config(16, 3), config(16, 6)}


def test_a_point_becomes_the_nearest_free_legal_config() -> None:
    space = Space(PROBLEM, SPEC, [GRID])
    assert (len(space), config(8, 2) in space, config(8, 3) in space) == (32, True, False)
    for c in LEGAL:
        assert space.nearest(space.point(c)) == c
    # tile 8 (index 3) with unroll 6 (index 4) is illegal: tiles 4 and 16 are one step away, 16 is predicted faster
    illegal = {"grid.tile": 3, "grid.unroll": 4}
    assert space.nearest(illegal) == config(16, 6)
    space.take(config(16, 6))
    assert not space.is_free(config(16, 6))
    assert space.nearest(illegal) == config(4, 6)
    for c in LEGAL:
        space.take(c)
    assert space.nearest(illegal) is None


class Other(Grid):
    """A second family of the same device, predicted slower."""

    name = "other"

    def predict_us(self, *_: object) -> float:
        return 1000.0


def test_several_families_are_searched_together(store: Store, replay: Replay) -> None:
    other = Other()
    replay.table = lambda c: smooth(c) - (50 if c.family == "other" else 0)
    space = Space(PROBLEM, SPEC, [GRID, other])
    assert len(space) == 64
    assert space.point(config(1, 1)) == {"family": "grid", "grid.tile": 0, "grid.unroll": 0}
    result = tune(PROBLEM, store=store, trials=30, families=[GRID, other])
    assert {c.family for c in replay.measured[:2]} == {"grid", "other"}
    assert result.best.family == "other"
    for c in LEGAL:
        space.take(c)
    found = space.nearest({"family": "grid", "grid.tile": 0, "grid.unroll": 0})
    assert found is not None
    assert found.family == "other"


def test_a_family_that_is_hopelessly_behind_is_sampled_no_more(store: Store, replay: Replay) -> None:
    other = Other()
    replay.table = lambda c: 3 * smooth(c) if c.family == "other" else smooth(c)
    assert tune(PROBLEM, store=store, trials=32, families=[GRID, other]).best.family == "grid"
    # by chance it would be half of them; some are under way before it is known to be behind
    assert Counter(c.family for c in replay.measured)["other"] <= 6


def test_a_family_whose_first_configs_fail_is_still_sampled() -> None:
    other = Other()
    space = Space(PROBLEM, SPEC, [GRID, other])
    broken = [trial_of(Config("other", c.knobs), Status.COMPILE) for c in LEGAL[:3]]
    sampler = Sampler(space, 3, [], [trial_of(LEGAL[0], 1.0), trial_of(LEGAL[1], 1.0), *broken])
    assert "other" in {found.family for _ in range(20) if (found := sampler.ask()) is not None}


def test_a_sampler_proposes_every_config_once_and_never_a_known_one() -> None:
    space = Space(PROBLEM, SPEC, [GRID])
    known = [trial_of(c, smooth(c)) for c in LEGAL[:5]] + [trial_of(LEGAL[5], Status.RUNTIME)]
    sampler = Sampler(space, 3, [LEGAL[0], LEGAL[9]], known)
    asked = []
    while (found := sampler.ask()) is not None:
        asked.append(found)
        if len(asked) % 3:
            sampler.tell(trial_of(found, smooth(found)))
    assert asked[0] == LEGAL[9]
    assert sorted(asked, key=str) == sorted(LEGAL[6:], key=str)


def test_the_sampler_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Large(Grid):
        """4096 configs and a prediction that says nothing."""

        name = "large"
        knobs = tuple(Knob(name=n, candidates=tuple(range(16)), meaning="") for n in ("x", "y", "z"))

        def illegal(self, *_: object) -> None:
            return None

        def predict_us(self, *_: object) -> float:
            return 1.0

    def bowl(c: Config) -> float:
        return 100.0 + (c["x"] - 11) ** 2 + (c["y"] - 4) ** 2 + (c["z"] - 9) ** 2

    found = []
    for seed in range(4):
        Replay(monkeypatch, bowl)
        with Store(tmp_path / f"{seed}.db") as store:
            found.append(tune(PROBLEM, store=store, trials=64, seed=seed, families=[Large()]).best.time_us)
    # 19 of 4096 configs are that good: 64 random ones find one in a quarter of the runs
    assert max(found) <= 102.0


def test_progress_tells_the_best_after_every_trial(store: Store, replay: Replay) -> None:
    replay.table = lambda c: Status.COMPILE if c["tile"] == 32 else smooth(c)
    seen: list[Progress] = []
    tune(PROBLEM, store=store, trials=5, families=[GRID])
    tune(PROBLEM, store=store, trials=9, families=[GRID], progress=seen.append)
    assert [(p.done, p.total) for p in seen] == [(6, 9), (7, 9), (8, 9), (9, 9)]
    assert [p.last.config for p in seen] == replay.measured[5:]
    correct = [smooth(c) for c in replay.measured if c["tile"] != 32]
    assert seen[-1].best is not None
    assert seen[-1].best.measurement is not None
    assert seen[-1].best.measurement.time_us == min(correct)


# on this machine's cpu


SMALL = ConvProblem(N=1, C=8, H=10, W=12, K=16, R=3, S=3, padding=1, dtype="f32")


def test_a_layer_is_tuned_on_the_cpu(store: Store) -> None:
    spec = find("cpu").spec
    assert spec is not None
    result = tune(SMALL, store=store, device="cpu", trials=5)
    assert result.measured == 5
    assert {t.status for t in result.trials} == {Status.CORRECT}
    assert store.best(SMALL, spec) == result.best
    family = DirectCpu()
    compiler = compiler_for(spec)
    for trial in result.trials:
        assert trial.problem == SMALL
        assert trial.device == spec
        assert family.legal(trial.config, SMALL, spec) is None
        assert trial.provenance.kernel_digest == compiler.digest(family.source(trial.config, SMALL, spec))
        assert trial.provenance.compiler == compiler.version
        assert trial.provenance.driver
        assert datetime.fromisoformat(trial.provenance.created_at).utcoffset() == timedelta(0)
        assert trial.measurement is not None
        assert trial.measurement.condition == "cold-loop"
    assert result.best.config in {t.config for t in finalists(result.trials)}


def test_a_device_that_tells_no_driver_is_tuned_too(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    taken = Workbench._take_prepared

    def take_nothing(bench: Workbench, worker: Worker) -> None:
        taken(bench, worker)
        bench._driver = ""

    monkeypatch.setattr(Workbench, "_take_prepared", take_nothing)
    result = tune(SMALL, store=store, device="cpu", trials=2)
    assert [(t.status, t.provenance.driver) for t in result.trials] == [(Status.CORRECT, "")] * 2


def test_a_search_that_is_killed_loses_at_most_the_trial_in_flight(tmp_path: Path) -> None:
    database = tmp_path / "tuning.db"
    script = tmp_path / "search.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os, signal
            from autotune import ConvProblem, Store, tune

            def stop(now):
                print(now.last.config, flush=True)
                if now.done == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

            problem = ConvProblem.parse("{SMALL}")
            tune(problem, store=Store({str(database)!r}), device="cpu", trials=5, progress=stop)
            """
        )
    )
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with Store(database) as store:
        assert [t.config.name for t in store.trials(SMALL, "cpu")] == ended.stdout.split()
        best = store.best(SMALL, "cpu")
        assert best is not None
        assert best.time_us == min(t.measurement.time_us for t in store.trials(SMALL, "cpu") if t.measurement)
        assert tune(SMALL, store=store, device="cpu", trials=5).measured == 2
        assert store.check() == []
