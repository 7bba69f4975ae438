"""A rank of a probe that also says how long its memory iteration took; else it is the worker's.

The zygote of the benchmark loads it in the place of `workers.rank_jobs.rank`.
"""

from __future__ import annotations

import time
from typing import Any

from layout_tuner.workers.rank_jobs import rank
from layout_tuner.workers.ranks.json_lines import JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.trainer.probe import probe
from layout_tuner.workers.trainer.training import Training

rehearse = probe.rehearse


def main(task: RankTask, line: JsonLines) -> None:
    """Runs one rank to its end."""

    def clocked(training: Training, **options: Any) -> int:
        started = time.perf_counter()
        peak_bytes = rehearse(training, **options)
        line.send({"event": "memory_iteration", "seconds": time.perf_counter() - started})
        return peak_bytes

    probe.rehearse = clocked
    rank.main(task, line)
