"""Groups in steps of a real allocation, and what is left when something of theirs is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.agent import TOKEN_VARIABLE
from layout_tuner.workers.launchers.group import GroupEnd, GroupFailure
from layout_tuner.workers.launchers.slurm_step.srun import SrunNodes
from layout_tuner.workers.launchers.slurm_step.step import Step
from layout_tuner.workers.launchers.slurm_step.step_node import STEP_VARIABLE
from layout_tuner.workers.packing.request import Share
from layout_tuner.workers.ranks.rank_task import RankTask
from tests.kit.waiting import wait_until
from tests.slurm.allocations import allocation, step_settings, steps
from tests.slurm.site import SlurmSite
from tests.workers.process_checks import (
    MARK,
    RANK_PROGRAMS,
    command_line,
    environment_of,
    is_alive,
    marked,
    run_group,
    wait_until_gone,
)

pytestmark = pytest.mark.slurm

ROOT = str(Path(__file__).parents[2])

HANGING = f"""
import os, sys
from types import SimpleNamespace
from tests.slurm.allocations import step_settings
from tests.workers.process_checks import run_group
from layout_tuner.workers.launchers.slurm_step.srun import SrunNodes
job, mark, *names = sys.argv[1:]
site = SimpleNamespace(environment=os.environ)
nodes = SrunNodes(step_settings(site, job, names, mark, rank_entry={RANK_PROGRAMS!r}))
say = lambda event: print(event["pid"], flush=True)
run_group(nodes, "hang", num_ranks=4, num_nodes=2, deadline_s=100, on_event=say)
"""


@pytest.fixture
def job(site: SlurmSite) -> Iterator[str]:
    with allocation(site, 4) as job_id:
        yield job_id


@pytest.fixture
def mark(site: SlurmSite, job: str) -> Iterator[str]:
    """Of every process of the test's steps; none of them may be left."""
    mark = uuid.uuid4().hex
    yield mark
    wait_until("no process is left", lambda: not marked(mark))


@pytest.fixture
def nodes(site: SlurmSite, job: str, mark: str) -> Iterator[SrunNodes]:
    nodes = start_nodes(site, job, mark)
    yield nodes
    nodes.close()
    wait_until("Slurm knows of no step", lambda: not steps(site, job))


@pytest.fixture
def unknown_to_slurm(site: SlurmSite, job: str, mark: str) -> Iterator[SrunNodes]:
    """Nodes for a fault that Slurm itself does not notice: it counts the step for ever."""
    nodes = start_nodes(site, job, mark)
    yield nodes
    nodes.close()


def start_nodes(site: SlurmSite, job: str, mark: str, **changes: Any) -> SrunNodes:
    entry = {"rank_entry": RANK_PROGRAMS, **changes}
    return SrunNodes(step_settings(site, job, site.node_names, mark, **entry))


def test_ranks_of_several_nodes_meet_at_the_address_of_the_first(nodes: SrunNodes) -> None:
    assert [node.name for node in nodes.nodes] == ["n1", "n2", "n3", "n4"]
    assert nodes.nodes[0].core_ids == tuple(sorted(os.sched_getaffinity(0)))
    assert not nodes.lost()
    end = run_group(nodes, "meet", num_ranks=8, num_nodes=4)
    assert end.failure is None, end
    where = {"address": "127.0.3.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in range(8)] == [where] * 8


class Hanging:
    """A group of two ranks on each of two nodes that hang, and what happens once all of them do."""

    def __init__(self, nodes: SrunNodes, strike: Callable[[Step], None]) -> None:
        self.ranks: list[int] = []
        started: list[Step] = []
        start = nodes.start

        def start_and_keep(tasks: Mapping[int, Sequence[RankTask]]) -> None:
            start(tasks)
            started.append(nodes.step(next(iter(tasks.values()))[0].group))

        def strike_when_all_hang(event: dict[str, Any]) -> None:
            if "pid" in event:
                self.ranks.append(event["pid"])
                if len(self.ranks) == 4:
                    strike(started[0])

        nodes.start = start_and_keep  # type: ignore[method-assign]
        self.end = run_group(
            nodes, "hang", num_ranks=4, num_nodes=2, deadline_s=60, on_event=strike_when_all_hang
        )
        nodes.start = start  # type: ignore[method-assign]

    @property
    def failure(self) -> GroupFailure:
        return self.end.failure


def kill(pid: int | None) -> None:
    os.kill(pid, signal.SIGKILL)


def test_sigkill_of_a_nodes_task_loses_that_node_until_nothing_of_the_step_is_left(
    nodes: SrunNodes, site: SlurmSite, job: str, mark: str
) -> None:
    hanging = Hanging(nodes, lambda step: kill(step.pids[1]))
    assert (hanging.failure.reason, hanging.failure.node) == ("node_lost", 1)
    assert hanging.failure.message.startswith("node n2 was lost: its line closed")
    wait_until_gone(hanging.ranks)
    assert list(nodes.lost()) == [1]
    refused = run_group(nodes, "succeed", num_ranks=4, num_nodes=2).failure
    assert refused.node == 1
    of_the_step = {
        MARK: mark,
        "SLURM_JOB_ID": job,
        "SLURMD_NODENAME": "n2",
        STEP_VARIABLE: "layout-tuner-of-before",
    }
    left = subprocess.Popen(["sleep", "1000"], env={**site.environment, **of_the_step})
    with pytest.raises(NodeLostError, match=r"are left on node n2: layout-tuner-of-before$"):
        nodes.recover(1)
    assert list(nodes.lost()) == [1]
    left.kill()
    left.wait()
    nodes.recover(1)
    assert not nodes.lost()
    assert run_group(nodes, "succeed", num_ranks=4, num_nodes=2).failure is None


def test_sigkill_of_slurms_manager_of_the_step_leaves_nothing(unknown_to_slurm: SrunNodes) -> None:
    nodes = unknown_to_slurm
    hanging = Hanging(nodes, lambda step: kill(psutil.Process(step.pids[1]).ppid()))
    assert (hanging.failure.reason, hanging.failure.node) == ("node_lost", 1)
    wait_until_gone(hanging.ranks)


def test_sigkill_of_srun_ends_the_step_and_blames_no_node(nodes: SrunNodes) -> None:
    hanging = Hanging(nodes, lambda step: kill(step.srun_pid))
    assert hanging.failure.reason == "node_lost"
    assert hanging.failure.message == "the step's srun ended with signal 9"
    wait_until_gone(hanging.ranks)
    assert not nodes.lost()
    assert run_group(nodes, "succeed", num_ranks=4, num_nodes=2).failure is None


def test_sigkill_of_the_launcher_leaves_nothing(site: SlurmSite, job: str, mark: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-P", "-c", HANGING, job, mark, *site.node_names],
        env={**site.environment, "PYTHONPATH": ROOT},
        stdout=subprocess.PIPE,
        text=True,
    ) as launcher:
        ranks = [int(launcher.stdout.readline()) for _ in range(4)]
        assert all(map(is_alive, ranks))
        assert len(steps(site, job)) == 1
        launcher.kill()
    wait_until("no process is left", lambda: not marked(mark), 30)
    wait_until("Slurm knows of no step", lambda: not steps(site, job), 30)


def test_a_host_without_srun_says_so(
    site: SlurmSite, job: str, mark: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NodeLostError, match=rf"no node of job {job} answers: .*srun"):
        start_nodes(site, job, mark)


def test_a_daemon_that_a_rank_leaves_is_gone_with_the_group(nodes: SrunNodes) -> None:
    end = run_group(nodes, "daemonise", num_ranks=4, num_nodes=2)
    assert not any(is_alive(result["daemon"]) for result in end.results.values())


def test_a_node_that_dies_is_lost_by_name_and_the_others_work_on(
    site: SlurmSite, nodes: SrunNodes, job: str, mark: str
) -> None:
    shares = (Share(node=2, devices=(0,)), Share(node=3, devices=(0,)))
    ranks: list[int] = []

    def strike(event: dict[str, Any]) -> None:
        ranks.append(event["pid"])
        if len(ranks) == 2:
            site.lose_node("n4")

    end = run_group(nodes, "hang", shares=shares, num_nodes=2, on_event=strike)
    assert (end.failure.reason, end.failure.node) == ("node_lost", 3)
    assert "node n4 was lost" in end.failure.message
    wait_until_gone(ranks)
    assert list(nodes.lost()) == [3]
    with pytest.raises(NodeLostError, match="n4"):
        nodes.recover(3)
    others = (Share(node=1, devices=(0,)), Share(node=2, devices=(0,)))
    of_the_others = run_group(nodes, "succeed", shares=others, num_nodes=2)
    of_another_launcher = start_nodes(site, job, mark)
    lost_from_the_start = of_another_launcher.lost()
    of_another_launcher.close()
    site.return_node("n4")
    assert of_the_others.failure is None
    assert list(lost_from_the_start) == [3]


def test_scancel_of_the_job_ends_every_process(site: SlurmSite, nodes: SrunNodes, job: str) -> None:
    hanging = Hanging(nodes, lambda _: site.run("scancel", job) and None)
    assert hanging.failure.reason == "node_lost"
    wait_until_gone(hanging.ranks)
    site.wait_for_end(int(job))


def test_groups_beyond_the_limit_of_steps_wait(site: SlurmSite, job: str, mark: str) -> None:
    nodes = start_nodes(site, job, mark, max_steps=1)
    iterating = threading.Event()
    ends: list[GroupEnd] = []

    def on_event(event: dict[str, Any]) -> None:
        iterating.set()

    def run_one(kind: str, device: int) -> None:
        shares = (Share(node=0, devices=(device,)),)
        ends.append(run_group(nodes, kind, shares=shares, num_ranks=1, on_event=on_event))

    first = threading.Thread(target=run_one, args=["iterate", 0])
    first.start()
    assert iterating.wait(60)
    cancelled = run_group(nodes, "succeed", cancelled=lambda: True)
    assert cancelled.failure.reason == "cancelled"
    assert first.is_alive()  # the one that waited has gone without a step of its own
    run_one("succeed", 1)
    first.join()
    nodes.close()
    assert [end.failure for end in ends] == [None, None]
    assert len(ends[0].results[0]) == 1  # the first to come was the first to run


def test_a_node_that_does_not_call_in_is_lost_by_name(site: SlurmSite, job: str, mark: str) -> None:
    nodes = start_nodes(site, job, mark)
    nodes.settings = replace(nodes.settings, connect_within_s=0.0)
    end = run_group(nodes, "succeed")
    nodes.close()
    assert end.failure.reason == "node_lost"
    assert end.failure.message.startswith("node n1 did not connect within 0 s")


def test_no_rank_or_command_line_has_the_address_or_token(nodes: SrunNodes, mark: str) -> None:
    seen: list[tuple[str, bool]] = []

    def look(_: dict[str, Any]) -> None:
        for process in marked(mark):
            command = " ".join(command_line(process))
            assert "127.0.3.100" not in command
            seen.append((command, TOKEN_VARIABLE in environment_of(process)))

    run_group(nodes, "hang", num_ranks=1, on_event=look, deadline_s=1)
    with_token = [command for command, has_token in seen if has_token]
    assert all("srun" in command or "step_node" in command for command in with_token)
    assert any("zygote" in command for command, _ in seen)
