"""Real probes, torch and gloo, in steps of a real allocation."""

from __future__ import annotations

import os
import signal
import threading
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.search_spaces.clusters.site import Site
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import OnEvent
from layout_tuner.workers.launchers.slurm_step.srun import srun_launcher
from layout_tuner.workers.packing.request import Placement, Share
from layout_tuner.workers.slurm.jobs import SlurmAllocation
from tests.kit.local_ranks import make_cluster, make_probe, run_probe
from tests.kit.waiting import wait_until
from tests.slurm.allocations import allocation
from tests.slurm.site import SlurmSite
from tests.workers.process_checks import (
    MARK,
    command_line,
    environment_of,
    is_alive,
    living_children,
    marked,
)
from tests.workers.programs.programs import python_trainer

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

CLUSTER = make_cluster(num_nodes=4, peak_flops_per_s={"fp32": 1e11})
HERE = Site(
    node_address="127.0.4.1{index}", environment_of_several_nodes={"OF_SEVERAL_NODES": "yes"}
)


PROGRAM = python_trainer("train(tokens=64)")


@dataclass
class Probes:
    """A launcher in an allocation of four nodes, and the mark of all that it starts."""

    launcher: GroupLauncher
    mark: str

    def run(
        self, layout: Layout, shares: Placement, on_event: OnEvent = lambda _: None, **settings: Any
    ) -> Outcome:
        request = make_probe(layout=layout, deadline_s=120.0, **settings)
        return run_probe(self.launcher, request, shares=shares, on_event=on_event)

    def ranks(self) -> list[psutil.Process]:
        """What sits two levels below a zygote: its keepers' children."""
        zygotes = [p for p in marked(self.mark) if is_zygote(p) and not is_zygote(p.parent())]
        return [
            rank
            for zygote in zygotes
            for keeper in living_children(zygote)
            for rank in living_children(keeper)
        ]


def is_zygote(process: psutil.Process | None) -> bool:
    return process is not None and "layout_tuner.workers.ranks.zygote" in command_line(process)[:5]


@pytest.fixture(scope="module")
def probes(site: SlurmSite) -> Iterator[Probes]:
    mark = uuid.uuid4().hex
    with allocation(site, 4) as job_id:
        held = SlurmAllocation(job_id=job_id, node_names=tuple(site.node_names))
        environment = {
            **site.environment,
            **HERE.environment_of_several_nodes,
            MARK: mark,
            "SLURMD_NODENAME": "n1",
        }
        with srun_launcher(
            CLUSTER, HERE, held, environment=environment, trainers={"theirs": PROGRAM}
        ) as launcher:
            yield Probes(launcher, mark)
    wait_until("no process is left", lambda: not marked(mark))


def whole(*nodes: int) -> Placement:
    return tuple(Share(node=node, devices=(0, 1)) for node in nodes)


def test_a_program_runs_on_two_nodes(probes: Probes) -> None:
    layout = Layout(dp=2, num_nodes=2, num_microbatches=1)
    outcome = probes.run(layout, whole(1, 3), trainer="theirs")
    assert outcome.measurement is not None, outcome
    assert (outcome.measurement.trainer, outcome.measurement.tokens_per_step) == ("theirs", 64)
    assert not marked(probes.mark)


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_a_probe_runs_on_one_node_and_on_several(probes: Probes, num_nodes: int) -> None:
    told: list[str] = []
    variables: set[str | None] = set()

    def look(event: dict[str, Any]) -> None:
        told.append(event["event"])
        if event["event"] == "listening":
            variables.update(environment_of(r).get("OF_SEVERAL_NODES") for r in probes.ranks())

    layout = Layout(dp=2 * num_nodes, num_nodes=num_nodes, num_microbatches=1)
    outcome = probes.run(layout, whole(*range(4 - num_nodes, 4)), on_event=look)
    assert outcome.state == "completed", outcome
    assert told[:2] == ["listening", "iteration"]
    assert variables == {None if num_nodes == 1 else "yes"}
    assert outcome.environment.backend == "gloo"
    assert not marked(probes.mark)


def test_two_probes_run_at_once_on_one_node_each_on_its_own_core(probes: Probes) -> None:
    """Each goes on in its first iteration once the other has come there."""
    both = threading.Barrier(2, timeout=120)
    outcomes: dict[int, Outcome] = {}
    cores: list[set[int]] = []

    def run(device: int) -> None:
        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "iteration" and event["index"] == 0 and both.wait() == 0:
                cores.extend(set(rank.cpu_affinity()) for rank in probes.ranks())

        shares = (Share(node=0, devices=(device,)),)
        outcomes[device] = probes.run(Layout(), shares, on_event=on_event, iterations=50)

    threads = [threading.Thread(target=run, args=[device]) for device in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [outcomes[device].state for device in (0, 1)] == ["completed"] * 2, outcomes
    assert len(cores) == 2
    if len(os.sched_getaffinity(0)) >= 2:
        assert not cores[0] & cores[1]


def test_ranks_of_a_step_are_held_to_their_memory_limit(probes: Probes) -> None:
    outcome = probes.run(Layout(tp=2), whole(3), memory_limit_bytes=4 << 20)
    assert (outcome.state, outcome.reason, outcome.node) == ("infeasible", "out_of_memory", "n4")
    assert "MemoryLimitExceededError" in outcome.message
    assert "Traceback" in outcome.log_tail


def test_a_killed_rank_fails_the_probe_with_rank_and_node(probes: Probes) -> None:
    ranks: list[int] = []

    def kill_one(event: dict[str, Any]) -> None:
        if event["event"] == "iteration" and not ranks:
            ranks.extend(rank.pid for rank in probes.ranks())
            os.kill(ranks[0], signal.SIGKILL)

    layout = Layout(dp=2, num_nodes=2)
    outcome = probes.run(layout, whole(0, 1), iterations=10_000, on_event=kill_one)
    assert (outcome.state, outcome.reason) == ("failed", "crashed")
    assert "was killed by signal 9 (SIGKILL)" in outcome.message
    assert outcome.node in ("n1", "n2")
    assert len(ranks) == 2
    assert not any(map(is_alive, ranks))
    assert not probes.launcher.lost()
