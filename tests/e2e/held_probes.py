"""Probes that stay in mid-iteration for as long as a test likes, on a live service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil

from benchmarks.service.live_service import LiveProcess, LiveService, wait_until
from benchmarks.workers.rank_faults import FOLDER, HELD_SEED, KEEPS_NODES_AWAY, LET_GO
from layout_tuner.process_resources import usable_cores
from layout_tuner.search_spaces.layouts.layout import Layout
from tests.workers.process_checks import command_line

RANK_ENTRY = "benchmarks.workers.recorded_rank:main"
NUM_RANKS = min(2, usable_cores())
ON_ALL = Layout(dp=NUM_RANKS)
"""A rank on every device of this machine that is used."""
PATIENCE_S = 120.0
LEASE_PATIENCE_S = 60.0
"""A lease of the service runs out in 15 s."""


class HeldProbes:
    """Adds probes to a service, and lets them go."""

    def __init__(self, service: LiveService, cluster: Any = "local-cpu") -> None:
        self.service, self._cluster = service, cluster
        self._folder = service.folder / "faults"
        self._folder.mkdir()
        service.environment[FOLDER] = str(self._folder)

    def add(self, seed: int = 0, deadline: str = "120s", layout: Layout = ON_ALL) -> int:
        """Adds a probe with a rank on each device of the machine; the seed determines its fault."""
        probe = {"warmup": 2, "iterations": 2, "deadline": deadline}
        return self.service.add(layout, seed=seed, probe=probe, cluster=self._cluster)

    def hold(self, layout: Layout = ON_ALL) -> int:
        """A probe that stays in its second iteration; returns once it is there."""
        self._struck(HELD_SEED).unlink(missing_ok=True)
        (self._folder / LET_GO).unlink(missing_ok=True)
        trial = self.add(HELD_SEED, layout=layout)
        self.wait_until_struck(HELD_SEED)
        wait_until("it has said so", lambda: self.service.trial(trial).trial.iterations_done, 30)
        return trial

    def wait_until_struck(self, seed: int) -> None:
        """Waits until a rank is about to meet what befalls this seed."""
        wait_until("a rank is struck", self._struck(seed).exists, PATIENCE_S)

    def strike_again(self, seed: int) -> None:
        """Has what befalls this seed befall the next attempt too."""
        self._struck(seed).unlink()

    def keep_nodes_away(self) -> None:
        """Has nodes that start from now on wait."""
        (self._folder / KEEPS_NODES_AWAY).touch()

    def let_nodes_start(self) -> None:
        """Has them go on."""
        (self._folder / KEEPS_NODES_AWAY).unlink()

    def let_go(self) -> None:
        """Has the held probe go on."""
        (self._folder / LET_GO).touch()

    def _struck(self, seed: int) -> Path:
        return self._folder / f"struck-{seed}"

    def wait_for_state(self, trial: int, state: str, patience_s: float = PATIENCE_S) -> None:
        """Waits until a trial is in a state."""
        wait_until(
            f"trial {trial} is {state}",
            lambda: self.service.trial(trial).trial.state == state,
            patience_s,
        )

    def endings(self, trial: int) -> list[str | None]:
        """How the trial's attempts ended."""
        return [attempt.ending for attempt in self.service.trial(trial).attempts]

    def ranks_and_zygotes(self) -> list[psutil.Process]:
        """The living processes of nodes: wardens, zygotes, ranks, and what ranks have left."""
        return [process for process in self.service.processes() if _belongs_to_a_node(process)]


def spooled(spool: Path) -> list[str]:
    """Outcomes that wait in a spool."""
    return sorted(path.name for path in spool.glob("trial-*.json"))


def assert_nothing_left(service: LiveService, *workers: LiveProcess) -> None:
    """Ends the workers; then nothing but the service is there."""
    for worker in workers:
        assert worker.stop() == 0, worker.said()
    wait_until(
        "only the service is left",
        lambda: [process.pid for process in service.processes()] == [service.serve.pid],
        30,
    )


def _belongs_to_a_node(process: psutil.Process) -> bool:
    words = " ".join(command_line(process))
    return "layout_tuner.workers.ranks.zygote" in words or "time.sleep" in words
