"""The driver when layouts need more nodes than any worker has."""

from __future__ import annotations

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from tests.tuner.factories import FakeWorker, drive_until, ended, make_spec, submit
from tuner.driver.driver import Driver
from tuner.driver.open_trial_target import MAX_TOO_LARGE, NUM_AHEAD


def wide_spec(**changes: object) -> CampaignSpec:
    """Most of its legal layouts need two nodes; the fake workers have one."""
    cluster = {
        "name": "local-cpu",
        "device": "CPU core",
        "num_nodes": 2,
        "devices_per_node": 8,
        "device_memory_bytes": 4 << 30,
    }
    space = {
        "global_batch_size": 16,
        "num_nodes": [1, 2],
        "tp": [1, 2, 4],
        "pp": [1, 2, 4],
        "micro_batch_size": [1, 2],
        "zero_stage": [0, 1],
    }
    return make_spec(**{"cluster": cluster, "space": space, **changes})


def test_trials_too_large_for_every_worker_do_not_keep_the_smaller_ones_from_being_tried(
    store: Store,
) -> None:
    campaign = submit(store, wide_spec(budget={"trials": 60}))
    driver, worker = Driver(store), FakeWorker(store)

    def num_too_large() -> int:
        return store.workers.count_too_large(campaign.id)

    drive_until(lambda: num_too_large() > NUM_AHEAD + 1, driver.step, worker)
    before = store.campaigns.count_trials(campaign.id)["COMPLETED"]
    drive_until(
        lambda: store.campaigns.count_trials(campaign.id)["COMPLETED"] > before + 1,
        driver.step,
        worker,
    )
    assert not ended(store, campaign)


def test_no_more_than_a_few_trials_wait_for_a_larger_worker(store: Store) -> None:
    spec = wide_spec(budget={"trials": 60})
    legal = spec.legal_set()
    campaign = submit(store, spec)
    too_large = [i for i in range(len(legal)) if legal.layout(i).num_nodes == 2]
    assert len(too_large) > 2 * MAX_TOO_LARGE
    FakeWorker(store)
    for index in too_large[: MAX_TOO_LARGE + NUM_AHEAD + 1]:
        store.trials.add(campaign.id, legal.layout(index))
    driver = Driver(store)
    for _ in range(5):
        driver.step()
    assert len(store.trials.find(campaign.id)) == MAX_TOO_LARGE + NUM_AHEAD + 1


def test_without_any_worker_no_trial_counts_as_too_large(store: Store) -> None:
    campaign = submit(store, wide_spec())
    driver = Driver(store)
    for _ in range(5):
        driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == NUM_AHEAD
