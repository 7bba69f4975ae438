"""How many trials the driver keeps ahead of the workers."""

from __future__ import annotations

from results_db.store import Store
from tests.kit.store import make_worker, take_leases
from tests.tuner.factories import FakeWorker, make_spec, submit
from tuner.driver.driver import MAX_A_ROUND, Driver

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
