"""The faults that the embedded trainer's ranks are tested with, each as a program of a trainer."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from search_spaces.spec.layout import Layout
from tests.workers import rank_programs
from tests.workers.programs.programs import (
    LONGER,
    SHORT,
    Fault,
    check,
    leaves_nothing,
    left_behind,
    python_trainer,
    run,
)
from workers.launchers.local import LocalNodes

pytestmark = pytest.mark.ranks

FAIL = "print('about to fail')\nsys.exit('ValueError: this rank was told to fail')"
HANG = "signal.pthread_sigmask(signal.SIG_BLOCK, [2, 15])\ntime.sleep(60)"
OUT_OF_MEMORY = 'sys.exit("RuntimeError: DefaultCPUAllocator: can\'t allocate memory")'
DEAD_PEER = "print('RuntimeError: Connection closed by peer')"
DAEMON = (
    "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(600)\n    os._exit(0)"
)
TALK = "for n in range(20000): print('line', n, 'of a program that says too much, ' * 5)"
FAILED = "rank 1: the program ended with exit code 1; its last line: ValueError: this rank was told"
NOT_AT_FAULT = {"peak", "garble"}
"""What comes before any program: the matmul that measures the devices. And what none can do: send
what is no report over the line of its rank."""


def on_rank_1(code: str, others: str = "time.sleep(60)") -> str:
    return f"if RANK != 1:\n    {others}\n    sys.exit()\n{code}"


AS_PROGRAMS = {
    "succeed": Fault("train()", None),
    "tell-oom-score": Fault(
        "sys.exit(open('/proc/self/oom_score_adj').read())", "crashed", "its last line: 500"
    ),
    "say-much": Fault("print('x' * 150000)\ntrain()", None),
    "iterate": Fault("train(200, sleep_s=0.005)", None, "", {"iterations": 190}),
    "hang": Fault(HANG, "timeout", r"within deadline_s=1.2 \(no iteration had ended\)", SHORT),
    "iterate-then-hang": Fault("train(4)\n" + HANG, "timeout", "last: iteration 3", LONGER),
    "fail": Fault(on_rank_1(FAIL), "crashed", FAILED),
    "fail-late": Fault(on_rank_1("time.sleep(0.15)\n" + FAIL, DEAD_PEER), "crashed", FAILED),
    "out-of-memory": Fault(on_rank_1(OUT_OF_MEMORY), "out_of_memory", "DefaultCPUAllocator"),
    "out-of-memory-late": Fault(
        on_rank_1("time.sleep(0.15)\n" + OUT_OF_MEMORY, "sys.exit('Connection closed by peer')"),
        "out_of_memory",
        "rank 1: .* DefaultCPUAllocator",
    ),
    "notice-dead-peer": Fault(
        on_rank_1("os.kill(os.getpid(), 9)", DEAD_PEER + "\n    time.sleep(0.2)\n    sys.exit(1)"),
        "crashed",
        "rank 1: the program was killed by signal 9",
    ),
    "leave-dead-peer": Fault(
        DEAD_PEER + "\nsys.exit(1)", "crashed", "its last line: .* Connection closed by peer"
    ),
    "kill-itself": Fault(
        on_rank_1("os.kill(os.getpid(), 9)"),
        "crashed",
        "rank 1: the program was killed by signal 9",
    ),
    "hang-past-alarm": Fault(
        "os.kill(os.getppid(), signal.SIGALRM)\n" + HANG, "timeout", "ended by its own alarm"
    ),
    "leave": Fault("", "crashed", "too few steps reported"),
    "daemonise": Fault(DAEMON + "\ntrain()", None),
    "daemonise-then-hang": Fault(DAEMON + "\n" + HANG, "timeout", "", SHORT),
    "fork-a-child": Fault("if os.fork() == 0:\n    time.sleep(600)\ntrain()", None),
    "talk": Fault(on_rank_1(f"{TALK}\n{FAIL}"), "crashed", FAILED),
    "talk-and-succeed": Fault(f"{TALK}\ntrain()", None),
    "talk-then-hang": Fault(f"{TALK}\n{HANG}", "timeout", "", SHORT),
    "talk-for-ever": Fault(
        "while True: print('a program that says too much')", "timeout", "", SHORT
    ),
    "take-a-little": Fault("taken = b'x' * (60 << 20)\n" + HANG, "timeout", "", SHORT),
    "take-more-and-more": Fault(
        "taken = []\nwhile True:\n    taken.append(b'x' * (8 << 20))\n    time.sleep(0.01)",
        "out_of_memory",
        "over the limit of 104857600 bytes",
        {"memory_limit_bytes": 100 << 20, "layout": Layout()},
    ),
    "allocate-too-much": Fault(
        "import resource\nresource.setrlimit(resource.RLIMIT_DATA, (64 << 20, 64 << 20))\n"
        "bytearray(1 << 30)",
        "out_of_memory",
        "it printed: MemoryError",
    ),
    "meet": Fault(
        "import socket\nwhere = (os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']))\n"
        "if RANK == 0: kept = socket.create_server(where).accept()\n"
        "while RANK:\n    try: kept = socket.create_connection(where)\n"
        "    except ConnectionRefusedError: continue\n    break\n"
        "train()",
        None,
    ),
}


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    with leaves_nothing() as nodes:
        yield nodes


def test_every_fault_of_the_embedded_trainers_ranks_is_one_of_these() -> None:
    assert set(AS_PROGRAMS) | NOT_AT_FAULT == set(rank_programs._PROGRAMS)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", AS_PROGRAMS)
def test_a_program_with_the_fault_of_a_rank_has_its_reason(nodes: LocalNodes, kind: str) -> None:
    fault = AS_PROGRAMS[kind]
    check(run(nodes, python_trainer(fault.code), **fault.changes), fault)
    assert left_behind(nodes) == []
