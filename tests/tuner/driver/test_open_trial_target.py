"""A campaign keeps as many trials open as fill the live workers, and one more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from results_db.records import TrialSize, WorkerRecord
from tuner.driver.open_trial_target import MAX_TOO_LARGE, MAX_WAITING, OpenTrialTarget


def make_worker(**changes: Any) -> WorkerRecord:
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
    return make_worker(num_nodes=num_nodes, shares_nodes=True, **changes)


def size(devices: int = 8, nodes: int = 1, *, is_waiting: bool = True) -> TrialSize:
    return TrialSize(num_nodes=nodes, num_devices=devices, is_waiting=is_waiting)


def num_asked(supply: OpenTrialTarget, trial: TrialSize) -> int:
    """How many such trials are asked for until there are enough."""
    asked = 0
    while supply.is_short:
        supply.add(trial)
        asked += 1
    return asked


def test_without_a_worker_one_trial_waits() -> None:
    assert num_asked(OpenTrialTarget([], []), size()) == 1


def test_a_node_that_is_not_shared_holds_one_trial_and_one_more_waits() -> None:
    assert num_asked(OpenTrialTarget([make_worker()], []), size(devices=1)) == 2
    assert num_asked(OpenTrialTarget([make_worker(), make_worker()], []), size(devices=2)) == 3


def test_a_node_that_is_shared_is_filled_with_small_trials() -> None:
    assert num_asked(OpenTrialTarget([sharing()], []), size(devices=2)) == 5
    assert num_asked(OpenTrialTarget([sharing(num_nodes=3)], []), size(devices=1)) == 25


def test_trials_of_several_nodes_are_counted_by_their_nodes() -> None:
    assert num_asked(OpenTrialTarget([sharing(num_nodes=6)], []), size(devices=16, nodes=2)) == 4


def test_all_nodes_of_an_allocation_are_supplied() -> None:
    assert num_asked(OpenTrialTarget([make_worker(num_nodes=4)], []), size(devices=2)) == 5


def test_what_runs_is_supplied_already() -> None:
    running = [size(devices=2, is_waiting=False)] * 4
    assert num_asked(OpenTrialTarget([sharing()], running), size(devices=2)) == 1


def test_smaller_trials_fill_what_a_large_one_that_waits_leaves_free() -> None:
    open_trials = [size(devices=72, nodes=9, is_waiting=False), size(devices=72, nodes=9)]
    assert num_asked(OpenTrialTarget([sharing(num_nodes=16)], open_trials), size()) == 7


def test_a_worker_that_drains_is_not_supplied() -> None:
    assert num_asked(OpenTrialTarget([sharing(num_nodes=4, state="draining")], []), size()) == 1


def test_trials_too_large_for_every_worker_supply_nobody() -> None:
    too_large = [size(devices=16, nodes=2)] * 3
    assert num_asked(OpenTrialTarget([make_worker()], too_large), size()) == 2


def test_no_more_than_a_few_trials_wait_for_a_larger_worker() -> None:
    supply = OpenTrialTarget([make_worker()], [])
    assert num_asked(supply, size(devices=16, nodes=2)) == MAX_TOO_LARGE + 2


def test_no_more_than_some_trials_wait_at_all() -> None:
    assert num_asked(OpenTrialTarget([sharing(num_nodes=1024)], []), size(devices=2)) == MAX_WAITING
    running = [size(devices=2, is_waiting=False)] * 100
    assert (
        num_asked(OpenTrialTarget([sharing(num_nodes=1024)], running), size(devices=2))
        == MAX_WAITING
    )
