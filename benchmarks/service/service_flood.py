"""A submitter floods the service with the costliest bodies, and others use it meanwhile.

The flood keeps to the rate of requests of a submitter's token. Another submitter's reads and small
plans are timed, and a worker's leases must hold.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx

from benchmarks.service.api_processes import ApiProcess
from benchmarks.service.hostile_bodies import (
    CSV,
    FORM,
    JSON,
    PARTS,
    SMALL,
    YAML,
    CostlyBody,
    Route,
    costliest,
)
from benchmarks.service.service_load import percentile
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec

READ_S: Final = 0.3
PLAN_S: Final = 2.0
PER_S: Final = 100
BURST: Final = 200
"""Requests of a submitter's token: a second, and at once."""
SEARCH_S: Final = 0.6
"""Seconds a scale of the search for each route."""
FLOOD_S: Final = 2.5
"""Seconds a scale of each flood."""
NUM_LEASES: Final = 4
LEASE_S: Final = 15.0

FLOOD_NOTES: Final = f"""\
On SQLite. A submitter's token sends {BURST} requests at once and then {PER_S} a second; for each route a search over shapes finds the \
body that costs the service the most processor time. The worst of three floods: the costliest body of every route in turn, plans \
alone, and the costliest body alone. Another submitter reads lists, a campaign and pages 40 times a second and plans a small space \
every 2 s; a worker holds {NUM_LEASES} leases of {LEASE_S:g} s with heartbeats every 2 s."""


@dataclass(kw_only=True, slots=True)
class Suffered:
    """What others noticed of a flood."""

    read_s: list[float] = field(default_factory=list)
    plan_s: list[float] = field(default_factory=list)
    beat_at_s: list[float] = field(default_factory=list)
    """When heartbeats were answered."""
    failed: list[str] = field(default_factory=list)
    """Requests of others that were not answered with 200."""

    @property
    def silent_s(self) -> float:
        """The longest time without an answered heartbeat."""
        at_s = self.beat_at_s
        return max((b - a for a, b in pairwise(at_s)), default=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scene:
    """A service with a flooder, another submitter, and a worker that holds leases."""

    url: str
    tokens: dict[str, str]
    worker_id: str
    trials: Sequence[int]

    def client(self, name: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.tokens[name]}", "Accept": "text/html"}
        return httpx.Client(base_url=self.url, headers=headers, timeout=120)


def measure_flood(folder: Path, scale: int) -> list[Figure]:
    """Searches for the costliest bodies, then floods with them."""
    with ApiProcess(folder, "flooded") as api, closing(Store.open(api.data)) as store:
        scene, routes = _prepare(api, store)
        flooding = scene.tokens["flood"]
        with _beating(scene):
            worst = [
                costliest(api, route, flooding, SEARCH_S * scale, seed)
                for seed, route in enumerate(routes)
            ]
        print("\n".join(one.describe() for one in worst), flush=True)
        floods: dict[str, Sequence[CostlyBody]] = {
            "none": [],
            "every route": worst,
            "plans": worst[:1],
            "the costliest": [max(worst, key=lambda one: one.cpu_s)],
        }
        suffered = {
            name: _flooded(api, scene, bodies, FLOOD_S * scale) for name, bodies in floods.items()
        }
        held = [store.trials.get(trial) for trial in scene.trials]
        lost = sum((trial.state, trial.attempt) != ("RUNNING", 1) for trial in held)
        return _figures(suffered.pop("none"), suffered, lost, len(held))


def _prepare(api: ApiProcess, store: Store) -> tuple[Scene, list[Route]]:
    tokens = {
        name: api.post("/tokens", {"name": name, "role": role})["token"]
        for name, role in (("flood", "submitter"), ("other", "submitter"), ("w", "worker"))
    }
    legal = CampaignSpec.from_mapping(SMALL).legal_set()
    added = {}
    for name in ("other", "flood"):
        headers = {"Authorization": f"Bearer {tokens[name]}"}
        made = api.http.post("/campaigns", json={**SMALL, "name": name}, headers=headers)
        campaign = made.raise_for_status().json()["id"]
        added[name] = [store.trials.add(campaign, legal.layout(i)).id for i in range(NUM_LEASES)]
    headers = {"Authorization": f"Bearer {tokens['w']}"}
    devices = {"num_nodes": 8, "devices_per_node": 8, "device": "MI250X GCD"}
    worker = {"name": "w", "host": "h", "cluster": "frontier", **devices}
    worker_id = api.http.post("/workers", json=worker, headers=headers).json()["worker_id"]
    ask = {"max_trials": NUM_LEASES, "wait_s": 2.0}
    leased = api.http.post(f"/workers/{worker_id}/leases", json=ask, headers=headers).json()
    scene = Scene(
        url=f"http://{api.address[0]}:{api.address[1]}",
        tokens=tokens,
        worker_id=worker_id,
        trials=[lease["trial_id"] for lease in leased["leases"]],
    )
    return scene, _routes(added["flood"][0])


def _routes(trial: int) -> list[Route]:
    documents, forms, yaml = (JSON, YAML), (FORM, PARTS), "view=yaml&do="
    asked = [
        ("POST", "/v1/plans", documents, "", ""),
        ("POST", "/v1/campaigns", documents, "", ""),
        ("POST", "/v1/campaigns/flood/clone", documents, "", ""),
        ("PUT", "/v1/models/mine", documents, "", ""),
        ("PUT", "/v1/clusters/mine", documents, "", ""),
        ("PATCH", "/v1/campaigns/flood", (JSON,), "", ""),
        ("POST", "/v1/campaigns/import", (CSV,), "", ""),
        ("POST", f"/v1/trials/{trial}/repeat", (JSON,), "", ""),
        ("POST", "/submit/check", forms, "yaml", yaml),
        ("POST", "/submit", forms, "yaml", f"{yaml}plan"),
        ("POST", "/campaigns/flood/change", forms, "notes", "trials=9"),
        ("POST", "/campaigns/flood/clone", forms, "name", "a=b"),
        ("POST", f"/trials/{trial}/repeat", forms, "back", "a=b"),
    ]
    return [Route(method=m, path=p, kinds=k, field=f, rest=r) for m, p, k, f, r in asked]


class _beating:  # noqa: N801 - read as a statement
    """Sends a worker's heartbeats from a thread while the block lasts."""

    def __init__(self, scene: Scene, suffered: Suffered | None = None) -> None:
        self._scene, self._suffered = scene, suffered or Suffered()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _beat(self) -> None:
        trials = [{"trial_id": t, "attempt": 1, "iterations_done": 1} for t in self._scene.trials]
        path = f"/v1/workers/{self._scene.worker_id}/heartbeats"
        with self._scene.client("w") as http:
            self._suffered.beat_at_s.append(time.monotonic())
            while not self._done.wait(2.0):
                _timed(self._suffered, lambda: http.post(path, json={"trials": trials}))
                self._suffered.beat_at_s.append(time.monotonic())


def _flooded(api: ApiProcess, scene: Scene, bodies: Sequence[CostlyBody], for_s: float) -> Suffered:
    """What others notice while the flood lasts."""
    suffered = Suffered()
    requests = [body.request("127.0.0.1", scene.tokens["flood"]) for body in bodies]
    process = multiprocessing.get_context("spawn").Process(
        target=_flood, args=(api.address[:2], requests, for_s)
    )
    with _beating(scene, suffered):
        time.sleep(BURST / PER_S)  # the flooder's burst is full again
        process.start()
        time.sleep(1)
        until_s = time.monotonic() + for_s
        with ThreadPoolExecutor(5) as others:
            for number in range(4):
                others.submit(_read, scene, suffered, number, until_s)
            others.submit(_plan, scene, suffered, until_s)
        process.join(for_s)
        process.kill()
    print(_words(suffered), f"load {os.getloadavg()[0]:.1f}", *suffered.failed[:3], flush=True)
    return suffered


def _read(scene: Scene, suffered: Suffered, number: int, until_s: float) -> None:
    paths = ("/v1/campaigns/other/leaderboard", "/v1/campaigns/other", "/", "/v1/campaigns")
    with scene.client("other") as http:
        while time.monotonic() < until_s:
            took_s = _timed(suffered, partial(http.get, paths[number % len(paths)]))
            suffered.read_s.append(took_s)
            time.sleep(0.1)
            number += 1


def _plan(scene: Scene, suffered: Suffered, until_s: float) -> None:
    with scene.client("other") as http:
        while time.monotonic() < until_s:
            took_s = _timed(suffered, lambda: http.post("/v1/plans", json=SMALL))
            suffered.plan_s.append(took_s)
            time.sleep(2)


def _timed(suffered: Suffered, ask: Callable[[], httpx.Response]) -> float:
    began_s = time.monotonic()
    try:
        answer = ask()
        if answer.status_code != 200:
            suffered.failed.append(f"{answer.status_code} {answer.text[:100]}")
    except httpx.TransportError as error:
        suffered.failed.append(repr(error))
    return time.monotonic() - began_s


def _flood(address: tuple[str, int], requests: Sequence[bytes], for_s: float) -> None:
    """Sends requests at the rate of a token, in a process of its own."""
    statuses: Counter[bytes] = Counter()

    async def send(request: bytes) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(*address)
            writer.write(request)
            await writer.drain()
            statuses[(await reader.read(12))[9:]] += 1
            while await reader.read(1 << 16):
                pass
            writer.close()

    async def all_of_them() -> None:
        began_s, number, tasks = time.monotonic(), 0, set()
        while (now_s := time.monotonic() - began_s) < for_s + 1:
            while requests and number < BURST + now_s * PER_S:
                tasks.add(task := asyncio.create_task(send(requests[number % len(requests)])))
                task.add_done_callback(tasks.discard)
                number += 1
            await asyncio.sleep(0.01)
        print(f"flood: {number} requests, {len(tasks)} unanswered,", dict(statuses), flush=True)

    asyncio.run(all_of_them())


def _words(suffered: Suffered) -> str:
    reads, plans = suffered.read_s, suffered.plan_s
    return (
        f"{len(reads)} reads: median {median(reads):.3f} s, p99 {percentile(reads, 99):.3f} s; "
        f"{len(plans)} plans: median {median(plans):.2f} s, most {max(plans):.2f} s; "
        f"longest without a heartbeat {suffered.silent_s:.1f} s; {len(suffered.failed)} failed;"
    )


def _figures(alone: Suffered, suffered: dict[str, Suffered], lost: int, held: int) -> list[Figure]:
    def worst(of: Callable[[Suffered], Any]) -> Any:
        return max(of(one) for one in suffered.values())

    read_s = worst(lambda one: percentile(one.read_s, 99))
    plan_s = worst(lambda one: max(one.plan_s))
    silent_s = worst(lambda one: one.silent_s)
    failed = sum(len(one.failed) for one in suffered.values())
    return [
        Figure(
            name="another submitter's GET while one floods with the costliest bodies, p99",
            asked=f"at most {READ_S:g} s",
            measured=f"{read_s:.3f} s ({sum(len(s.read_s) for s in suffered.values())} requests; "
            f"without a flood {percentile(alone.read_s, 99):.3f} s)",
            reached=read_s <= READ_S,
        ),
        Figure(
            name="another submitter's small plan, the slowest",
            asked=f"at most {PLAN_S:g} s",
            measured=f"{plan_s:.2f} s (without a flood {max(alone.plan_s):.2f} s)",
            reached=plan_s <= PLAN_S,
        ),
        Figure(
            name="leases lost",
            asked="0",
            measured=f"{lost} of {held}; longest without a heartbeat {silent_s:.1f} s",
            reached=lost == 0 and silent_s < LEASE_S,
        ),
        Figure(
            name="requests of others that failed", asked="0", measured=f"{failed}",
            reached=failed == 0,
        ),
    ]  # fmt: skip
