"""Processor time of the service beside another revision: to its first page, and of a probe.

Run as `python -m benchmarks.bench_processor --base ../base`, where another revision is installed in
an environment of its own (`git worktree add ../base REVISION && make -C ../base install`), with
nothing else on the machine. The revisions take turns, each time on a folder of its own, with SQLite
and compiled modules. `--record` writes the section "Processor time" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Final

from benchmarks.arguments import count
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service import load_workers
from benchmarks.service.api_processes import ApiProcess
from benchmarks.service.live_service import ROOT
from benchmarks.service.service_load import CAMPAIGN, DEVICES, NODES, NUM_WORKERS

NUM_CAMPAIGNS: Final = 10
NUM_PROBES: Final = 1000

_ADD_TRIALS: Final = f"""\
import sys
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
store = Store(sys.argv[1])
legal = CampaignSpec.from_mapping({{**{CAMPAIGN!r}, "name": "any"}}).legal_set()
for number in range(int(sys.argv[2])):
    for campaign in map(int, sys.argv[3:]):
        store.trials.add(campaign, legal.layout(number))
"""


def start_s(base: Path, folder: Path) -> float:
    """Processor seconds of `serve` on an empty folder until its first page has been sent."""
    with ApiProcess(folder, "start", program=base / ".venv/bin/layout-tuner") as api:
        api.http.get(api.http.base_url.join("/")).raise_for_status()
        return api.cpu_s


def probes_s(base: Path, folder: Path) -> float:
    """Processor seconds of the service for the leases and outcomes of all probes that wait."""
    with ApiProcess(folder, "probes", program=base / ".venv/bin/layout-tuner") as api:
        campaigns = [
            str(api.post("/campaigns", {**CAMPAIGN, "name": f"c{number}"})["id"])
            for number in range(NUM_CAMPAIGNS)
        ]
        each = str(NUM_PROBES // NUM_CAMPAIGNS)
        command = [base / ".venv/bin/python", "-c", _ADD_TRIALS, api.data.database_url, each]
        subprocess.run([*command, *campaigns], check=True, cwd=folder)
        host, port, _ = api.address
        orders = load_workers.WorkerOrders(
            services=[(host, port, api.data.worker_token_file.read_text().strip())],
            cluster=CAMPAIGN["cluster"],
            num_workers=NUM_WORKERS,
            nodes=NODES,
            devices_per_node=DEVICES,
            max_trials=1,
            duration_s=300.0,
            beats=False,  # of which there are more the slower the machine is
        )
        before_s = api.cpu_s
        work = asyncio.run(load_workers.work(orders))
        assert (len(work.posted), work.refused) == (NUM_PROBES, [])
        return api.cpu_s - before_s


FIGURES: Final[dict[str, tuple[Callable[[Path, Path], float], float, float]]] = {
    "start of `serve` to its first page": (start_s, 1.0, 0.5),
    "a probe's lease and outcome": (probes_s, NUM_PROBES, 0.7),
}
"""By name: what measures it, how many of it that is, and the ratio that is asked."""


def compared(name: str, base: Path, pairs: int) -> tuple[str, ...]:
    """A row of the table: medians of both, and the median of the ratios of pairs."""
    measure, parts, asked = FIGURES[name]
    taken: dict[Path, list[float]] = {base: [], ROOT: []}
    for pair in range(1 + pairs):
        for side in (base, ROOT) if pair % 2 else (ROOT, base):
            with tempfile.TemporaryDirectory() as folder:
                took_s = measure(side, Path(folder))
            if pair:  # the first pair compiles the modules
                taken[side].append(took_s)
    ratios = [ours / theirs for ours, theirs in zip(taken[ROOT], taken[base], strict=True)]
    before_ms, now_ms = (f"{1000 * median(taken[side]) / parts:.1f} ms" for side in (base, ROOT))
    spread = f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    return name, before_ms, now_ms, spread, f"at most {asked:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", type=Path, required=True, help="folder of the other revision")
    parser.add_argument("--pairs", type=count, default=5)
    parser.add_argument("--only", choices=list(FIGURES), action="append", help="repeatable")
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    rows = []
    for name in asked.only or FIGURES:
        rows.append(compared(name, asked.base.absolute(), asked.pairs))
        print(" | ".join(rows[-1]), flush=True)
    header = ("processor time of the service", "before", "now", "now / before", "asked")
    text = (
        f"`python -m benchmarks.bench_processor`, {asked.pairs} pairs in turns; {NUM_PROBES} probes "
        f"that wait at once, {NUM_WORKERS} workers; {describe_machine('fastapi', 'sqlalchemy')}.\n\n"
        f"{table(header, rows)}"
    )
    if asked.record:
        record("Processor time", text)


if __name__ == "__main__":
    main()
