"""The product's worker with a launcher that makes outcomes up, at once; a journal says which.

Everything but the ranks is real: the lease protocol over HTTP, heartbeats, the spool, the packing.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.protocol.worker_messages import AllocationBody, WorkerCreate
from layout_tuner.workers.launchers.launcher_nodes import Cancelled, OnEvent
from layout_tuner.workers.packing.request import Placement
from layout_tuner.workers.service.lease_client import EncodedOutcome, LeaseClient
from layout_tuner.workers.worker.outcome_posting import Outbox
from layout_tuner.workers.worker.outcome_spool import Spool
from layout_tuner.workers.worker.scheduler import SchedulerOptions
from layout_tuner.workers.worker.worker import Drain, Worker
from tests.kit.fake_launcher import FakeLauncher
from tests.kit.store import completed, failed, make_iterations

DEVICES = 4
TAKES_S = (0.01, 0.1)
FAILURES = ("crashed", "out_of_memory", "node_lost")
FAIL_SHARE = 0.15


class Journal:
    """Lines that a kill of this process does not take back."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, **line: Any) -> None:
        os.write(self._file, json.dumps(line).encode() + b"\n")


def read_journal(path: Path) -> list[dict[str, Any]]:
    """Its lines, in order."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class JournalingClient(LeaseClient):
    """Writes down what the service said of each outcome."""

    def __init__(self, url: str, token: str, journal: Journal) -> None:
        super().__init__(url, token)
        self._journal = journal

    def post_outcome(self, outcome: EncodedOutcome) -> bool:
        accepted = super().post_outcome(outcome)
        posted = json.loads(outcome.body)["outcome"]
        measured = posted["measurement"]
        self._journal.write(
            what="receipt",
            trial=outcome.trial_id,
            attempt=outcome.attempt,
            rate=None if measured is None else measured["tokens_per_s"],
            reason=posted["reason"],
            accepted=accepted,
        )
        return accepted


class MadeUpProbes:
    """Makes up how probes end. Every rate is made once in the world."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._random = random.Random(os.urandom(16))

    def __call__(
        self, request: ProbeRequest, _shares: Placement, on_event: OnEvent, cancelled: Cancelled
    ) -> Outcome:
        on_event({"event": "listening"})
        began = time.monotonic()
        takes_s = self._random.uniform(*TAKES_S)
        while (held_s := time.monotonic() - began) < takes_s:
            if cancelled():
                return failed("cancelled", duration_s=held_s)
            time.sleep(0.005)
        if self._random.random() < FAIL_SHARE:
            return failed(self._random.choice(FAILURES), duration_s=held_s)
        share = self._random.uniform(0.5, 0.9)  # of the time, for its iterations
        step_time_s = share * held_s / (request.warmup + request.iterations)
        iterations = make_iterations(step_time_s, timed=request.iterations, warmup=request.warmup)
        outcome = completed(
            request.layout, model=request.model, iterations=iterations, duration_s=held_s
        )
        rate = outcome.measurement.tokens_per_s
        self._journal.write(what="made", rate=rate, layout=request.layout.key)
        for iteration in iterations:
            on_event({"event": "iteration", **asdict(iteration)})
        return outcome


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.e2e.fake_probe_worker")
    parser.add_argument("--url", required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--spool-dir", type=Path, required=True)
    parser.add_argument("--journal", type=Path, required=True)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    journal = Journal(arguments.journal)
    drain = Drain()
    drain.listen()
    token = arguments.token_file.read_text().strip()
    with (
        JournalingClient(arguments.url, token, journal) as client,
        Spool(arguments.spool_dir) as spool,
    ):
        Worker(
            client=client,
            identity=WorkerCreate(
                name=arguments.name,
                host="127.0.0.1",
                cluster="local-cpu",
                num_nodes=1,
                devices_per_node=DEVICES,
                device="CPU core",
                versions={},
                allocation=AllocationBody(launcher="fake", shares_nodes=True),
            ),
            start_launcher=lambda: FakeLauncher(placed=MadeUpProbes(journal), sizes=(DEVICES,)),
            outbox=Outbox(client, spool),
            drain=drain,
            options=SchedulerOptions(share_nodes=True, drain_s=5.0),
        ).run(patience_s=60.0)


if __name__ == "__main__":
    main()
