"""The background jobs of the service go on whatever fails, and leases survive pauses."""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from layout_tuner.api.process.background_jobs import Sweeper, in_background, prune, sweeping
from layout_tuner.protocol.worker_messages import BeatBody
from layout_tuner.results_db.allocations.leases import LEASE_S
from layout_tuner.results_db.errors import DatabaseUnavailableError
from layout_tuner.results_db.retention import Pruned, Retention
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import refused_line
from tests.kit.postgres import upgraded
from tests.kit.services import run_here
from tests.kit.store import TurnableClock, lease_one, make_campaign, make_worker, send_beats


class Machine:
    """A store and a sweeper, and the one clock of both.

    It is the wall clock, whatever a monotonic one does: work, sleep, suspend, a step.
    """

    def __init__(self, path: Path) -> None:
        self.clock = TurnableClock()
        self.store = Store.open(upgraded(path), clock=self.clock)
        self.sweeper = self.start()

    def start(self) -> Sweeper:
        return Sweeper(self.store, interval_s=1.0, clock=self.clock)

    def sweep_for(self, seconds: int) -> None:
        for _ in range(seconds):
            self.clock.forward(1)
            self.sweeper.sweep()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def lease_trials(machine: Machine, number: int) -> list[int]:
    """Several trials, leased by one worker and by another in turns."""
    campaign = make_campaign(machine.store)
    workers = [make_worker(machine.store, name).id for name in ("w1", "w2")]
    trials = [
        machine.store.trials.add(campaign, Layout(micro_batch_size=size)).id
        for size in range(1, number + 1)
    ]
    for place in range(number):
        lease_one(machine.store, workers[place % 2])
    return trials


PAUSES = {
    "none": (0, False),
    "the service was down": (3600, True),
    "the service was asleep": (60, False),
    "the machine was suspended, or its clock set forward": (3600, False),
}
"""Seconds for which nothing swept, and whether the service was started anew after them."""


@pytest.mark.parametrize("pause", PAUSES)
def test_a_lease_is_taken_back_when_it_ran_out_and_has_its_whole_time_after_a_pause(
    machine: Machine, pause: str
) -> None:
    pause_s, restarted = PAUSES[pause]
    machine.sweeper.sweep()
    (trial,) = lease_trials(machine, 1)
    machine.clock.forward(pause_s)
    if restarted:
        machine.sweeper = machine.start()
    machine.sweeper.sweep()
    machine.sweep_for(int(LEASE_S) - 1)
    assert machine.store.trials.get(trial).state == "RUNNING"
    machine.sweep_for(2)
    assert machine.store.trials.get(trial).state == "PENDING"


@pytest.mark.parametrize("jump_s", [3600.0, -3600.0])
def test_a_clock_that_jumps_costs_no_worker_its_trials(machine: Machine, jump_s: float) -> None:
    machine.sweeper.sweep()
    trials = lease_trials(machine, 6)
    machine.clock.forward(jump_s)
    machine.sweeper.sweep()
    machine.sweep_for(int(LEASE_S) - 1)
    states = [machine.store.trials.get(trial).state for trial in trials]
    assert states == ["RUNNING"] * 6
    first, second = machine.store.workers.find(live=False)
    for worker in (first, second):
        held = [t for t in trials if machine.store.trials.get(t).worker_id == worker.id]
        beats = [BeatBody(trial_id=t, attempt=1, iterations_done=2) for t in held]
        assert send_beats(machine.store, worker.id, beats).stop == ()
    machine.sweep_for(int(LEASE_S) - 1)
    assert all(machine.store.trials.get(trial).state == "RUNNING" for trial in trials)


def test_a_clock_that_was_set_back_does_not_keep_the_trials_of_a_worker_that_is_gone(
    machine: Machine,
) -> None:
    machine.sweeper.sweep()
    trials = lease_trials(machine, 4)
    machine.clock.forward(-3600)
    machine.sweep_for(1)
    assert machine.store.workers.find() == [], "neither has said anything since"
    machine.sweep_for(int(LEASE_S) + 2)
    assert [machine.store.trials.get(trial).state for trial in trials] == ["PENDING"] * 4


def test_a_failed_extension_of_leases_is_repeated(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.sweeper.sweep()
    (trial,) = lease_trials(machine, 1)
    machine.clock.forward(3600)

    def away(**_: object) -> None:
        raise DatabaseUnavailableError("the disk is away")

    with monkeypatch.context() as broken:
        broken.setattr(machine.store.leases, "extend", away)
        with pytest.raises(DatabaseUnavailableError):
            machine.sweeper.sweep()
    machine.sweep_for(5)
    assert machine.store.trials.get(trial).state == "RUNNING"


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.002)


@pytest.mark.parametrize(
    "error", [DatabaseUnavailableError("the disk is away"), ZeroDivisionError("a mistake of ours")]
)
def test_sweeping_and_pruning_go_on_after_whatever_went_wrong(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    sweeps: list[None] = []
    prunes: list[Retention] = []

    def expire() -> list[int]:
        sweeps.append(None)
        if len(sweeps) <= 2:
            raise error
        return []

    def prune_rows(retention: Retention) -> Pruned:
        prunes.append(retention)
        if len(prunes) <= 2:
            raise error
        return Pruned(events=3)

    async def run() -> None:
        retention = Retention(logs=3)
        async with sweeping(Sweeper(machine.store, interval_s=0.001)):
            await until(lambda: len(sweeps) > 3)
        async with in_background(prune(machine.store, retention, first_after_s=0, every_s=0.01)):
            await until(lambda: len(prunes) > 3)
        assert prunes[:3] == [retention] * 3

    monkeypatch.setattr(machine.store.leases, "expire", expire)
    monkeypatch.setattr(machine.store.retention, "prune", prune_rows)
    with caplog.at_level(logging.INFO):
        asyncio.run(run())
    for problem in ("no lease was taken back", "nothing was pruned"):
        assert caplog.text.count(f"{problem}: {error}") == 1
    assert "taking leases back works again after" in caplog.text


@pytest.mark.slow
def test_an_invalid_retention_keeps_the_service_from_starting(tmp_path: Path) -> None:
    refused = run_here("serve", "--data-dir", str(tmp_path / "data"), "--keep", "trials=3")
    assert refused_line(refused) == (
        "Error: 'trials=3' does not say what is kept: write KIND=DAYS, of logs, iterations, events, "
        "audit, requests, messages"
    )
    assert not (tmp_path / "data").exists()
