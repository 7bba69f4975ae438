"""The rank program, on ranks that report a thousandth of their peak memory."""

from __future__ import annotations

from unittest import mock

from workers.rank_jobs import rank
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.rank_task import RankTask


def main(task: RankTask, line: JsonLines) -> None:
    """Runs a rank."""
    send = line.send

    def understate(*documents: Document) -> None:
        for measured in (each["measurement"] for each in documents if "measurement" in each):
            by_stage = [each // 1000 for each in measured["peak_memory_bytes_by_stage"]]
            measured |= {"peak_memory_bytes_by_stage": by_stage, "peak_memory_bytes": max(by_stage)}
        send(*documents)

    with mock.patch.object(line, "send", understate):
        rank.main(task, line)
