"""Runs a program in the place of a rank, and reports its steps and its end.

The supervisor is the rank that the keeper has forked: it has the rank's device, cores, output and
deadline, and the program inherits them. It reads the program's output and the steps that
`layout_tuner.report_step` writes into a named pipe. The keeper ends both, and all that the program
has started.
"""

from __future__ import annotations

import json
import math
import operator
import os
import resource
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from layout_tuner import step_reports
from layout_tuner.protocol.outcome import FailureReason
from layout_tuner.timing_mark import timing
from layout_tuner.trainers.failure_texts import (
    RAISED,
    lacking,
    reason_of,
    row_of,
    says_peer_ended,
)
from layout_tuner.trainers.placeholders import filled
from layout_tuner.units import memory
from layout_tuner.workers.programs.failure_blocks import ErrorLines, FailureCause
from layout_tuner.workers.programs.memory_sample import MemorySample, process_tree
from layout_tuner.workers.programs.program_run import ProgramTask
from layout_tuner.workers.programs.step_lines import StepLines
from layout_tuner.workers.ranks.json_lines import Document, JsonLines
from layout_tuner.workers.ranks.rank_task import RankTask
from layout_tuner.workers.ranks.scratch import make_directory
from layout_tuner.workers.trainer.disturbance import CoreWatch

REPORT_VARIABLE: Final = "LAYOUT_TUNER_REPORT"
"""The named pipe that `layout_tuner.report_step` writes to."""

_PACKAGE_ROOT: Final = Path(step_reports.__file__).parents[1].resolve()
_LOOPBACK: Final = "127."
_CHUNK: Final = 1 << 16
_LONGEST_WAIT_S: Final = 0.25
"""Between two samples of the memory."""
_LIBRARIES_BYTES: Final = 4 << 30
"""Private memory beyond the limit that a program's libraries may map without using it."""
_LONGEST_REPORT: Final = 4096
"""Bytes; up to this length the kernel writes a report into the pipe as a whole."""
_LATEST_S: Final = 1.0
"""How long a program may take to write a report; it is read at once, unless this process stops."""
_MOST_CHUNKS_LEFT: Final = 64
_REPORT_FIGURES: Final = ("step_time_s", "tokens", "loss", "skipped", "peak_memory_bytes")
_SIGNALLED: Final = 128
"""Shells end with this exit code plus the number of the signal that killed their program."""
_POSITION: Final = ("rank", "world_size", "local_rank", "local_world_size", "node_rank")
"""Fields of a task that a program gets as values and as variables."""
_OURS: Final = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_")
"""Variables for ranks of the embedded trainer alone."""


class ProgramFailedError(Exception):
    """The program failed.

    Args:
        reason: of the outcome.
        message: how, as one sentence.
        transport: whether to wait for what other ranks report: it may be the consequence of their
            failure, or came after the program's last step.
    """

    def __init__(self, reason: FailureReason, message: str, *, transport: bool = False) -> None:
        super().__init__(message)
        self.reason = reason
        self.transport = transport


def run_program(task: RankTask, line: JsonLines) -> Document:
    """Runs a rank's program to its end; returns the rank's result, or raises ProgramFailedError."""
    program = ProgramTask.of(task)
    directory = make_directory(task)
    with _rendezvous(task, line) as reserved:
        port = reserved.getsockname()[1] if task.rank == 0 else receive_rendezvous(line)["port"]
        return _Supervisor(task, program, directory, port, line).run()


def _rendezvous(task: RankTask, line: JsonLines) -> socket.socket:
    """Reserves the job's port on the node of rank 0, and reports it.

    The socket stays bound and never listens. A program that sets SO_REUSEADDR, as torch does, can
    bind the port too, and nothing else gets it meanwhile.
    """
    reserved = socket.socket(
        socket.AF_INET6 if ":" in task.address else socket.AF_INET, socket.SOCK_STREAM
    )
    if task.rank == 0:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((task.address, 0))
        line.send({"event": "listening", "port": reserved.getsockname()[1]})
    return reserved


def receive_rendezvous(line: JsonLines) -> Document:
    """Waits for the address and the port of rank 0; ConnectionError if they do not come."""
    if (rendezvous := line.receive()) is None:
        raise ConnectionError("the node's agent closed the line before it sent the port of rank 0")
    return rendezvous


class _Supervisor:
    """One program from its start to its end."""

    def __init__(
        self, task: RankTask, program: ProgramTask, directory: Path, port: int, line: JsonLines
    ) -> None:
        self._task = task
        self._program = program
        self._directory = directory
        self._line = line
        self._values = {**program.values, **_run_values(task, port, directory)}
        self._lines = StepLines(program.log, most=int(program.values["steps"]))
        self._memory = MemorySample(
            task, num_ranks=len(self._ranks), limit_bytes=program.memory_limit_bytes
        )
        self._partial: dict[int, bytes] = {}
        self._errors = ErrorLines()
        self._peer_ended = ""
        """The last line that says so, since the last step."""
        self._last_line = ""
        self._cores: CoreWatch | None = None

    def run(self) -> Document:
        """Runs it; see `run_program`."""
        pipe = self._report_pipe()
        output, theirs = os.pipe()
        os.set_blocking(output, False)
        self._started = self._read_at = time.monotonic()
        process = self._start(theirs)
        os.close(theirs)
        if self._task.device == "cpu" and not self._task.oversubscribed:
            cores = os.sched_getaffinity(0)
            self._cores = CoreWatch(cores, lambda: process_tree(process.pid))
        ended = os.pidfd_open(process.pid)
        poll = select.poll()
        for fd in (pipe, output, ended, self._line.socket.fileno()):
            poll.register(fd, select.POLLIN)
        with timing():
            while True:
                ready = {fd for fd, _ in poll.poll(_LONGEST_WAIT_S * 1e3)}
                if self._memory.take(process.pid) and self._cores is not None:
                    self._cores.take()
                self._refuse_over_limit()
                asked = any("drain" in order for order in self._line.read(block=False) or ())
                self._read_reports(pipe)  # before the output: see `_take_line`
                if output in ready and not self._read_output(output):
                    poll.unregister(output)
                if asked:
                    self._read_output(output)
                    self._line.send({"event": "drained"})
                if ended in ready:
                    break
        # What it has left in the pipes; a daemon of it may go on writing.
        for _ in range(_MOST_CHUNKS_LEFT):
            more = self._read_reports(pipe), self._read_output(output)
            if not any(more):
                break
        self._take_line(self._partial.pop(output, b""))
        self._line.send({"event": "drained"})
        code = process.wait()
        if code != 0:
            raise self._failure(code)
        return {}

    def _report_pipe(self) -> int:
        """The named pipe for reports; it is open for writing here too, so that it never ends."""
        path = self._directory / "report"
        os.mkfifo(path, 0o600)
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def _start(self, output: int) -> subprocess.Popen[bytes]:
        program, values = self._program, self._values
        (self._directory / "values.json").write_text(json.dumps(program.configuration))
        shutil.copy(step_reports.__file__, self._directory / "layout_tuner.py")
        command = [filled(each, values) for each in program.command]
        own = {name: filled(value, values) for name, value in program.environment.items()}
        where = filled(program.working_directory, values) or str(self._directory)
        self._refuse_paths_outside()
        try:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=where,
                env=self._environment(own),
                preexec_fn=self._limit_memory,
                start_new_session=True,  # a signal to its process group spares the supervisor
            )
        except (OSError, ValueError) as error:
            said = f"{type(error).__name__}: {error}"
            row = row_of(said, RAISED, frames="fork")
            if row and reason_of(row.resource, on_cpu=False) == "host_resource":
                why = (
                    f"the program {command[0]!r} can't be started: {error}; {lacking(row.resource)}"
                )
                raise ProgramFailedError("host_resource", why) from error
            raise ProgramFailedError(
                "unsupported",
                f"the program {command[0]!r} can't be started in {where} on this node: {error}; "
                "correct the trainer's entry",
            ) from error

    def _environment(self, own: Mapping[str, str]) -> dict[str, str]:
        """The environment of the rank, with what launchers such as torchrun set."""
        theirs = {name: value for name, value in os.environ.items() if name not in _OURS}
        if every := theirs.pop("LC_ALL", ""):  # would outrank what follows
            theirs = {name: value for name, value in theirs.items() if name[:3] != "LC_"}
            theirs["LANG"] = every
        inherited = own.get("PYTHONPATH", theirs.get("PYTHONPATH", "")).split(":")
        paths = [path for path in inherited if path and Path(path).resolve() != _PACKAGE_ROOT]
        if self._task.address.startswith(_LOOPBACK):
            theirs.setdefault("GLOO_SOCKET_IFNAME", "lo")
        values = self._values
        given = {
            "PYTHONUNBUFFERED": "1",
            "LC_MESSAGES": "C",  # errors of the system in the words of `failure_texts`
            **{name.upper(): values[name] for name in _POSITION},
            "GROUP_RANK": values["node_rank"],
            "MASTER_ADDR": values["master_address"],
            "MASTER_PORT": values["master_port"],
            REPORT_VARIABLE: str(self._directory / "report"),
        }
        ours = {"PYTHONPATH": ":".join([str(self._directory), *paths])}
        return {**theirs, **given, **own, **ours}

    def _refuse_paths_outside(self) -> None:
        """Refuses a path that a link leads out of the directory that it must lie in."""
        for name, below in self._program.paths.items():
            path = Path(self._values[name]).resolve()
            if not path.is_relative_to(Path(below).resolve()):
                raise ProgramFailedError(
                    "unsupported",
                    f"the parameter {name} leads to {path}, which is not below {below}",
                )

    def _limit_memory(self) -> None:
        """Runs in the program before it starts: a layout that is far too large fails by itself."""
        limit_bytes = self._program.memory_limit_bytes
        if limit_bytes is None or self._task.device != "cpu":
            return
        allowed = limit_bytes + limit_bytes // 8 + _LIBRARIES_BYTES
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        if hard == resource.RLIM_INFINITY or allowed < hard:
            resource.setrlimit(resource.RLIMIT_DATA, (allowed, hard))

    def _refuse_over_limit(self) -> None:
        limit_bytes, peak_bytes = self._program.memory_limit_bytes, self._memory.peak_bytes
        if limit_bytes is not None and peak_bytes > limit_bytes:
            raise ProgramFailedError(
                "out_of_memory",
                f"{memory(peak_bytes)} were in use, over the limit of {memory(limit_bytes)}",
            )

    def _read_output(self, fd: int) -> bool:
        """Passes on the output that has come, and looks at its lines; False at its end."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            return False
        with suppress(OSError):  # the keeper has ended, and this process is about to
            os.write(1, data)
        *lines, unfinished = (self._partial.get(fd, b"") + data).replace(b"\r", b"\n").split(b"\n")
        self._partial[fd] = unfinished[-_CHUNK:]
        for each in lines:
            self._take_line(each)
        return True

    def _take_line(self, line: bytes) -> None:
        text = line[:_CHUNK].decode(errors="replace")
        self._errors.take(text, self._lines.furthest)
        if not (text := text.strip()):
            return
        self._last_line = text
        if says_peer_ended(text):
            self._peer_ended = text
        for check in self._program.ran:
            if dropped := check.dropped(text):
                raise ProgramFailedError("unsupported", dropped)
        try:
            event = self._lines.read_line(text, self._task.rank)
        except ValueError as error:
            raise ProgramFailedError("implausible", str(error)) from error
        if event is not None:
            self._send(event, time.monotonic())

    def _read_reports(self, fd: int) -> bool:
        """Reads the reports that have come, up to a chunk of them; False: there are none."""
        self._earliest, self._read_at = self._read_at - _LATEST_S, time.monotonic()
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        *lines, unfinished = (self._partial.get(fd, b"") + data).split(b"\n")
        if len(unfinished) > _LONGEST_REPORT:
            lines.append(unfinished)
        self._partial[fd] = unfinished
        for each in lines:
            self._take_report(each)
        return True

    def _take_report(self, report: bytes) -> None:
        try:
            said = json.loads(report)
            # A sum refuses texts, of which float() would read "5_0" and digits of other scripts.
            rank, at_s = operator.index(said["rank"]), float(said["at_s"] + 0)
            if len(report) > _LONGEST_REPORT or not math.isfinite(at_s):
                raise ValueError(report)
            figures = {name: float(said[name] + 0) for name in _REPORT_FIGURES if name in said}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            raise ProgramFailedError(
                "implausible",
                f"the program wrote {report[:80]!r} into {REPORT_VARIABLE}, which is not a report of "
                "layout_tuner.report_step",
            ) from error
        if rank not in self._ranks:
            raise ProgramFailedError(
                "implausible",
                f"the program reported as rank {rank}, and its ranks are {self._ranks[0]} to "
                f"{self._ranks[-1]}; is RANK set for its processes?",
            )
        now = time.monotonic()
        if (event := self._lines.take("report", rank, figures)) is not None:
            self._send(event, min(max(at_s, self._earliest), now))

    @property
    def _ranks(self) -> range:
        """The ranks of the layout that this program is: its own, or all of its node."""
        num = int(self._values["num_devices"])
        if self._task.world_size == num:
            return range(self._task.rank, self._task.rank + 1)
        per_node = int(self._values["ranks_per_node"])
        first = self._task.node_rank * per_node
        return range(first, min(first + per_node, num))

    def _send(self, event: Document, at_s: float) -> None:
        """Sends the event of a line or a report to the worker."""
        if event["event"] == "iteration":
            self._peer_ended = ""  # the program went on after it
            event |= {
                "since_start_s": at_s - self._started,
                "sampled_bytes": self._memory.peak_bytes,
                "others": [self._cores.taken_s, self._cores.elapsed_s] if self._cores else None,
            }
        self._line.send(event)

    def _failure(self, code: int) -> ProgramFailedError:
        """Why a program ended with an exit code, or by a signal where it is negative."""
        how = f"ended with exit code {code}" if code > 0 else f"was killed by signal {-code}"
        steps = self._lines.furthest
        is_last = steps >= int(self._values["_least_steps"])  # others may not be that far
        number = -code if code < 0 else code - _SIGNALLED  # as shells pass a signal on
        is_abort = number == signal.SIGABRT
        cause = self._errors.cause(steps, ended_itself=code > 0 or is_abort)
        if cause is None and number == signal.SIGBUS:
            cause = FailureCause("shared memory", "")
        on_cpu = self._task.device == "cpu"
        if cause and (reason := reason_of(cause.resource, on_cpu=on_cpu)):
            printed = f"; it printed: {_short(cause.line)}" if cause.line else ""
            lacks = f"; {lacking(cause.resource)}" if reason == "host_resource" else ""
            return ProgramFailedError(
                reason, f"the program {how}{printed}{lacks}", transport=is_last
            )
        if killed := self._memory.kernel_killed(number):
            how = f"{how}; {killed[1]}"
            return ProgramFailedError(killed[0], f"the program {how}", transport=is_last)
        last = f"; its last line: {_short(self._last_line)}" if self._last_line else ""
        may_wait = is_last or bool(self._peer_ended)
        return ProgramFailedError("crashed", f"the program {how}{last}", transport=may_wait)


def _run_values(task: RankTask, port: int, directory: Path) -> dict[str, Any]:
    return {
        **{name: str(getattr(task, name)) for name in _POSITION},
        "master_address": task.master_address,
        "master_port": str(port),
        "values_file": str(directory / "values.json"),
        "probe_directory": str(directory),
        "device": task.device,
        "python": sys.executable,
    }


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:300]}..."
