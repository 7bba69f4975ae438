"""How many trials the driver keeps ahead of the workers, also of those that are too small."""

from __future__ import annotations

from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from tests.kit.store import make_worker, take_leases
from tests.tuner.factories import DrivenCampaign, FakeWorker, make_spec, submit
from tuner.driver.driver import MAX_A_ROUND, Driver
from tuner.driver.open_trial_target import MAX_TOO_LARGE

SMALL_LAYOUTS = {
    "global_batch_size": 16,
    "tp": [1, 2],
    "pp": [1, 2],
    "dp": [1, 2],
    "micro_batch_size": [1, 2, 4],
    "zero_stage": [0, 1],
    "recompute": ["none", "full"],
}
"""Of 1 to 8 devices."""


def test_one_trial_waits_beyond_what_the_workers_run(store: Store) -> None:
    campaign = submit(store, make_spec(budget={"trials": 20}))
    workers = [FakeWorker(store, name=f"w{i}") for i in range(3)]
    driver = Driver(store)
    for _ in range(3):
        driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 4
    for worker in workers:
        take_leases(store, worker.id, 1)
    driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 1


def test_the_devices_of_a_worker_that_shares_its_nodes_are_kept_supplied(store: Store) -> None:
    campaign = submit(store, make_spec(space=SMALL_LAYOUTS, budget={"trials": 100}))
    make_worker(store, num_nodes=2, shares_nodes=True)
    driver = Driver(store)
    for _ in range(5):
        driver.step()
    devices = [trial.layout.num_devices for trial in store.trials.find(campaign.id)]
    assert sum(devices) - max(devices) >= 16
    assert sum(devices[:-1]) - max(devices[:-1]) < 16


def test_a_round_asks_for_a_few_trials_only(store: Store) -> None:
    campaign = submit(store, make_spec(space=SMALL_LAYOUTS, budget={"trials": 100}))
    make_worker(store, num_nodes=64, shares_nodes=True)
    driver = Driver(store)
    driver.step()
    assert len(store.trials.find(campaign.id)) == MAX_A_ROUND
    driver.step()
    assert len(store.trials.find(campaign.id)) == 2 * MAX_A_ROUND


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
    campaign = DrivenCampaign(store, wide_spec(budget={"trials": 60}))
    campaign.until(lambda: store.workers.count_too_large(campaign.id) > 2)
    campaign.until_completed(campaign.count() + 2)
    assert campaign.record.state == "RUNNING"
    assert store.workers.count_too_large(campaign.id) <= MAX_TOO_LARGE + 2


def test_without_any_worker_no_trial_counts_as_too_large(store: Store) -> None:
    campaign = submit(store, wide_spec())
    driver = Driver(store)
    for _ in range(5):
        driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 1
