"""Ranks that stop for seconds change no outcome: causes are awaited, and last steps of others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.trainers.program import ProgramTrainer
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.launchers.launcher_nodes import NodeSet
from layout_tuner.workers.launchers.local import LocalNodes
from tests.kit.local_ranks import SeveralLocalNodes, make_probe, run_probe
from tests.workers.programs.programs import TWO_CORES, make_request, python_trainer

pytestmark = pytest.mark.ranks

STOP_S = 1.5
"""Longer than a supervisor may take to read a report, and shorter than a cause is waited for."""

STOP = """
def stop(pid):
    keep_on = "sleep SECONDS; while kill -CONT %d; do sleep 0.2; done" % pid
    subprocess.Popen(["sh", "-c", keep_on], stderr=subprocess.DEVNULL)
    os.kill(pid, signal.SIGSTOP)

def at(point):
    if "%d %s" % (RANK, point) == "WHERE":
        stop(os.getpid() if "WHO" == "program" else os.getppid())

"""
"""What stops a rank's program, or its supervisor, at a point that it reaches."""


def probe(nodes: NodeSet, *trainers: ProgramTrainer) -> Outcome:
    cluster = replace(TWO_CORES, num_nodes=len(nodes.nodes))
    theirs = {each.name: each for each in trainers}
    launcher = GroupLauncher(nodes, cluster, allow_sharing=True, trainers=theirs)
    if trainers:
        return run_probe(launcher, make_request(deadline_s=60.0))
    layout = Layout(dp=2, num_nodes=len(nodes.nodes))
    return run_probe(launcher, make_probe(layout=layout, iterations=3))


def stopping_program(code: str, *, who: str = "no", where: str = "") -> ProgramTrainer:
    stop = STOP.replace("WHO", who).replace("WHERE", where).replace("SECONDS", str(STOP_S))
    return python_trainer(stop + code)


@pytest.mark.sampled(10)  # the first
@pytest.mark.parametrize(
    ("rank", "point"),
    [
        (1, "before keeper error"),  # rank 0 reports first that the connection closed
        (0, "start"),
        (0, "after rank listening"),
        (0, "before keeper iteration"),
        (1, "before rank error"),
        (0, "after rank error"),
        (0, "before keeper error"),
    ],
)
def test_a_ranks_memory_is_the_cause_wherever_ranks_of_the_embedded_trainer_stop(
    two_nodes: SeveralLocalNodes, orders: Path, rank: int, point: str
) -> None:
    stop = {"rank": rank, "point": point, "stop_s": STOP_S}
    orders.write_text(json.dumps({**stop, "out_of_memory": 1}))
    outcome = probe(two_nodes)
    assert (outcome.state, outcome.reason) == ("infeasible", "out_of_memory"), outcome
    assert outcome.message.startswith("rank 1: RuntimeError: ")
    assert "can't allocate memory" in outcome.message


OUT_OF_MEMORY = """
meet()
step()
at("before its failure")
if RANK == 0:
    while not os.path.exists(os.path.dirname("{probe_directory}") + "/1/short"):
        time.sleep(0.001)
    print("RuntimeError: Connection closed by peer", flush=True)
else:
    open("{probe_directory}/short", "w").close()
    at("after it has closed its connections")
    print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
at("before its exit")
sys.exit(1)
"""


@pytest.mark.sampled(10)  # the first
@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("program", "1 after it has closed its connections"),
        ("supervisor", "1 after it has closed its connections"),
        ("program", "0 before its failure"),
        ("supervisor", "1 before its failure"),
        ("program", "1 before its exit"),
        ("supervisor", "0 before its exit"),
    ],
)
def test_a_ranks_memory_is_the_cause_wherever_ranks_of_a_program_stop(
    nodes: LocalNodes, who: str, where: str
) -> None:
    outcome = probe(nodes, stopping_program(OUT_OF_MEMORY, who=who, where=where))
    assert (outcome.state, outcome.reason) == ("infeasible", "out_of_memory"), outcome
    assert outcome.message == (
        "rank 1: the program ended with exit code 1; it printed: "
        "torch.OutOfMemoryError: CUDA out of memory"
    )


ENDS_WITH_1 = """
meet()
at("before its first step")
for number in range(STEPS - 1):  # none is like the one before, so that all of them are needed
    step(0.2 * 0.8**number, 0.2 * 0.8**number)
at("before its last step")
step()
at("after its last step")
sys.exit(1)
"""


@pytest.mark.sampled(10)  # the first
@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("program", "1 before its last step"),
        ("supervisor", "0 before its last step"),
        ("program", "0 before its first step"),
        ("supervisor", "1 before its first step"),
        ("program", "0 after its last step"),
        ("supervisor", "1 after its last step"),
    ],
)
def test_ranks_that_fail_after_the_last_step_complete(
    nodes: LocalNodes, who: str, where: str
) -> None:
    outcome = probe(nodes, stopping_program(ENDS_WITH_1, who=who, where=where))
    assert outcome.state == "completed", outcome


CAUSE_BEFORE_THE_LAST_STEP = """
meet()
if RANK == 0:
    train()
    sys.exit("an end that others do not care for")
train(3)
time.sleep(0.5)
sys.exit("ValueError: the cause")
"""


def test_a_failure_before_the_last_step_replaces_later_ones(nodes: LocalNodes) -> None:
    said = probe(nodes, python_trainer(CAUSE_BEFORE_THE_LAST_STEP)).message
    cause = "rank 1: the program ended with exit code 1; its last line: ValueError: the cause"
    assert said.endswith(cause)


def test_a_program_is_not_complete_before_its_last_rank_has_started(
    nodes: LocalNodes, orders: Path, tmp_path: Path
) -> None:
    """Rank 1 starts when rank 0 has reported all its steps, and finds no program."""
    (tmp_path / "sh0").symlink_to("/bin/sh")
    trainer = python_trainer("train()")
    command = (f"{tmp_path}/sh{{rank}}", "-c", 'exec "$0" "$@"', *trainer.command)
    trainer = python_trainer("train()", command=command)
    orders.write_text(json.dumps({"rank": 1, "point": "start", "stop_s": STOP_S}))
    outcome = probe(nodes, trainer)
    assert outcome.reason == "unsupported", outcome
    assert outcome.message.startswith("rank 1: ")


def test_a_stopped_supervisor_takes_no_step_for_longer(nodes: LocalNodes) -> None:
    code = 'meet()\ntrain(2, step_time_s=0.1, sleep_s=0.1)\nat("its third step")\n'
    code += "train(step_time_s=0.1, sleep_s=0.1)"
    trainer = stopping_program(code, who="supervisor", where="0 its third step")
    assert probe(nodes, trainer).state == "completed"


def test_reports_before_the_last_step_of_another_rank_count(nodes: LocalNodes) -> None:
    """Rank 0 is done when the supervisor of rank 1 reads the report of its first step."""
    code = """
meet()
at("its first step")
if RANK: report_step(loss=float("nan"))
open("{probe_directory}/reported", "w").close()
while not os.path.exists(os.path.dirname("{probe_directory}") + "/1/reported"):
    time.sleep(0.001)
train()
time.sleep(60)
"""
    trainer = stopping_program(code, who="supervisor", where="1 its first step")
    outcome = probe(nodes, trainer)
    assert outcome.reason == "diverged", outcome
