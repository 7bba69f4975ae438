"""How many trials a campaign asks for, its budgets, and the words in which it ends."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from results_db.records import CampaignRecord, TrialRecord, TrialSize, WorkerRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.campaigns.campaign_settings import Budget
from tests.kit.store import TurnableClock, make_worker, take_leases
from tests.results_db.intercepted_store import InterceptedStore
from tests.tuner.factories import (
    DrivenCampaign,
    FakeWorker,
    drive_until,
    ended,
    ended_trial,
    make_spec,
    submit,
)
from tuner.driver.campaign_end import Spent, closing_message, time_is_up, trials_left
from tuner.driver.driver import MAX_A_ROUND, Driver
from tuner.driver.open_trial_target import MAX_TOO_LARGE, MAX_WAITING, OpenTrialTarget


def make_spent(*, trials: int = 0, node_seconds: float = 0.0, wall_time_s: float = 0.0) -> Spent:
    return Spent(trials=trials, node_seconds=node_seconds, wall_time_s=wall_time_s)


DONE, CANCELLED, PART = (
    ended_trial("COMPLETED"),
    ended_trial("CANCELLED", "cancelled"),
    ended_trial("COMPLETED", is_cheap=True),
)
NO_MEMORY, CRASHED, LATE, CRASHED_PART = (
    ended_trial("INFEASIBLE", "out_of_memory"),
    ended_trial("FAILED", "crashed"),
    ended_trial("FAILED", "timeout"),
    ended_trial("FAILED", "crashed", is_cheap=True),
)
NO_FULL_ONE = "; no layout was measured in full, so there is no winner"


@pytest.mark.parametrize(
    ("budget", "spent", "left", "said"),
    [
        (Budget(trials=3), make_spent(), 3, None),
        (Budget(trials=3), make_spent(trials=2), 1, None),
        (Budget(trials=3), make_spent(trials=3), 0, None),
        (Budget(trials=3), make_spent(trials=4), 0, None),
        (Budget(trials=1), make_spent(node_seconds=1e9, wall_time_s=1e9), 1, None),
        (Budget(wall_time_s=90.0), make_spent(trials=1000, wall_time_s=89.9), None, None),
        (Budget(wall_time_s=90.0), make_spent(wall_time_s=90.0), None, "90 of 90 s of wall time"),
        (Budget(node_hours=2.0), make_spent(node_seconds=7199.0), None, None),
        (Budget(node_hours=2.0), make_spent(node_seconds=7560.0), None, "2.1 of 2 node-hours"),
        (Budget(node_hours=1.0, wall_time_s=90.0), make_spent(wall_time_s=99.0), None, "99 of 90"),
        (
            Budget(node_hours=1.0, wall_time_s=90.0),
            make_spent(node_seconds=3600.0),
            None,
            "1 of 1 node-hours",
        ),
    ],
)
def test_a_budget_is_spent_at_the_first_of_its_bounds(
    budget: Budget, spent: Spent, left: int | None, said: str | None
) -> None:
    assert trials_left(budget, spent) == left
    words = time_is_up(budget, spent)
    assert words is None if said is None else words is not None and words.startswith(said)


@pytest.mark.parametrize(
    ("trials", "words"),
    [
        ([DONE] * 12, " (12 completed)"),
        (
            [DONE] * 2 + [NO_MEMORY] * 3 + [CRASHED, CANCELLED],
            " (1 cancelled, 2 completed, 1 failed, 3 infeasible)",
        ),
        (
            [NO_MEMORY] * 3 + [CRASHED] + [CANCELLED] * 5,
            "; no trial completed; most common reason: out_of_memory (3 of 4)",
        ),
        ([CANCELLED] * 2, "; no trial was run"),
        ([], "; no trial was run"),
        (
            [PART, CRASHED_PART],
            f" (1 completed, 1 failed){NO_FULL_ONE}: clone the campaign with a larger budget",
        ),
        ([PART, DONE], " (2 completed)"),
        # Where every full probe failed, a larger budget would not help.
        (
            [PART, *[CRASHED_PART] * 3, LATE, LATE, CANCELLED],
            f" (1 cancelled, 1 completed, 5 failed){NO_FULL_ONE}; most common reason: timeout "
            "(2 of 2)",
        ),
    ],
)
def test_the_closing_message_says_what_came_of_the_trials(
    trials: list[TrialRecord], words: str
) -> None:
    assert closing_message("done", trials) == f"done{words}"


def test_a_lowered_budget_ends_the_campaign_once_what_waits_is_done(store: Store) -> None:
    campaign = DrivenCampaign(store, make_spec(budget={"trials": 20}))
    campaign.until_completed(2)
    store.campaigns.update(campaign.id, budget={"trials": 1})
    before = len(campaign.trials)
    record = campaign.to_end()
    assert (record.state, record.reason) == ("COMPLETED", "budget")
    assert len(campaign.trials) == before


class RaisedWhileEnding(InterceptedStore):
    """A store whose user raises the budget just before the driver writes that it is spent."""

    def __init__(self, store: Store, campaign: CampaignRecord) -> None:
        super().__init__(store, self._raise_in_time)
        self._campaign = campaign
        self.raised = False

    def _raise_in_time(self, call: str) -> None:
        if call in ("campaigns.end", "campaigns.cancel_pending") and not self.raised:
            self.raised = True
            self._store.campaigns.update(
                self._campaign.id, budget={"trials": 4, "wall_time_s": 1000.0}
            )


@pytest.mark.parametrize("bound", [{"trials": 2}, {"wall_time_s": 10.0, "trials": 3}])
def test_a_budget_raised_in_the_very_round_that_ends_the_campaign_is_not_lost(
    store: Store, clock: TurnableClock, bound: dict[str, float]
) -> None:
    campaign = submit(store, make_spec(budget=bound))
    between = RaisedWhileEnding(store, campaign)
    driver, worker = Driver(between), FakeWorker(store)  # type: ignore[arg-type]
    driver.step()
    if "wall_time_s" in bound:
        clock.forward(12.0)
    drive_until(lambda: ended(store, campaign), driver.step, worker)
    assert between.raised
    assert store.campaigns.get(campaign.id).message == "4 of 4 trials done (4 completed)"


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
