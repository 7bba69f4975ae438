"""Forty owners and 400 simulated campaigns on two services and one PostgreSQL, with kills.

    python -m tests.long_run.run --folder FOLDER [--minutes 120]
    python -m tests.long_run.run --folder FOLDER --report

All state is in the folder. A run that was interrupted, however that was, goes on when the command
is given again. Every few seconds something is killed: the first service, the driver, a worker, or a
connection of the database. PostgreSQL crashes twice, and the services are restarted one after the
other near the beginning and the end. In between the second service lives in peace, so that its
memory and handles in the second half are comparable with those in the first.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.arguments import count, refuse
from benchmarks.results_file import describe_machine, record
from layout_tuner.client.clients import Client
from layout_tuner.client.errors import ServiceError
from layout_tuner.results_db.store import Store
from tests.long_run import measured
from tests.long_run.people import CAMPAIGNS, OWNERS, People
from tests.long_run.processes import SERVICES, Processes, patiently

CALM_S: Final = (10.0, 40.0)
"""Shortest and longest time between two strikes."""
SAMPLED_S: Final = 10.0
TRIALS_A_MINUTE: Final = 0.05
"""Of a campaign with an end, by minute of the run: the owners with the least share need a quarter
of what they get where the processor is fast enough."""
PATIENCE_S: Final = 1200.0
"""How long campaigns may still take when the run is over."""


class LongRun:
    """A run in a folder, new or interrupted.

    Args:
        folder: readable by all, because PostgreSQL does not run as root.
        minutes: its length, without the time in which the owners are made.
    """

    def __init__(self, folder: Path, minutes: int) -> None:
        folder.mkdir(exist_ok=True, parents=True)
        folder.chmod(0o755)
        self.folder = folder
        self._file = folder / "state.json"
        self.state: dict[str, Any] = (
            json.loads(self._file.read_text())
            if self._file.exists()
            else {"minutes": minutes, "elapsed_s": 0.0, "done": [], "strikes": [], "faults": []}
        )
        if self.state["minutes"] != minutes:
            raise ValueError(
                f"the run in {folder} is one of {self.state['minutes']} minutes; leave --minutes out"
            )
        self.samples = folder / "samples.jsonl"
        self._random = random.Random()

    def go_on(self) -> list[str]:
        """Runs to the end; returns what is not as it is to be."""
        if "result" in self.state:
            return list(self.state["result"])
        self._processes = Processes(self.folder, self.state)
        try:
            self._processes.start()
            self._keep()
            trials = max(1, round(self.state["minutes"] * TRIALS_A_MINUTE))
            with closing(People(self._processes, self.state, trials)) as people:
                people.settle(self._keep)
                people.begin()
                self._rage(people)
                self._finish(people)
        finally:
            self._keep()
            self._processes.end()
        self._keep()
        return list(self.state["result"])

    def _keep(self) -> None:
        unfinished = self._file.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.state))
        unfinished.rename(self._file)

    @property
    def _part(self) -> float:
        """The part of the run that is over."""
        return float(self.state["elapsed_s"]) / (60 * self.state["minutes"])

    def _rage(self, people: People) -> None:
        now = time.monotonic()
        sampled_at, strike_at = now, now + self._random.uniform(*CALM_S)
        while self._part < 1.0:
            before = time.monotonic()
            time.sleep(0.2)
            self._processes.look()
            if before >= strike_at and self._part < measured.END:
                self._note(self._processes.strike(self._random))
                strike_at = time.monotonic() + self._random.uniform(*CALM_S)
            for at, name, act in (
                (0.05, "rolling restart", self._processes.roll),
                (measured.WARM, "first use", lambda: self._note_use(people, "use_before")),
                (0.3, "crash of PostgreSQL", self._processes.restart_database),
                (0.7, "another crash of PostgreSQL", self._processes.restart_database),
                (measured.END, "last use", lambda: self._note_use(people, "use_after")),
                (0.92, "another rolling restart", self._processes.roll),
            ):
                if self._part >= at and name not in self.state["done"]:
                    act()
                    self.state["done"].append(name)
                    self._note(name)
            if before >= sampled_at:
                self._sample(people)
                sampled_at = before + SAMPLED_S
            self.state["elapsed_s"] += time.monotonic() - before

    def _note(self, what: str) -> None:
        self.state["strikes"].append((round(self.state["elapsed_s"], 1), what))
        self._keep()

    def _note_use(self, people: People, name: str) -> None:
        self.state[name] = people.node_hours()

    def _sample(self, people: People) -> None:
        token = self._processes.data.token_file.read_text().strip()
        for name, url in zip(SERVICES, self._processes.urls, strict=True):
            try:
                with Client(url, token, timeout_s=10.0) as client:
                    metrics = client.metrics()
                taken = measured.sample(self._part, name, self._processes.live[name].pid, metrics)
            except (ServiceError, psutil.Error):
                continue
            measured.keep(self.samples, taken)
        self._keep()

    def _finish(self, people: People) -> None:
        """Lets campaigns and messages come to their end, and looks at everything."""
        people.end_looking()
        people.cancel_endless()
        faults, told = self._processes.faults, self.folder / "messages.jsonl"
        with closing(Store(self._processes.url)) as store:
            patiently("every campaign has ended", lambda: _have_ended(store), faults, PATIENCE_S)
            everything = CAMPAIGNS * OWNERS
            patiently(
                "every message has arrived",
                lambda: measured.num_told(told) >= everything,
                faults,
                PATIENCE_S,
            )
            self._processes.end("worker-1", "worker-2", "driver")
            self.state["result"] = [*faults, *measured.lost(self._processes, store)]

    def report(self) -> str:
        """What was measured so far."""
        minutes = self.state["elapsed_s"] / 60
        strikes = [what for _, what in self.state["strikes"]]
        counts = {what: strikes.count(what) for what in sorted(set(strikes))}
        lines = [f"{minutes:.1f} of {self.state['minutes']} minutes; {counts}"]
        if "use_after" in self.state:
            heavy, off = measured.shares_of_weights(
                self.state["use_before"], self.state["use_after"]
            )
            lines.append(
                f"owners of weight 2 had {heavy:.1f} % of the node-hours (asked: 66.7 %); the owner "
                f"furthest off differs by {off:.0f} % of its share"
            )
        lines += ["", measured.text_of(measured.kept(self.samples)), ""]
        result = self.state.get("result", self.state["faults"])
        return "\n".join([*lines, f"{len(result)} faults", *(f"- {each}" for each in result)])


def _have_ended(store: Store) -> bool:
    return all(each.ended_at is not None for each in store.campaigns.find())


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Turns SIGTERM into an exit, so that all processes are ended."""

    def end(*_: object) -> None:
        sys.exit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    """Runs, or goes on; prints the report. Exits with 1 if something is not as it is to be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the run's state")
    parser.add_argument("--minutes", type=count, help="of a new run; by default 120")
    parser.add_argument("--report", action="store_true", help="print what was measured so far")
    parser.add_argument("--record", action="store_true", help="write to RESULTS.md")
    asked = parser.parse_args()
    kept = asked.folder / "state.json"
    minutes = json.loads(kept.read_text())["minutes"] if kept.exists() else 120
    try:
        run = LongRun(asked.folder, asked.minutes or minutes)
    except ValueError as error:
        refuse(parser.prog, str(error))
    if not asked.report:
        with ended_by_signals():
            run.go_on()
    sys.stdout.write(f"{run.report()}\n")
    if asked.record:
        machine = describe_machine("sqlalchemy", "psycopg")
        record("Forty owners", f"`python -m tests.long_run.run`; {machine}.\n\n{run.report()}")
    sys.exit(bool(run.state.get("result")))


if __name__ == "__main__":
    main()
