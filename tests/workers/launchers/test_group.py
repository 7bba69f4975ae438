"""A group ends at its first failure, on one node and on two, with the cause and nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.workers.launchers.group import (
    COMPLETED_LOG_LENGTH,
    FAILED_LOG_LENGTH,
    RankGroup,
    joined_tails,
)
from layout_tuner.workers.launchers.launcher_nodes import CAUSE_WITHIN_S, NodeEvent
from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.launchers.placement import place
from layout_tuner.workers.ranks.rank_task import Device
from tests.kit.local_ranks import (
    NEVER_S,
    Hanging,
    SeveralLocalNodes,
    failure_of,
    local_nodes,
    several_nodes,
)
from tests.workers.process_checks import RANK_PROGRAMS, is_alive, run_group, wait_until_gone

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with local_nodes(4) as nodes:
        yield nodes


CAUSES = {
    "a-peer-that-notices-a-death-first-is-not-it": (
        *("notice-dead-peer-then-hang", {"3": "pause-then-fail"}, {"num_ranks": 4}),
        *("crashed", 3, "rank 3: ValueError: this rank was told to fail"),
    ),
    "a-transport-error-where-there-is-nothing-else": (
        *("succeed", {"1": "notice-dead-peer-then-exit"}, {"num_ranks": 3}),
        *("crashed", 1, "rank 1: RuntimeError: Connection closed by peer"),
    ),
    "ranks-that-leave-after-a-transport-error-do-not-hide-it": (
        *("notice-dead-peer-then-exit", {"0": "pause-then-out-of-memory"}, {"num_ranks": 4}),
        *("out_of_memory", 0, "rank 0: RuntimeError: DefaultCPUAllocator: can't allocate memory"),
    ),
    "a-rank-that-is-killed-is-named-with-the-signal": (
        *("hang", {"1": "kill-itself"}, {}, "crashed", 1),
        "rank 1 was killed by signal 9 (SIGKILL); the kernel's out-of-memory killer did not strike "
        "on the node meanwhile",
    ),
    "a-rank-that-leaves-without-a-result": (
        *("hang", {"0": "leave"}, {}, "crashed", 0, "rank 0 ended without a result"),
    ),
    "a-hang-says-how-far-it-got": (
        *("hang", {"0": "iterate-once-then-hang"}, {"deadline_s": 1.5}, "timeout", None),
        "the probe did not end within deadline_s=1.5 (last: iteration 3) on {node}",
    ),
}


@pytest.mark.parametrize(
    ("kind", "by_rank", "options", "reason", "rank", "message"), CAUSES.values(), ids=CAUSES
)
def test_a_group_tells_the_cause_of_its_failure(
    nodes: LocalNodes,
    kind: str,
    by_rank: dict[str, str],
    options: dict[str, Any],
    reason: str,
    rank: int | None,
    message: str,
) -> None:
    failure = failure_of(nodes, kind, by_rank=by_rank, **options)
    assert (failure.reason, failure.rank, failure.node) == (reason, rank, 0)
    assert failure.message == message.format(node=nodes.nodes[0].name)
    assert failure.transport == message.endswith("Connection closed by peer")


LEFT = {"by_rank": {"1": "notice-dead-peer-then-exit"}}


def test_deadline_and_cancellation_end_the_wait_for_a_cause(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "hang", deadline_s=1.0, **LEFT)
    assert failure.message == "rank 1: RuntimeError: Connection closed by peer"
    told: list[object] = []
    is_told = {"on_event": told.append, "cancelled": lambda: bool(told)}
    failure = failure_of(nodes, "hang", deadline_s=NEVER_S, **LEFT, **is_told)
    assert failure.reason == "cancelled"


@pytest.mark.slow
def test_a_cause_that_does_not_come_is_given_up(nodes: LocalNodes) -> None:
    end = run_group(nodes, "hang", deadline_s=NEVER_S, **LEFT)
    assert end.failure.message == "rank 1: RuntimeError: Connection closed by peer"
    assert end.duration_s >= CAUSE_WITHIN_S


@pytest.mark.parametrize(
    ("oom_kills", "limit_bytes", "reason", "sentence"),
    [
        (1, 699, "out_of_memory", "rank 1 had taken 0.6836 KiB, over its limit of 0.6826 KiB"),
        (1, 700, "node_lost", "rank took more than rank 1, 0.6836 KiB of the 0.6836 KiB promised"),
        (2, None, "out_of_memory", "struck 2 times on the node meanwhile, which had 0.9766 KiB"),
        (None, 500, "crashed", "can't be known: the kernel keeps no count"),
    ],
)
def test_the_out_of_memory_killer_is_the_layouts_fault_where_a_rank_took_too_much(
    nodes: LocalNodes,
    monkeypatch: pytest.MonkeyPatch,
    oom_kills: int | None,
    limit_bytes: int | None,
    reason: str,
    sentence: str,
) -> None:
    """With the kernel's figures for the death of a rank that has killed itself."""
    taken = {"memory_available_bytes": 1000, "memory_taken_bytes": {"0": 500, "1": 700}}
    poll = nodes.poll

    def poll_with_figures(*arguments: Any) -> list[NodeEvent]:
        events = poll(*arguments)
        for event in events:
            event.document.update({"oom_kills": oom_kills, **taken})
        return events

    monkeypatch.setattr(nodes, "poll", poll_with_figures)
    kills_itself = {"by_rank": {"0": "kill-itself"}, "memory_limit_bytes": limit_bytes}
    failure = failure_of(nodes, "hang", deadline_s=NEVER_S, **kills_itself)
    assert failure.reason == reason
    assert failure.message.startswith("rank 0 was killed by signal 9 (SIGKILL); ")
    assert sentence in failure.message


@pytest.mark.parametrize(
    ("device", "code", "reason", "sentence"),
    [
        ("cuda", signal.SIGKILL, "host_resource", "the host ran out of memory: give the job more"),
        ("cpu", signal.SIGKILL, "out_of_memory", "over its limit"),
        ("cuda", signal.SIGBUS, "host_resource", "the host ran out of shared memory: enlarge"),
        ("cpu", signal.SIGBUS, "host_resource", "the host ran out of shared memory: enlarge"),
    ],
)
def test_what_the_host_of_a_rank_ran_out_of_is_told_from_its_devices_memory(
    nodes: LocalNodes, device: Device, code: int, reason: str, sentence: str
) -> None:
    machine = replace(nodes.nodes[0], num_devices=1)
    places = {"num_ranks": 1, "num_nodes": 1, "device": device, "deadline_s": NEVER_S}
    group = RankGroup(
        nodes=nodes,
        tasks=place([machine], job={"kind": "hang"}, **places),
        deadline_s=NEVER_S,
        on_event=lambda _: None,
        cancelled=lambda: False,
        memory_limit_bytes=600,
    )
    figures = {"memory_available_bytes": 1000, "memory_taken_bytes": {"0": 700}}
    found, how = group._how_it_ended({"code": -code, "oom_kills": 1, **figures})
    assert (found, sentence in how) == (reason, True), how


def test_the_clock_of_a_group_starts_when_its_zygote_is_ready() -> None:
    nodes = LocalNodes(num_devices=2, rank_entry="tests.workers.slow_rank_programs:run")
    end = run_group(nodes, "succeed", deadline_s=2.0)
    nodes.close()
    assert end.failure is None
    assert end.duration_s < 2.0


def test_the_log_of_ranks_that_succeed_is_kept_up_to_a_bound(nodes: LocalNodes) -> None:
    end = run_group(nodes, "talk-then-succeed", num_ranks=2)
    assert end.failure is None
    lines = end.log_tail.splitlines()
    assert COMPLETED_LOG_LENGTH / 2 < len(end.log_tail) <= COMPLETED_LOG_LENGTH
    assert [line for line in lines if line.startswith("---")] == ["--- rank 0", "--- rank 1"]
    assert lines[-1].startswith("line 19999 of rank 1, ")
    assert lines[lines.index("--- rank 1") - 1].startswith("line 19999 of rank 0, ")


def test_a_cancelled_group_ends_at_once_and_keeps_more_of_its_log(nodes: LocalNodes) -> None:
    told: list[dict[str, Any]] = []
    both_hang = {"on_event": told.append, "cancelled": lambda: len(told) == 2}  # after all words
    talks = {"1": "talk-then-hang"}
    end = run_group(nodes, "hang", by_rank=talks, num_ranks=2, deadline_s=NEVER_S, **both_hang)
    assert (end.failure.reason, end.failure.rank) == ("cancelled", None)
    assert end.failure.message == "the probe was cancelled (no iteration had ended)"
    assert COMPLETED_LOG_LENGTH < len(end.log_tail) <= FAILED_LOG_LENGTH


def test_ranks_that_print_little_leave_their_share_of_the_log_to_the_others() -> None:
    tails = {0: "x" * 2000, 1: "short", 2: "", 3: "\n".join(["y" * 99] * 20)}
    joined = joined_tails(tails, 3000)
    assert joined.startswith("--- rank 0\n" + "x" * 1400)
    assert "\n--- rank 1\nshort\n--- rank 3\n" + "y" * 99 + "\n" in joined
    assert 2800 < len(joined) <= 3000
    of_many = joined_tails({rank: f"rank {rank}\n" * 5000 for rank in range(1000)}, 16_384)
    assert len(of_many) <= 16_384
    assert of_many.startswith("--- rank 0\n")
    assert of_many.endswith("\n--- 960 more ranks printed something")
    assert joined_tails({0: "", 1: ""}, 100) == joined_tails({}, 100) == ""


ON_BOTH = {"num_ranks": 4, "num_nodes": 2}


@pytest.fixture(scope="module")
def two_nodes() -> Iterator[SeveralLocalNodes]:
    with several_nodes([RANK_PROGRAMS] * 2) as nodes:
        yield nodes


def test_every_rank_of_both_nodes_is_told_where_rank_0_is(two_nodes: SeveralLocalNodes) -> None:
    end = run_group(two_nodes, "meet", **ON_BOTH)
    assert end.failure is None
    where = {"address": "127.0.2.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in range(4)] == [where] * 4


def test_a_failure_ends_the_ranks_of_both_nodes(two_nodes: SeveralLocalNodes) -> None:
    hanging, by = Hanging(), {"3": "pause-then-fail"}
    end = run_group(two_nodes, "hang", by_rank=by, deadline_s=NEVER_S, on_event=hanging, **ON_BOTH)
    assert (end.failure.reason, end.failure.rank, end.failure.node) == ("crashed", 3, 1)
    assert end.failure.message == "rank 3: ValueError: this rank was told to fail"
    assert end.log_tail.splitlines() == ["about to fail", "ValueError: this rank was told to fail"]
    assert len(hanging.pids) == 3
    assert not any(map(is_alive, hanging.pids))


def test_the_loss_of_a_node_ends_the_ranks_of_the_other(two_nodes: SeveralLocalNodes) -> None:
    zygote = two_nodes.parts[1].ranks.pids["zygote"]
    hanging = Hanging(4, lambda: os.kill(zygote, signal.SIGKILL))
    failure = failure_of(two_nodes, "hang", on_event=hanging, **ON_BOTH)
    assert (failure.reason, failure.node) == ("node_lost", 1)
    wait_until_gone(hanging.pids)
    assert list(two_nodes.lost()) == [1]
    started = Hanging()
    assert failure_of(two_nodes, "hang", on_event=started, **ON_BOTH).reason == "node_lost"
    assert not any(map(is_alive, started.pids))
    two_nodes.recover(1)
    assert not two_nodes.lost()
    assert run_group(two_nodes, "succeed", **ON_BOTH).failure is None
