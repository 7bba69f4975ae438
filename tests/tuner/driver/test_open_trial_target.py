"""A campaign keeps as many trials open as fill the live workers, and one more."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

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


RUNS = size(devices=2, is_waiting=False)


@pytest.mark.parametrize(
    ("workers", "open_trials", "trial", "asked"),
    [
        # Without a worker one trial waits.
        ([], [], size(), 1),
        # A node that is not shared holds one trial, and one more waits.
        ([make_worker()], [], size(devices=1), 2),
        ([make_worker(), make_worker()], [], size(devices=2), 3),
        ([make_worker(num_nodes=4)], [], size(devices=2), 5),
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
        ([make_worker()], [size(devices=16, nodes=2)] * 3, size(), 2),
        ([make_worker()], [], size(devices=16, nodes=2), MAX_TOO_LARGE + 2),
        # No more than some wait at all.
        ([sharing(num_nodes=1024)], [], size(devices=2), MAX_WAITING),
        ([sharing(num_nodes=1024)], [RUNS] * 100, size(devices=2), MAX_WAITING),
    ],
)
def test_so_many_trials_are_asked_for_until_there_are_enough(
    workers: list[WorkerRecord], open_trials: list[TrialSize], trial: TrialSize, asked: int
) -> None:
    supply = OpenTrialTarget(workers, open_trials)
    num_asked = 0
    while supply.is_short:
        supply.add(trial)
        num_asked += 1
    assert num_asked == asked
