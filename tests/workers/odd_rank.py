"""The rank program, on ranks that do something odd where the file that ORDERS names asks for it.

{"rank": 1, "point": ..., "stop_s": ...}: the rank, or its keeper, stops at the point for a while
{"out_of_memory": 1}: the second step of that rank needs more memory than there is
{"open_files": 1}: that rank can open no more files from its second step on
{"talks": true}: every rank prints warnings, one of them with a NUL
{"understates": true}: every rank reports a thousandth of its peak memory
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from layout_tuner.workers.rank_jobs import rank
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.processes import die_with_parent
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.trainer.training import Training

ODD_ENTRY = "tests.workers.odd_rank:main"
ORDERS = "LAYOUT_TUNER_TEST_ORDERS"


def main(task: RankTask, line: JsonLines) -> None:
    """Runs a rank; stops it at its point."""
    orders = json.loads(Path(os.environ[ORDERS]).read_text())
    if orders.get("out_of_memory") == task.rank:
        _before_step(2, lambda: torch.empty(1 << 50))
    if orders.get("open_files") == task.rank:
        _before_step(2, _run_out_of_files)
    if "talks" in orders:
        os.write(1, f"a library warns rank {task.rank}\n".encode())
        os.write(2, b"binary \0 \xff garbage\n")
    if orders.get("rank") == task.rank and orders["point"] == "start":
        _stop(os.getpid(), orders["stop_s"])
    elif orders.get("rank") == task.rank or "understates" in orders:
        line = _OddLine(line, orders)
    rank.main(task, line)


def crowded(task: RankTask, line: JsonLines) -> None:
    """Runs a rank that has a fifteenth of one core: others take the rest."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rank_pid = os.getpid()
    for _ in range(14):
        if os.fork() == 0:
            die_with_parent(rank_pid)
            while True:
                pass
    rank.main(task, line)


def _stop(pid: int, stop_s: float) -> None:
    """Stops a process; another one continues it."""
    keep_on = f"sleep {stop_s}; while kill -CONT {pid}; do sleep 0.2; done"
    subprocess.Popen(["sh", "-c", keep_on], stderr=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)


class _OddLine(JsonLines):
    """Understates the peak; or stops the rank or its keeper before or after the point's event."""

    def __init__(self, line: JsonLines, orders: dict[str, Any]) -> None:
        super().__init__(line.socket)
        self._orders = orders

    def send(self, *documents: Document) -> None:
        for measured in (each["measurement"] for each in documents if "measurement" in each):
            if "understates" in self._orders:
                by_stage = [each // 1000 for each in measured["peak_memory_bytes_by_stage"]]
                measured["peak_memory_bytes_by_stage"] = by_stage
                measured["peak_memory_bytes"] = max(by_stage)
        when, who, event = self._orders.get("point", "never rank any").split()
        is_here = any(document["event"] == event for document in documents)
        pid = os.getppid() if who == "keeper" else os.getpid()
        if is_here and when == "before":
            _stop(pid, self._orders["stop_s"])
        super().send(*documents)
        if is_here and when == "after":
            _stop(pid, self._orders["stop_s"])


def _run_out_of_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    os.open("/dev/null", os.O_RDONLY)


def _before_step(number: int, act: Callable[[], object]) -> None:
    whole_step, steps = Training.step, 0

    def step(self: Training, *arguments: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == number:
            act()
        return whole_step(self, *arguments, **options)

    Training.step = step
