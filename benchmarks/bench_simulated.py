"""Simulated campaigns through `layout-tuner up --simulate`: how long they take, and what they cost.

Run as `python -m benchmarks.bench_simulated`. The first campaign searches 60 probes on 64 simulated
nodes of Frontier. The second has a thousand probes at once, on 9,408 nodes of 64 workers: processor
time of service and driver a probe, and the share of the devices' simulated time that is used while
trials wait. Its strategy is random, since the time of a strategy is another question.
`--postgres` runs them on a PostgreSQL that is started for them; `--record` writes the section
"Simulated campaigns" of RESULTS.md.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.arguments import count
from benchmarks.bench_idle import processor_times, running_up
from benchmarks.results_file import describe_machine, record, table
from benchmarks.service.postgres_server import PostgresServer, running_server
from layout_tuner.client.clients import Client
from layout_tuner.protocol.connection.running_service import find_service

SMALL_PROBES: Final = 60
SMALL_WITHIN_S: Final = 60.0
"""Real seconds that are asked for the campaign of so many probes."""
AT_ONCE: Final = 1000
WORKERS: Final = 64
NODES: Final = 147
PROBES: Final = 2500
A_PROBE_S: Final = 0.1
"""Seconds of processor time of service and driver that are asked for a probe, at most."""
LEAST_USED: Final = 0.95
"""Share of the devices' time that is asked for while trials wait."""

_USED: Final = re.compile(r"simulated ([\d.e+]+) h .*: ([\d.]+)% of .* waited, ([\d.]+)% in all")

SMALL: Final[Mapping[str, Any]] = {
    "model": "gpt-22b",
    "cluster": "frontier",
    "simulated": {"seed": 1},
    "space": {"global_batch_size": 512, "num_nodes": 16, "precision": "bf16"},
    "budget": {"trials": SMALL_PROBES},
    "probe": {"deadline": "15m"},
}
LARGE: Final[Mapping[str, Any]] = {
    "model": "gpt-22b",
    "cluster": "frontier",
    "simulated": {"seed": 1},
    "strategy": "random",
    "space": {
        "global_batch_size": 2880,
        "num_nodes": [8, 9, 10],
        "tp": [1, 2, 4, 8],
        "pp": [1, 2, 3, 4, 6, 8],
        "vpp": [1, 2],
        "micro_batch_size": [1, 2, 4],
        "zero_stage": [0, 1, 2, 3],
        "recompute": ["none", "selective", "full"],
        "sequence_parallel": [False, True],
        "precision": "bf16",
    },
    "probe": {"deadline": "1h"},
    "stop": {"remeasure": 0},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedCampaign:
    """A campaign that has ended."""

    wall_s: float
    probes: int
    most_at_once: int
    processor_s: Mapping[str, float]
    """By part of `layout-tuner up`."""
    simulated_h: float
    used_while_waited: float
    used: float
    campaign: Any

    @property
    def a_probe_s(self) -> float:
        """Processor time of service and driver, by probe."""
        return (self.processor_s["api"] + self.processor_s["driver"]) / self.probes


@contextmanager
def _client(data_dir: Path) -> Iterator[Client]:
    service = find_service(data_dir)
    assert service is not None
    with Client(service.url, (data_dir / "token").read_text().strip()) as client:
        yield client


def measure(document: Mapping[str, Any], *options: str) -> EndedCampaign:
    """Runs a campaign with workers of these options."""
    with tempfile.TemporaryDirectory() as folder:
        data_dir = Path(folder) / "data"
        with running_up(data_dir, "--simulate", "frontier", *options) as up:
            time.sleep(3)  # nodes are checked
            with _client(data_dir) as client:
                before, began = _by_part(up), time.monotonic()
                client.create_campaign({"name": "bench", **document})
                most = 0
                while (campaign := client.campaign("bench")).ended_at is None:
                    most = max(most, campaign.progress.trials["RUNNING"])
                    time.sleep(1.0)
                wall_s, after = time.monotonic() - began, _by_part(up)
        said = _USED.search((data_dir / "logs" / "worker.log").read_text())
    assert said is not None, "the worker says at its end how much was used"
    return EndedCampaign(
        wall_s=wall_s,
        probes=campaign.progress.trials_ended,
        most_at_once=most,
        processor_s={part: after[part] - before[part] for part in after},
        simulated_h=float(said[1]),
        used_while_waited=float(said[2]) / 100,
        used=float(said[3]) / 100,
        campaign=campaign,
    )


def _by_part(up: psutil.Process) -> Counter[str]:
    spent: Counter[str] = Counter()
    for process, seconds in processor_times(up).items():
        spent[process.part] += seconds  # type: ignore[assignment]  # it is not whole
    return spent


def _rows(small: EndedCampaign | None, large: EndedCampaign) -> Iterator[tuple[str, str, str]]:
    if small is not None:
        yield (
            f"{small.probes} probes, guided, 64 nodes: real time",
            f"{small.wall_s:.1f} s",
            f"{SMALL_WITHIN_S:.0f} s",
        )
    yield "probes that ran at once, at most", f"{large.most_at_once:,}", f"{AT_ONCE:,}"
    yield "probes in all", f"{large.probes:,}", ""
    yield "legal layouts", f"{large.campaign.num_legal_layouts:,}", "10,000 at most"
    yield "real and simulated time", f"{large.wall_s:.0f} s, {large.simulated_h:.2f} h", ""
    yield (
        "processor time of service and driver, by probe",
        f"{large.a_probe_s:.3f} s",
        f"{A_PROBE_S} s",
    )
    parts = ("api", "driver", "worker")
    shares = [f"{large.processor_s[part] / large.probes:.3f} s" for part in parts]
    yield f"that of {', '.join(parts)}", ", ".join(shares), ""
    yield (
        "devices' time used while trials wait",
        f"{large.used_while_waited:.1%}",
        f"{LEAST_USED:.0%}",
    )
    yield "the same, to the end of the last probe", f"{large.used:.1%}", ""


def _where(server: PostgresServer | None, name: str) -> tuple[str, ...]:
    """The options for a database of its own."""
    if server is None:
        return ()
    server.execute(f"CREATE DATABASE {name}")
    return "--database", server.url(name)


def main() -> None:
    """Measures, prints, and records if asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--probes", type=count, default=PROBES, help="of the second campaign")
    parser.add_argument("--workers", type=count, default=WORKERS)
    parser.add_argument("--nodes", type=count, default=NODES, help="of each worker")
    parser.add_argument("--postgres", action="store_true", help="on PostgreSQL and not on SQLite")
    parser.add_argument("--without-small", action="store_true", help="only the second campaign")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    asked = parser.parse_args()
    with ExitStack() as started:
        server = started.enter_context(running_server()) if asked.postgres else None
        small = None
        if not asked.without_small:
            small = measure(SMALL, "--nodes", "64", *_where(server, "small"))
        large = measure(
            {**LARGE, "budget": {"trials": asked.probes}},
            *("--workers", str(asked.workers), "--nodes", str(asked.nodes)),
            *_where(server, "large"),
        )
    rows = list(_rows(small, large))
    for row in rows:
        print(*row, sep=" | ")
    text = (
        f"`python -m benchmarks.bench_simulated`; {describe_machine('sqlalchemy')}. "
        f"`layout-tuner up --simulate frontier --time-scale 0`; the second campaign, of "
        f"{large.probes:,} probes, on "
        f"{asked.workers} workers of {asked.nodes} nodes, on "
        f"{'PostgreSQL' if asked.postgres else 'SQLite'}.\n\n"
        + table(("", "measured", "asked"), [row for row in rows if row[2]])
    )
    print(text)
    if asked.record:
        record("Simulated campaigns", text)


if __name__ == "__main__":
    main()
