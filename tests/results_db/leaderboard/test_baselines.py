"""What the store says of baselines, on every database."""

from __future__ import annotations

import math
from typing import Any

import pytest

from results_db.records import CampaignRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.estimates.prediction import Prediction
from search_spaces.protocol.outcome import Iteration, Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed, lease_one, make_spec, make_worker

BASELINE = Layout(tp=2, num_microbatches=8)
FASTER = Layout(num_microbatches=8)
OTHER = Layout(pp=2, num_microbatches=8)
FOREIGN = Layout(num_microbatches=8, recompute="full")


def submit(store: Store, name: str = "first", **changes: Any) -> CampaignRecord:
    spec = CampaignSpec.from_mapping(
        {
            "name": name,
            "model": "tiny",
            "cluster": {
                "name": "local-cpu",
                "device": "CPU core",
                "num_nodes": 1,
                "devices_per_node": 8,
                "device_memory_bytes": 8 << 30,
            },
            "objective": "tokens_per_s",
            "strategy": "random",
            "budget": {"trials": 9},
            "space": {"global_batch_size": 8, "tp": [1, 2], "pp": [1, 2], "dp": 1},
            "baseline": BASELINE.to_mapping(),
            "probe": {"iterations": 5},
            **changes,
        }
    )
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=4)


def noisy(layout: Layout, tokens_per_s: float, noise: float = 0.01, **changes: Any) -> Outcome:
    """A measurement whose iterations differ by some percent, with the median in the middle."""
    step_time_s = 8 * 128 / tokens_per_s
    iterations = tuple(
        Iteration(
            index=index,
            kind="timed" if index > 1 else "warmup",
            step_time_s=step_time_s * (1 + off),
            loss=6.0,
            grad_norm=1,
        )
        for index, off in enumerate((0.0, 0.0, -2 * noise, -noise, 0.0, noise, 2 * noise))
    )
    return completed(layout, tokens_per_s=tokens_per_s, iterations=iterations, **changes)


def measure(store: Store, campaign: CampaignRecord, layout: Layout, outcome: Outcome) -> int:
    trial = store.trials.add(campaign.id, layout)
    return post(store, trial.id, outcome)


def post(store: Store, trial_id: int, outcome: Outcome) -> int:
    lease = lease_one(store, make_worker(store).id)
    assert lease.trial_id == trial_id
    assert store.outcomes.post(trial_id, lease.attempt, outcome).accepted
    return trial_id


def test_before_its_trial_there_is_a_layout_alone(store: Store) -> None:
    campaign = submit(store)
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.layout, found.layout_key) == (BASELINE, BASELINE.key)
    assert not found.outside_space
    assert (found.trial_id, found.trial_number, found.state, found.reason) == (None,) * 4
    assert (found.value, found.gain, found.is_ranked) == (None, None, False)


def test_the_gain_is_the_ratio_of_the_values_with_an_interval_from_both(store: Store) -> None:
    campaign = submit(store)
    first = measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0))
    alone = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (alone.trial_id, alone.state, alone.value) == (first, "COMPLETED", pytest.approx(1000.0))
    assert alone.gain is not None
    assert (alone.gain.ratio, alone.gain.trial_number) == (1.0, 1)
    measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    baseline, winner = (
        next(
            each
            for each in store.leaderboard.ranked_layouts(campaign.id, "tokens_per_s")
            if each.rank == rank
        )
        for rank in (2, 1)
    )
    assert (found.value_low, found.value_high) == (baseline.low, baseline.high)
    gain = found.gain
    assert gain is not None
    assert gain.ratio == pytest.approx(1.3)
    assert gain.trial_number == 2
    assert gain.ratio_low is not None
    assert gain.ratio_high is not None
    assert winner.high is not None
    assert baseline.high is not None
    width = math.log(gain.ratio_high / gain.ratio)
    assert width == pytest.approx(math.log(gain.ratio / gain.ratio_low))
    parts = [math.log(each.high / each.value) for each in (winner, baseline) if each.high]
    assert max(parts) < width < sum(parts)


def test_runs_of_both_are_pooled(store: Store) -> None:
    campaign = submit(store)
    first = measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0))
    second = measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    for trial_id, layout, speed in ((first, BASELINE, 1020.0), (second, FASTER, 1250.0)):
        post(store, store.trials.repeat(trial_id).id, noisy(layout, speed))
    ranked = store.leaderboard.ranked_layouts(campaign.id, "tokens_per_s")
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert found.value == ranked[1].value
    assert (found.value_low, found.value_high) == (
        pytest.approx(ranked[1].low),
        pytest.approx(ranked[1].high),
    )
    assert found.gain is not None
    assert found.gain.ratio == pytest.approx(ranked[0].value / ranked[1].value)


def test_one_that_failed_has_a_reason_until_it_is_queued_again(store: Store) -> None:
    campaign = submit(store)
    first = measure(store, campaign, BASELINE, failed("out_of_memory"))
    measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.state, found.reason) == ("INFEASIBLE", "out_of_memory")
    assert found.message == "rank 1 of 2: out_of_memory"
    assert (found.value, found.gain) == (None, None)
    again = store.trials.requeue(first)
    assert again.is_baseline
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.state, found.trial_id, found.message) == ("PENDING", again.id, "")
    post(store, again.id, noisy(BASELINE, 1000.0))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.state, found.trial_id, found.trial_number) == ("COMPLETED", again.id, 3)
    assert found.gain is not None


def test_one_that_breaks_a_constraint_is_compared_without_an_interval(store: Store) -> None:
    campaign = submit(store, constraints={"memory_headroom": 0.1})
    measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0, peak_memory_bytes=(8 << 30) - 1))
    measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.is_ranked, found.value, found.value_high) == (False, pytest.approx(1000.0), None)
    assert found.gain is not None
    assert (found.gain.ratio, found.gain.ratio_low) == (pytest.approx(1.3), None)


def test_one_whose_ranks_shared_devices_is_not_compared(store: Store) -> None:
    campaign = submit(store)
    measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0, oversubscribed=True))
    measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert (found.is_ranked, found.value, found.gain) == (False, pytest.approx(1000.0), None)


def test_one_outside_of_the_space_is_marked(store: Store) -> None:
    campaign = submit(store, baseline=FOREIGN.to_mapping())
    measure(store, campaign, FOREIGN, noisy(FOREIGN, 1000.0))
    found = store.baselines.of_campaigns([campaign])[campaign.id]
    assert found.outside_space
    assert found.is_ranked


def test_many_campaigns_are_read_together(store: Store) -> None:
    campaigns = [submit(store, f"c{number}") for number in range(3)]
    campaigns.append(store.campaigns.create(make_spec("plain"), num_legal_layouts=4))
    for number, campaign in enumerate(campaigns[:2]):
        measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0 + number))
        measure(store, campaign, OTHER, noisy(OTHER, 2000.0))
    found = store.baselines.of_campaigns(campaigns)
    assert found == {
        id_: each for one in campaigns for id_, each in store.baselines.of_campaigns([one]).items()
    }
    assert [found[campaign.id].state for campaign in campaigns[:3]] == ["COMPLETED"] * 2 + [None]
    assert campaigns[3].id not in found


def test_a_layout_other_than_the_winner_is_compared_too(store: Store) -> None:
    campaign = submit(store)
    measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0))
    measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    measure(store, campaign, OTHER, noisy(OTHER, 900.0))
    worse = store.baselines.gain(campaign, OTHER.key)
    best = store.baselines.gain(campaign, FASTER.key)
    itself = store.baselines.gain(campaign, BASELINE.key)
    assert worse is not None
    assert itself is not None
    assert (worse.ratio, worse.trial_number) == (pytest.approx(0.9), 3)
    assert best == store.baselines.of_campaigns([campaign])[campaign.id].gain
    assert (itself.ratio, itself.ratio_low) == (1.0, 1.0)
    assert store.baselines.gain(campaign, FOREIGN.key) is None


@pytest.mark.sqlite_is_enough
def test_a_baseline_that_cannot_be_read_is_none(store: Store) -> None:
    spec = make_spec("odd", baseline={"tp": "two"})
    campaign = store.campaigns.create(spec, num_legal_layouts=4)
    assert store.baselines.of_campaigns([campaign]) == {}
    assert not store.trials.add(campaign.id, BASELINE).is_baseline


def test_its_rows_are_marked_on_the_leaderboard_and_among_the_trials(store: Store) -> None:
    campaign = submit(store)
    measure(store, campaign, BASELINE, noisy(BASELINE, 1000.0))
    measure(store, campaign, FASTER, noisy(FASTER, 1300.0))
    page = store.leaderboard.page_of_layouts(campaign.id, limit=9)
    assert [each.trial.is_baseline for each in page.layouts] == [False, True]
    assert [trial.is_baseline for trial in store.trials.find(campaign.id)] == [True, False]


PREDICTION = Prediction(
    step_time_s=0.5,
    log_step_time_sd=0.2,
    peak_memory_bytes=5 << 40,
    fit_probability=0.9,
    source="calibrated",
)


def test_a_prediction_is_kept_with_its_trial_and_deleted_with_it(store: Store) -> None:
    campaign = submit(store)
    trial = store.trials.add(campaign.id, BASELINE, prediction=PREDICTION)
    store.trials.add(campaign.id, OTHER)
    assert store.trials.detail(trial.id).prediction == PREDICTION
    (waiting,) = store.trials.predictions(campaign.id)
    assert (waiting.state, waiting.step_time_s, waiting.is_baseline) == ("PENDING", None, True)
    post(store, trial.id, noisy(BASELINE, 1000.0))
    (found,) = store.trials.predictions(campaign.id)
    assert (found.prediction, found.step_time_s) == (PREDICTION, pytest.approx(1.024))
    assert found.peak_memory_bytes == 5 << 30
    store.campaigns.cancel(campaign.id)
    store.campaigns.delete(campaign.id)
    assert store.trials.predictions(campaign.id) == []


def test_the_newest_predictions_are_read(store: Store) -> None:
    campaign = submit(store)
    for layout in (BASELINE, FASTER, OTHER):
        store.trials.add(campaign.id, layout, prediction=PREDICTION)
    assert [each.number for each in store.trials.predictions(campaign.id, limit=2)] == [2, 3]
