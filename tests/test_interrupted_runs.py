"""A run of the tests that is interrupted leaves no process, whatever its tests had started."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.kit.python_process import ROOT
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, command_line, kill, living_children, marked

ENDLESS = "tests/endless_tests.py"
SIDE_BY_SIDE = ("-n", "2")
ONE_AT_A_TIME = ("-n", "0", "-k", "daemons")
PATIENCE_S = 200.0
"""A run imports the project in three processes, which takes long beside other load."""

pytestmark = pytest.mark.timeout(3 * PATIENCE_S)


class Run:
    """A run of endless tests, on a terminal of its own."""

    def __init__(self, folder: Path, arguments: Sequence[str]) -> None:
        self.mark = uuid.uuid4().hex
        self._folder = folder
        self._master, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, ENDLESS],
            cwd=ROOT,
            env={**os.environ, "TOLD": str(folder), MARK: self.mark},
            preexec_fn=lambda: os.login_tty(terminal),
        )
        os.close(terminal)
        self.seen: set[psutil.Process] = set()

    def has_started(self, tests: set[str]) -> bool:
        """Whether these tests wait for ever; fails where the run has ended instead."""
        if self.process.poll() is not None:
            pytest.fail(f"the run ended: {self.printed()}")
        return {each.name for each in self._folder.iterdir()} == tests

    def printed(self) -> str:
        """What a run that has ended showed on its terminal."""
        return os.read(self._master, 1 << 16).decode()

    def press_control_c(self) -> None:
        os.write(self._master, b"\x03")

    def terminate_alone(self) -> None:
        self.process.terminate()

    def left(self) -> list[psutil.Process]:
        """What is still there of all processes that were seen below it, and of their children.

        PostgreSQL loses the mark, and a daemon its parents.
        """
        own = psutil.Process(self.process.pid) if self.process.poll() is None else None
        found = {*marked(self.mark), *(living_children(own, recursive=True) if own else ())}
        self.seen |= found
        return [each for each in self.seen if each.is_running() and not is_zombie(each)]

    def close(self) -> None:
        os.close(self._master)
        kill(self.left())
        self.process.wait(PATIENCE_S)


def is_zombie(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("arguments", [ONE_AT_A_TIME, SIDE_BY_SIDE], ids=["alone", "side by side"])
@pytest.mark.parametrize(
    "interrupt",
    [
        pytest.param(Run.press_control_c, id="control-c"),
        pytest.param(Run.terminate_alone, id="SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_leaves_no_process(
    tmp_path: Path, arguments: Sequence[str], interrupt: Callable[[Run], None]
) -> None:
    tests = {"daemons", "database"} if arguments == SIDE_BY_SIDE else {"daemons"}
    run = Run(tmp_path, arguments)
    try:
        wait_until("its tests have started all", lambda: run.has_started(tests), PATIENCE_S)
        words = {word for process in run.left() for word in command_line(process)}
        assert {"serve", "5001", "5002", "5003"} <= words
        interrupt(run)
        code = run.process.wait(PATIENCE_S)
        wait_until("nothing of it is left", lambda: not run.left(), 10)
        assert code != pytest.ExitCode.OK, run.printed()
    finally:
        run.close()
