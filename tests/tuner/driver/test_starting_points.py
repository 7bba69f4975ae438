"""A campaign that starts from others: what its search learns; a restart changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from results_db.campaigns.start_from import knowledge_of
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from tests.kit.postgres import upgraded
from tests.tuner.factories import FakeWorker, drive_until, ended, layouts_of, make_spec, submit
from tuner.driver.campaign_search import CampaignSearch
from tuner.driver.driver import Driver


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store.open(upgraded(tmp_path / "data"))
    yield store
    store.close()


def finished(store: Store, spec: CampaignSpec, worker: FakeWorker) -> int:
    campaign = submit(store, spec)
    drive_until(lambda: ended(store, campaign), Driver(store).step, worker)
    return campaign.id


def test_the_search_is_given_what_other_campaigns_measured(store: Store) -> None:
    worker = FakeWorker(store)
    first = finished(store, make_spec("first"), worker)
    second = submit(store, make_spec("second"))
    samples = knowledge_of(store.plans.known_trials(second)).samples
    told = [trial for trial in store.trials.find(first) if trial.state == "COMPLETED"]
    told.sort(key=lambda trial: trial.ended_seq or 0)
    assert [sample.layout for sample in samples] == layouts_of(told)
    spec = make_spec("first")
    for sample, trial in zip(samples, told, strict=True):
        assert trial.measurement is not None
        assert (sample.model, sample.cluster) == (spec.model, spec.cluster)
        assert sample.state == "completed"
        assert sample.step_time_s == trial.measurement.step_time_s
        assert sample.peak_memory_bytes == trial.measurement.peak_memory_bytes
        assert sample.software == ""


def test_a_search_that_starts_from_others_asks_the_same_after_a_restart(store: Store) -> None:
    worker = FakeWorker(store)
    finished(store, make_spec("first"), worker)
    second = submit(store, make_spec("second", seed=3))
    asked = [
        CampaignSearch.rebuild(
            second, store.trials.find(second.id), store.plans.known_trials(second)
        ).ask()
        for _ in range(2)
    ]
    assert asked[0] is not None
    assert asked[0] == asked[1]


def test_a_campaign_with_a_headroom_is_driven_and_tells_peaks(store: Store) -> None:
    worker = FakeWorker(store)
    # What the workers of the tests measure is more than a device has.
    campaign = finished(store, make_spec("tight", constraints={"memory_headroom": 0.1}), worker)
    counts = store.campaigns.count_trials(campaign)
    assert counts["COMPLETED"] == 6
    assert (
        store.leaderboard.ranked_summary(campaign).num_ranked,
        store.leaderboard.page_of_layouts(campaign, limit=0).constrained,
    ) == (0, 6)


def test_a_guided_campaign_of_several_objectives_starts_from_another_and_survives_a_restart(
    store: Store,
) -> None:
    worker = FakeWorker(store)
    finished(store, make_spec("first"), worker)
    second = submit(
        store,
        make_spec(
            "second",
            strategy="guided",
            objective=["tokens_per_s", "memory_headroom", "tokens_per_node_hour"],
            constraints={"memory_headroom": 0.05},
            stop={"remeasure": 0},
        ),
    )
    for _ in range(3):
        drive_until(lambda: worker.run_one(), Driver(store).step)
    asked = [
        CampaignSearch.rebuild(
            second, store.trials.find(second.id), store.plans.known_trials(second)
        ).ask()
        for _ in range(2)
    ]
    assert asked[0] == asked[1]
    drive_until(lambda: ended(store, second), Driver(store).step, worker)
    record = store.campaigns.get(second.id)
    assert (record.state, record.reason) == ("COMPLETED", "budget"), record.message
    assert store.campaigns.count_trials(second.id)["COMPLETED"] == 6
