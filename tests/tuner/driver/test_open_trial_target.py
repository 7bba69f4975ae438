"""A campaign keeps as many trials open as fill the live workers, and one more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from results_db.records import TrialSize, WorkerRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from tests.kit.store import make_worker, take_leases
from tests.tuner.factories import DrivenCampaign, FakeWorker, make_spec, submit
from tuner.driver.driver import MAX_A_ROUND, Driver
from tuner.driver.open_trial_target import MAX_TOO_LARGE, MAX_WAITING, OpenTrialTarget


def live(**changes: Any) -> WorkerRecord:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    worker: dict[str, Any] = {
        "id": "w",
        "name": "w",
        "host": "node-1",
        "cluster": "frontier",
        "num_nodes": 1,
        "devices_per_node": 8,
        "device": "MI250X GCD",
        "versions": {},
        "trainers": {},
        "registered_at": now,
        "seen_at": now,
        "ended_at": None,
    }
    return WorkerRecord(**worker | changes)


def sharing(num_nodes: int = 1, **changes: Any) -> WorkerRecord:
    return live(num_nodes=num_nodes, shares_nodes=True, **changes)


def size(devices: int = 8, nodes: int = 1, *, is_waiting: bool = True) -> TrialSize:
    return TrialSize(num_nodes=nodes, num_devices=devices, is_waiting=is_waiting)


RUNS = size(devices=2, is_waiting=False)


@pytest.mark.parametrize(
    ("workers", "open_trials", "trial", "asked"),
    [
        # Without a worker one trial waits.
        ([], [], size(), 1),
        # A node that is not shared holds one trial, and one more waits.
        ([live()], [], size(devices=1), 2),
        ([live(), live()], [], size(devices=2), 3),
        ([live(num_nodes=4)], [], size(devices=2), 5),
        # One that is shared is filled with small trials; larger ones are counted by their nodes.
        ([sharing()], [], size(devices=2), 5),
        ([sharing(num_nodes=3)], [], size(devices=1), 25),
        ([sharing(num_nodes=6)], [], size(devices=16, nodes=2), 4),
        # What runs is supplied already.
        ([sharing()], [RUNS] * 4, size(devices=2), 1),
        # Smaller trials fill what a large one that waits leaves free.
        (
            [sharing(num_nodes=16)],
            [size(devices=72, nodes=9, is_waiting=False), size(devices=72, nodes=9)],
            size(),
            7,
        ),
        # A worker that drains is not supplied.
        ([sharing(num_nodes=4, state="draining")], [], size(), 1),
        # Trials too large for every worker supply nobody, and no more than a few of them wait.
        ([live()], [size(devices=16, nodes=2)] * 3, size(), 2),
        ([live()], [], size(devices=16, nodes=2), MAX_TOO_LARGE + 2),
        # No more than some wait at all.
        ([sharing(num_nodes=1024)], [], size(devices=2), MAX_WAITING),
        ([sharing(num_nodes=1024)], [RUNS] * 100, size(devices=2), MAX_WAITING),
    ],
)
def test_a_campaign_asks_for_as_many_trials_as_fill_its_workers(
    workers: list[WorkerRecord], open_trials: list[TrialSize], trial: TrialSize, asked: int
) -> None:
    supply = OpenTrialTarget(workers, open_trials)
    num_asked = 0
    while supply.is_short:
        supply.add(trial)
        num_asked += 1
    assert num_asked == asked


def test_one_trial_waits_beyond_what_the_workers_run(store: Store) -> None:
    campaign = submit(store, make_spec(budget={"trials": 20}))
    workers = [FakeWorker(store, name=f"w{i}") for i in range(3)]
    driver = Driver(store)
    driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 4
    for worker in workers:
        take_leases(store, worker.id, 1)
    driver.step()
    assert store.campaigns.count_trials(campaign.id)["PENDING"] == 1


def test_a_round_asks_for_a_few_trials_only(store: Store) -> None:
    degrees = {"tp": [1, 2, 4], "pp": [1, 2, 4], "micro_batch_size": [1, 2, 4]}
    space = {"global_batch_size": 64, "recompute": ["none", "full"], **degrees}
    campaign = submit(store, make_spec(space=space, budget={"trials": 100}))
    make_worker(store, num_nodes=64, shares_nodes=True)
    driver = Driver(store)
    for number in (1, 2):
        driver.step()
        assert len(store.trials.find(campaign.id)) == number * MAX_A_ROUND


def test_trials_too_large_for_every_worker_do_not_keep_the_smaller_ones_from_being_tried(
    store: Store,
) -> None:
    """Most of the legal layouts need two nodes; the worker has one."""
    spec = make_spec().to_mapping()
    spec["cluster"]["num_nodes"] = 2
    spec["space"]["num_nodes"] = [1, 2]
    spec["budget"] = {"trials": 60}
    campaign = DrivenCampaign(store, CampaignSpec.from_mapping(spec))
    campaign.until(lambda: store.workers.count_too_large(campaign.id) > 2)
    campaign.until_completed(campaign.count() + 2)
    assert campaign.record.state == "RUNNING"
    assert store.workers.count_too_large(campaign.id) <= MAX_TOO_LARGE + 2
