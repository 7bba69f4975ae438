"""Two groups in a container too small for both: the real out-of-memory killer, and the blame."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from tests.workers.process_checks import RANK_PROGRAMS, run_group
from workers.launchers.group import GroupEnd
from workers.launchers.local import LocalNodes

pytestmark = pytest.mark.ranks

MIB = 1 << 20
PROMISED_BYTES = 100 * MIB


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    """A node whose ranks have 200 MiB to share."""
    group = make_control_group(limit_bytes=200 * MIB)
    nodes = LocalNodes(num_devices=3, rank_entry=RANK_PROGRAMS)
    nodes.wait_until_ready()
    (group / "cgroup.procs").write_text(str(nodes.ranks.pids["zygote"]))
    yield nodes
    nodes.close()
    wait_until("the group is empty", lambda: not (group / "cgroup.procs").read_text())
    group.rmdir()


def make_control_group(limit_bytes: int) -> Path:
    top = Path("/sys/fs/cgroup")
    hierarchy, limit = (
        (top / "memory", "memory.limit_in_bytes")
        if (top / "memory").is_dir()
        else (top, "memory.max")
    )
    group = hierarchy / f"layout-tuner-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / limit).write_text(str(limit_bytes))
    except OSError as error:
        pytest.skip(f"no control group with a memory limit can be made here: {error}")
    return group


def run_both(nodes: LocalNodes, first: str, second: str) -> tuple[GroupEnd, GroupEnd]:
    """Runs two groups side by side; the second begins when the first has said something."""
    ends: dict[str, GroupEnd] = {}
    has_begun = threading.Event()

    def run(kind: str) -> None:
        ends[kind] = run_group(
            nodes,
            kind,
            num_ranks=1,
            deadline_s=60.0,
            memory_limit_bytes=PROMISED_BYTES,
            on_event=lambda _: has_begun.set(),
            cancelled=lambda: bool(ends),  # the one that is struck ends both
        )

    threads = [threading.Thread(target=run, args=[kind]) for kind in (first, second)]
    threads[0].start()
    assert has_begun.wait(30)
    threads[1].start()
    for thread in threads:
        thread.join(90)
    return ends[first], ends[second]


def test_a_rank_that_took_more_than_it_was_promised_is_out_of_memory(nodes: LocalNodes) -> None:
    """The one beside it has done nothing, and isn't struck."""
    still, greedy = run_both(nodes, "hang", "take-more-and-more")
    assert greedy.failure is not None
    assert greedy.failure.reason == "out_of_memory"
    assert "rank 0 had taken " in greedy.failure.message
    assert f"over its limit of {PROMISED_BYTES}" in greedy.failure.message
    assert still.failure is not None
    assert still.failure.reason == "cancelled"


def test_a_rank_that_is_struck_for_the_greed_of_another_group_lost_its_node(
    nodes: LocalNodes,
) -> None:
    modest, _ = run_both(nodes, "take-a-little", "take-more-and-more")
    assert modest.failure is not None
    assert modest.failure.reason == "node_lost"
    assert f"of the {PROMISED_BYTES} bytes promised" in modest.failure.message
