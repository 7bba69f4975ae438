"""What a search predicted is kept with the trial, as of the moment of the proposal."""

from __future__ import annotations

import math

import pytest

from results_db.store import Store
from search_spaces.estimates.prediction import Prediction
from tests.tuner.factories import DrivenCampaign, make_spec, run_campaign, submit
from tuner.driver.campaign_search import CampaignSearch
from tuner.driver.driver import Driver


def test_each_proposal_of_the_guided_search_has_one(store: Store) -> None:
    campaign = run_campaign(store, make_spec(strategy="guided", budget={"trials": 5}))
    found = store.trials.predictions(campaign.id)
    trials = store.trials.find(campaign.id)
    assert [each.trial_id for each in found] == [trial.id for trial in trials]
    assert found[0].prediction.source == "estimates"
    assert found[-1].prediction.source == "calibrated"
    for each, trial in zip(found, trials, strict=True):
        assert trial.measurement is not None
        assert each.step_time_s == trial.measurement.step_time_s
        assert each.peak_memory_bytes == trial.measurement.peak_memory_bytes
        assert each.layout_key == trial.layout_key
        assert 0 < each.prediction.step_time_s < 1e6
        assert 0 < each.prediction.log_step_time_sd < 5
        assert each.prediction.peak_memory_bytes > 1 << 20
        assert 0 < each.prediction.fit_probability <= 1


def test_a_stored_prediction_is_that_of_the_proposal_and_not_of_a_later_search(
    store: Store,
) -> None:
    """The measured value is far off the estimate, and a rebuilt search would predict it."""
    campaign = DrivenCampaign(store, make_spec(strategy="guided", budget={"trials": 6}))
    campaign.step()
    (first, *_) = store.trials.predictions(campaign.id)
    campaign.to_end()
    trial = store.trials.get(first.trial_id)
    assert trial.measurement is not None
    assert store.trials.detail(trial.id).prediction == first.prediction
    later = CampaignSearch.rebuild(campaign.record, campaign.trials).predict(trial.layout)
    assert later is not None
    off_s = math.log(trial.measurement.step_time_s)
    assert abs(math.log(later.step_time_s) - off_s) < 0.1
    assert abs(math.log(first.prediction.step_time_s) - off_s) > 0.5


def test_it_is_what_a_search_with_the_same_history_predicts(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(strategy="guided", budget={"trials": 6}))
    campaign.until_completed(3)
    before = campaign.trials
    search = CampaignSearch.rebuild(campaign.record, before)
    campaign.step()
    for added in campaign.trials[len(before) :]:
        expected = search.predict(added.layout)
        kept = store.trials.detail(added.id).prediction
        assert expected is not None
        assert kept is not None
        assert kept.source == expected.source
        assert kept.step_time_s == pytest.approx(expected.step_time_s)
        assert kept.log_step_time_sd == pytest.approx(expected.log_step_time_sd)
        assert kept.peak_memory_bytes == pytest.approx(expected.peak_memory_bytes, abs=1)
        assert kept.fit_probability == pytest.approx(expected.fit_probability)


@pytest.mark.parametrize("strategy", ["random", "model-only"])
def test_strategies_that_predict_nothing_keep_nothing(store: Store, strategy: str) -> None:
    campaign = run_campaign(store, make_spec(strategy=strategy, budget={"trials": 2}))
    assert store.trials.predictions(campaign.id) == []
    assert store.trials.detail(1).prediction is None


def test_the_baseline_has_one_where_the_search_knows_it(store: Store) -> None:
    inside = make_spec("inside", strategy="guided", baseline={"tp": 4, "micro_batch_size": 2})
    outside = make_spec("outside", strategy="guided", baseline={"recompute": "full"})
    driver = Driver(store)
    for spec, is_known in ((inside, True), (outside, False)):
        campaign = submit(store, spec)
        driver.step()
        trial = store.trials.by_number(campaign.id, 1)
        assert trial.is_baseline
        assert (store.trials.detail(trial.id).prediction is not None) == is_known


def test_repeats_have_no_prediction(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(strategy="guided"))
    campaign.turn()
    repeat = store.trials.repeat(1)
    assert store.trials.detail(repeat.id).prediction is None
    assert len(store.trials.predictions(campaign.id, limit=1)) == 1


def test_figures_beyond_the_database_are_cut() -> None:
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
