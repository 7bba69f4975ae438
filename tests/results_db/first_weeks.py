"""Writes a database with the code that a revision of the schema was released with.

Run once a revision, with that revision's sources first on the path:

    git worktree add /tmp/then COMMIT
    PYTHONPATH=/tmp/then python tests/results_db/released/write.py 0004 > tests/results_db/released/0004.sql

Every store call below is made by the code of then; what it could not do yet is left out. The third
revision was never the newest of any commit: its database is written by the code of the second, brought
to the third, and given an analysis in SQL (`--to 0003`).
"""

from __future__ import annotations

import argparse
import inspect
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Any

from results_db import migrate
from results_db.data_dir import DataDir
from results_db.store import Store
from search_spaces.campaign import CampaignSpec
from tests.results_db.factories import TurnableClock, completed, failed, make_worker

DEVICES = 4

DOCUMENT: dict[str, Any] = {
    "name": "pilot",
    "model": "tiny",
    "cluster": {
        "name": "box",
        "device": "CPU core",
        "num_nodes": 2,
        "devices_per_node": DEVICES,
        "device_memory_bytes": 8 << 30,
    },
    "objective": "tokens_per_s",
    "strategy": "random",
    "seed": 7,
    "budget": {"trials": 40},
    "probe": {"warmup": 2, "iterations": 3},
    "space": {
        "global_batch_size": 16,
        "tp": [1, 2],
        "pp": [1, 2],
        "dp": [1, 2, 4],
        "micro_batch_size": [1, 2, 4],
        "precision": "fp32",
    },
}


class Writer:
    """A group's first weeks: campaigns in every state, trials in every state, attempts of every end."""

    def __init__(self, store: Store, clock: TurnableClock) -> None:
        self.store, self.clock = store, clock
        self.worker = make_worker(store, cluster="box", num_nodes=2, devices_per_node=DEVICES)

    def campaign(self, name: str, **changes: Any) -> tuple[int, list[Any]]:
        spec = CampaignSpec.from_mapping({**DOCUMENT, "name": name, **changes})
        legal = spec.legal_set()
        layouts = [legal.layout(place) for place in range(len(legal))]
        self.clock.forward(60)
        created = self.store.create_campaign(spec.to_mapping(), num_legal_layouts=len(legal))
        return created.id, layouts

    def lease(self) -> Any:
        self.clock.forward(1)
        (lease,) = self.store.lease(self.worker.id, 1)
        return lease

    def probe(self, campaign: int, layout: Any, outcome: Any) -> Any:
        trial = self.store.add_trial(campaign, layout)
        return self.run(trial, outcome)

    def run(self, trial: Any, outcome: Any) -> Any:
        lease = self.lease()
        assert lease.trial_id == trial.id
        self.clock.forward(outcome.duration_s)
        receipt = self.store.post_outcome(trial.id, lease.attempt, outcome)
        assert receipt.accepted
        return trial

    def write(self) -> None:
        self.store.heartbeat_driver()
        self.ended()
        self.stopped()
        self.running()
        self.store.heartbeat_driver()

    def ended(self) -> None:
        """A campaign that came to its end, with a repeat, failures and a lost attempt."""
        campaign, layouts = self.campaign("pilot")
        for place, layout in enumerate(layouts[:8]):
            rate = 1000.0 + 70 * ((place * 5) % 8)
            first = self.probe(campaign, layout, completed(layout, tokens_per_s=rate))
        again = self.store.repeat_trial(first.id)
        self.run(again, completed(layouts[7], tokens_per_s=1111.0))
        self.probe(campaign, layouts[8], failed("out_of_memory"))
        self.probe(campaign, layouts[9], failed("crashed"))
        self.store.add_trial(campaign, layouts[10])
        self.lease()
        self.clock.forward(100)
        self.store.expire_leases()
        lease = self.lease()
        self.clock.forward(3)
        self.store.post_outcome(lease.trial_id, lease.attempt, completed(layouts[10]))
        self.store.end_campaign(campaign, "COMPLETED", "budget", "40 of 40 trials done")

    def stopped(self) -> None:
        """One that a user cancelled while a probe ran, and one that is paused."""
        campaign, layouts = self.campaign("given-up")
        self.store.add_trial(campaign, layouts[0])
        self.store.add_trial(campaign, layouts[1])
        lease = self.lease()
        self.store.cancel_campaign(campaign)
        self.store.post_outcome(lease.trial_id, lease.attempt, failed("cancelled"))
        campaign, layouts = self.campaign("on-hold")
        self.probe(campaign, layouts[3], completed(layouts[3]))
        self.store.add_trial(campaign, layouts[4])
        self.store.pause_campaign(campaign)

    def running(self) -> None:
        """One in the middle: measured, running, waiting, and one that is to be stopped."""
        campaign, layouts = self.campaign("at-work", seed=8)
        for place, layout in enumerate(layouts[:4]):
            self.probe(campaign, layout, completed(layout, tokens_per_s=900.0 + 11 * place))
        self.store.add_trial(campaign, layouts[5])
        lease = self.lease()
        beat = _beat(lease)
        self.store.heartbeat(self.worker.id, [beat])
        self.store.add_trial(campaign, layouts[6])


def _beat(lease: Any) -> Any:
    from results_db.records import TrialBeat

    known = inspect.signature(TrialBeat).parameters
    said = {"phase": "iterating", "held_s": 4.0, "nodes_held": 0.5}
    more = {name: value for name, value in said.items() if name in known}
    return TrialBeat(trial_id=lease.trial_id, attempt=lease.attempt, iterations_done=2, **more)


def _second(writer: Writer) -> None:
    """Since the second: losses that are off, and where the time of a step went (every measurement)."""
    from dataclasses import replace

    campaign, layouts = writer.campaign("off")
    for place in range(3):
        outcome = completed(layouts[place])
        if place == 1:
            measured = outcome.measurement
            assert measured is not None
            wild = tuple(replace(each, loss=each.loss + 3) for each in measured.iterations)
            outcome = replace(outcome, measurement=replace(measured, iterations=wild))
        writer.probe(campaign, layouts[place], outcome)
    writer.store.end_campaign(campaign, "COMPLETED", "exhausted", "all 3 legal layouts were tried")


def _fourth(writer: Writer) -> None:
    """Since the third and fourth: a shortened probe, an analysis, constraints, an imported table."""
    from dataclasses import replace

    from tests.results_db.test_analyses import make_analysis
    from tests.results_db.test_imports import make_import, varied_rows

    changes = {
        "constraints": {"memory_headroom": 0.1},
        "objective": ["tokens_per_s", "tokens_per_node_hour"],
    }
    campaign, layouts = writer.campaign("two-goals", **changes)
    trial = writer.probe(campaign, layouts[0], completed(layouts[0]))
    outcome = completed(layouts[1])
    assert outcome.measurement is not None
    short = replace(outcome.measurement, shortened=True, iterations_asked=9)
    writer.probe(campaign, layouts[1], replace(outcome, measurement=short))
    writer.store.keep_analysis(campaign, make_analysis(trial.id))
    writer.store.import_campaigns([make_import("theirs", *varied_rows())])


def _fifth(writer: Writer) -> None:
    """Since the fifth: an allocation with nodes, one of them in quarantine, one released again."""
    from results_db.allocation_records import AllocationFacts, NodeFacts

    nodes = [NodeFacts(name=f"n{number}", num_devices=DEVICES) for number in range(3)]
    facts = AllocationFacts(scheduler="slurm", job_id="77", launcher="srun", ends_in_s=7200.0)
    writer.store.register_worker(
        name="job-77",
        host="login",
        cluster="box",
        num_nodes=3,
        devices_per_node=DEVICES,
        device="CPU core",
        versions={"python": "3.11"},
        allocation=facts,
        nodes=nodes,
    )
    writer.store.quarantine_node("box", "n1", "its memory is not free")
    writer.store.quarantine_node("box", "n2", "slow")
    writer.store.release_node("box", "n2")


THIRD_ROWS = (
    "UPDATE measurements SET shortened = 1, iterations_asked = 9 WHERE trial_id = 2",
    """INSERT INTO analyses VALUES (1, 1, 'tokens_per_s', 9, 11, 'fANOVA',
       '2026-01-01 13:00:00.000000')""",
    "INSERT INTO knob_importances VALUES (1, 'tp', 0.75), (1, 'pp', 0.25)",
    """INSERT INTO knob_steps VALUES (1, 'tp', 'up', '1', '2', 'dp', 'key', 'measured', 'completed',
       -0.25, 1, 2), (1, 'pp', 'up', '1', '2', '', 'key', 'predicted', 'failed', NULL, NULL, NULL)""",
)


def main() -> None:
    """Prints the database as SQL."""
    parser = argparse.ArgumentParser()
    parser.add_argument("revision", choices=["0001", "0002", "0003", "0004", "0005"])
    revision = parser.parse_args().revision
    with tempfile.TemporaryDirectory() as folder:
        data, clock = DataDir(Path(folder)), TurnableClock()
        if revision == "0003":
            # In a process of its own the code of then wrote the second; here the third is made of it.
            path = Path(folder) / "results.sqlite3"
            with sqlite3.connect(path) as connection:
                connection.executescript(Path(__file__).with_name("0002.sql").read_text())
            connection.close()
            migrate.upgrade(data.database_url, "0003")
            with sqlite3.connect(path) as connection:
                for row in THIRD_ROWS:
                    connection.execute(row)
            connection.close()
        else:
            store = Store.open(data, clock=clock)
            writer = Writer(store, clock)
            for since, write in (("0002", _second), ("0004", _fourth), ("0005", _fifth)):
                if revision >= since:
                    write(writer)
            writer.write()
            store.close()
        with sqlite3.connect(Path(folder) / "results.sqlite3") as connection:
            found = connection.execute("SELECT version_num FROM alembic_version").fetchone()
            assert found == (revision,), f"the sources on the path write {found}"
            sys.stdout.writelines(f"{line}\n" for line in connection.iterdump())
        connection.close()


if __name__ == "__main__":
    main()
