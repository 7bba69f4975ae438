"""Campaigns and workers for the tests of the driver, against the real store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from results_db.records import CampaignRecord, LeaseRecord, TrialRecord
from results_db.store import Store
from search_spaces.campaigns.campaign import CampaignSpec
from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from tests.kit.store import completed, failed, make_worker, post_outcome, take_leases

MAX_ROUNDS = 2_000


def make_spec(name: str = "first", **changes: Any) -> CampaignSpec:
    """28 legal layouts on one node of 8 devices."""
    return CampaignSpec.from_mapping(
        {
            "name": name,
            "model": "tiny",
            "cluster": {
                "name": "local-cpu",
                "device": "CPU core",
                "num_nodes": 1,
                "devices_per_node": 8,
                "device_memory_bytes": 4 << 30,
            },
            "space": {
                "global_batch_size": 16,
                "tp": [1, 2, 4],
                "pp": [1, 2, 4],
                "micro_batch_size": [1, 2],
                "zero_stage": [0, 1],
            },
            "strategy": "random",
            "budget": {"trials": 6},
            "stop": {"remeasure": 0},
            **changes,
        }
    )


def submit(store: Store, spec: CampaignSpec) -> CampaignRecord:
    return store.campaigns.create(spec.to_mapping(), num_legal_layouts=len(spec.legal_set()))


def measured(layout: Layout) -> Outcome:
    """Every layout runs; the more tensor parallel, the slower."""
    return completed(layout, tokens_per_s=1000.0 * layout.num_devices / (layout.tp + layout.pp))


def out_of_memory(_layout: Layout) -> Outcome:
    return failed("out_of_memory")


class FakeWorker:
    """Leases from the store and posts what `judge` says of the layout.

    A cheap probe trains as many tokens a second of fewer layers, and of fewer iterations.
    """

    def __init__(
        self, store: Store, judge: Callable[[Layout], Outcome] = measured, *, name: str = "w1"
    ) -> None:
        self.store = store
        self.judge = judge
        self.id = make_worker(store, name).id

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
    spec = CampaignSpec.from_mapping(lease.spec)
    request = spec.probe_request(lease.layout, num_layers=lease.num_layers)
    return completed(
        lease.layout, model=request.model, timed=request.iterations, tokens_per_s=tokens_per_s
    )


def ended(store: Store, campaign: CampaignRecord) -> bool:
    return store.campaigns.get(campaign.id).ended_at is not None


def drive_until(
    condition: Callable[[], bool],
    step: Callable[[], object],
    *workers: FakeWorker,
) -> None:
    """Turns of the driver and of the workers, until the condition holds."""
    for _ in range(MAX_ROUNDS):
        if condition():
            return
        step()
        for worker in workers:
            worker.run_one()
    raise AssertionError(f"the condition did not hold within {MAX_ROUNDS} rounds")


def layouts_of(trials: list[TrialRecord]) -> list[Layout]:
    return [trial.layout for trial in trials]
