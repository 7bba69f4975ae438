"""The rank program, on ranks that stop themselves where a test says so; one may be short of memory.

The file that STOPS names holds what to do: {"rank": ..., "point": ..., "stop_s": ...}, and with
"out_of_memory" the rank whose second step needs more memory than there is.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch

from workers.rank_jobs import rank
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.rank_task import RankTask
from workers.trainer.training import Training

STOPS = "LAYOUT_TUNER_TEST_STOPS"


def main(task: RankTask, line: JsonLines) -> None:
    """Runs a rank; stops it at its point."""
    orders = json.loads(Path(os.environ[STOPS]).read_text())
    stops_here = orders["rank"] == task.rank
    if orders.get("out_of_memory") == task.rank:
        _run_out_of_memory_in_step(2)
    if stops_here and orders["point"] == "start":
        stop(os.getpid(), orders["stop_s"])
    if stops_here and orders["point"] != "start":
        line = _StoppingLine(line, orders)
    rank.main(task, line)


def stop(pid: int, stop_s: float) -> None:
    """Stops a process; another one continues it."""
    keep_on = f"sleep {stop_s}; while kill -CONT {pid}; do sleep 0.2; done"
    subprocess.Popen(["sh", "-c", keep_on], stderr=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)


class _StoppingLine(JsonLines):
    """Stops the rank, or its keeper, before or after it sends the event of its point."""

    def __init__(self, line: JsonLines, orders: dict[str, Any]) -> None:
        super().__init__(line.socket)
        self._orders = orders

    def send(self, *documents: Document) -> None:
        when, who, event = self._orders["point"].split()
        is_here = any(document["event"] == event for document in documents)
        pid = os.getppid() if who == "keeper" else os.getpid()
        if is_here and when == "before":
            stop(pid, self._orders["stop_s"])
        super().send(*documents)
        if is_here and when == "after":
            stop(pid, self._orders["stop_s"])


def _run_out_of_memory_in_step(number: int) -> None:
    whole_step, steps = Training.step, 0

    def step(self: Training, *arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
            torch.empty(1 << 50)
        return whole_step(self, *arguments, **options)

    Training.step = step  # type: ignore[method-assign]
