"""The rank program on a node where others take most of the rank's core."""

from __future__ import annotations

import os

from workers.rank_jobs import rank
from workers.ranks.json_lines import JsonLines
from workers.ranks.processes import die_with_parent
from workers.ranks.rank_task import RankTask

NUM_OTHERS = 14


def main(task: RankTask, line: JsonLines) -> None:
    """Runs a rank that has a fifteenth of one core."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    rank_pid = os.getpid()
    for _ in range(NUM_OTHERS):
        if os.fork() == 0:
            die_with_parent(rank_pid)
            while True:
                pass
    rank.main(task, line)
