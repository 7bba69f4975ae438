"""What an agent reads from the lines of a group: the reports of a rank come before its exit."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import pytest

from search_spaces.protocol.outcome import Outcome
from tests.kit.side_by_side import make_task
from workers.rank_jobs.rank import _one_line
from workers.ranks.json_lines import Document, JsonLines
from workers.ranks.rank_reports import RankReports

EXITS = [{"event": "exit", "group": "a", "rank": rank, "code": 0} for rank in (1, 0)]
RESULT = {"event": "result", "pad": "x"}
LONG_RESULT = {"event": "result", "pad": "x" * 150_000}


class Group:
    """Two ranks and their keeper, whose ends of the lines the test holds."""

    def __init__(self) -> None:
        self.events: list[Document] = []
        self.late: list[Document] = []
        """What rank 0 sends once the agent is at the exits."""
        tasks = [make_task("a", rank=rank, world_size=2) for rank in (0, 1)]
        self.lines = RankReports(tasks, self._take)
        self.keeper, self.rank, _ = map(JsonLines, self.lines.others_ends)
        self.rank.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self.rank.socket.settimeout(10)  # what does not fit would block

    def end(self) -> list[tuple[str, int]]:
        """Has both ranks exit; returns the kinds and ranks of what the agent tells."""
        self.keeper.send(*EXITS)
        self.keeper.close()
        self.lines.run()
        return [(event["event"], event["rank"]) for event in self.events]

    def _take(self, events: Sequence[Document]) -> None:
        self.events += events
        if EXITS[0] in events and self.late:
            self.rank.send(*self.late)
            self.rank.close()


@pytest.mark.parametrize("result", [RESULT, LONG_RESULT], ids=["short", "of-many-chunks"])
def test_a_report_is_told_before_the_exit_of_its_rank(result: Document) -> None:
    group = Group()
    group.rank.send(result)
    group.rank.close()
    told = group.end()
    assert told.index(("report", 0)) < told.index(("exit", 0))
    assert [one["document"] for one in group.events if one["event"] == "report"] == [result]
    # Another rank sends it and exits at once, after the agent has looked at the rank's line.
    group = Group()
    group.late = [result]
    assert group.end() == [("exit", 1), ("report", 0), ("exit", 0)]
    assert group.events[1]["document"] == result


def test_an_error_that_quotes_a_name_of_no_encoding_still_makes_an_outcome() -> None:
    said = _one_line(OSError("cannot open weights-\udcff.bin\nand more"))
    assert said == "OSError: cannot open weights-\\udcff.bin"
    assert Outcome(state="failed", reason="crashed", message=said).message == said
