"""What one owner's campaigns cost others: the first trial, the driver's memory, shares of trials.

Run as `python -m benchmarks.bench_owners`; `--record` writes the section "Owners" of RESULTS.md.
All of it goes through `layout-tuner up --simulate` and HTTP. First, one owner submits 20 campaigns
of 1.5 million legal layouts on a cluster without a worker, and another submits small campaigns,
before and after; then a worker of that cluster comes. Then four owners, one of whom has 97 of 100
campaigns, share one allocation.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any, Final

import psutil

from benchmarks.arguments import count
from benchmarks.bench_idle import running_up
from benchmarks.bench_plan import frontier_space
from benchmarks.results_file import describe_machine, record, table
from benchmarks.trainer.trainer_table import Figure
from layout_tuner.api.schemas.access import TokenCreate
from layout_tuner.client.clients import Client
from layout_tuner.protocol.connection.running_service import find_service

NUM_LARGE: Final = 20
NUM_SMALL: Final = 4
"""Small campaigns before, and after."""
SLOWER: Final = 3.0
MOST_GB: Final = 0.6
NUM_CAMPAIGNS: Final = 100
POINTS: Final = 10.0
WATCHED_S: Final = 100
PATIENCE_S: Final = 1800.0
_POLL_S: Final = 0.02
_SAMPLED_S: Final = 1.0

SMALL: Final[Mapping[str, Any]] = {
    "model": "gpt-22b",
    "cluster": "h100-sxm",
    "simulated": {"seed": 1},
    "space": {"global_batch_size": 256, "num_nodes": [2, 4], "precision": "bf16"},
    "budget": {"trials": 3},
    "stop": {"remeasure": 0},
    "probe": {"deadline": "1h"},
}
LARGE: Final[Mapping[str, Any]] = {
    **SMALL,
    "cluster": "frontier",
    "budget": {"trials": 2},
    "space": frontier_space(95),
}
SHARED: Final[Mapping[str, Any]] = {
    **SMALL,
    "strategy": "random",
    "space": {"global_batch_size": 256, "num_nodes": 1, "precision": "bf16"},
    "model": "gpt-1.3b",
    "budget": {"trials": 5000},
}


class ResidentPeak:
    """The largest resident memory of a process since the last `take`, in bytes."""

    def __init__(self, process: psutil.Process) -> None:
        self._process, self._peak, self._ended = process, 0, Event()
        Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def take(self) -> int:
        peak, self._peak = self._peak, self._process.memory_info().rss
        return peak

    def close(self) -> None:
        self._ended.set()


class OwnerClients:
    """The clients of owners at one service."""

    def __init__(self, data_dir: Path, opened: ExitStack) -> None:
        service = find_service(data_dir)
        assert service is not None
        self.url = service.url
        token = (data_dir / "token").read_text().strip()
        self.admin = opened.enter_context(Client(self.url, token))
        self._opened = opened

    def client(self, name: str) -> Client:
        created = self.admin.create_token(TokenCreate(name=name, role="submitter"))
        return self._opened.enter_context(Client(self.url, created.token))


def first_trial_s(client: Client, name: str) -> float:
    """Seconds from the submission of a small campaign to its first trial; it ends then."""
    began = time.monotonic()
    client.create_campaign({**SMALL, "name": name})
    _wait(lambda: any(client.campaign(name).progress.trials.values()))
    took_s = time.monotonic() - began
    _wait(lambda: client.campaign(name).ended_at is not None)
    return took_s


def measure_flood(num_large: int) -> list[Figure]:
    """The first part: 20 large campaigns, another owner's small ones, and a worker that comes."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        data_dir = Path(folder) / "data"
        up = opened.enter_context(running_up(data_dir, "--simulate", "h100-sxm", "--nodes", "4"))
        time.sleep(3)  # nodes are checked
        owners = OwnerClients(data_dir, opened)
        other, flood = owners.client("other"), owners.client("flood")
        alone = [first_trial_s(other, f"alone-{number}") for number in range(NUM_SMALL)]
        memory = ResidentPeak(_driver(up))
        opened.callback(memory.close)
        time.sleep(1)
        idle = memory.take()
        for number in range(num_large):
            flood.create_campaign({**LARGE, "name": f"large-{number}"})
        beside = [first_trial_s(other, f"beside-{number}") for number in range(NUM_SMALL)]
        time.sleep(10)
        waiting_gb = (memory.take() - idle) / 1e9
        reason = flood.campaign("large-0").progress.waiting_reason
        print(f"alone {alone}, beside {beside}, +{waiting_gb:.2f} GB; {reason}", flush=True)
        opened.enter_context(_worker(owners.url, data_dir))
        began = time.monotonic()
        served = [first_trial_s(other, f"served-{number}") for number in range(NUM_SMALL)]
        names = [f"large-{number}" for number in range(num_large)]
        _wait(lambda: all(flood.campaign(each).progress.trials_ended for each in names))
        took_s, serving_gb = time.monotonic() - began, (memory.take() - idle) / 1e9
        states = Counter(flood.campaign(each).state for each in names)
        print(f"served {served}, +{serving_gb:.2f} GB, {took_s:.0f} s, {states}", flush=True)
    slower = statistics.median(beside) / statistics.median(alone)
    slower_served = statistics.median(served) / statistics.median(alone)
    return [
        Figure(
            name=f"another's first trial beside {num_large} campaigns without a worker, over alone",
            asked=f"<= {SLOWER:g} times",
            measured=f"{slower:.2f} ({max(beside):.2f} s at most, alone "
            f"{statistics.median(alone):.2f} s)",
            reached=slower <= SLOWER,
        ),
        Figure(
            name="the driver's memory beyond idle meanwhile",
            asked=f"<= {MOST_GB} GB",
            measured=f"{waiting_gb:.2f} GB",
            reached=waiting_gb <= MOST_GB,
        ),
        Figure(
            name=f"the same {num_large} campaigns once a worker of their cluster comes",
            asked="all run",
            measured=f"all had trials after {took_s:.0f} s; driver +{serving_gb:.2f} GB",
            reached="FAILED" not in states,
        ),
        Figure(
            name="another's first trial meanwhile, over alone",
            asked="",
            measured=f"{slower_served:.2f} ({max(served):.2f} s at most)",
            reached=None,
        ),
    ]


def measure_shares(num_campaigns: int, watched_s: int, time_scale: str) -> list[Figure]:
    """The second part: the shares of four owners in the trials that start on one allocation."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        data_dir = Path(folder) / "data"
        simulated = ("--simulate", "h100-sxm", "--nodes", "4", "--time-scale", time_scale)
        opened.enter_context(running_up(data_dir, *simulated))
        time.sleep(3)
        owners = OwnerClients(data_dir, opened)
        names = {f"{owner}-0": owner for owner in ("b", "c", "d")}
        names |= {f"a-{number}": "a" for number in range(num_campaigns - len(names))}
        clients = {owner: owners.client(owner) for owner in "abcd"}
        for name, owner in sorted(names.items()):
            clients[owner].create_campaign({**SHARED, "name": name})
        _wait(lambda: set(_trials(owners.admin)[0]) == set("abcd"))
        started: Counter[str] = Counter()
        before, waiting = _trials(owners.admin)
        deadline = time.monotonic() + watched_s
        while time.monotonic() < deadline:
            time.sleep(_SAMPLED_S)
            all_waited = set(waiting) == set(clients)
            now, waiting = _trials(owners.admin)
            if all_waited and set(waiting) == set(clients):
                started += now - before
            before = now
    shares = {owner: 100 * started[owner] / started.total() for owner in sorted(clients)}
    print(started, shares, flush=True)
    return [
        Figure(
            name=f"{num_campaigns} campaigns on one allocation, one of four owners has "
            f"{num_campaigns - 3}: shares of the {started.total()} trials started while all four "
            f"had some, in {watched_s} s",
            asked=f"within {POINTS:g} points of 25 %",
            measured=", ".join(f"{share:.1f} %" for share in shares.values()),
            reached=all(abs(share - 25.0) <= POINTS for share in shares.values()),
        )
    ]


def _trials(admin: Client) -> tuple[Counter[str], Counter[str]]:
    """Trials of each owner that have started, and that wait."""
    started: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    for campaign in admin.campaigns():
        trials = campaign.progress.trials
        started[campaign.created_by] += sum(trials.values()) - trials["PENDING"]
        waiting[campaign.created_by] += trials["PENDING"]
    return +started, +waiting


def _driver(up: psutil.Process) -> psutil.Process:
    (driver,) = (child for child in up.children() if "driver" in child.cmdline())
    return driver


@contextmanager
def _worker(url: str, data_dir: Path) -> Iterator[None]:
    """A worker that simulates the large campaigns' cluster."""
    where = ("--url", url, "--token-file", str(data_dir / "worker-token"))
    options = ("--simulate", "frontier", "--nodes", "96", "--spool-dir", str(data_dir / "other"))
    with subprocess.Popen(
        [sys.executable, "-m", "layout_tuner", "worker", *where, *options, "--name", "later"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)


def _wait(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError("what is waited for did not come")
        time.sleep(_POLL_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, prints, and records if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--large", type=count, default=NUM_LARGE)
    parser.add_argument("--campaigns", type=count, default=NUM_CAMPAIGNS)
    parser.add_argument("--seconds", type=count, default=WATCHED_S, help="of the second part")
    parser.add_argument("--time-scale", default="0.03", help="of the second part's probes")
    parser.add_argument("--only-shares", action="store_true", help="the second part alone")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    asked = parser.parse_args(arguments)
    # The short part is first.
    shares = measure_shares(asked.campaigns, asked.seconds, asked.time_scale)
    figures = shares if asked.only_shares else [*measure_flood(asked.large), *shares]
    rows = [figure.cells() for figure in figures if figure.asked]
    text = (
        f"`python -m benchmarks.bench_owners`; {describe_machine('sqlalchemy', 'numpy')}.\n\n"
        + table(("figure", "asked", "measured", "reached"), rows)
    )
    print(text)
    if asked.record:
        record("Owners", text)


if __name__ == "__main__":
    main()
