"""Keeps the processes of one machine's service running: starts, watches, restarts, ends them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from api.errors import ServiceStartError, ServiceUnstableError

POLL_S: Final = 0.1
STOP_PATIENCE_S: Final = 20.0
MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0
_PR_SET_PDEATHSIG: Final = 1


@dataclass(kw_only=True)
class Child:
    """One process of the service."""

    name: str
    argv: Sequence[str]
    log: Path
    """Where its output goes; appended to."""
    environment: Mapping[str, str] | None = None
    """Its environment variables; None: those of this process."""
    process: subprocess.Popen[bytes] | None = None
    restarts: deque[float] = field(default_factory=deque)
    """Times of the latest restarts (monotonic seconds)."""
    log_start: int = 0
    """Where its log begins, behind what earlier processes wrote, in bytes."""

    def start(self) -> None:
        """Starts the process; it is told to end when this one dies, even by SIGKILL."""
        with self.log.open("ab") as output:
            self.log_start = output.tell()
            self.process = subprocess.Popen(
                list(self.argv),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.environment,
                preexec_fn=end_with(os.getpid()),  # safe: one thread here
            )

    def returncode(self) -> int | None:
        """None while it runs."""
        assert self.process is not None
        return self.process.poll()

    def log_tail(self, lines: int = 5) -> str:
        """The last lines that it printed."""
        with self.log.open("rb") as printed:
            printed.seek(self.log_start)
            text = printed.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Asks it to end, waits, and kills it when it does not."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def end_with(parent: int) -> Callable[[], None]:
    """What a child does first so that it is told to end when its parent dies, even by SIGKILL."""
    libc = ctypes.CDLL(None, use_errno=True)

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died between the fork and the line above
            os._exit(1)

    return bind


def start_and_wait(child: Child, ready: Callable[[], bool], patience_s: float) -> None:
    """Starts a child and waits until it is ready.

    Raises:
        ServiceStartError: it ended, or was not ready in time.
    """
    child.start()
    deadline = time.monotonic() + patience_s
    while not ready():
        if child.returncode() is not None:
            words = child.log_tail().removeprefix("Error: ")
            raise ServiceStartError(words or f"{child.name} ended without a word")
        if time.monotonic() > deadline:
            child.stop()
            raise ServiceStartError(
                f"{child.name} was not ready within {patience_s:.0f} s; its log is {child.log}"
            )
        time.sleep(POLL_S)


def watch(
    children: Sequence[Child],
    *,
    stopping: Callable[[], bool],
    say: Callable[[str], None],
    each_round: Callable[[], None],
) -> None:
    """Restarts whatever ends, aloud, until told to stop.

    Raises:
        ServiceUnstableError: one of them ended more than `MAX_RESTARTS` times in a minute.
    """
    while not stopping():
        for child in children:
            code = child.returncode()
            if code is not None and not stopping():
                _restart(child, code, say)
        each_round()
        time.sleep(POLL_S)


def _restart(child: Child, code: int, say: Callable[[str], None]) -> None:
    now = time.monotonic()
    while child.restarts and now - child.restarts[0] > RESTART_WINDOW_S:
        child.restarts.popleft()
    if len(child.restarts) >= MAX_RESTARTS:
        raise ServiceUnstableError(
            f"{child.name} ended {MAX_RESTARTS + 1} times within {RESTART_WINDOW_S:.0f} s; "
            f"its log is {child.log}; the last lines:\n{child.log_tail()}"
        )
    child.restarts.append(now)
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    say(f"{child.name} ended {how}; starting it again (its log is {child.log})")
    child.start()


@contextmanager
def until_signalled() -> Iterator[Callable[[], bool]]:
    """Yields a question: was SIGINT or SIGTERM received since?"""
    received: list[int] = []
    previous = {
        number: signal.signal(number, lambda caught, _frame: received.append(caught))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(received)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
