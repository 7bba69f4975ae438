"""A campaign that starts from others: what its search learns; a restart changes nothing."""

from results_db.campaigns.start_from import knowledge_of
from results_db.store import Store
from tests.tuner.factories import DrivenCampaign, layouts_of, make_spec, run_campaign, submit
from tuner.driver.campaign_search import CampaignSearch


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
