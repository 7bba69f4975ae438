"""What test ranks do; named to a zygote as "tests.workers.rank_programs:run"."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

from layout_tuner.workers.ranks.json_lines import JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask


def run(task: RankTask, line: JsonLines) -> None:
    """Does what the task's job asks of this rank: {"kind": ..., "by_rank": {rank: program}}.

    The program "daemonise-then-hang" calls the functions `_daemonise` and `_hang`, and so on.
    """
    by_rank = task.job.get("by_rank", {})
    program = by_rank.get(str(task.rank), task.job["kind"])
    for part in program.split("-then-"):
        globals()[f"_{part.replace('-', '_')}"](task, line)


def _report_error(line: JsonLines, message: str, **changes: Any) -> None:
    usual = {"event": "error", "reason": "crashed", "transport": False}
    line.send({**usual, "message": message, **changes})


def _succeed(task: RankTask, line: JsonLines) -> None:
    score = int(Path("/proc/self/oom_score_adj").read_text())
    cores = sorted(os.sched_getaffinity(0))
    line.send({"event": "result", "rank": task.rank, "cores": cores, "oom_score_adj": score})


def _peak(task: RankTask, line: JsonLines) -> None:
    """The peak that a launcher asks for before a probe: it fails, and how depends on what it is."""
    if task.job["precision"] == "bf16":
        _out_of_memory(task, line)
    _fail(task, line)


def _say_much(task: RankTask, line: JsonLines) -> None:
    """A result of many chunks: what a probe of thousands of iterations returns."""
    line.send({"event": "result", "pad": "x" * 150_000})


def _iterate(task: RankTask, line: JsonLines) -> None:
    """A hundred iterations of 5 ms."""
    for index in range(100):
        time.sleep(0.005)
        line.send({"event": "iteration", "index": index, "kind": "timed", "loss": 1.0})
    line.send({"event": "result"})


def _hang(task: RankTask, line: JsonLines) -> None:
    line.send({"event": "hanging", "pid": os.getpid()})
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    while True:
        time.sleep(3600)


def _probe(task: RankTask, line: JsonLines) -> None:
    """What a launcher asks for: it hangs."""
    _hang(task, line)


def _iterate_once(task: RankTask, line: JsonLines) -> None:
    line.send({"event": "iteration", "index": 3, "kind": "timed", "loss": 1.0})


def _pause(task: RankTask, line: JsonLines) -> None:
    time.sleep(0.15)


def _fail(task: RankTask, line: JsonLines) -> None:
    sys.stdout.write("about to fail\n")
    message = "ValueError: this rank was told to fail"
    sys.stderr.write(f"{message}\n")
    _report_error(line, message)
    os._exit(1)


def _out_of_memory(task: RankTask, line: JsonLines) -> None:
    message = "RuntimeError: DefaultCPUAllocator: can't allocate memory"
    _report_error(line, message, reason="out_of_memory")
    os._exit(1)


def _notice_dead_peer(task: RankTask, line: JsonLines) -> None:
    _report_error(line, "RuntimeError: Connection closed by peer", transport=True)


def _exit(task: RankTask, line: JsonLines) -> None:
    os._exit(1)


def _leave(task: RankTask, line: JsonLines) -> None:
    pass


def _hang_past_alarm(task: RankTask, line: JsonLines) -> None:
    """As if the deadline had passed long ago: the kernel's timer is all that is left."""
    assert signal.getitimer(signal.ITIMER_REAL)[0] > task.deadline_s - 1
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    _hang(task, line)


def _kill_itself(task: RankTask, line: JsonLines) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _daemonise(task: RankTask, line: JsonLines) -> None:
    """Leaves a grandchild in a session of its own, which holds every descriptor open."""
    told_r, told_w = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.write(told_w, str(os.getpid()).encode())
            while True:
                time.sleep(3600)
        os._exit(0)
    os.wait()
    line.send({"event": "result", "daemon": int(os.read(told_r, 32))})


def _fork_a_child(task: RankTask, line: JsonLines) -> None:
    """Leaves a child that nobody waits for, and that is deaf to signals."""
    pid = os.fork()
    if pid == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        while True:
            time.sleep(3600)
    line.send({"event": "result", "daemon": pid})


def _allocate_too_much(task: RankTask, line: JsonLines) -> None:
    """Memory that the kernel refuses for real."""
    resource.setrlimit(resource.RLIMIT_DATA, (64 << 20, 64 << 20))
    try:
        bytearray(1 << 30)
    except MemoryError:
        _out_of_memory(task, line)


def _take_a_little(task: RankTask, line: JsonLines) -> None:
    """60 MiB, and the first place in the out-of-memory killer's queue."""
    Path("/proc/self/oom_score_adj").write_text("1000")
    taken = b"x" * (60 << 20)
    line.send({"event": "taken", "num_bytes": len(taken)})
    _hang(task, line)


def _take_more_and_more(task: RankTask, line: JsonLines) -> None:
    line.send({"event": "taking"})
    taken = []
    while True:
        taken.append(b"x" * (8 << 20))
        time.sleep(0.01)


def _talk_for_ever(task: RankTask, line: JsonLines) -> None:
    words = "a rank that says too much\n" * 1000
    sys.stdout.write(words)
    sys.stdout.flush()
    line.send({"event": "talking", "pid": os.getpid()})
    while True:
        sys.stdout.write(words)


def _talk(task: RankTask, line: JsonLines) -> None:
    for number in range(20_000):
        sys.stdout.write(f"line {number} of rank {task.rank}, {'which says too much, ' * 30}\n")
    sys.stdout.flush()


def _garble(task: RankTask, line: JsonLines) -> None:
    line.socket.sendall(b"no document\n")
    _hang(task, line)


def _meet(task: RankTask, line: JsonLines) -> None:
    if task.rank == 0:
        line.send({"event": "listening", "port": 4321})
    line.send({"event": "result", "told": line.receive()})
