"""What a search predicted is kept with the trial, as of the moment of the proposal."""

from __future__ import annotations

import math

import pytest

from results_db.store import Store
from search_spaces.estimates.prediction import Prediction
from tests.tuner.factories import DrivenCampaign, make_spec
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
