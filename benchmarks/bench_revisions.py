"""Two revisions of layout-tuner side by side, in turns: twelve figures through commands and HTTP.

Run as `make bench-revisions BASE=../base/.venv/bin`, where another revision is installed in an
environment of its own (`git worktree add ../base REVISION && make -C ../base install`). Commands
and routes are the same in all revisions, so that it also compares revisions whose modules have
moved. It takes a quarter of an hour, with nothing else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import httpx
import numpy as np

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, table
from benchmarks.service.api_processes import ApiProcess
from benchmarks.service.live_service import LiveProcess, wait_until

SCENARIO: Final = "h100-8b"
"""Simulated measurements that are searched and ranked: 1,752 layouts."""

SPACE: Final = {
    "global_batch_size": 512,
    "tp": {"from": 1, "to": 8, "times": 2},
    "pp": {"from": 1, "to": 16, "times": 2},
    "num_nodes": {"from": 1, "to": 128, "times": 2},
    "micro_batch_size": {"from": 1, "to": 32, "times": 2},
    "zero_stage": [0, 1],
    "recompute": ["none", "selective", "full"],
    "sequence_parallel": [False, True],
    "vpp": 1,
    "precision": ["bf16", "fp16", "fp32"],
}
CELLS: Final = {
    "probe tp 2": ("--tp", "2"),
    "probe pp 2": ("--pp", "2"),
    "probe dp 2, ZeRO 1": ("--dp", "2", "--zero-stage", "1"),
}
PROBE: Final = ("probe", "--model", "tiny", "--micro-batch-size", "2", "--num-microbatches", "8")
PROBE_STEPS: Final = 40
REQUESTS: Final = 60
"""Requests of a figure's turn."""
LEASES: Final = 20
"""Trials that are leased and reported in a turn."""
RESAMPLES: Final = 10_000

OUT_OF_MEMORY: Final = {
    "state": "infeasible",
    "reason": "out_of_memory",
    "message": "",
    "node": "",
    "duration_s": 1.0,
    "environment": None,
    "measurement": None,
    "log_tail": "",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """An installed revision, with a service that runs."""

    bin: Path
    folder: Path
    http: httpx.Client
    as_worker: httpx.Client

    def run(self, *arguments: str) -> str:
        """What one of its commands prints."""
        return _output([self.bin / "layout-tuner", *arguments], self.folder)


Figure = Callable[[Revision], float]
"""Takes a turn; seconds."""


def _figures() -> dict[str, Figure]:
    searched = ("replay", "table.csv", "--strategy", "guided", "--seeds", "4", "--probes", "12")
    estimated = (
        "estimate",
        "--model",
        "gpt-22b",
        "--cluster",
        "frontier",
        "--tp",
        "8",
        "--pp",
        "4",
    )
    return {
        "leaderboard page": partial(_get, path="/campaigns/ranked/leaderboard?limit=100&offset={}"),
        "page of trials": partial(_get, path="/campaigns/ranked/trials?limit={}"),
        "report": partial(_get, path="/campaigns/ranked/report", requests=4),
        "lease and outcome": _lease,
        "submission: enumeration": _submit,
        "guided search": lambda of: _seconds(of, *searched, "--jobs", "1", "--json"),
        "estimate": lambda of: _seconds(of, *estimated, "--num-microbatches", "64"),
        "packing": _pack,
        "probe start": _probe_start,
        **{name: partial(_probe, knobs=knobs) for name, knobs in CELLS.items()},
    }


def _get(of: Revision, path: str, requests: int = REQUESTS) -> float:
    started = time.perf_counter()
    for number in range(requests):
        of.http.get(path.format(1 + number)).raise_for_status()
    return time.perf_counter() - started


def _submit(of: Revision) -> float:
    """Submits a campaign of 34,560 combinations; the answer has the number of legal ones."""
    started = time.perf_counter()
    made = _submitted(of)
    seconds = time.perf_counter() - started
    of.http.post(f"/campaigns/{made}/cancel").raise_for_status()
    return seconds


def _submitted(of: Revision, **fields: Any) -> str:
    name = f"c{time.monotonic_ns()}"
    document = {"name": name, "model": "gpt-22b", "cluster": "frontier", "space": SPACE, **fields}
    document |= {"strategy": "random", "budget": {"trials": 1000}}
    of.http.post("/campaigns", json=document).raise_for_status()
    return name


def _lease(of: Revision) -> float:
    """Leases trials that the driver has proposed, one by one, and reports each as out of memory."""
    campaign = _submitted(of, model="gpt-125m", space=SPACE | {"num_nodes": 1})
    worker = _post(of, "/workers", _introduction())["worker_id"]
    wait_until(f"{LEASES} trials are proposed", lambda: len(_pending(of, campaign)) >= LEASES)
    started = time.perf_counter()
    for _ in range(LEASES):
        asked = {"max_trials": 1, "wait_s": 5.0}
        (lease,) = _post(of, f"/workers/{worker}/leases", asked)["leases"]
        report = {"worker_id": worker, "attempt": lease["attempt"], "outcome": OUT_OF_MEMORY}
        _post(of, f"/trials/{lease['trial_id']}/outcome", report)
    seconds = time.perf_counter() - started
    of.http.post(f"/campaigns/{campaign}/cancel").raise_for_status()
    return seconds


def _pending(of: Revision, campaign: str) -> list[Any]:
    query = {"state": "PENDING", "limit": LEASES}
    answer = of.http.get(f"/campaigns/{campaign}/trials", params=query).raise_for_status()
    return list(answer.json()["trials"])


def _introduction() -> dict[str, Any]:
    """A worker on an allocation of 128 nodes."""
    nodes = [{"name": f"n{number}", "num_devices": 8} for number in range(128)]
    return {
        "name": f"w{time.monotonic_ns()}",
        "host": "n0",
        "cluster": "frontier",
        "num_nodes": len(nodes),
        "devices_per_node": 8,
        "device": "MI250X GCD",
        "versions": {},
        "nodes": nodes,
    }


def _post(of: Revision, path: str, document: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = of.as_worker.post(path, json=document).raise_for_status().json()
    return answer


def _seconds(of: Revision, *arguments: str) -> float:
    started = time.perf_counter()
    of.run(*arguments)
    return time.perf_counter() - started


def _pack(of: Revision) -> float:
    """Packs probes onto a pretended allocation, by the benchmark of each revision."""
    python = of.bin / "python"
    code = (
        "import sys, time; from benchmarks.bench_packing import steady_row; start = time.perf_counter();"
        "steady_row('any', 'three times', ended=1000, seed=1); print(time.perf_counter() - start)"
    )
    return float(_output([python, "-c", code], of.bin.parent.parent))


def _probe(of: Revision, knobs: tuple[str, ...]) -> float:
    """Median seconds of a step."""
    printed = of.run(*PROBE, *knobs, "--steps", str(PROBE_STEPS), "--json")
    return median(json.loads(printed)["step_times_s"])


def _probe_start(of: Revision) -> float:
    """Seconds of a probe's command outside of its steps."""
    started = time.perf_counter()
    printed = of.run(*PROBE, "--steps", "2", "--json")
    return time.perf_counter() - started - sum(json.loads(printed)["step_times_s"])


FIGURES: Final = _figures()
"""By name."""


@contextmanager
def running(bin_folder: Path, folder: Path) -> Iterator[Revision]:
    """A revision with its service and driver, and a ranked campaign of the simulated table."""
    program = bin_folder / "layout-tuner"
    with ExitStack() as stack:
        api = stack.enter_context(ApiProcess(folder, "api", program=program))
        driver = LiveProcess(
            [str(program), "driver", "--data-dir", str(api.data.path)],
            environment=os.environ,
            log=folder / "driver.log",
        )
        driver.start()
        stack.callback(driver.stop)
        host, port, _ = api.address
        token = f"Bearer {api.data.worker_token_file.read_text().strip()}"
        as_worker = httpx.Client(
            base_url=api.http.base_url, headers={"Authorization": token}, timeout=60.0
        )
        stack.enter_context(as_worker)
        revision = Revision(bin=bin_folder, folder=folder, http=api.http, as_worker=as_worker)
        # Older revisions call the command `simulate`.
        is_old = "  simulate " in _output([bin_folder / "layout-tuner", "--help"], folder)
        revision.run("simulate" if is_old else "scenario", SCENARIO, "--out", "table.csv")
        of_service = ("--url", f"http://{host}:{port}", "--token-file", str(api.data.token_file))
        revision.run("campaign", "import", "table.csv", "--name", "ranked", *of_service)
        yield revision


def _output(command: list[Any], cwd: Path) -> str:
    ended = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        sys.exit(f"{command[0]} {' '.join(map(str, command[1:]))} failed:\n{ended.stderr}")
    return ended.stdout


def compared(base: list[float], ours: list[float]) -> tuple[str, str, str]:
    """Median ratio of the base to this revision in pairs, with its 95 % interval by bootstrap."""
    ratios = np.array(base) / np.array(ours)
    draws = np.random.default_rng(0).choice(ratios, (RESAMPLES, len(ratios)))
    low, high = np.quantile(np.median(draws, axis=1), (0.025, 0.975))
    return f"{median(ours):.4g} s", f"{np.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"


def main() -> None:
    """Prints the table, and records it where that is asked for."""
    parser = argparse.ArgumentParser(prog="bench-revisions", description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="bin folder of the other revision")
    parser.add_argument("--pairs", type=count, default=8)
    parser.add_argument("--only", action="append", choices=list(FIGURES), help="repeatable")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # its services end with it
    rows = []
    with ExitStack() as stack:
        sides = []
        for bin_folder in (asked.base, Path(sys.executable).parent):
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            sides.append(stack.enter_context(running(bin_folder.absolute(), folder)))
        for name in asked.only or FIGURES:
            seconds: tuple[list[float], list[float]] = [], []
            for pair in range(1 + asked.pairs):
                for side in (0, 1) if pair % 2 else (1, 0):
                    turn = FIGURES[name](sides[side])
                    if pair > 0:  # the first pair warms up
                        seconds[side].append(turn)
            rows.append((name, *compared(*seconds)))
            print(" | ".join(rows[-1]), flush=True)
    header = ("figure", "this revision", "base / this", "95 % interval")
    print(f"\n{describe_machine('torch')}\n\n{table(header, rows)}")


if __name__ == "__main__":
    main()
