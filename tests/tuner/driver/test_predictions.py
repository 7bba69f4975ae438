"""What a search starts from, and what it predicted at the moment of each proposal."""

from __future__ import annotations

import math

import pytest

from results_db.campaigns.start_from import knowledge_of
from results_db.store import Store
from search_spaces.estimates.prediction import Prediction
from tests.tuner.factories import DrivenCampaign, layouts_of, make_spec, run_campaign, submit
from tuner.driver.campaign_search import CampaignSearch


def test_each_proposal_of_the_guided_search_has_the_prediction_of_its_moment(store: Store) -> None:
    """The measured values are far off the estimates, and a later search would predict them."""
    campaign = DrivenCampaign(store, make_spec(strategy="guided", budget={"trials": 5}))
    at_first = CampaignSearch.rebuild(campaign.record, [])
    campaign.to_end()
    found, trials = store.trials.predictions(campaign.id), campaign.trials
    assert [each.trial_id for each in found] == [trial.id for trial in trials]
    assert found[0].prediction.source == "estimates"
    assert found[-1].prediction.source == "calibrated"
    for each, trial in zip(found, trials, strict=True):
        assert each.step_time_s == trial.measurement.step_time_s
        assert each.peak_memory_bytes == trial.measurement.peak_memory_bytes
        assert each.layout_key == trial.layout_key
        assert 0 < each.prediction.log_step_time_sd < 5
        assert store.trials.detail(trial.id).prediction == each.prediction
    kept, expected = found[0].prediction, at_first.predict(trials[0].layout)
    later = CampaignSearch.rebuild(campaign.record, trials).predict(trials[0].layout)
    assert kept.step_time_s == pytest.approx(expected.step_time_s)
    assert kept.peak_memory_bytes == pytest.approx(expected.peak_memory_bytes, abs=1)
    assert kept.fit_probability == pytest.approx(expected.fit_probability)
    measured_s = trials[0].measurement.step_time_s
    assert abs(math.log(later.step_time_s / measured_s)) < 0.1
    assert abs(math.log(kept.step_time_s / measured_s)) > 0.5


def test_repeats_baselines_unknown_to_the_search_and_random_proposals_have_no_prediction(
    store: Store,
) -> None:
    cases = {
        "inside": {"strategy": "guided", "baseline": {"tp": 4, "micro_batch_size": 2}},
        "outside": {"strategy": "guided", "baseline": {"recompute": "full"}},
        "random": {"strategy": "random"},
    }
    for name, changes in cases.items():
        campaign = DrivenCampaign(store, make_spec(name, **changes))
        campaign.turn()
        first = campaign.trials[0]
        assert first.is_baseline == ("baseline" in changes)
        assert (store.trials.detail(first.id).prediction is not None) == (name == "inside")
        assert store.trials.detail(store.trials.repeat(first.id).id).prediction is None
        store.campaigns.cancel(campaign.id)  # the next one has the worker for itself


def test_a_prediction_beyond_what_the_database_holds_is_cut() -> None:
    absurd = Prediction.of(
        log_step_time=1e4,
        log_step_time_sd=0.3,
        peak_memory_bytes=1e40,
        fit_probability=1.0 + 1e-12,
        source="estimates",
    )
    assert absurd.step_time_s < 1e300
    assert absurd.peak_memory_bytes < 1 << 63
    assert absurd.fit_probability == 1.0


def test_the_search_is_given_what_other_campaigns_measured(store: Store) -> None:
    first = run_campaign(store, make_spec("first", budget={"trials": 3}))
    second = submit(store, make_spec("second"))
    samples = knowledge_of(store.plans.known_trials(second)).samples
    told = [trial for trial in store.trials.find(first.id) if trial.state == "COMPLETED"]
    told.sort(key=lambda trial: trial.ended_seq or 0)
    assert [sample.layout for sample in samples] == layouts_of(told)
    spec = make_spec("first")
    for sample, trial in zip(samples, told, strict=True):
        assert (sample.model, sample.cluster) == (spec.model, spec.cluster)
        assert sample.state == "completed"
        assert sample.step_time_s == trial.measurement.step_time_s
        assert sample.peak_memory_bytes == trial.measurement.peak_memory_bytes
        assert sample.software == ""


def test_a_campaign_with_a_headroom_is_driven_and_tells_peaks(store: Store) -> None:
    # What the workers of the tests measure is more than a device has.
    campaign = DrivenCampaign(
        store, make_spec(constraints={"memory_headroom": 0.1}, budget={"trials": 2})
    )
    campaign.to_end()
    assert campaign.count() == 2
    assert store.leaderboard.ranked_summary(campaign.id).num_ranked == 0
    assert store.leaderboard.page_of_layouts(campaign.id, limit=0).constrained == 2


def test_a_guided_campaign_of_several_objectives_starts_from_another_and_survives_a_restart(
    store: Store,
) -> None:
    run_campaign(store, make_spec("first", budget={"trials": 3}))
    spec = make_spec(
        "second",
        strategy="guided",
        objective=["tokens_per_s", "memory_headroom", "tokens_per_node_hour"],
        constraints={"memory_headroom": 0.05},
        stop={"remeasure": 0},
        budget={"trials": 4},
    )
    campaign = DrivenCampaign(store, spec)
    campaign.turn(2)
    told, known = campaign.trials, store.plans.known_trials(campaign.record)
    one, other = (CampaignSearch.rebuild(campaign.record, told, known).ask() for _ in range(2))
    assert one == other
    assert one is not None
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget"), record.message
    assert campaign.count() == 4
