"""Two groups on one node: whatever becomes of one, the other runs on to its result."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest

from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.ranks.json_lines import MOST_FDS
from tests.kit.local_ranks import below_zygote, keeper_of, local_nodes
from tests.kit.python_process import start_python
from tests.kit.side_by_side import SideBySide
from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    is_alive,
    living_children,
    marked,
    run_group,
    wait_until_gone,
)

pytestmark = pytest.mark.ranks


AGENT = """
import sys
from tests.kit.side_by_side import SideBySide, make_task
node = SideBySide()
for group in [node.start("daemonise-then-hang", num_ranks=2) for _ in range(2)]:
    node.report(group, "hanging")
print(node.ranks.pids["warden"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(mark: str) -> Iterator[SideBySide]:
    """A node of which nothing may be left."""
    node = SideBySide()
    yield node
    node.ranks.close()


@pytest.fixture
def other(node: SideBySide) -> Iterator[str]:
    """A group that waits for a word beside the one under test, and must get its result."""
    group = node.start("meet")
    node.report(group, "listening")
    yield group
    node.ranks.tell(group, {"go": "on"})
    assert node.report(group, "result")["told"] == {"go": "on"}
    node.ranks.end(group)


def start_daemon(node: SideBySide, **options: Any) -> tuple[str, int, int]:
    """A group whose ranks hang, the daemon of one of them, and the rank itself."""
    group = node.start("daemonise-then-hang", **options)
    return group, node.report(group, "result")["daemon"], node.report(group, "hanging")["pid"]


def descendants_of_zygote(node: SideBySide) -> set[int]:
    zygote = psutil.Process(node.ranks.pids["zygote"])
    return {child.pid for child in living_children(zygote, recursive=True)}


def test_the_end_of_a_group_ends_its_processes_alone(node: SideBySide, other: str) -> None:
    of_the_other = descendants_of_zygote(node)
    group, daemon, rank = start_daemon(node, num_ranks=2)
    assert set(node.ranks.end(group)) == {0, 1}
    assert not is_alive(daemon)
    assert not is_alive(rank)
    assert descendants_of_zygote(node) == of_the_other


def test_what_a_rank_garbles_loses_its_own_group(node: SideBySide, other: str) -> None:
    garbling = node.start("garble")
    assert "a report of rank 0 can't be read" in node.event(garbling, "group_lost")["message"]
    node.ranks.end(garbling)


def test_a_flood_of_words_in_one_group_keeps_no_other_from_iterating(node: SideBySide) -> None:
    flood = node.start("talk-for-ever", num_ranks=2)
    node.reports(flood, "talking", 2)
    other = node.start("iterate")
    assert node.event(other, "exit")["code"] == 0
    assert all("a rank that says too much" in tail for tail in node.ranks.end(flood).values())
    node.ranks.end(other)


def test_a_killed_keeper_loses_its_own_group_and_no_other(node: SideBySide, other: str) -> None:
    group, daemon, rank = start_daemon(node, num_ranks=2)
    os.kill(keeper_of(rank), signal.SIGKILL)
    lost = node.event(group, "group_lost")
    assert lost["message"] == "the keeper of the group's ranks ended with exit code -9"
    wait_until_gone([daemon, rank])  # although nobody has asked for its end yet
    assert node.ranks.end(group) == {}


def test_a_keeper_that_is_killed_while_its_group_is_ended_leaves_nothing(node: SideBySide) -> None:
    with ThreadPoolExecutor(1) as pool:
        for _ in range(3):
            group, daemon, rank = start_daemon(node)
            keeper = keeper_of(rank)
            os.kill(keeper, signal.SIGSTOP)  # it won't hear that it shall end its group
            ending = pool.submit(node.ranks.end, group)
            os.kill(keeper, signal.SIGKILL)
            assert ending.result(20) == {}
            assert not is_alive(daemon)
            assert not is_alive(rank)


@pytest.mark.slow  # the patience with a keeper is longer than that with a driver
def test_a_keeper_that_hangs_is_killed_when_its_groups_end_is_overdue(node: SideBySide) -> None:
    group, daemon, rank = start_daemon(node)
    os.kill(keeper_of(rank), signal.SIGSTOP)
    assert node.ranks.end(group) == {}
    assert not is_alive(daemon)
    assert not is_alive(rank)


@pytest.mark.parametrize("victims", [["zygote"], ["warden"], ["warden", "zygote"]], ids="+".join)
def test_sigkill_of_zygote_or_warden_leaves_nothing(node: SideBySide, victims: list[str]) -> None:
    pids = [pid for _ in range(2) for pid in start_daemon(node)[1:]]
    for victim in victims:
        os.kill(node.ranks.pids[victim], signal.SIGKILL)
    wait_until_gone([*pids, *node.ranks.pids.values()])
    code = -signal.SIGKILL if "warden" in victims else 128 + signal.SIGKILL
    why = f"the zygote ended: its warden ended with exit code {code}"
    lost = wait_until("the loss is known", lambda: node.ranks.poll(0.1))[-1]
    assert lost == {"event": "lost", "message": why}
    with pytest.raises(NodeLostError, match=why):
        node.ranks.end("any")


@pytest.mark.parametrize("warden_too", [False, True])
def test_sigkill_of_the_agent_leaves_nothing_of_any_group(mark: str, warden_too: bool) -> None:
    with start_python(AGENT) as agent:
        warden = int(agent.stdout.readline())
        # The agent, the warden and the zygote; and twice a keeper, two ranks, and a daemon each.
        wait_until("all of them run", lambda: len(marked(mark)) == 3 + 2 * (1 + 2 * 2))
        if warden_too:
            os.kill(warden, signal.SIGKILL)
        agent.kill()


def test_groups_of_all_kinds_four_at_a_time_end_as_they_should() -> None:
    reasons = {
        **dict.fromkeys(("succeed", "meet", "say-much", "daemonise", "fork-a-child"), None),
        **dict.fromkeys(("fail", "kill-itself", "leave", "talk-then-fail"), "crashed"),
        "allocate-too-much": "out_of_memory",
        **dict.fromkeys(("hang", "hang-past-alarm", "daemonise-then-hang"), "timeout"),
    }

    def run(kind: str) -> str | None:
        end = run_group(nodes, kind, deadline_s=0.5 if reasons[kind] == "timeout" else 60.0)
        return None if end.failure is None else end.failure.reason

    with local_nodes(4) as nodes:
        with ThreadPoolExecutor(4) as pool:
            ended = list(pool.map(run, [*reasons] * 2))
        assert ended == [*reasons.values()] * 2
        assert not below_zygote(nodes)
        zygote = psutil.Process(nodes.ranks.pids["zygote"])
        # Its standard ones, the agent's, the warden's, the keepers' pipe.
        assert zygote.num_fds() <= 8


def test_a_rank_runs_on_its_cores_and_says_where_there_are_none(node: SideBySide) -> None:
    last = max(os.sched_getaffinity(0))
    group, of_none = (node.start("succeed", cores=cores) for cores in ((last, 100_000), (100_000,)))
    assert node.report(group, "result")["cores"] == [last]
    error = node.report(of_none, "error")
    assert error["reason"] == "crashed"
    cores = sorted(os.sched_getaffinity(0))
    refused = f"may use none of the cores [100000], only {cores}; correct device_cores"
    assert refused in error["message"]
    node.ranks.end(group)
    node.ranks.end(of_none)


def test_a_group_has_more_ranks_than_a_document_carries_descriptors(node: SideBySide) -> None:
    group = node.start("succeed", num_ranks=MOST_FDS + 2)
    ranks = {report["rank"] for report in node.reports(group, "result", MOST_FDS + 2)}
    assert ranks == set(range(MOST_FDS + 2))
    node.ranks.end(group)


@pytest.mark.parametrize(
    ("spare_descriptors", "num_ranks", "message"),
    [
        (0, 1, "no process could be forked for the group: "),
        (10, 8, "8 ranks could not be forked: "),
    ],
)
def test_a_machine_without_a_process_to_spare_loses_the_group_and_not_the_node(
    node: SideBySide, spare_descriptors: int, num_ranks: int, message: str
) -> None:
    zygote = psutil.Process(node.ranks.pids["zygote"])
    before = zygote.rlimit(psutil.RLIMIT_NOFILE)
    zygote.rlimit(psutil.RLIMIT_NOFILE, (zygote.num_fds() + spare_descriptors, before[1]))
    group = node.start("daemonise-then-hang", num_ranks=num_ranks)
    assert message in node.event(group, "group_lost")["message"]
    node.ranks.end(group)
    wait_until("nothing is left of it", lambda: not descendants_of_zygote(node))
    zygote.rlimit(psutil.RLIMIT_NOFILE, before)
    group = node.start("succeed")
    assert node.report(group, "result")
    node.ranks.end(group)
