"""A node's zygote forks ranks, relays what they say, and is the end of whatever they leave."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence

import psutil
import pytest

from layout_tuner.protocol.connection.service_address import PRIVATE_VARIABLES
from layout_tuner.protocol.outcome import Outcome
from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.launcher_nodes import NodeEvent
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.rank_jobs.rank import _one_line
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_reports import RankReports
from tests.kit.local_ranks import Hanging, failure_of, local_nodes
from tests.kit.side_by_side import make_task
from tests.workers.process_checks import RANK_PROGRAMS, kill, marked, run_group, wait_until_gone

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with local_nodes() as nodes:
        yield nodes


def test_every_rank_returns_its_result_from_its_own_core(nodes: LocalNodes) -> None:
    results = run_group(nodes, "succeed").results
    assert [results[rank]["oom_score_adj"] for rank in (0, 1)] == [500, 500]
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        share = len(cores) // 2
        assert results[0]["cores"] == cores[:share]
        assert results[1]["cores"] == cores[share : 2 * share]
    shared = run_group(nodes, "succeed", num_ranks=3).results
    assert [result["cores"] for result in shared.values()] == [cores] * 3


def test_ranks_see_no_secret_and_keep_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRIVATE_VARIABLES:
        monkeypatch.setenv(name, "private")
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "12345678")
    with local_nodes(1) as nodes:
        environment = psutil.Process(nodes.ranks.pids["zygote"]).environ()
    assert not PRIVATE_VARIABLES & environment.keys()
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "4000000000"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "12345678"


def test_a_node_without_a_group_waits_for_its_zygote_without_looking_again(
    nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_group(nodes, "succeed")
    looks = []
    read = JsonLines.read

    def noted(line: JsonLines, *, block: bool) -> list[Document] | None:
        looks.append(block)
        return read(line, block=block)

    monkeypatch.setattr(JsonLines, "read", noted)
    time.sleep(0.2)
    assert len(looks) <= 10, "a line of the group may still come; a loop looks thousands of times"


def test_iterations_arrive_several_at_a_time(
    nodes: LocalNodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    lots: list[list[int]] = []
    poll = nodes.poll

    def poll_and_count(on: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        events = poll(on, group, timeout_s)
        told = [event.document for event in events]
        reports = [event["document"] for event in told if event["event"] == "report"]
        if lot := [report["index"] for report in reports if report["event"] == "iteration"]:
            lots.append(lot)
        return events

    monkeypatch.setattr(nodes, "poll", poll_and_count)
    end = run_group(nodes, "iterate", num_ranks=1)
    assert end.failure is None
    assert lots[0] == [0]  # the first is news at once
    assert [index for lot in lots for index in lot] == list(range(100))
    assert len(lots) <= 2 + end.duration_s / 0.5


def test_sigkill_of_warden_zygote_and_keeper_together_leaves_no_daemon(mark: str) -> None:
    nodes = LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS)
    nodes.ranks.wait_until_ready()

    def kill_all_that_watch() -> None:
        zygote = psutil.Process(nodes.ranks.pids["zygote"])
        watchers = [*nodes.ranks.pids.values(), *(keeper.pid for keeper in zygote.children())]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another one end
            for pid in watchers:
                os.kill(pid, number)

    hanging = Hanging(1, kill_all_that_watch)
    failure = failure_of(nodes, "daemonise-then-hang", num_ranks=1, on_event=hanging)
    assert failure.reason == "node_lost"
    left = [process.pid for process in marked(mark)]
    kill(marked(mark))
    nodes.close()
    assert left == []


@pytest.mark.parametrize(
    ("program", "within_s", "words"),
    [
        (
            *("no_such_module:run", 10.0),
            r"did not get ready.*: its warden ended with exit code 1; its last words: "
            "(?s:.*)No module named 'tests.workers.no_such_module'",
        ),
        ("slow_rank_programs:run", 0.3, r"did not get ready within 0\.3 s$"),
        ("garbled_rank:run", 30.0, "did not get ready: its message can't be read"),
    ],
    ids=["cannot-load-its-program", "takes-too-long", "sends-no-json"],
)
def test_a_zygote_that_does_not_get_ready_is_reported_with_the_reason_and_ends(
    program: str, within_s: float, words: str
) -> None:
    nodes = LocalNodes(num_devices=1, rank_entry=f"tests.workers.{program}")
    with pytest.raises(NodeLostError, match=words) as lost:
        nodes.ranks.wait_until_ready(within_s)
    warden = nodes.ranks.pids["warden"]
    nodes.close()
    assert ("within" in str(lost.value)) == (within_s < 1), "only of one that is waited for"
    wait_until_gone([warden])


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
