"""A node's zygote forks ranks, relays what they say, and is the end of whatever they leave."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from search_spaces.connection.service_address import PRIVATE_VARIABLES
from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    MARK,
    RANK_PROGRAMS,
    is_alive,
    kill,
    marked,
    run_group,
    wait_until_gone,
)
from workers.errors import NodeLostError
from workers.launchers.base import NodeEvent
from workers.launchers.local import LocalNodes

pytestmark = pytest.mark.ranks


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    nodes = LocalNodes(num_devices=2, rank_entry=RANK_PROGRAMS)
    nodes.ranks.wait_until_ready()
    yield nodes
    pids = nodes.ranks.pids.values()
    nodes.close()
    wait_until_gone(pids)


def children_of_zygote(nodes: LocalNodes) -> list[psutil.Process]:
    return psutil.Process(nodes.ranks.pids["zygote"]).children(recursive=True)


def test_every_rank_returns_its_result_and_sits_on_its_own_core(nodes: LocalNodes) -> None:
    end = run_group(nodes, "succeed")
    assert end.failure is None
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= 2:
        share = len(cores) // 2
        assert end.results[0]["cores"] == cores[:share]
        assert end.results[1]["cores"] == cores[share : 2 * share]


def test_ranks_see_neither_tokens_nor_passwords(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PRIVATE_VARIABLES:
        monkeypatch.setenv(name, "private")
    nodes = LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS)
    try:
        nodes.ranks.wait_until_ready()
        seen = psutil.Process(nodes.ranks.pids["zygote"]).environ()
    finally:
        nodes.close()
    assert not PRIVATE_VARIABLES & seen.keys()


def test_more_ranks_than_devices_share_all_cores(nodes: LocalNodes) -> None:
    end = run_group(nodes, "succeed", num_ranks=3)
    assert {tuple(result["cores"]) for result in end.results.values()} == {
        tuple(sorted(os.sched_getaffinity(0)))
    }


def test_a_result_of_many_chunks_is_never_overtaken_by_the_exit(nodes: LocalNodes) -> None:
    for _ in range(10):
        end = run_group(nodes, "say-much")
        assert end.failure is None
        assert [len(end.results[rank]["pad"]) for rank in (0, 1)] == [150_000] * 2


def test_iterations_come_in_order_and_in_lots(
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
    assert [index for lot in lots for index in lot] == list(range(200))
    assert len(lots) <= 2 + end.duration_s / 0.5


def test_freed_memory_stays_with_the_ranks_unless_the_user_has_another_wish(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "12345678")
    nodes = LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS)
    nodes.ranks.wait_until_ready()
    environment = psutil.Process(nodes.ranks.pids["zygote"]).environ()
    nodes.close()
    assert environment["MALLOC_MMAP_THRESHOLD_"] == "4000000000"
    assert environment["MALLOC_TRIM_THRESHOLD_"] == "12345678"


def test_ranks_go_before_everything_else_when_memory_gets_short(nodes: LocalNodes) -> None:
    end = run_group(nodes, "tell-oom-score")
    assert [end.results[rank]["oom_score_adj"] for rank in (0, 1)] == [500, 500]


def test_ranks_are_told_where_rank_0_listens(nodes: LocalNodes) -> None:
    end = run_group(nodes, "meet")
    where = {"address": "127.0.0.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in (0, 1)] == [where, where]


def test_a_daemon_that_a_rank_leaves_is_gone_when_the_group_has_ended(nodes: LocalNodes) -> None:
    end = run_group(nodes, "daemonise")
    daemons = [result["daemon"] for result in end.results.values()]
    assert len(daemons) == 2
    assert not any(map(is_alive, daemons))


def test_a_rank_of_many_words_keeps_its_last_ones(nodes: LocalNodes) -> None:
    end = run_group(nodes, "talk", num_ranks=1)
    lines = end.log_tail.splitlines()
    assert len(lines) == 50
    assert lines[-1] == "ValueError: this rank was told to fail"
    assert lines[-3] == "line 19999 of a rank that says too much"


def test_twenty_groups_in_a_row_leave_no_process_and_no_descriptor(nodes: LocalNodes) -> None:
    run_group(nodes, "succeed")
    zygote = nodes.ranks.pids["zygote"]
    descriptors = len(list(Path(f"/proc/{zygote}/fd").iterdir()))
    for kind in ("succeed", "fail", "daemonise", "kill-itself", "meet") * 4:
        run_group(nodes, kind)
        assert not children_of_zygote(nodes)
    assert len(list(Path(f"/proc/{zygote}/fd").iterdir())) == descriptors


@pytest.mark.parametrize("victim", ["zygote", "warden"])
def test_sigkill_of_zygote_or_warden_leaves_no_rank_and_the_node_recovers(
    nodes: LocalNodes, victim: str
) -> None:
    pids = dict(nodes.ranks.pids)
    hanging: list[int] = []

    def kill_when_all_hang(event: dict[str, Any]) -> None:
        hanging.append(event["pid"])
        if len(hanging) == 2:
            os.kill(pids[victim], signal.SIGKILL)

    end = run_group(nodes, "hang", on_event=kill_when_all_hang)
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    code = {"zygote": 128 + signal.SIGKILL, "warden": -signal.SIGKILL}[victim]
    assert end.failure.message == f"the zygote ended: its warden ended with exit code {code}"
    wait_until_gone([*hanging, *pids.values()])
    nodes.recover(0)
    assert run_group(nodes, "succeed").failure is None


def test_sigkill_of_warden_zygote_and_keeper_together_leaves_no_daemon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = f"watched-{os.getpid()}"
    monkeypatch.setenv(MARK, mark)
    nodes = LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS)
    nodes.ranks.wait_until_ready()

    def kill_all_that_watch(_: dict[str, Any]) -> None:
        zygote = psutil.Process(nodes.ranks.pids["zygote"])
        watchers = [*nodes.ranks.pids.values(), *(keeper.pid for keeper in zygote.children())]
        for number in (signal.SIGSTOP, signal.SIGKILL):  # none sees another one end
            for pid in watchers:
                os.kill(pid, number)

    end = run_group(nodes, "daemonise-then-hang", num_ranks=1, on_event=kill_all_that_watch)
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    left = [process.pid for process in marked(mark)]
    kill(marked(mark))
    nodes.close()
    assert left == []


def test_a_rank_with_nobody_left_to_end_it_ends_by_its_own_alarm(nodes: LocalNodes) -> None:
    end = run_group(nodes, "hang-past-alarm", num_ranks=1)
    assert end.failure is not None
    assert end.failure.reason == "timeout"
    assert end.failure.message == "rank 0 was ended by its own alarm after the deadline"


def test_an_order_to_a_lost_node_says_so(nodes: LocalNodes) -> None:
    os.kill(nodes.ranks.pids["zygote"], signal.SIGKILL)
    wait_until("the loss is known", lambda: nodes.ranks.poll(0.1))
    with pytest.raises(NodeLostError, match="the zygote ended: its warden ended with exit code 1"):
        nodes.ranks.end("any")


def test_a_zygote_that_cannot_load_its_program_is_reported_at_once() -> None:
    nodes = LocalNodes(num_devices=1, rank_entry="tests.workers.no_such_module:run")
    with pytest.raises(NodeLostError, match="did not get ready") as lost:
        nodes.ranks.wait_until_ready(10)
    nodes.close()
    assert "its warden ended with exit code 1; its last words: " in str(lost.value)
    assert "No module named 'tests.workers.no_such_module'" in str(lost.value)
    assert "within" not in str(lost.value)


def test_a_zygote_that_takes_too_long_is_reported_with_the_seconds() -> None:
    nodes = LocalNodes(num_devices=1, rank_entry="tests.workers.slow_rank_programs:run")
    with pytest.raises(NodeLostError, match=r"did not get ready within 0\.3 s$"):
        nodes.ranks.wait_until_ready(0.3)
    nodes.close()


def test_a_zygote_that_sends_what_is_no_json_is_lost_and_ends() -> None:
    nodes = LocalNodes(num_devices=1, rank_entry="tests.workers.garbled_rank:run")
    with pytest.raises(NodeLostError, match="did not get ready: its message can't be read") as lost:
        nodes.ranks.wait_until_ready(30)
    warden = nodes.ranks.pids["warden"]
    nodes.close()
    assert "within" not in str(lost.value)
    wait_until_gone([warden])
