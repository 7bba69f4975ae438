"""The benchmark of early stopping: the service's threshold, and campaigns whose end is known."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from benchmarks.bench_stopping import (
    Noise,
    Stopped,
    campaign,
    campaigns,
    campaigns_row,
    share_stopped,
    to_beat_s,
)
from results_db.store import Store
from search_spaces.belief.step_time_to_beat import stop_above_s
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.campaigns.campaign_settings import Budget
from search_spaces.protocol.outcome import Iteration
from search_spaces.spec.layout import Layout
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from search_spaces.spec.presets.spaces import resolve_space
from search_spaces.spec.probe_defaults import DEFAULT_ITERATIONS, DEFAULT_WARMUP
from search_spaces.statistics.early_stop import LEAST_TIMED
from tests.kit.postgres import upgraded
from tests.kit.store import completed, lease_one, make_campaign, make_worker, post_outcome
from tests.tuner.replay.cells import make_cell

STILL = Noise(iterations=1e-9)
SPENT_STOPPED = DEFAULT_WARMUP + LEAST_TIMED
SPENT = DEFAULT_WARMUP + DEFAULT_ITERATIONS


def test_the_step_time_to_beat_is_what_the_service_tells_a_worker(tmp_path: Path) -> None:
    timed = Noise(iterations=0.02).run(0.5, Random(0))
    iterations = tuple(
        Iteration(index=index, kind="timed", step_time_s=seconds, loss=6.0, grad_norm=1.5)
        for index, seconds in enumerate(timed)
    )
    middle = sorted(timed)[4:6]
    layout = Layout(num_microbatches=8)
    spec = CampaignSpec(
        name="first",
        model=model_preset("tiny"),
        cluster=CLUSTER_PRESETS["frontier"],
        space=resolve_space("paper-table-v"),
        budget=Budget(trials=2),
        objectives=("tokens_per_s",),
    )
    store = Store.open(upgraded(tmp_path / "data"))
    number, worker = make_campaign(store), make_worker(store)
    first = store.trials.add(number, layout)
    figures = {"tokens_per_s": 1024 / (sum(middle) / 2), "iterations": iterations}
    post_outcome(store, first.id, lease_one(store, worker.id).attempt, completed(layout, **figures))
    store.trials.add(number, Layout(tp=2, num_microbatches=8))
    best = store.leaderboard.values_to_beat([number])[number]
    told_s = stop_above_s(best, spec, lease_one(store, worker.id).layout)
    store.close()
    assert told_s == pytest.approx(to_beat_s(timed))
    assert told_s > 1.005 * sum(middle) / 2


def test_clearly_slower_layouts_end_at_the_first_look() -> None:
    ran = campaign([1.0, 1.5, 2.0, 3.0], STILL, Random(1))
    assert ran == Stopped(
        asked=4 * SPENT, spent=SPENT + 3 * SPENT_STOPPED, loss=0.0, loss_in_full=0.0, as_good=(0, 0)
    )


def test_ever_better_layouts_are_all_timed_to_the_end() -> None:
    ran = campaign([4.0, 3.0, 2.0, 1.0], Noise(iterations=0.02), Random(2))
    assert (ran.spent, ran.as_good, ran.loss) == (ran.asked, (3, 0), 0.0)


def test_a_good_layout_that_looked_slow_is_a_loss_and_counted() -> None:
    noise = Noise(iterations=1e-6, runs=0.3)
    lost = [campaign([1.0, 0.99], noise, Random(seed)) for seed in range(40)]
    wrongly = [ran for ran in lost if ran.as_good == (1, 1)]
    assert 10 < len(wrongly) < 30, "runs differ by far more than the layouts do"
    assert all(ran.loss == pytest.approx(1.0 / 0.99 - 1.0) for ran in wrongly)


def test_an_equal_layout_is_stopped_less_often_than_allowed() -> None:
    noise = Noise(iterations=0.02)
    known, measured = (share_stopped(noise, is_known=is_known, probes=1000) for is_known in (1, 0))
    assert 0.01 < known <= 0.05
    assert measured < known


def test_failed_layouts_are_left_out_and_equal_seeds_agree() -> None:
    cells = [make_cell([1.0, "failed", 2.0, 4.0]), make_cell(["failed", 1.0], source="other")]
    ran = list(campaigns(cells, Noise(iterations=0.02), seeds=2))
    assert [each.asked // SPENT for each in ran] == [3, 3, 1, 1]
    assert ran == list(campaigns(cells, Noise(iterations=0.02), seeds=2))
    name, noise, count, *_, as_good = campaigns_row("made_up", Noise(iterations=0.02), ran)
    assert (name, noise, count) == ("made_up", "2%, 0%", "4")
    assert as_good.startswith("0 of ")
