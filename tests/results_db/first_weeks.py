"""The database of a group's first weeks: campaigns, trials and attempts in every state."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import AllocationBody, BeatBody, NodeBody
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.service_tables import PastUse, QuotaRow
from layout_tuner.results_db.records import LeaseRecord, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.kit.api import CAMPAIGN, CLUSTER
from tests.kit.store import (
    TimelyStore,
    TurnableClock,
    completed,
    failed,
    make_worker,
    post_outcome,
    send_beats,
    take_leases,
)
from tests.results_db.campaigns.test_analyses import make_analysis
from tests.results_db.campaigns.test_imported_tables import make_import, varied_rows
from tests.results_db.next_version import THIS

DEVICES: Final = CLUSTER["devices_per_node"]

DOCUMENT: Final[dict[str, Any]] = {
    **CAMPAIGN,
    "name": "pilot",
    "cluster": {**CLUSTER, "name": "box", "num_nodes": 2},
    "seed": 7,
    "budget": {"trials": 40},
    "probe": {"warmup": 2, "iterations": 10},
    "space": {
        "global_batch_size": 16,
        "tp": [1, 2],
        "pp": [1, 2],
        "dp": [1, 2, 4],
        "micro_batch_size": [1, 2, 4],
        "precision": "fp32",
    },
}

CAMPAIGNS: Final = {
    "pilot": "COMPLETED",
    "given-up": "CANCELLED",
    "on-hold": "PAUSED",
    "at-work": "RUNNING",
    "off": "COMPLETED",
    "two-goals": "RUNNING",
    "theirs": "COMPLETED",
}
"""The campaigns that it holds, by name, with their states."""


def write_first_weeks(path: Path) -> str:
    """Writes the database, a SQLite of this version's schema; returns its URL."""
    path.write_bytes(_content())
    return f"sqlite:///{path}"


@functools.cache
def _content() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.sqlite3"
        # Of this version, even where a test has become the next one.
        migrate.upgrade(f"sqlite:///{path}", THIS)
        clock = TurnableClock()
        with closing(TimelyStore(f"sqlite:///{path}", clock=clock)) as store:
            _Writer(store, clock).write()
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        return path.read_bytes()


class _Writer:
    """Writes the rows through the store, as a service, a driver and workers do."""

    def __init__(self, store: Store, clock: TurnableClock) -> None:
        self.store, self.clock = store, clock
        self.worker = make_worker(store, cluster="box", num_nodes=2, devices_per_node=DEVICES)

    def write(self) -> None:
        self.compared()
        self.analysed()
        self.imported()
        self.allocated()
        self.shared()
        self.ended()
        self.stopped()
        self.running()

    def campaign(self, name: str, **changes: Any) -> tuple[int, list[Layout]]:
        spec = CampaignSpec.from_mapping({**DOCUMENT, "name": name, **changes})
        legal = spec.legal_set()
        layouts = [legal.layout(place) for place in range(len(legal))]
        self.clock.forward(60)
        created = self.store.campaigns.create(spec.to_mapping(), num_legal_layouts=len(legal))
        return created.id, layouts

    def lease(self) -> LeaseRecord:
        self.clock.forward(1)
        (lease,) = take_leases(self.store, self.worker.id, 1)
        return lease

    def probe(self, campaign: int, layout: Layout, outcome: Outcome) -> TrialRecord:
        return self.run(self.store.trials.add(campaign, layout), outcome)

    def run(self, trial: TrialRecord, outcome: Outcome) -> TrialRecord:
        lease = self.lease()
        assert lease.trial_id == trial.id
        self.clock.forward(outcome.duration_s)
        assert post_outcome(self.store, trial.id, lease.attempt, outcome).accepted
        return trial

    def ended(self) -> None:
        """A campaign that came to its end, with a repeat, failures and a lost attempt."""
        campaign, layouts = self.campaign("pilot")
        for place, layout in enumerate(layouts[:8]):
            rate = 1000.0 + 70 * ((place * 5) % 8)
            first = self.probe(campaign, layout, completed(layout, tokens_per_s=rate))
        again = self.store.trials.repeat(first.id)
        self.run(again, completed(layouts[7], tokens_per_s=1111.0))
        self.probe(campaign, layouts[8], failed("out_of_memory"))
        self.probe(campaign, layouts[9], failed("crashed"))
        self.store.trials.add(campaign, layouts[10])
        self.lease()
        self.clock.forward(100)
        self.store.leases.expire()
        lease = self.lease()
        self.clock.forward(3)
        post_outcome(self.store, lease.trial_id, lease.attempt, completed(layouts[10]))
        self.store.campaigns.end(campaign, "COMPLETED", "budget", "40 of 40 trials done")

    def stopped(self) -> None:
        """One that a user cancelled while a probe ran, and one that is paused."""
        campaign, layouts = self.campaign("given-up")
        self.store.trials.add(campaign, layouts[0])
        self.store.trials.add(campaign, layouts[1])
        lease = self.lease()
        self.store.campaigns.cancel(campaign)
        post_outcome(self.store, lease.trial_id, lease.attempt, failed("cancelled"))
        campaign, layouts = self.campaign("on-hold")
        self.probe(campaign, layouts[3], completed(layouts[3]))
        self.store.trials.add(campaign, layouts[4])
        self.store.campaigns.pause(campaign)

    def running(self) -> None:
        """One in the middle: measured, running and waiting."""
        campaign, layouts = self.campaign("at-work", seed=8)
        for place, layout in enumerate(layouts[:4]):
            self.probe(campaign, layout, completed(layout, tokens_per_s=900.0 + 11 * place))
        self.store.trials.add(campaign, layouts[5])
        lease = self.lease()
        beat = BeatBody(
            trial_id=lease.trial_id,
            attempt=lease.attempt,
            iterations_done=2,
            phase="iterating",
            held_s=4.0,
            nodes_held=0.5,
        )
        send_beats(self.store, self.worker.id, [beat])
        self.store.trials.add(campaign, layouts[6])

    def compared(self) -> None:
        """One whose second layout has losses that are off the others'."""
        campaign, layouts = self.campaign("off")
        for place in range(3):
            off = 3.0 if place == 1 else 0.0
            self.probe(campaign, layouts[place], completed(layouts[place], loss_off=off))
        self.store.campaigns.end(campaign, "COMPLETED", "exhausted", "all 3 layouts were tried")

    def analysed(self) -> None:
        """One of two objectives with a constraint, a shortened probe and an analysis."""
        campaign, layouts = self.campaign(
            "two-goals",
            constraints={"memory_headroom": 0.1},
            objective=["tokens_per_s", "tokens_per_node_hour"],
        )
        trial = self.probe(campaign, layouts[0], completed(layouts[0]))
        self.probe(campaign, layouts[1], completed(layouts[1], shortened=True))
        self.store.reports.keep_analysis(campaign, make_analysis(trial.id))

    def imported(self) -> None:
        """A table that was imported."""
        self.store.imports.add([make_import("theirs", *varied_rows())])

    def shared(self) -> None:
        """Owners in a group, one by a claim; what they may use, and what they have used."""
        self.store.access.create_token("ann-laptop", "submitter", owner="ann")
        self.store.owners.put_group("lab", weight=2.0, members=["ann", "bob"], known_members=False)
        self.store.owners.note_claimed_groups("cid", ["lab", "site"])
        of = {"kind": "group", "name": "lab", "period": "month"}
        with self.store._db.write() as session:
            session.add(QuotaRow(**of, node_hours=10.5, beyond="wait"))
            session.add(
                PastUse(
                    campaign_id=10**6,
                    day="2026-01-02",
                    owner="ann",
                    group="lab",
                    visibility="group",
                    name="gone",
                    cluster="box",
                    trainer="embedded",
                    probes=0.1 + 0.2,
                )
            )

    def allocated(self) -> None:
        """An allocation with nodes: one of them in quarantine, one released again."""
        nodes = [NodeBody(name=f"n{number}", num_devices=DEVICES) for number in range(3)]
        facts = AllocationBody(scheduler="slurm", job_id="77", launcher="srun", ends_in_s=7200.0)
        size = {"num_nodes": 3, "devices_per_node": DEVICES}
        make_worker(self.store, "job-77", cluster="box", allocation=facts, nodes=nodes, **size)
        self.store.allocations.quarantine_node("box", "n1", "its memory is not free")
        self.store.allocations.quarantine_node("box", "n2", "slow")
        self.store.allocations.release_node("box", "n2")
