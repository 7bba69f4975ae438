"""Two groups on one node: whatever becomes of one, the other runs on to its result."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    MARK,
    RANK_PROGRAMS,
    is_alive,
    living_children,
    marked,
    run_group,
    wait_until_gone,
)
from tests.workers.side_by_side import SideBySide, make_task
from workers.launchers.group import GroupEnd
from workers.launchers.local import LocalNodes
from workers.ranks.json_lines import MOST_FDS
from workers.ranks.node_ranks import NodeRanks

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[3]

AGENT = """
import sys
from tests.workers.side_by_side import SideBySide, make_task
node = SideBySide()
for group in [node.start("daemonise-then-hang", num_ranks=2) for _ in range(2)]:
    node.report(group, "hanging")
print(node.ranks.pids["warden"], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Iterator[SideBySide]:
    """A node of which nothing may be left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    node = SideBySide()
    yield node
    node.ranks.close()
    wait_until("no process is left", lambda: not marked(mark))


def keeper_of(pid: int) -> int:
    """The keeper of a rank."""
    return psutil.Process(pid).ppid()


def descendants_of_zygote(node: SideBySide) -> set[int]:
    zygote = psutil.Process(node.ranks.pids["zygote"])
    return {child.pid for child in living_children(zygote, recursive=True)}


def test_the_end_of_a_group_ends_its_processes_alone(node: SideBySide) -> None:
    other = node.start("meet", num_ranks=2)
    node.report(other, "listening")
    of_the_other = descendants_of_zygote(node)
    group = node.start("daemonise-then-hang", num_ranks=2)
    daemon, rank = node.report(group, "result")["daemon"], node.report(group, "hanging")["pid"]
    tails = node.ranks.end(group)
    assert set(tails) == {0, 1}
    assert not is_alive(daemon)
    assert not is_alive(rank)
    assert descendants_of_zygote(node) == of_the_other
    node.ranks.tell(other, {"go": "on"})
    assert node.report(other, "result")["told"] == {"go": "on"}
    node.ranks.end(other)


@pytest.mark.parametrize(
    ("kind", "event"),
    [
        ("fail", "error"),
        ("allocate-too-much", "error"),
        ("hang", "hanging"),
        ("hang-past-alarm", "hanging"),
        ("kill-itself", ""),
        ("leave", ""),
        ("daemonise", "result"),
        ("fork-a-child", "result"),
        ("talk-for-ever", "talking"),
    ],
)
def test_whatever_a_rank_does_the_other_group_gets_its_result(
    node: SideBySide, kind: str, event: str
) -> None:
    other = node.start("meet")
    node.report(other, "listening")
    of_the_other = descendants_of_zygote(node)
    group = node.start(kind)
    said = node.report(group, event) if event else node.event(group, "exit")
    node.ranks.tell(other, {"go": "on"})
    assert node.report(other, "result")["told"] == {"go": "on"}
    node.ranks.end(group)
    wait_until("only the other is left", lambda: descendants_of_zygote(node) <= of_the_other)
    if "daemon" in said:
        assert not is_alive(said["daemon"])
    node.ranks.end(other)


def test_a_flood_of_words_in_one_group_keeps_no_other_from_iterating(node: SideBySide) -> None:
    flood = node.start("talk-for-ever", num_ranks=2)
    node.report(flood, "talking")
    other = node.start("iterate")
    assert node.event(other, "exit")["code"] == 0
    assert all("a rank that says too much" in tail for tail in node.ranks.end(flood).values())
    node.ranks.end(other)


def test_a_keeper_that_is_killed_loses_its_own_group_and_no_other(node: SideBySide) -> None:
    other = node.start("meet")
    node.report(other, "listening")
    group = node.start("daemonise-then-hang", num_ranks=2)
    daemon, rank = node.report(group, "result")["daemon"], node.report(group, "hanging")["pid"]
    os.kill(keeper_of(rank), signal.SIGKILL)
    lost = node.event(group, "group_lost")
    assert lost["message"] == "the keeper of the group's ranks ended with exit code -9"
    wait_until_gone([daemon, rank])  # although nobody has asked for its end yet
    assert node.ranks.end(group) == {}
    node.ranks.tell(other, {"go": "on"})
    assert node.report(other, "result")["told"] == {"go": "on"}
    node.ranks.end(other)


def test_a_probe_whose_keeper_is_killed_lost_its_node_and_the_probe_beside_it_did_not() -> None:
    nodes = LocalNodes(num_devices=2, rank_entry=RANK_PROGRAMS)
    nodes.wait_until_ready()
    ends: dict[str, GroupEnd] = {}
    beside = threading.Thread(
        target=lambda: ends.update(beside=run_group(nodes, "iterate", num_ranks=1))
    )
    beside.start()
    end = run_group(
        nodes,
        "hang",
        num_ranks=1,
        on_event=lambda event: os.kill(keeper_of(event["pid"]), signal.SIGKILL),
    )
    beside.join()
    assert end.failure is not None
    assert end.failure.reason == "node_lost"
    assert end.failure.message == "the keeper of the group's ranks ended with exit code -9"
    assert ends["beside"].failure is None
    assert not nodes.lost()
    nodes.close()


def test_a_keeper_that_is_killed_while_its_group_is_ended_leaves_nothing(node: SideBySide) -> None:
    for _ in range(5):
        group = node.start("daemonise-then-hang")
        daemon, rank = node.report(group, "result")["daemon"], node.report(group, "hanging")["pid"]
        keeper = keeper_of(rank)
        os.kill(keeper, signal.SIGSTOP)  # it won't hear that it shall end its group
        ended: list[dict[int, str]] = []
        ending = threading.Thread(target=lambda: ended.append(node.ranks.end(group)))  # noqa: B023
        ending.start()
        os.kill(keeper, signal.SIGKILL)
        ending.join(20)
        assert ended == [{}]
        assert not is_alive(daemon)
        assert not is_alive(rank)


@pytest.mark.slow  # the patience with a keeper is longer than that with a driver
def test_a_keeper_that_hangs_is_killed_when_its_groups_end_is_overdue(
    node: SideBySide,
) -> None:
    group = node.start("daemonise-then-hang")
    daemon, rank = node.report(group, "result")["daemon"], node.report(group, "hanging")["pid"]
    os.kill(keeper_of(rank), signal.SIGSTOP)
    assert node.ranks.end(group) == {}
    assert not is_alive(daemon)
    assert not is_alive(rank)


def test_many_groups_start_and_end_from_threads_of_their_own(node: SideBySide) -> None:
    groups = [node.start("daemonise-then-hang") for _ in range(6)]
    daemons = [node.report(group, "result")["daemon"] for group in groups]
    ended: dict[str, dict[int, str]] = {}

    def end(group: str) -> None:
        ended[group] = node.ranks.end(group)

    threads = [threading.Thread(target=end, args=[group]) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert {group: list(tails) for group, tails in ended.items()} == {g: [0] for g in groups}
    assert not any(map(is_alive, daemons))


@pytest.mark.parametrize("victims", [["zygote"], ["warden"], ["warden", "zygote"]])
def test_sigkill_of_the_zygote_or_the_warden_or_both_leaves_nothing_of_any_group(
    node: SideBySide, victims: list[str]
) -> None:
    pids = []
    for _ in range(2):
        group = node.start("daemonise-then-hang")
        pids += [node.report(group, "result")["daemon"], node.report(group, "hanging")["pid"]]
    for victim in victims:
        os.kill(node.ranks.pids[victim], signal.SIGKILL)
    wait_until_gone([*pids, *node.ranks.pids.values()])
    wait_until("the loss is known", lambda: node.ranks.poll(0.1)[-1:])


@pytest.mark.parametrize("warden_too", [False, True])
def test_sigkill_of_the_agent_leaves_nothing_of_any_group(
    monkeypatch: pytest.MonkeyPatch, warden_too: bool
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    with subprocess.Popen(
        [sys.executable, "-c", AGENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as agent:
        assert agent.stdout is not None
        warden = int(agent.stdout.readline())
        # The agent, the warden and the zygote; and twice a keeper, two ranks, and a daemon each.
        wait_until("all of them run", lambda: len(marked(mark)) == 3 + 2 * (1 + 2 * 2))
        if warden_too:
            os.kill(warden, signal.SIGKILL)
        agent.kill()
    wait_until("no process is left", lambda: not marked(mark), 20)


def test_what_forks_has_one_thread_and_no_device() -> None:
    """With torch and the trainer loaded: a fork of more threads than one may hang in the child."""
    ranks = NodeRanks()
    ranks.wait_until_ready()
    job = {"kind": "calibrate"}  # it waits for a word that nobody says
    ranks.start([make_task("a", rank=1, world_size=2, job=job, rendezvous=True)])
    zygote = psutil.Process(ranks.pids["zygote"])
    (keeper,) = wait_until("there is a keeper", zygote.children)
    wait_until("there is a rank", keeper.children)
    for process in (zygote, keeper):
        assert process.num_threads() == 1
        held = [str(fd.readlink()) for fd in Path(f"/proc/{process.pid}/fd").iterdir()]
        assert not [path for path in held if path.startswith(("/dev/kfd", "/dev/dri", "/dev/nv"))]
    ranks.end("a")
    ranks.close()


@pytest.mark.slow
def test_a_hundred_groups_four_at_a_time_end_as_they_should_and_leave_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    nodes = LocalNodes(num_devices=4, rank_entry=RANK_PROGRAMS)
    nodes.wait_until_ready()
    reasons = {
        "succeed": None,
        "meet": None,
        "say-much": None,
        "daemonise": None,
        "fork-a-child": None,
        "fail": "crashed",
        "kill-itself": "crashed",
        "leave": "crashed",
        "allocate-too-much": "out_of_memory",
        "talk": "crashed",
        "hang": "timeout",
        "hang-past-alarm": "timeout",
        "daemonise-then-hang": "timeout",
    }
    kinds = [kind for _ in range(8) for kind in reasons]

    def run(kind: str) -> tuple[str, str | None]:
        end = run_group(nodes, kind, deadline_s=0.5 if reasons[kind] == "timeout" else 60.0)
        return kind, None if end.failure is None else end.failure.reason

    with ThreadPoolExecutor(4) as pool:
        ended = list(pool.map(run, kinds))
    assert ended == [(kind, reasons[kind]) for kind in kinds]
    zygote = psutil.Process(nodes.ranks.pids["zygote"])
    assert not zygote.children()
    assert zygote.num_fds() <= 6  # its standard ones, the agent's, the warden's
    nodes.close()
    wait_until("no process is left", lambda: not marked(mark))


def test_cores_that_the_node_does_not_give_fail_the_rank_and_say_so(node: SideBySide) -> None:
    group = node.start("succeed", cores=(100_000,))
    error = node.report(group, "error")
    assert error["reason"] == "crashed"
    assert "may use none of the cores [100000]" in error["message"]
    node.ranks.end(group)


def test_a_rank_runs_on_the_very_cores_that_it_is_given(node: SideBySide) -> None:
    last = max(os.sched_getaffinity(0))
    group = node.start("succeed", cores=(last, 100_000))
    assert node.report(group, "result")["cores"] == [last]
    node.ranks.end(group)


def test_a_rank_that_reports_no_json_loses_its_group_and_not_the_node(node: SideBySide) -> None:
    other = node.start("meet")
    group = node.start("garble")
    assert "a report of rank 0 can't be read" in node.event(group, "group_lost")["message"]
    node.ranks.end(group)
    node.ranks.tell(other, {"go": "on"})
    assert node.report(other, "result")["told"] == {"go": "on"}
    node.ranks.end(other)


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
def test_a_machine_that_takes_no_more_processes_loses_the_group_and_not_the_node(
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
