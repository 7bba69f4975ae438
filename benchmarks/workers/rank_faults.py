"""Everything that a rank can do to its node, each once.

The seed of a probe determines its fault; service and worker do not know of it. A fault strikes at
the first attempt alone, so that a trial whose node was lost completes when it is run again.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask

LOSES_WORKER: Final = "loses its worker"

HELD_SEED: Final = 1_000_000
"""Seed of a probe whose first attempt stays in its second iteration until it is let go."""
LET_GO: Final = "let-go"
"""File in the directory that lets it go."""

KEEPS_NODES_AWAY: Final = "keeps-nodes-away"
"""File in the directory; while it is there, no node that starts gets ready."""

FOLDER: Final = "LAYOUT_TUNER_BENCH_FAULTS"
"""Variable that names the directory where faults say that they have struck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankFault:
    """One way to fail."""

    name: str
    strike: Callable[[], None]
    """What rank 0 does when its second iteration has ended."""
    reasons: tuple[str | None, ...]
    """What the trial's reason may be; None: the probe is none the worse."""
    attempts: int = 1
    """Attempts that the trial takes."""

    def armed(self, task: RankTask, line: JsonLines) -> JsonLines:
        """The rank's line, on which rank 0's second iteration is its last."""
        return _ArmedLine(line, self) if task.rank == 0 else line


class _ArmedLine(JsonLines):
    def __init__(self, line: JsonLines, fault: RankFault) -> None:
        super().__init__(line.socket)
        self._line, self._fault = line, fault

    def send(self, *documents: Document) -> None:
        self._line.send(*documents)
        for document in documents:
            if document["event"] == "iteration" and document["index"] == 1:
                if note := getattr(self._line, "note", None):
                    note("fault")
                self._fault.strike()


def seed_of(fault: RankFault, time: int) -> int:
    """Seed of the probe that this fault befalls for the so-manieth time; nothing befalls seed 0."""
    return 1 + FAULTS.index(fault) + time * len(FAULTS)


def fault_named(name: str) -> RankFault:
    """The fault of this name."""
    (found,) = (fault for fault in FAULTS if fault.name == name)
    return found


def wait_until_nodes_may_start() -> None:
    """Returns once no file keeps nodes away."""
    if FOLDER in os.environ:
        while (Path(os.environ[FOLDER]) / KEEPS_NODES_AWAY).exists():
            time.sleep(0.05)


def fault_of(task: RankTask) -> RankFault | None:
    """What shall befall this rank's probe; None: nothing, or it already has."""
    seed = task.job["request"]["seed"]
    if seed == 0 or task.rank != 0 or FOLDER not in os.environ:
        return None
    struck = Path(os.environ[FOLDER]) / f"struck-{seed}"
    if struck.exists():
        return None
    struck.touch()
    if seed == HELD_SEED:
        return RankFault(name="is held", strike=_wait_until_let_go, reasons=(None,))
    return FAULTS[(seed - 1) % len(FAULTS)]


def _wait_until_let_go() -> None:
    while not (Path(os.environ[FOLDER]) / LET_GO).exists():
        time.sleep(0.05)


def _crash() -> None:
    raise RuntimeError("this rank was told to crash")


def _exit_silently() -> None:
    os._exit(3)


def _leave_without_a_result() -> None:
    os._exit(0)


def _die(number: signal.Signals) -> Callable[[], None]:
    def strike() -> None:
        os.kill(os.getpid(), number)
        time.sleep(3600)  # a stopped process that is continued goes on here

    return strike


def _hang() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    while True:
        time.sleep(3600)


def _run_out_of_memory() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, resource.RLIM_INFINITY))
    torch.zeros(1 << 28)


def _segfault() -> None:
    ctypes.string_at(0)


def _leave_a_child() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    _crash()


def _daemonise() -> None:
    """Leaves a grandchild in a session of its own, which holds every descriptor open; goes on."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                time.sleep(3600)
        os._exit(0)
    os.wait()


def _fork_many() -> None:
    for _ in range(20):
        if os.fork() == 0:
            os.setsid()
            while True:
                time.sleep(3600)
    _die(signal.SIGKILL)()


def _leave_threads() -> None:
    for _ in range(20):
        threading.Thread(target=time.sleep, args=(3600,)).start()
    _crash()


def _flood_the_log() -> None:
    line = "a rank that says too much " * 40 + "\n"
    for _ in range(20_000):
        sys.stdout.write(line)
    _crash()


def _fill_shared_memory() -> None:
    """Leaves a segment mapped, as a rank does that is killed between two steps."""
    file = os.memfd_create("left")
    os.ftruncate(file, 256 << 20)
    os.write(file, b"x" * (64 << 20))
    _die(signal.SIGKILL)()


def _kill_above(*words: str, without: str = "\0") -> Callable[[], None]:
    """Kills the topmost process above this one whose command line has these words."""

    def strike() -> None:
        found, pid = 0, os.getppid()
        while pid > 1:
            said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if all(word in said for word in words) and without not in said:
                found = pid
            status = Path(f"/proc/{pid}/status").read_text()
            pid = int(status.split("PPid:")[1].split()[0])
        if not found:
            raise RuntimeError(f"no process above this one has {words} in its command line")
        os.kill(found, signal.SIGKILL)
        time.sleep(3600)

    return strike


def _fault(
    name: str, strike: Callable[[], Any], *reasons: str | None, attempts: int = 1
) -> RankFault:
    return RankFault(name=name, strike=strike, reasons=reasons, attempts=attempts)


FAULTS: Final[tuple[RankFault, ...]] = (
    _fault("raises", _crash, "crashed"),
    _fault("ends with an exit code", _exit_silently, "crashed"),
    _fault("ends without a result", _leave_without_a_result, "crashed"),
    _fault("is killed", _die(signal.SIGKILL), "crashed"),
    _fault("segfaults", _segfault, "crashed"),
    _fault("aborts", _die(signal.SIGABRT), "crashed"),
    _fault("hangs until its deadline", _hang, "timeout"),
    _fault("is stopped until its deadline", _die(signal.SIGSTOP), "timeout"),
    _fault("runs out of memory", _run_out_of_memory, "out_of_memory"),
    _fault("forks a child and crashes", _leave_a_child, "crashed"),
    _fault("leaves a daemon and completes", _daemonise, None),
    _fault("forks 20 sessions and is killed", _fork_many, "crashed"),
    _fault("crashes with threads at work", _leave_threads, "crashed"),
    _fault("floods the log", _flood_the_log, "crashed"),
    _fault("is killed with shared memory mapped", _fill_shared_memory, "crashed"),
    _fault(
        "loses its zygote",
        _kill_above(
            "layout_tuner.workers.ranks.zygote", without="layout_tuner.workers.ranks.warden"
        ),
        None,
        attempts=2,
    ),
    _fault(
        "loses its warden",
        _kill_above("layout_tuner.workers.ranks.warden", "layout_tuner.workers.ranks.zygote"),
        None,
        attempts=2,
    ),
    _fault("loses its node agent", _kill_above("RayAgent"), None, attempts=2),
    _fault("loses its raylet", _kill_above("--raylet_socket_name="), None, attempts=2),
    _fault(LOSES_WORKER, _kill_above("benchmarks.workers.live_worker"), None, attempts=2),
)
