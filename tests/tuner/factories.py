"""Campaigns and workers for the tests of the driver, against the real store."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.results_db.records import CampaignRecord, LeaseRecord, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.tuner.driver.driver import Driver
from tests.kit.campaigns import spec_of
from tests.kit.store import completed, make_worker, post_outcome, take_leases
from tests.kit.waiting import wait_until

MAX_ROUNDS = 2_000


def make_spec(name: str = "first", **changes: Any) -> CampaignSpec:
    """28 legal layouts on one node of 8 devices."""
    cluster = {"name": "local-cpu", "device": "CPU core", "num_nodes": 1, "devices_per_node": 8}
    space = {"global_batch_size": 16, "tp": [1, 2, 4], "pp": [1, 2, 4], "micro_batch_size": [1, 2]}
    usual = {
        "cluster": {**cluster, "device_memory_bytes": 4 << 30},
        "space": {**space, "zero_stage": [0, 1]},
        "strategy": "random",
        "budget": {"trials": 6},
        "stop": {"remeasure": 0},
    }
    return spec_of(name=name, **usual | changes)


def submit(store: Store, spec: CampaignSpec) -> CampaignRecord:
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=len(spec.legal_set()))


def measured(layout: Layout) -> Outcome:
    """Every layout runs; the more tensor parallel, the slower."""
    return completed(layout, tokens_per_s=1000.0 * layout.num_devices / (layout.tp + layout.pp))


class FakeWorker:
    """Leases from the store and posts what `judge` says of the layout.

    A cheap probe trains as many tokens a second of fewer layers, and of fewer iterations.
    """

    def __init__(
        self,
        store: Store,
        judge: Callable[[Layout], Outcome] = measured,
        *,
        name: str = "w1",
        nodes: int = 1,
    ) -> None:
        self.store = store
        self.judge = judge
        self.id = make_worker(store, name, num_nodes=nodes).id

    def run_one(self) -> bool:
        # As the service does: a look first, that does not queue for the lock of the writers.
        leases = take_leases(self.store, self.id, 1)
        for lease in leases:
            outcome = self.judge(lease.layout)
            if lease.num_layers is not None and outcome.measurement is not None:
                outcome = of_part(lease, outcome.measurement.tokens_per_s)
            post_outcome(self.store, lease.trial_id, lease.attempt, outcome)
        return bool(leases)


def of_part(lease: LeaseRecord, tokens_per_s: float) -> Outcome:
    """The outcome of a cheap probe."""
    spec = lease.stored.spec
    request = spec.probe_request(lease.layout, num_layers=lease.num_layers)
    return completed(
        lease.layout, model=request.model, timed=request.iterations, tokens_per_s=tokens_per_s
    )


def ended(store: Store, campaign: CampaignRecord) -> bool:
    return store.campaigns.get(campaign.id).ended_at is not None


def drive_until(
    condition: Callable[[], bool], step: Callable[[], object], *workers: FakeWorker
) -> None:
    """Turns of the driver and of the workers, until the condition holds."""
    for _ in range(MAX_ROUNDS):
        if condition():
            return
        step()
        for worker in workers:
            worker.run_one()
    raise AssertionError(f"the condition did not hold within {MAX_ROUNDS} rounds")


def wait_for(condition: Callable[[], bool], act: Callable[[], object] = lambda: None) -> None:
    """Waits for what a driver in another process does, and acts meanwhile."""

    def holds() -> bool:
        if condition():
            return True
        act()
        return False

    wait_until("the condition holds", holds)


class DrivenCampaign:
    """A campaign with a driver, and with a worker that answers at once.

    A driver dies before a turn with the probability `mortality`, and another takes its place.
    """

    def __init__(
        self,
        store: Store,
        spec: CampaignSpec,
        judge: Callable[[Layout], Outcome] = measured,
        *,
        mortality: float = 0.0,
        dice_seed: int = 1,
    ) -> None:
        self.store = store
        self.id = submit(store, spec).id
        self.drivers = [Driver(store)]
        self.workers = [FakeWorker(store, judge)]
        self._mortality = mortality
        self._dice = random.Random(dice_seed)

    @property
    def driver(self) -> Driver:
        return self.drivers[-1]

    @property
    def worker(self) -> FakeWorker:
        return self.workers[0]

    @property
    def record(self) -> CampaignRecord:
        return self.store.campaigns.get(self.id)

    @property
    def trials(self) -> list[TrialRecord]:
        return self.store.trials.find(self.id)

    @property
    def repeats(self) -> list[TrialRecord]:
        return [trial for trial in self.trials if trial.repeat_of is not None]

    def count(self, state: str = "COMPLETED") -> int:
        return self.store.campaigns.count_trials(self.id)[state]

    def step(self) -> None:
        if self._dice.random() < self._mortality:
            self.drivers.append(Driver(self.store))
        self.driver.step()

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.step()
            self.worker.run_one()

    def until(self, condition: Callable[[], bool]) -> None:
        drive_until(condition, self.step, *self.workers)

    def until_completed(self, number: int) -> None:
        self.until(lambda: self.count() >= number)

    def to_end(self) -> CampaignRecord:
        self.until(lambda: self.record.ended_at is not None)
        return self.record


def run_campaign(
    store: Store, spec: CampaignSpec, judge: Callable[[Layout], Outcome] = measured
) -> CampaignRecord:
    """The campaign as it ended."""
    return DrivenCampaign(store, spec, judge).to_end()


def layouts_of(trials: list[TrialRecord]) -> list[Layout]:
    return [trial.layout for trial in trials]
