"""Workers that lease and report as fast as they are answered, over HTTP; probes take no time.

The process reads its task as JSON from stdin and writes its results as JSON to stdout. Each worker
has one connection for leases and outcomes, and one for heartbeats. Some outcomes are posted twice,
as by a worker that did not receive the answer.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from benchmarks.service.http_connection import HttpConnection
from benchmarks.service.made_outcome import completed_outcome

BEAT_S: Final = 2.0
"""Seconds between heartbeats, as the service asks for them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerOrders:
    """What the workers do."""

    services: list[tuple[str, int, str]]
    """Host, port and token of each api process; workers take them in turns."""
    cluster: str
    num_workers: int
    nodes: int
    """Of each worker's allocation."""
    devices_per_node: int
    max_trials: int
    """Leased at once."""
    duration_s: float
    """After which they lease no more; they end earlier where no trial is left."""
    twice_every: int = 50
    """One outcome in so many is posted twice."""
    beats: bool = True
    """Whether they send heartbeats."""


@dataclass(kw_only=True, slots=True)
class PostedWork:
    """What came of it; times are seconds of the machine's monotonic clock."""

    first_s: float = 0.0
    """When the first outcome was answered."""
    last_s: float = 0.0
    """When the last was."""
    posted: dict[int, float] = field(default_factory=dict)
    """By trial, the tokens_per_s that were posted and accepted."""
    refused: list[int] = field(default_factory=list)
    """Trials whose outcome was not accepted."""
    lease_s: list[float] = field(default_factory=list)
    """How long each lease took that found a trial."""
    outcome_s: list[float] = field(default_factory=list)
    beat_s: list[float] = field(default_factory=list)
    twice: int = 0
    cpu_s: float = 0.0
    """Of this process."""


class _Worker:
    def __init__(self, orders: WorkerOrders, posted_work: PostedWork, number: int) -> None:
        self._orders = orders
        self._posted_work = posted_work
        self._name = f"load-{number:03d}"
        self._service = orders.services[number % len(orders.services)]
        self._chance = random.Random(number)
        self._held: dict[int, int] = {}

    async def work(self, until_s: float) -> None:
        async with HttpConnection(*self._service) as http, HttpConnection(*self._service) as beats:
            self._id = (await http.post("/v1/workers", self._introduction()))["worker_id"]
            beating = asyncio.create_task(self._beat(beats))
            try:
                while time.monotonic() < until_s and (leases := await self._lease(http)):
                    for lease in leases:
                        await self._report(http, lease)
            finally:
                beating.cancel()

    def _introduction(self) -> bytes:
        nodes = [f"{self._name}-{node}" for node in range(self._orders.nodes)]
        return json.dumps(
            {
                "name": self._name,
                "host": nodes[0],
                "cluster": self._orders.cluster,
                "num_nodes": self._orders.nodes,
                "devices_per_node": self._orders.devices_per_node,
                "device": "MI250X GCD",
                "versions": {"torch": "2.7.0"},
                "nodes": [
                    {"name": node, "num_devices": self._orders.devices_per_node} for node in nodes
                ],
            }
        ).encode()

    async def _lease(self, http: HttpConnection) -> list[dict[str, Any]]:
        body = json.dumps({"max_trials": self._orders.max_trials, "wait_s": 2.0}).encode()
        started_s = time.monotonic()
        leases = (await http.post(f"/v1/workers/{self._id}/leases", body))["leases"]
        if leases:
            self._posted_work.lease_s.append(time.monotonic() - started_s)
        self._held |= {lease["trial_id"]: lease["attempt"] for lease in leases}
        return list(leases)

    async def _report(self, http: HttpConnection, lease: dict[str, Any]) -> None:
        trial_id, posted_work = lease["trial_id"], self._posted_work
        outcome = completed_outcome(lease["request"], self._chance)
        document = {"worker_id": self._id, "attempt": lease["attempt"], "outcome": outcome}
        body = json.dumps(document).encode()
        twice = self._chance.randrange(self._orders.twice_every) == 0
        for _ in range(2 if twice else 1):
            started_s = time.monotonic()
            answer = await http.post(f"/v1/trials/{trial_id}/outcome", body)
            posted_work.last_s = time.monotonic()
            posted_work.first_s = posted_work.first_s or posted_work.last_s
            posted_work.outcome_s.append(posted_work.last_s - started_s)
            if (answer["accepted"], answer["state"]) != (True, "COMPLETED"):
                posted_work.refused.append(trial_id)
        posted_work.twice += twice
        posted_work.posted[trial_id] = outcome["measurement"]["tokens_per_s"]
        del self._held[trial_id]

    async def _beat(self, http: HttpConnection) -> None:
        # Workers come when their allocations begin, and not all at once.
        pause_s = self._chance.uniform(0, BEAT_S)
        while self._orders.beats:
            await asyncio.sleep(pause_s)
            pause_s = BEAT_S
            trials = [
                {"trial_id": trial_id, "attempt": attempt, "iterations_done": 3}
                for trial_id, attempt in self._held.items()
            ]
            started_s = time.monotonic()
            body = json.dumps({"trials": trials}).encode()
            await http.post(f"/v1/workers/{self._id}/heartbeats", body)
            self._posted_work.beat_s.append(time.monotonic() - started_s)


async def work(orders: WorkerOrders) -> PostedWork:
    """All of the workers, until there is nothing left to do."""
    posted_work = PostedWork()
    until_s = time.monotonic() + orders.duration_s
    async with asyncio.TaskGroup() as group:
        for number in range(orders.num_workers):
            group.create_task(_Worker(orders, posted_work, number).work(until_s))
    posted_work.cpu_s = time.process_time()
    return posted_work


if __name__ == "__main__":
    json.dump(asdict(asyncio.run(work(WorkerOrders(**json.load(sys.stdin))))), sys.stdout)
