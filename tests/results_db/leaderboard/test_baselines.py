"""What the store says of baselines, on every database."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.results_db.leaderboard.leaderboard_records import BaselineRead
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN
from tests.kit.store import (
    completed,
    failed,
    lease_one,
    make_iterations,
    make_spec,
    make_worker,
    post_outcome,
    run_trial,
)

pytestmark = pytest.mark.sqlite_is_enough

BASELINE = Layout(tp=2, num_microbatches=8)
FASTER = Layout(num_microbatches=8)
OTHER = Layout(pp=2, num_microbatches=8)
FOREIGN = Layout(num_microbatches=8, recompute="full")


def submit(store: Store, name: str = "first", **changes: Any) -> CampaignRecord:
    own = {"name": name, "baseline": BASELINE.to_mapping(), "probe": {"iterations": 5}}
    spec = CampaignSpec.from_mapping({**CAMPAIGN, **own, **changes})
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=4)


def measure(
    store: Store, campaign: CampaignRecord, layout: Layout, tokens_per_s: float, **changes: Any
) -> int:
    """Runs a trial whose iterations differ by some percent, with the median in the middle."""
    step_time_s = 8 * 128 / tokens_per_s
    offs = (0.0, 0.0, -0.02, -0.01, 0.0, 0.01, 0.02)
    iterations = tuple(
        replace(each, step_time_s=step_time_s * (1 + off), loss=6.0)
        for each, off in zip(make_iterations(step_time_s, timed=5), offs, strict=True)
    )
    figures = {"tokens_per_s": tokens_per_s, "iterations": iterations, **changes}
    return run_trial(store, campaign.id, layout, **figures)


def baseline_of(store: Store, campaign: CampaignRecord) -> BaselineRead:
    return store.baselines.of_campaigns([campaign])[campaign.id]


@pytest.mark.sqlite_is_enough(False)
def test_a_baseline_without_a_trial_has_no_value(store: Store) -> None:
    found = baseline_of(store, submit(store))
    assert (found.layout, found.layout_key) == (BASELINE, BASELINE.key)
    assert not found.outside_space
    assert (found.trial_id, found.trial_number, found.state, found.reason) == (None,) * 4
    assert (found.value, found.gain, found.is_ranked) == (None, None, False)


@pytest.mark.sqlite_is_enough(False)
def test_a_baseline_alone_has_no_gain_over_itself(store: Store) -> None:
    first = measure(store, campaign := submit(store), BASELINE, 1000.0)
    alone = baseline_of(store, campaign)
    assert (alone.trial_id, alone.state, alone.value) == (first, "COMPLETED", pytest.approx(1000.0))
    assert (alone.gain.ratio, alone.gain.trial_number) == (1.0, 1)


@pytest.fixture
def beaten(store: Store) -> CampaignRecord:
    """A campaign whose winner gives 1.3 times what its baseline does."""
    campaign = submit(store)
    for layout, speed in ((BASELINE, 1000.0), (FASTER, 1300.0)):
        measure(store, campaign, layout, speed)
    return campaign


@pytest.mark.sqlite_is_enough(False)
def test_a_baseline_has_the_interval_of_its_layout(store: Store, beaten: CampaignRecord) -> None:
    found = baseline_of(store, beaten)
    _winner, baseline = store.leaderboard.ranked_layouts(beaten.id, "tokens_per_s")
    assert (found.value_low, found.value_high) == (baseline.value_low, baseline.value_high)


@pytest.mark.sqlite_is_enough(False)
def test_the_gain_has_an_interval_from_both_layouts(store: Store, beaten: CampaignRecord) -> None:
    gain = baseline_of(store, beaten).gain
    assert (gain.ratio, gain.trial_number) == (pytest.approx(1.3), 2)
    width = math.log(gain.ratio_high / gain.ratio)
    assert width == pytest.approx(math.log(gain.ratio / gain.ratio_low))
    ranked = store.leaderboard.ranked_layouts(beaten.id, "tokens_per_s")
    parts = [math.log(each.value_high / each.value) for each in ranked if each.value_high]
    assert max(parts) < width < sum(parts)


@pytest.mark.sqlite_is_enough(False)
def test_the_gain_pools_the_runs_of_both(store: Store, beaten: CampaignRecord) -> None:
    for layout, speed in ((BASELINE, 1020.0), (FASTER, 1250.0)):
        measure(store, beaten, layout, speed)
    first, second = store.leaderboard.ranked_layouts(beaten.id, "tokens_per_s")
    found = baseline_of(store, beaten)
    assert found.value == second.value
    ends = (pytest.approx(second.value_low), pytest.approx(second.value_high))
    assert (found.value_low, found.value_high) == ends
    assert found.gain.ratio == pytest.approx(first.value / second.value)


def test_one_that_failed_has_a_reason_until_it_is_queued_again(store: Store) -> None:
    campaign = submit(store)
    first = run_trial(store, campaign.id, BASELINE, failed("out_of_memory"))
    measure(store, campaign, FASTER, 1300.0)
    found = baseline_of(store, campaign)
    assert (found.state, found.reason) == ("INFEASIBLE", "out_of_memory")
    assert found.message == "rank 1 of 2: out_of_memory"
    assert (found.value, found.gain) == (None, None)
    again = store.trials.requeue(first)
    assert again.is_baseline
    found = baseline_of(store, campaign)
    assert (found.state, found.trial_id, found.message) == ("PENDING", again.id, "")
    store.trials.cancel(again.id)
    third = measure(store, campaign, BASELINE, 1000.0)
    found = baseline_of(store, campaign)
    assert (found.state, found.trial_id, found.trial_number) == ("COMPLETED", third, 4)
    assert found.gain is not None


@pytest.mark.parametrize(
    ("constraints", "changes", "ratio"),
    [
        ({"memory_headroom": 0.1}, {"peak_memory_bytes": (8 << 30) - 1}, pytest.approx(1.3)),
        ({}, {"oversubscribed": True}, None),
    ],
    ids=["breaks a constraint, compared without an interval", "shared devices, not compared"],
)
def test_one_that_is_not_ranked_has_a_value_without_an_interval(
    store: Store, constraints: dict[str, float], changes: dict[str, Any], ratio: Any
) -> None:
    campaign = submit(store, constraints=constraints)
    measure(store, campaign, BASELINE, 1000.0, **changes)
    measure(store, campaign, FASTER, 1300.0)
    found = baseline_of(store, campaign)
    assert (found.is_ranked, found.value, found.value_high) == (False, pytest.approx(1000.0), None)
    gain = found.gain and (found.gain.ratio, found.gain.ratio_low)
    assert gain == (None if ratio is None else (ratio, None))


def test_many_campaigns_are_read_together(store: Store) -> None:
    plain, odd = (
        store.campaigns.create(make_spec(name, **baseline), num_legal_layouts=4)
        for name, baseline in (("plain", {}), ("odd", {"baseline": {"tp": "two"}}))
    )
    foreign = submit(store, "foreign", baseline=FOREIGN.to_mapping())
    campaigns = [submit(store, "measured"), submit(store, "waiting"), foreign, plain, odd]
    for campaign, layout in ((campaigns[0], BASELINE), (campaigns[0], OTHER), (foreign, FOREIGN)):
        measure(store, campaign, layout, 1000.0)
    found = store.baselines.of_campaigns(campaigns)
    assert found == {
        id_: each for one in campaigns for id_, each in store.baselines.of_campaigns([one]).items()
    }
    shown = [(each.state, each.outside_space, each.is_ranked) for each in found.values()]
    assert sorted(shown, key=str) == [
        ("COMPLETED", False, True),
        ("COMPLETED", True, True),
        (None, False, False),
    ], "neither without a baseline nor with one that cannot be read"
    assert not store.trials.add(odd.id, BASELINE).is_baseline


def test_any_layout_is_compared_and_its_rows_are_marked(store: Store) -> None:
    campaign = submit(store)
    for layout, speed in ((BASELINE, 1000.0), (FASTER, 1300.0), (OTHER, 900.0)):
        measure(store, campaign, layout, speed)
    worse = store.baselines.gain(campaign, OTHER.key)
    best = store.baselines.gain(campaign, FASTER.key)
    itself = store.baselines.gain(campaign, BASELINE.key)
    assert (worse.ratio, worse.trial_number) == (pytest.approx(0.9), 3)
    assert best == baseline_of(store, campaign).gain
    assert (itself.ratio, itself.ratio_low) == (1.0, 1.0)
    assert store.baselines.gain(campaign, FOREIGN.key) is None
    page = store.leaderboard.page_of_layouts(campaign.id, limit=9)
    assert [each.trial.is_baseline for each in page.layouts] == [False, True, False]
    marked = [trial.is_baseline for trial in store.trials.find(campaign.id)]
    assert marked == [True, False, False]


PREDICTION = Prediction(
    step_time_s=0.5,
    log_step_time_sd=0.2,
    peak_memory_bytes=5 << 40,
    fit_probability=0.9,
    source="calibrated",
)


@pytest.mark.sqlite_is_enough(False)
def test_predictions_are_kept_with_their_trials_and_deleted_with_them(store: Store) -> None:
    campaign = submit(store)
    trial = store.trials.add(campaign.id, BASELINE, prediction=PREDICTION)
    assert store.trials.detail(trial.id).prediction == PREDICTION
    (waiting,) = store.trials.predictions(campaign.id)
    assert (waiting.state, waiting.step_time_s, waiting.is_baseline) == ("PENDING", None, True)
    lease = lease_one(store, make_worker(store).id)
    post_outcome(store, trial.id, lease.attempt, completed(BASELINE, tokens_per_s=1000.0, timed=5))
    store.trials.add(campaign.id, FOREIGN)
    (found,) = store.trials.predictions(campaign.id)
    assert (found.prediction, found.step_time_s) == (PREDICTION, pytest.approx(1.024))
    assert found.peak_memory_bytes == 5 << 30
    for layout in (FASTER, OTHER):
        store.trials.add(campaign.id, layout, prediction=PREDICTION)
    newest = store.trials.predictions(campaign.id, limit=2)
    assert [each.number for each in newest] == [3, 4]
    store.campaigns.cancel(campaign.id)
    store.campaigns.delete(campaign.id)
    assert store.trials.predictions(campaign.id) == []
