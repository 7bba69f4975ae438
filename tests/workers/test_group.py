"""A group ends at its first failure, with the cause and not its consequences."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.workers.process_checks import RANK_PROGRAMS, is_alive, run_group
from workers.launchers.group import GroupFailure
from workers.launchers.local import LocalNodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    nodes = LocalNodes(num_devices=4, rank_entry=RANK_PROGRAMS)
    nodes.ranks.wait_until_ready()
    yield nodes
    nodes.close()


def failure_of(nodes: LocalNodes, kind: str, **options: Any) -> GroupFailure:
    failure = run_group(nodes, kind, **options).failure
    assert failure is not None
    return failure


def test_the_first_failure_ends_the_ranks_that_hang(nodes: LocalNodes) -> None:
    hanging: list[int] = []
    started = time.monotonic()
    end = run_group(
        nodes,
        "hang",
        by_rank={"2": "fail-late"},
        num_ranks=4,
        on_event=lambda event: hanging.append(event["pid"]),
    )
    assert time.monotonic() - started < 1.0
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
    failure = failure_of(nodes, "hang", by_rank={"1": "leave-dead-peer"}, num_ranks=3)
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
    assert failure.message.startswith("rank 1 was killed by signal 9 (SIGKILL); whether")


def test_a_rank_that_leaves_without_a_result_has_failed(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "hang", by_rank={"0": "leave"})
    assert failure.message == "rank 0 ended without a result"


def test_a_hang_meets_the_deadline_and_the_message_says_how_far_it_got(nodes: LocalNodes) -> None:
    failure = failure_of(nodes, "hang", by_rank={"0": "iterate-then-hang"}, deadline_s=0.3)
    assert failure.reason == "timeout"
    assert failure.message == "the probe did not end within deadline_s=0.3 (last: iteration 3)"


def test_a_cancelled_group_ends_within_a_moment(nodes: LocalNodes) -> None:
    told: list[dict[str, Any]] = []
    started = time.monotonic()
    failure = failure_of(nodes, "hang", on_event=told.append, cancelled=lambda: len(told) == 2)
    assert failure.reason == "cancelled"
    assert failure.message == "the probe was cancelled (no iteration had ended)"
    assert time.monotonic() - started < 1.0
