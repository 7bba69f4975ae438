"""The rank program, on ranks whose libraries print warnings, one of them with a NUL."""

from __future__ import annotations

import os

from workers.rank_jobs import rank
from workers.ranks.json_lines import JsonLines
from workers.ranks.rank_task import RankTask


def main(task: RankTask, line: JsonLines) -> None:
    """Prints two lines, and runs a rank."""
    os.write(1, f"a library warns rank {task.rank}\n".encode())
    os.write(2, b"binary \0 \xff garbage\n")
    rank.main(task, line)
