"""A rank that writes down when it did what, and fails as its layout asks; else it is the worker's.

A zygote of the benchmark's worker loads it in the place of `workers.rank_jobs.rank`.
"""

from __future__ import annotations

import os

from benchmarks.workers import rank_faults
from benchmarks.workers.rank_records import RECORDS, RecordedLine
from layout_tuner.workers.rank_jobs import rank
from layout_tuner.workers.ranks.json_lines import JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask


def main(task: RankTask, line: JsonLines) -> None:
    """Runs one rank to its end."""
    if task.job["kind"] != "probe":
        return rank.main(task, line)
    recorded = RecordedLine(line, task) if RECORDS in os.environ else line
    if isinstance(recorded, RecordedLine):
        recorded.note("entered")
    fault = rank_faults.fault_of(task)
    return rank.main(task, recorded if fault is None else fault.armed(task, recorded))


rank_faults.wait_until_nodes_may_start()  # a zygote is ready once it has loaded this module
