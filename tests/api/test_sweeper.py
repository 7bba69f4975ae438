from pathlib import Path

import pytest

from api.sweeper import Sweeper
from results_db.data_dir import DataDir
from results_db.leases import LEASE_S
from results_db.store import Store
from search_spaces.layout import Layout
from tests.results_db.factories import TurnableClock, lease_one, make_campaign, make_worker


class Machine:
    """A store, a sweeper, and the clocks of both, turned together."""

    def __init__(self, path: Path) -> None:
        self.clock = TurnableClock()
        self.seconds = 0.0
        self.store = Store.open(DataDir(path), clock=self.clock)
        self.sweeper = self.start()

    def start(self) -> Sweeper:
        return Sweeper(self.store, lease_s=LEASE_S, interval_s=1.0, monotonic=lambda: self.seconds)

    def forward(self, seconds: float) -> None:
        self.clock.forward(seconds)
        self.seconds += seconds

    def sweep_for(self, seconds: int) -> None:
        for _ in range(seconds):
            self.forward(1)
            self.sweeper.sweep()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def lease_a_trial(machine: Machine) -> int:
    trial = machine.store.add_trial(make_campaign(machine.store), Layout())
    lease_one(machine.store, make_worker(machine.store).id)
    return trial.id


def test_a_lease_that_ran_out_is_taken_back(machine: Machine) -> None:
    machine.sweeper.sweep()
    trial = lease_a_trial(machine)
    machine.sweep_for(int(LEASE_S) - 1)
    assert machine.store.trial(trial).state == "RUNNING"
    machine.sweep_for(2)
    assert machine.store.trial(trial).state == "PENDING"


def test_a_service_that_was_down_gives_every_lease_its_time_again(machine: Machine) -> None:
    trial = lease_a_trial(machine)
    machine.forward(3600)
    machine.sweeper = machine.start()
    machine.sweeper.sweep()
    machine.sweep_for(int(LEASE_S) - 1)
    assert machine.store.trial(trial).state == "RUNNING"
    machine.sweep_for(2)
    assert machine.store.trial(trial).state == "PENDING"


def test_a_service_that_was_asleep_gives_every_lease_its_time_again(machine: Machine) -> None:
    machine.sweeper.sweep()
    trial = lease_a_trial(machine)
    machine.forward(60)
    machine.sweeper.sweep()
    machine.sweep_for(5)
    assert machine.store.trial(trial).state == "RUNNING"
