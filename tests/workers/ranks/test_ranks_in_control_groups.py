"""Ranks in control groups: struck by the out-of-memory killer, whose fault it was, and frozen."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from layout_tuner.units import memory
from layout_tuner.workers.errors import RanksLeftError
from layout_tuner.workers.launchers.group import GroupEnd
from layout_tuner.workers.launchers.local import LocalNodes
from tests.kit.local_ranks import local_nodes
from tests.kit.side_by_side import SideBySide
from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive, run_group, wait_until_gone

pytestmark = pytest.mark.ranks

MIB = 1 << 20
PROMISED_BYTES = 100 * MIB


@pytest.fixture
def nodes() -> Iterator[LocalNodes]:
    """A node whose ranks have 200 MiB to share."""
    group = make_control_group(limit_bytes=200 * MIB)
    with local_nodes(3) as nodes:
        (group / "cgroup.procs").write_text(str(nodes.ranks.pids["zygote"]))
        yield nodes
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
    ends: list[GroupEnd] = []
    has_begun = threading.Event()

    def run(kind: str) -> GroupEnd:
        ends.append(
            run_group(
                nodes,
                kind,
                num_ranks=1,
                deadline_s=60.0,
                memory_limit_bytes=PROMISED_BYTES,
                on_event=lambda _: has_begun.set(),
                cancelled=lambda: bool(ends),  # the one that is struck ends both
            )
        )
        return ends[-1]

    with ThreadPoolExecutor(2) as pool:
        of_first = pool.submit(run, first)
        assert has_begun.wait(30)
        of_second = pool.submit(run, second)
        return of_first.result(90), of_second.result(90)


def test_a_rank_that_took_more_than_it_was_promised_is_out_of_memory(nodes: LocalNodes) -> None:
    """The one beside it has done nothing, and isn't struck."""
    still, greedy = run_both(nodes, "hang", "take-more-and-more")
    assert greedy.failure.reason == "out_of_memory"
    assert "rank 0 had taken " in greedy.failure.message
    assert f"over its limit of {memory(PROMISED_BYTES)}" in greedy.failure.message
    assert still.failure.reason == "cancelled"


def test_a_rank_struck_for_the_greed_of_another_lost_its_node(nodes: LocalNodes) -> None:
    modest, _ = run_both(nodes, "take-a-little", "take-more-and-more")
    assert modest.failure.reason == "node_lost"
    assert f"of the {memory(PROMISED_BYTES)} promised" in modest.failure.message


@pytest.fixture
def freezer() -> Iterator[Path]:
    """A control group whose processes can be frozen; what is frozen can't be killed."""
    group = Path("/sys/fs/cgroup/freezer") / f"layout-tuner-test-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no group of the version 1 freezer can be made here: {error}")
    yield group
    (group / "freezer.state").write_text("THAWED")
    group.rmdir()


@pytest.mark.slow  # ten seconds pass before a rank counts as left
def test_a_rank_that_cannot_be_ended_is_named_and_reaped_once_it_can(freezer: Path) -> None:
    node = SideBySide()
    other = node.start("meet")
    group = node.start("hang", num_ranks=2)
    frozen, mortal = [report["pid"] for report in node.reports(group, "hanging", 2)]
    (freezer / "cgroup.procs").write_text(str(frozen))
    (freezer / "freezer.state").write_text("FROZEN")
    with pytest.raises(RanksLeftError, match=rf"processes \[{frozen}\] are still there 10 s"):
        node.ranks.end(group)
    assert is_alive(frozen)
    assert not is_alive(mortal)
    node.ranks.tell(other, {"go": "on"})
    assert node.report(other, "result")["told"] == {"go": "on"}
    (freezer / "freezer.state").write_text("THAWED")
    wait_until_gone([frozen])
    assert set(node.ranks.end(other)) == {0}
    node.ranks.close()


@pytest.mark.slow  # twenty seconds pass before it is given up
def test_a_node_that_cannot_be_closed_says_who_is_still_at_it(freezer: Path) -> None:
    node = SideBySide()
    group = node.start("hang")
    frozen = node.report(group, "hanging")["pid"]
    warden = node.ranks.pids["warden"]
    (freezer / "cgroup.procs").write_text(str(frozen))
    (freezer / "freezer.state").write_text("FROZEN")
    with pytest.raises(RanksLeftError, match=f"the warden, process {warden}, could not end"):
        node.ranks.close()
    assert is_alive(frozen)
    (freezer / "freezer.state").write_text("THAWED")
    node.ranks.close()  # now it can
    wait_until_gone([frozen, warden])
