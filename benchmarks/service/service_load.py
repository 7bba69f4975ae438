"""Outcomes of 64 workers and watchers of 64 campaigns at once, on PostgreSQL, all checked.

All requests go over HTTP on loopback: workers and watchers are two processes, and the service is
several `layout-tuner serve` on one database. Afterwards the benchmark looks every outcome up in the
database and compares every watcher's events with those in the database.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.service import load_watchers, load_workers
from benchmarks.service.api_processes import ApiProcess, processor_seconds
from benchmarks.service.live_service import ROOT, wait_until
from benchmarks.service.postgres_server import DURABLE, running_server
from benchmarks.service.service_start import MEMORY_BYTES
from benchmarks.trainer.trainer_table import Figure
from benchmarks.workers.outcome_check import OutcomeFaults, check_outcomes, missed_events
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec

NUM_API: Final = 2
NUM_CAMPAIGNS: Final = 64
NUM_WORKERS: Final = 64
NUM_WATCHERS: Final = 200
TRIALS_A_SCALE: Final = 24
"""Of each campaign."""
OUTCOMES_PER_S: Final = 60.0
LATE_S: Final = 1.0
LEASE_S: Final = 0.1
NODES: Final = 4
DEVICES: Final = 8

CAMPAIGN: Final[dict[str, Any]] = {
    "model": "gpt-1.3b",
    "cluster": "frontier",
    "objective": "tokens_per_s_per_device",
    "strategy": "random",
    "budget": {"trials": 1000},
    "space": {
        "global_batch_size": 256,
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 4, 8],
        "dp": [1, 2, 4],
        "num_nodes": [1, 2, 4],
        "micro_batch_size": [1, 2, 4],
        "zero_stage": [0, 1],
        "recompute": ["none", "selective", "full"],
        "vpp": 1,
        "sequence_parallel": False,
    },
}

LOAD_NOTES: Final = f"""\
{NUM_API} `layout-tuner serve` on one PostgreSQL 18 that keeps its defaults (fsync on); {NUM_WORKERS} workers are one process, \
{NUM_WATCHERS} watchers another, all of it on this machine, without a driver. A worker holds {NODES} nodes, leases one trial at a time \
and posts a whole outcome as soon as it has the lease, one in 50 twice; heartbeats every 2 s. Every outcome and every watcher's \
events are looked up in the database."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What came of it."""

    work: load_workers.PostedWork
    heard: Sequence[load_watchers.ReceivedEvents]
    faults: OutcomeFaults
    missed: int
    """Events that a watcher did not hear, or heard twice or out of order."""
    memory_bytes: Sequence[int]
    cpu_s: Mapping[str, float]
    """Processor seconds while it lasted, by who spent them."""

    @property
    def outcomes_per_s(self) -> float:
        return (len(self.work.posted) - 1) / (self.work.last_s - self.work.first_s)

    @property
    def late_s(self) -> list[float]:
        return [late for one in self.heard for late in one.late_s]


def measure_load(folder: Path, scale: int) -> list[Figure]:
    """Outcomes, leases and live events at once."""
    return load_figures(put_load_on(folder, TRIALS_A_SCALE * scale))


def put_load_on(
    folder: Path,
    trials_each: int,
    *,
    num_campaigns: int = NUM_CAMPAIGNS,
    num_workers: int = NUM_WORKERS,
    num_watchers: int = NUM_WATCHERS,
    num_api: int = NUM_API,
    max_trials: int = 1,
) -> Load:
    """Runs the load until every trial has its outcome."""
    with ExitStack() as stack:
        server = stack.enter_context(running_server(settings=DURABLE))
        url = stack.enter_context(server.database())
        store = stack.enter_context(closing(Store.connect(url)))
        apis = [stack.enter_context(ApiProcess(folder, f"api-{i}", url)) for i in range(num_api)]
        campaigns = _submit(apis[0], store, num_campaigns, trials_each)
        services = [api.address for api in apis]
        watched = [campaigns[i % len(campaigns)] for i in range(num_watchers)]
        spent_before = _spent(apis, server.pid)
        with _watching(services, watched) as watchers:
            work = _work(services, num_workers, max_trials)
            heard, watchers_cpu_s = watchers.stop(_last_seqs(store, campaigns))
        cpu_s = {name: s - spent_before[name] for name, s in _spent(apis, server.pid).items()}
        return Load(
            work=work,
            heard=heard,
            faults=check_outcomes(store, work.posted),
            missed=missed_events(store, heard),
            memory_bytes=[api.memory_bytes for api in apis],
            cpu_s={**cpu_s, "workers": work.cpu_s, "watchers": watchers_cpu_s},
        )


def _spent(apis: Sequence[ApiProcess], postgres: int) -> dict[str, float]:
    return {
        "api": sum(api.cpu_s for api in apis),
        "PostgreSQL": processor_seconds([postgres]),
    }


def _submit(api: ApiProcess, store: Store, num_campaigns: int, trials_each: int) -> list[int]:
    """Creates the campaigns, and their trials as a driver would, in turns."""
    documents = [{**CAMPAIGN, "name": f"load-{i}"} for i in range(num_campaigns)]
    campaigns = [int(api.post("/campaigns", document)["id"]) for document in documents]
    legal = CampaignSpec.from_mapping(documents[0]).legal_set()
    layouts = [legal.layout(i) for i in range(trials_each)]
    with ThreadPoolExecutor(4) as pool:
        for layout in layouts:
            list(pool.map(lambda campaign: store.trials.add(campaign, layout), campaigns))  # noqa: B023
    # Else watchers would hear some of the making too, late by as long as they took to start.
    _wait_for_numbers(store)
    return campaigns


def _work(services: list[tuple[str, int, str]], num_workers: int, max_trials: int) -> Any:
    orders = load_workers.WorkerOrders(
        services=services,
        cluster=CAMPAIGN["cluster"],
        num_workers=num_workers,
        nodes=NODES,
        devices_per_node=DEVICES,
        max_trials=max_trials,
        duration_s=300.0,
    )
    process = subprocess.run(
        _command("load_workers"),
        input=json.dumps(asdict(orders)),
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=_environment(),
    )
    work = json.loads(process.stdout)
    work["posted"] = {int(trial): value for trial, value in work["posted"].items()}
    return load_workers.PostedWork(**work)


class _Watchers:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def stop(
        self, last_seqs: Mapping[int, int]
    ) -> tuple[list[load_watchers.ReceivedEvents], float]:
        """Ends them once each has heard the last event of its campaign, or has had its time."""
        answer, _ = self._process.communicate(json.dumps(last_seqs) + "\n")
        work = json.loads(answer)
        return [load_watchers.ReceivedEvents(**one) for one in work["heard"]], work["cpu_s"]


@contextmanager
def _watching(services: list[tuple[str, int, str]], campaigns: list[int]) -> Iterator[_Watchers]:
    process = subprocess.Popen(
        _command("load_watchers"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=_environment(),
    )
    try:
        assert process.stdin is not None
        assert process.stdout is not None
        orders = load_watchers.WatcherOrders(services=services, campaigns=campaigns)
        process.stdin.write(json.dumps(asdict(orders)) + "\n")
        process.stdin.flush()
        said = process.stdout.readline()
        assert said == "watching\n", said
        yield _Watchers(process)
    finally:
        process.kill()
        process.wait()


def _command(module: str) -> list[str]:
    return [sys.executable, "-P", "-m", f"benchmarks.service.{module}"]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def _last_seqs(store: Store, campaigns: Sequence[int]) -> dict[int, int]:
    """The last number of each campaign's events, once all of them have one."""
    _wait_for_numbers(store)
    return {
        campaign: store.events.find(after=0, campaign_id=campaign, limit=1 << 20)[-1].seq
        for campaign in campaigns
    }


def _wait_for_numbers(store: Store) -> None:
    wait_until(
        "every event has its number", lambda: not store.statistics.service_stats().unnumbered_events
    )


def load_figures(load: Load) -> list[Figure]:
    """What is asked of it."""
    return [*_figures_of_outcomes(load), *_figures_of_events(load), *_figures_of_processes(load)]


def _figures_of_outcomes(load: Load) -> list[Figure]:
    work, faults = load.work, load.faults
    return [
        Figure(
            name=f"outcomes a second, posted by {NUM_WORKERS} workers at once",
            asked=f"{OUTCOMES_PER_S:.0f}",
            measured=f"{load.outcomes_per_s:.0f} ({len(work.posted)} in "
            f"{work.last_s - work.first_s:.1f} s, {work.twice} of them posted twice; an answer takes "
            f"{median(work.outcome_s) * 1e3:.0f} ms, p99 {percentile(work.outcome_s, 99) * 1e3:.0f} ms)",
            reached=load.outcomes_per_s >= OUTCOMES_PER_S,
        ),
        Figure(
            name="of these lost, or not whole in the database",
            asked="0",
            measured=f"{faults.lost}",
            reached=not faults.lost and not work.refused,
        ),
        Figure(
            name="of these counted twice",
            asked="0",
            measured=f"{faults.twice}",
            reached=not faults.twice,
        ),
    ]


def _figures_of_events(load: Load) -> list[Figure]:
    late_s = load.late_s
    return [
        Figure(
            name=f"events that one of {len(load.heard)} watchers did not hear, or heard twice or out of order",
            asked="0",
            measured=f"{load.missed} of {len(late_s)}",
            reached=not load.missed and bool(late_s),
        ),
        Figure(
            name="how late an event is heard, p99",
            asked=f"under {LATE_S:g} s",
            measured=f"{percentile(late_s, 99):.3f} s (median {median(late_s):.3f} s, most "
            f"{max(late_s):.3f} s)",
            reached=percentile(late_s, 99) < LATE_S,
        ),
    ]


def _figures_of_processes(load: Load) -> list[Figure]:
    lease_s = load.work.lease_s
    return [
        Figure(
            name="lease of a trial under that load, p99",
            asked=f"under {LEASE_S * 1e3:.0f} ms",
            measured=f"{percentile(lease_s, 99) * 1e3:.0f} ms (median {median(lease_s) * 1e3:.0f} ms, "
            f"most {max(lease_s) * 1e3:.0f} ms, {len(lease_s)} leases)",
            reached=percentile(lease_s, 99) < LEASE_S,
        ),
        Figure(
            name="memory of an api process under that load, largest",
            asked=f"under {MEMORY_BYTES / 1e6:.0f} MB",
            measured=f"{max(load.memory_bytes) / 1e6:.0f} MB",
            reached=max(load.memory_bytes) < MEMORY_BYTES,
        ),
        Figure(
            name="processor seconds of it",
            asked="",
            measured=", ".join(f"{name} {cpu_s:.1f}" for name, cpu_s in load.cpu_s.items()),
            reached=None,
        ),
    ]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many of a hundred do not exceed."""
    ordered = sorted(values)
    return ordered[min(int(len(ordered) * percent / 100), len(ordered) - 1)]
