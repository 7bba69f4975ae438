"""A group ends at its first failure, with the cause and not its consequences."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from tests.workers.process_checks import RANK_PROGRAMS, is_alive, run_group
from workers.launchers.base import Node, NodeEvent
from workers.launchers.group import (
    COMPLETED_LOG_LENGTH,
    FAILED_LOG_LENGTH,
    GroupFailure,
    joined_tails,
)
from workers.launchers.local import LocalNodes
from workers.ranks.rank_task import RankTask

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    nodes = LocalNodes(num_devices=4, rank_entry=RANK_PROGRAMS)
    nodes.ranks.wait_until_ready()
    yield nodes
    nodes.close()


NEVER_S = 3600.0
"""A deadline long after that of the test: if ranks that hang end, something else has ended them."""


def failure_of(nodes: LocalNodes, kind: str, **options: Any) -> GroupFailure:
    failure = run_group(nodes, kind, **options).failure
    assert failure is not None
    return failure


def test_the_first_failure_ends_the_ranks_that_hang(nodes: LocalNodes) -> None:
    hanging: list[int] = []
    end = run_group(
        nodes,
        "hang",
        by_rank={"2": "fail-late"},
        num_ranks=4,
        deadline_s=NEVER_S,
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert end.failure is not None
    assert (end.failure.reason, end.failure.rank, end.failure.node) == ("crashed", 2, 0)
    assert end.failure.message == "rank 2: ValueError: this rank was told to fail"
    assert end.log_tail.splitlines() == ["about to fail", "ValueError: this rank was told to fail"]
    assert len(hanging) == 3
    assert not any(map(is_alive, hanging))


def test_a_peer_that_notices_a_death_first_is_not_the_cause(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "notice-dead-peer", by_rank={"3": "fail-late"}, num_ranks=4)
    assert failure.rank == 3
    assert not failure.transport


def test_a_transport_error_without_a_cause_is_reported_as_it_is(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "succeed", by_rank={"1": "leave-dead-peer"}, num_ranks=3)
    assert failure.message == "rank 1: RuntimeError: Connection closed by peer"


def test_ranks_that_leave_after_a_transport_error_do_not_hide_the_cause(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "leave-dead-peer", by_rank={"0": "out-of-memory-late"}, num_ranks=4)
    assert (failure.reason, failure.rank) == ("out_of_memory", 0)


def test_out_of_memory_is_told_apart(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "notice-dead-peer", by_rank={"1": "out-of-memory"})
    assert failure.reason == "out_of_memory"
    assert failure.message == "rank 1: RuntimeError: DefaultCPUAllocator: can't allocate memory"


def test_a_rank_that_is_killed_is_named_with_the_signal(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "hang", by_rank={"1": "kill-itself"})
    assert failure.reason == "crashed"
    assert failure.message == (
        "rank 1 was killed by signal 9 (SIGKILL); the kernel's out-of-memory killer did not strike "
        "on the node meanwhile"
    )


class OneDeath:
    """A node whose only news is that rank 0 was killed."""

    def __init__(self, oom_kills: int | None, taken_bytes: Sequence[int] = (0,)) -> None:
        two = {"num_devices": 2, "num_cores": 2}
        self.nodes = (Node(name="n", address="127.0.0.1", core_ids=(0, 1), **two),)
        self.died = {"event": "exit", "rank": 0, "code": -signal.SIGKILL, "oom_kills": oom_kills}
        taken = {str(rank): taken for rank, taken in enumerate(taken_bytes)}
        self.died |= {"memory_available_bytes": 1000, "memory_taken_bytes": taken}

    def wait_until_ready(self) -> None:
        pass

    def start(self, tasks: Mapping[int, Sequence[RankTask]]) -> None:
        self.died["group"] = tasks[0][0].group

    def tell(self, nodes: Sequence[int], group: str, document: dict[str, Any]) -> None:
        raise NotImplementedError

    def poll(self, nodes: Sequence[int], group: str, timeout_s: float) -> list[NodeEvent]:
        return [NodeEvent(node=0, document=self.died)]

    def end(self, nodes: Sequence[int], group: str) -> dict[int, str]:
        return {}

    def lost(self) -> Mapping[int, str]:
        return {}

    def recover(self, node: int) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("oom_kills", "limit_bytes", "reason", "sentence"),
    [
        (1, 699, "out_of_memory", "rank 1 had taken 700 bytes, over its limit of 699"),
        (1, 700, "node_lost", "no rank took more than rank 1, 700 of the 700 bytes promised"),
        (2, None, "out_of_memory", "killer struck 2 times on the node meanwhile, which had 1000"),
        (0, 500, "crashed", "killer did not strike on the node meanwhile"),
        (None, 500, "crashed", "can't be known: the kernel keeps no count"),
    ],
)
def test_the_out_of_memory_killer_is_the_layouts_fault_where_a_rank_took_more_than_it_was_promised(
    oom_kills: int | None, limit_bytes: int | None, reason: str, sentence: str
) -> None:
    nodes = OneDeath(oom_kills, taken_bytes=(500, 700))
    failure = run_group(nodes, "any", memory_limit_bytes=limit_bytes).failure
    assert failure is not None
    assert failure.reason == reason
    assert failure.message.startswith("rank 0 was killed by signal 9 (SIGKILL); ")
    assert sentence in failure.message


def test_the_clock_of_a_group_starts_when_its_zygote_is_ready() -> None:
    nodes = LocalNodes(num_devices=2, rank_entry="tests.workers.slow_rank_programs:run")
    end = run_group(nodes, "succeed", deadline_s=4.0)
    nodes.close()
    assert end.failure is None
    assert end.duration_s < 4.0


def test_a_rank_that_leaves_without_a_result_has_failed(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "hang", by_rank={"0": "leave"})
    assert failure.message == "rank 0 ended without a result"


def test_a_hang_meets_the_deadline_and_the_message_says_how_far_it_got(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "hang", by_rank={"0": "iterate-then-hang"}, deadline_s=3.0)
    assert failure.reason == "timeout"
    where = nodes.nodes[0].name
    assert failure.message == (
        f"the probe did not end within deadline_s=3 (last: iteration 3) on {where}"
    )
    assert failure.node == 0


def test_a_cancelled_group_ends_within_a_moment(nodes: LocalNodes) -> None:
    told: list[dict[str, Any]] = []
    failure = failure_of(
        nodes,
        "hang",
        deadline_s=NEVER_S,
        on_event=told.append,
        cancelled=lambda: len(told) == 2,
    )
    assert failure.reason == "cancelled"
    assert failure.message == "the probe was cancelled (no iteration had ended)"


def test_the_log_of_ranks_that_succeed_is_kept_up_to_a_bound(nodes: LocalNodes) -> None:
    end = run_group(nodes, "talk-and-succeed", num_ranks=2)
    assert end.failure is None
    lines = end.log_tail.splitlines()
    assert COMPLETED_LOG_LENGTH / 2 < len(end.log_tail) <= COMPLETED_LOG_LENGTH
    assert [line for line in lines if line.startswith("---")] == ["--- rank 0", "--- rank 1"]
    assert lines[-1].startswith("line 19999 of rank 1, ")
    assert lines[lines.index("--- rank 1") - 1].startswith("line 19999 of rank 0, ")


def test_a_failure_of_no_single_rank_keeps_more_of_the_log(nodes: LocalNodes) -> None:
    told: list[dict[str, Any]] = []
    end = run_group(
        nodes,
        "hang",
        by_rank={"1": "talk-then-hang"},
        num_ranks=2,
        deadline_s=NEVER_S,
        on_event=told.append,
        cancelled=lambda: len(told) == 2,  # rank 1 tells that it hangs when it has printed all
    )
    assert end.failure is not None
    assert (end.failure.reason, end.failure.rank) == ("cancelled", None)
    assert COMPLETED_LOG_LENGTH < len(end.log_tail) <= FAILED_LOG_LENGTH


def test_ranks_that_print_little_leave_their_share_to_the_others() -> None:
    tails = {0: "x" * 2000, 1: "short", 2: "", 3: "\n".join(["y" * 99] * 20)}
    joined = joined_tails(tails, 3000)
    assert joined.startswith("--- rank 0\n" + "x" * 1400)
    assert "\n--- rank 1\nshort\n--- rank 3\n" + "y" * 99 + "\n" in joined
    assert 2800 < len(joined) <= 3000


def test_logs_of_a_thousand_ranks_stay_within_the_bound() -> None:
    joined = joined_tails({rank: f"rank {rank}\n" * 5000 for rank in range(1000)}, 16_384)
    assert len(joined) <= 16_384
    assert joined.startswith("--- rank 0\n")
    assert joined.endswith("\n--- 960 more ranks printed something")


def test_nothing_printed_is_no_log() -> None:
    assert joined_tails({0: "", 1: ""}, 100) == ""
    assert joined_tails({}, 100) == ""
