"""The warden ends everything below it, whatever it was that ended above or beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from layout_tuner.workers.ranks import processes
from layout_tuner.workers.ranks.processes import end_marked
from layout_tuner.workers.ranks.scratch import HeldDirectory
from layout_tuner.workers.ranks.warden import start_under_warden
from tests.kit.python_process import start_python
from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, command_line, marked

pytestmark = pytest.mark.ranks

# A command with a child, and a daemon in a session of its own whose parents are gone.
TREE = "sleep 1000 & (setsid sleep 2000 &) ; sleep 3000"

GUARDED = f"""
import os, subprocess, sys
from layout_tuner.workers.ranks.warden import start_under_warden
guardians = [int(pid) for pid in sys.argv[1:]]
start_under_warden(["sh", "-c", "{TREE}"], env=dict(os.environ), other_guardians=guardians)
sys.stdin.read()
"""


def wait_for_sleeps(mark: str, count: int) -> None:
    seen: set[int] = set()

    def sleeps() -> bool:
        """The warden ends the daemon, an orphan that it adopts, after a while: one look counts."""
        seen.update(each.pid for each in marked(mark) if each.name() == "sleep")
        return len(seen) == count

    wait_until(f"{count} sleeps run", sleeps)


def start_guarded(*other_guardians: int) -> subprocess.Popen[str]:
    return start_python(GUARDED, *map(str, other_guardians))


def start(*command: str, **options: Any) -> subprocess.Popen[bytes]:
    return start_under_warden(list(command), env=dict(os.environ), **options)


def test_sigkill_of_the_process_that_started_it_leaves_nothing(mark: str) -> None:
    with start_guarded() as guarded:
        wait_for_sleeps(mark, 3)
        guarded.kill()


def test_sigkill_of_another_guardian_leaves_nothing_but_who_started_it(mark: str) -> None:
    with subprocess.Popen(["sleep", "500"]) as guardian, start_guarded(guardian.pid) as guarded:
        wait_for_sleeps(mark, 4)
        guardian.kill()
        guardian.wait()
        alone = [guarded.pid]
        wait_until("it is alone", lambda: [each.pid for each in marked(mark)] == alone, 5)
        guarded.kill()


def test_sigkill_of_the_warden_itself_ends_its_command(mark: str) -> None:
    warden = start("sleep", "1000")
    wait_for_sleeps(mark, 1)
    warden.kill()
    warden.wait(60)


def test_an_orphan_is_ended_unless_the_command_may_have_daemons(mark: str, tmp_path: Path) -> None:
    outlived = tmp_path / "outlived"
    # Longer than the warden needs for the two looks after which it would end an orphan.
    daemon = f"sleep 2.5; touch {outlived}; sleep 4000"
    keeping = start("sh", "-c", f"(setsid sh -c '{daemon}' &) ; exec sleep 5000", has_daemons=True)
    warden = start("sh", "-c", TREE)

    def words() -> set[str]:
        return {word for process in marked(mark) for word in command_line(process)}

    wait_until("all sleep", lambda: {"1000", "2000", "3000"} <= words())
    wait_until("the daemon has been ended", lambda: "2000" not in words())
    assert {"1000", "3000"} <= words()
    assert warden.poll() is None
    wait_until("the daemon that may run has outlived the looks", outlived.exists)
    for each in (warden, keeping):
        each.terminate()
        each.wait(60)


def test_sigterm_ends_what_is_below_and_removes_its_directory(mark: str, tmp_path: Path) -> None:
    with closing(HeldDirectory.create_below(tmp_path, "of-the-command", MARK)) as held:
        warden = start("sh", "-c", TREE, directory=held)
    directory = held.path
    wait_for_sleeps(mark, 3)
    assert directory.exists()
    warden.terminate()
    assert warden.wait(60) == 128 + signal.SIGKILL
    assert not directory.exists()


def test_the_end_of_the_command_ends_its_daemons_and_passes_its_code_on(mark: str) -> None:
    assert start("sh", "-c", "(setsid sleep 1000 &) ; exit 7").wait(60) == 7


def test_a_guardian_that_is_gone_already_means_that_nothing_is_started(mark: str) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    warden = start("sleep", "1000", other_guardians=[gone.pid])
    assert warden.wait(60) == 1


def test_a_marked_process_that_one_look_misses_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    mark = uuid.uuid4().hex
    own_processes = processes._own_processes
    looks: list[int] = []

    def all_but_at_the_first_look() -> list[int]:
        looks.append(1)
        return own_processes() if len(looks) > 1 else []

    monkeypatch.setattr(processes, "_own_processes", all_but_at_the_first_look)
    with subprocess.Popen(["sleep", "1000"], env={**os.environ, MARK: mark}) as process:
        try:
            end_marked(MARK, mark, within_s=10)
            assert process.wait(60) == -signal.SIGKILL
        finally:
            process.kill()
