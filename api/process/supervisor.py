"""Starts, watches, restarts and ends the processes of `layout-tuner up`."""

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

from layout_tuner.api.errors import ServiceStartError, ServiceUnstableError

POLL_S: Final = 0.1
STOP_PATIENCE_S: Final = 20.0
MAX_RESTARTS: Final = 5
RESTART_WINDOW_S: Final = 60.0
REFUSAL: Final = "Error: "
"""Beginning of the last line of a child that refuses to start."""

SAID_AFTER_S: Final = 3.0
"""After this time the last line of a child that is not ready is printed."""
_PR_SET_PDEATHSIG: Final = 1


@dataclass(kw_only=True)
class Child:
    """One process of the service."""

    name: str
    argv: Sequence[str]
    log: Path
    """File to which its output is appended."""
    environment: Mapping[str, str] | None = None
    """Its environment variables; None: those of this process."""
    process: subprocess.Popen[bytes] | None = None
    restarts: deque[float] = field(default_factory=deque)
    """Times of the latest restarts (monotonic seconds)."""
    log_start: int = 0
    """Offset of its output in the log, in bytes; earlier processes wrote what comes before."""

    def start(self) -> None:
        """Starts the process. It gets SIGTERM when this process dies, even by SIGKILL."""
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
        with self.log.open("rb") as printed:
            printed.seek(self.log_start)
            text = printed.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def stop(self) -> None:
        """Sends SIGTERM, waits, and kills the process if it does not end."""
        if self.process is None or self.process.poll() is not None:
            return
        self.process.terminate()
        try:
            self.process.wait(STOP_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def end_with(parent: int) -> Callable[[], None]:
    """A function for a new child: it makes the kernel send SIGTERM when the parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)

    def bind() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent died between the fork and the line above
            os._exit(1)

    return bind


def start_and_wait(
    child: Child,
    ready: Callable[[], bool],
    patience_s: float,
    *,
    stopping: Callable[[], bool] = lambda: False,
    say: Callable[[str], None] = lambda _line: None,
) -> bool:
    """Starts a child and waits until it is ready or `stopping`; returns whether it is ready.

    While this takes long, the last line of the child's log is passed to `say`.

    Raises:
        ServiceStartError: the child ended, or was not ready in time.
    """
    child.start()
    began = time.monotonic()
    deadline, said = began + patience_s, ""
    while not ready():
        if stopping():
            return False
        last = child.log_tail(1)
        is_new = last != said and not last.startswith(REFUSAL)  # with a refusal it is about to end
        if is_new and time.monotonic() - began > SAID_AFTER_S:
            said = last
            say(f"{child.name} is not ready yet: {last}")
        if child.returncode() is not None:
            words = child.log_tail().removeprefix(REFUSAL)
            raise ServiceStartError(words or f"{child.name} ended without a word")
        if time.monotonic() > deadline:
            child.stop()
            raise ServiceStartError(
                f"{child.name} was not ready within {patience_s:.0f} s; its log is {child.log}"
            )
        time.sleep(POLL_S)
    return True


def watch(
    children: Sequence[Child],
    *,
    stopping: Callable[[], bool],
    say: Callable[[str], None],
    each_round: Callable[[], None],
) -> None:
    """Restarts children until `stopping`; ServiceUnstableError after `MAX_RESTARTS` in a minute."""
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
def signals_to(handler: Callable[[int, object], None]) -> Iterator[None]:
    """In the block, SIGINT and SIGTERM call a function."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


@contextmanager
def until_signalled() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether SIGINT or SIGTERM was received in the block."""
    received: list[int] = []
    with signals_to(lambda caught, _frame: received.append(caught)):
        yield lambda: bool(received)
