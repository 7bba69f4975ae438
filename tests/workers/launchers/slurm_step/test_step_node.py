"""Steps with a stand-in for `srun`: the nodes' tasks, their connections and the ranks are real.

What Slurm itself does is tested in tests/slurm.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.workers.errors import NodeLostError
from layout_tuner.workers.launchers.slurm_step.srun import SrunNodes, StepSettings
from layout_tuner.workers.launchers.slurm_step.step_node import STEP_VARIABLE, living_steps
from layout_tuner.workers.packing.request import Share
from tests.e2e.test_service_away import Namespace, why_not
from tests.kit.local_ranks import Hanging, failure_of
from tests.kit.waiting import wait_until
from tests.workers.process_checks import (
    MARK,
    RANK_PROGRAMS,
    command_line,
    environment_of,
    is_alive,
    kill,
    marked,
    run_group,
    wait_until_gone,
)

pytestmark = pytest.mark.ranks

SRUN = """#!/bin/bash
# One task for each name of the list, behind $BEFORE_NAME where there is one; fails if one of them does.
while [[ $1 == --* ]]; do
  case $1 in --nodelist=*) names=${1#*=};; esac
  shift
done
case $names in *$REFUSED_NODE*) [ -z "$REFUSED_NODE" ] || exit 1;; esac
[ -z "$REFUSAL" ] || { echo "srun: error: $REFUSAL" >&2; exit 1; }
trap 'kill $(jobs -p)' TERM
for name in ${names//,/ }; do
  before=BEFORE_$name
  SLURM_JOB_ID=$JOB SLURM_STEP_ID=0 SLURMD_NODENAME=$name ${!before} "$@" &
done
for task in $(jobs -p); do wait "$task" || code=$?; done
exit ${code:-0}
"""


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """With the stand-ins first on the path; no process that has it may be left."""
    for name, text in (("srun", SRUN), ("squeue", "#!/bin/sh\n"), ("scancel", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    mark = uuid.uuid4().hex
    path = f"{tmp_path}:{os.environ['PATH']}"
    job = str(uuid.uuid4().int % 10**9)  # others may run these tests on this machine
    yield {**os.environ, MARK: mark, "JOB": job, "PATH": path}
    wait_until("no process is left", lambda: not marked(mark))


def start_nodes(
    environment: dict[str, str], listen_address: str = "127.0.3.100", num_nodes: int = 2
) -> SrunNodes:
    return SrunNodes(
        StepSettings(
            job_id=environment["JOB"],
            node_names=tuple(f"n{number}" for number in range(1, num_nodes + 1)),
            addresses=tuple(f"127.0.3.{number}" for number in range(1, num_nodes + 1)),
            listen_address=listen_address,
            num_devices=2,
            environment=environment,
            rank_entry=RANK_PROGRAMS,
            connect_within_s=60,
        )
    )


@pytest.fixture
def nodes(environment: dict[str, str]) -> Iterator[SrunNodes]:
    nodes = start_nodes(environment)
    yield nodes
    nodes.close()


def start_late(environment: dict[str, str], node: str, program: Path, until: str) -> None:
    """Has the task of a node wait for something first."""
    program.write_text(f'#!/bin/sh\n{until}\nexec "$@"\n')
    program.chmod(0o755)
    environment[f"BEFORE_{node}"] = str(program)


def test_ranks_meet_although_a_node_calls_in_after_the_first_rank_listens(
    environment: dict[str, str], nodes: SrunNodes, tmp_path: Path
) -> None:
    listens = tmp_path / "listens"
    start_late(environment, "n2", tmp_path / "late", f"until [ -e {listens} ]; do sleep 0.05; done")
    told = {"on_event": lambda _: listens.touch(), "deadline_s": 60}
    end = run_group(nodes, "meet", num_ranks=4, num_nodes=2, **told)
    assert end.failure is None, end
    where = {"address": "127.0.3.1", "port": 4321}
    assert [end.results[rank]["told"] for rank in range(4)] == [where] * 4


@pytest.mark.slow
def test_the_start_of_a_step_is_none_of_its_groups_time(
    environment: dict[str, str], nodes: SrunNodes, tmp_path: Path
) -> None:
    start_late(environment, "n1", tmp_path / "late", "sleep 4")
    end = run_group(nodes, "succeed", num_ranks=1, deadline_s=3.5)
    assert end.failure is None
    assert end.duration_s > 4


def test_a_killed_zygote_loses_its_node(nodes: SrunNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layout_tuner.workers.launchers.slurm_step.step._WORDS_WITHIN_S", 0.5)

    def kill_a_zygote() -> None:
        mark = nodes.settings.environment[MARK]
        zygotes = [
            p for p in marked(mark) if "layout_tuner.workers.ranks.zygote" in command_line(p)[:5]
        ]
        on_n2 = [p for p in zygotes if environment_of(p).get("SLURMD_NODENAME") == "n2"]
        kill(on_n2)  # the keepers forked from it go by its name

    hanging = Hanging(2, kill_a_zygote)
    failure = failure_of(nodes, "hang", num_ranks=2, num_nodes=2, on_event=hanging)
    assert (failure.reason, failure.node) == ("node_lost", 1)
    assert failure.message.startswith("node n2 was lost: the zygote ended: its warden ended with")
    wait_until_gone(hanging.pids)
    nodes.recover(1)
    assert run_group(nodes, "succeed", num_nodes=2).failure is None


def test_closing_while_a_groups_own_thread_ends_it_waits_for_that_end(nodes: SrunNodes) -> None:
    step = nodes._new_step("meeting-of-a-test", [0])
    nodes._launch_what_may_run()
    step.hellos()
    (pid,) = step.pids.values()
    with ThreadPoolExecutor() as pool:
        ending = pool.submit(nodes.end, [0], "meeting-of-a-test")
        nodes.close()
        assert not is_alive(pid)
        assert ending.result(30) == {}


def test_a_refusal_blames_the_node_it_names(environment: dict[str, str], nodes: SrunNodes) -> None:
    environment["REFUSAL"] = "Unable to create step: node n2 is not responding"
    failure = failure_of(nodes, "succeed", num_nodes=2)
    assert (failure.reason, failure.node) == ("node_lost", 1)
    assert "node n2 is not responding" in failure.message
    with pytest.raises(NodeLostError, match="node n2 is not responding") as still:
        nodes.recover(1)
    assert still.value.node == 1
    assert list(nodes.lost()) == [1]
    del environment["REFUSAL"]
    nodes.recover(1)


def test_an_allocation_none_of_whose_nodes_answers_is_refused(environment: dict[str, str]) -> None:
    environment["REFUSAL"] = "Job has expired"
    with pytest.raises(NodeLostError, match=r"no node of job \d+ answers: .*Job has expired"):
        start_nodes(environment)


def test_one_node_that_is_down_at_the_start_is_lost_alone(environment: dict[str, str]) -> None:
    environment["REFUSED_NODE"] = "n2"
    nodes = start_nodes(environment, num_nodes=3)
    assert list(nodes.lost()) == [1]
    assert nodes.lost()[1].startswith("node n2 did not connect: the step's srun ended with exit")
    shares = tuple(Share(node=node, devices=(0,)) for node in (0, 2))
    assert run_group(nodes, "succeed", shares=shares, num_ranks=2, num_nodes=2).failure is None
    nodes.close()


def test_a_step_is_found_alive_and_ignores_options_of_the_batch_script(
    environment: dict[str, str],
) -> None:
    environment.update(SLURM_GPUS_PER_TASK="1", SLURM_NTASKS="64", SLURM_NETWORK="kept")
    here = {"SLURM_JOB_ID": environment["JOB"], "SLURMD_NODENAME": "n1"}
    seen: list[dict[str, str]] = []
    found: list[list[str]] = []

    def look(_: dict[str, Any]) -> None:
        seen.extend(filter(None, map(environment_of, marked(environment[MARK]))))
        found.append(living_steps(here))
        others = [{STEP_VARIABLE: found[0][0]}, {"SLURM_JOB_ID": "1"}, {"SLURMD_NODENAME": "n2"}]
        found.extend(living_steps({**here, **other}) for other in others)

    nodes = start_nodes(environment)
    run_group(nodes, "hang", num_ranks=1, on_event=look, cancelled=lambda: bool(found))
    nodes.close()
    ((step,), *of_others) = found
    assert step.startswith("layout-tuner-")
    assert of_others == [[], [], []], "of the own step, of another job, of another node"
    assert seen
    for variables in seen:
        assert not {"SLURM_GPUS_PER_TASK", "SLURM_NTASKS"} & set(variables)
        assert variables["SLURM_NETWORK"] == "kept"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_that_is_cut_off_is_lost_and_ends_its_ranks(environment: dict[str, str]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    namespace = Namespace()
    hanging = Hanging(2, namespace.cut)
    environment["BEFORE_n2"] = " ".join(namespace.prefix)
    try:
        nodes = start_nodes(environment, listen_address=namespace.host)
        end = run_group(nodes, "hang", num_nodes=2, deadline_s=200, on_event=hanging)
        assert (end.failure.reason, end.failure.node) == ("node_lost", 1)
        assert "node n2 was lost" in end.failure.message
        assert end.duration_s < 100
        wait_until_gone(hanging.pids)
        nodes.close()
    finally:
        namespace.remove()
