"""Ranks that stop for seconds change no outcome: causes are awaited, and last steps of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from search_spaces.protocol.outcome import Outcome
from search_spaces.spec.layout import Layout
from search_spaces.trainers.program import ProgramTrainer
from tests.kit.local_ranks import (
    NEVER_S,
    SeveralLocalNodes,
    failure_of,
    local_nodes,
    make_probe,
    run_probe,
    several_nodes,
)
from tests.workers.process_checks import run_group
from tests.workers.programs.programs import TWO_CORES, make_request, python_trainer
from tests.workers.stopped_rank import STOPS
from workers.launchers.base import CAUSE_WITHIN_S, NodeSet
from workers.launchers.group_launcher import GroupLauncher
from workers.launchers.local import LocalNodes

pytestmark = pytest.mark.ranks

ENTRY = "tests.workers.stopped_rank:main"
STOP_S = 3.0
NO_STOP = {"rank": -1, "point": "", "stop_s": 0}

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


@pytest.fixture(scope="module")
def stops(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file of `tests.workers.stopped_rank`, which the zygotes of the nodes must know."""
    path = tmp_path_factory.mktemp("stops") / "stops"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STOPS, str(path))
        yield path


@pytest.fixture(scope="module")
def nodes(stops: Path) -> Iterator[LocalNodes]:
    with local_nodes(rank_entry=ENTRY) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def several(stops: Path) -> Iterator[SeveralLocalNodes]:
    with several_nodes([ENTRY] * 2, num_devices=1) as nodes:
        yield nodes


def probe(
    nodes: NodeSet, stops: Path, orders: dict[str, Any], *trainers: ProgramTrainer, **changes: Any
) -> Outcome:
    stops.write_text(json.dumps({**NO_STOP, **orders}))
    launcher = GroupLauncher(
        nodes,
        replace(TWO_CORES, num_nodes=len(nodes.nodes)),
        allow_sharing=True,
        trainers={each.name: each for each in trainers},
    )
    if trainers:
        return run_probe(launcher, make_request(deadline_s=60.0, **changes))
    layout = Layout(dp=2, num_nodes=len(nodes.nodes))
    return run_probe(launcher, make_probe(layout=layout, iterations=3))


def stopping_program(code: str, *, who: str = "no", where: str = "") -> ProgramTrainer:
    stop = STOP.replace("WHO", who).replace("WHERE", where).replace("SECONDS", str(STOP_S))
    return python_trainer(stop + code)


SLOW = pytest.mark.slow
OF_EMBEDDED_RANKS = [
    (1, "before keeper error"),  # rank 0 reports that the connection closed, 3 s before the cause
    pytest.param(0, "start", marks=SLOW),
    pytest.param(1, "start", marks=SLOW),
    pytest.param(0, "after rank listening", marks=SLOW),
    pytest.param(0, "before keeper iteration", marks=SLOW),
    pytest.param(0, "before rank error", marks=SLOW),
    pytest.param(1, "before rank error", marks=SLOW),
    pytest.param(0, "after rank error", marks=SLOW),
    pytest.param(1, "after rank error", marks=SLOW),
    pytest.param(0, "before keeper error", marks=SLOW),
]


@pytest.mark.parametrize(("rank", "point"), OF_EMBEDDED_RANKS)
def test_a_ranks_memory_is_the_cause_wherever_ranks_of_the_embedded_trainer_stop(
    several: SeveralLocalNodes, stops: Path, rank: int, point: str
) -> None:
    orders = {"rank": rank, "point": point, "stop_s": STOP_S, "out_of_memory": 1}
    outcome = probe(several, stops, orders)
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
POINTS_OF_A_FAILURE = ["before its failure", "before its exit"]


@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("program", "1 after it has closed its connections"),
        *(
            pytest.param(who, f"{rank} {point}", marks=SLOW)
            for who in ("program", "supervisor")
            for rank in (0, 1)
            for point in POINTS_OF_A_FAILURE
        ),
        pytest.param("supervisor", "1 after it has closed its connections", marks=SLOW),
    ],
)
def test_a_ranks_memory_is_the_cause_wherever_ranks_of_a_program_stop(
    nodes: LocalNodes, stops: Path, who: str, where: str
) -> None:
    trainer = stopping_program(OUT_OF_MEMORY, who=who, where=where)
    outcome = probe(nodes, stops, {}, trainer)
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
POINTS_OF_AN_END = ["before its first step", "before its last step", "after its last step"]


@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("program", "1 before its last step"),
        *(
            pytest.param(who, f"{rank} {point}", marks=SLOW)
            for who in ("program", "supervisor")
            for rank in (0, 1)
            for point in POINTS_OF_AN_END
            if (who, rank, point) != ("program", 1, "before its last step")
        ),
    ],
)
def test_ranks_that_fail_after_their_last_step_complete_wherever_they_stop(
    nodes: LocalNodes, stops: Path, who: str, where: str
) -> None:
    outcome = probe(nodes, stops, {}, stopping_program(ENDS_WITH_1, who=who, where=where))
    assert outcome.state == "completed", outcome


CAUSE_BEFORE_THE_LAST_STEP = """
meet()
if RANK == 0:
    train()
    sys.exit("an end that others do not care for")
train(3)
time.sleep(1.5)
sys.exit("ValueError: the cause")
"""


def test_a_failure_before_the_last_step_replaces_later_ones(nodes: LocalNodes, stops: Path) -> None:
    trainer = python_trainer(CAUSE_BEFORE_THE_LAST_STEP)
    said = probe(nodes, stops, {}, trainer, iterations=3).message
    cause = "rank 1: the program ended with exit code 1; its last line: ValueError: the cause"
    assert said.endswith(cause)


def test_a_program_is_not_complete_before_its_last_rank_has_started(
    nodes: LocalNodes, stops: Path, tmp_path: Path
) -> None:
    """Rank 1 starts when rank 0 has reported all its steps, and finds no program."""
    (tmp_path / "sh0").symlink_to("/bin/sh")
    trainer = python_trainer("train()")
    command = (f"{tmp_path}/sh{{rank}}", "-c", 'exec "$0" "$@"', *trainer.command)
    trainer = python_trainer("train()", command=command)
    outcome = probe(nodes, stops, {"rank": 1, "point": "start", "stop_s": STOP_S}, trainer)
    assert outcome.reason == "unsupported", outcome
    assert outcome.message.startswith("rank 1: ")


def test_a_stopped_supervisor_takes_no_step_for_longer(nodes: LocalNodes, stops: Path) -> None:
    code = 'meet()\ntrain(2, step_time_s=0.1, sleep_s=0.1)\nat("its third step")\n'
    code += "train(step_time_s=0.1, sleep_s=0.1)"
    trainer = stopping_program(code, who="supervisor", where="0 its third step")
    assert probe(nodes, stops, {}, trainer).state == "completed"


def test_reports_before_the_last_step_of_another_rank_count(nodes: LocalNodes, stops: Path) -> None:
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
    outcome = probe(nodes, stops, {}, trainer)
    assert outcome.reason == "diverged", outcome


@pytest.fixture(scope="module")
def programs() -> Iterator[LocalNodes]:
    with local_nodes(4) as nodes:
        yield nodes


LEFT = {"by_rank": {"1": "leave-dead-peer"}}


def test_the_deadline_ends_the_wait_for_a_cause(programs: LocalNodes) -> None:
    failure = failure_of(programs, "hang", deadline_s=1.0, **LEFT)
    assert failure.message == "rank 1: RuntimeError: Connection closed by peer"


def test_a_cancellation_ends_the_wait_for_a_cause(programs: LocalNodes) -> None:
    told: list[object] = []
    is_told = {"on_event": told.append, "cancelled": lambda: bool(told)}
    assert failure_of(programs, "hang", deadline_s=NEVER_S, **LEFT, **is_told).reason == "cancelled"


@pytest.mark.slow
def test_a_cause_that_does_not_come_is_given_up(programs: LocalNodes) -> None:
    end = run_group(programs, "hang", deadline_s=NEVER_S, **LEFT)
    assert end.failure is not None
    assert end.failure.message == "rank 1: RuntimeError: Connection closed by peer"
    assert end.duration_s >= CAUSE_WITHIN_S
