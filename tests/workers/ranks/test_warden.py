"""The warden ends everything below it, whatever it was that ended above or beside it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from tests.workers.process_checks import MARK, kill, marked
from workers.ranks.warden import start_under_warden

pytestmark = pytest.mark.ranks

# A command with a child, and a daemon in a session of its own whose parents are gone.
TREE = "sleep 1000 & (setsid sleep 2000 &) ; sleep 3000"

GUARDED = f"""
import os, subprocess, sys
from workers.ranks.warden import start_under_warden
guardians = [int(pid) for pid in sys.argv[1:]]
start_under_warden(["sh", "-c", "{TREE}"], env=dict(os.environ), other_guardians=guardians)
sys.stdin.read()
"""


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Marks every process that the test starts; none may be left when it ends."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(MARK, mark)
    yield mark
    left = marked(mark)
    kill(left)
    assert not left


def wait_for_sleeps(mark: str, count: int) -> None:
    seen: set[int] = set()

    def sleeps() -> bool:
        """The warden ends the daemon, an orphan that it adopts, after a while: one look counts."""
        seen.update(process.pid for process in marked(mark) if process.name() == "sleep")
        return len(seen) == count

    wait_until(f"{count} sleeps run", sleeps)


def start_guarded(*other_guardians: int) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).parents[3])
    arguments = map(str, other_guardians)
    return subprocess.Popen(
        [sys.executable, "-c", GUARDED, *arguments],
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": root},
    )


def wait_until_nothing_is_left(mark: str) -> None:
    wait_until("no process is left", lambda: not marked(mark), 5)


def test_sigkill_of_the_process_that_started_it_leaves_nothing(mark: str) -> None:
    with start_guarded() as guarded:
        wait_for_sleeps(mark, 3)
        guarded.kill()
    wait_until_nothing_is_left(mark)


def test_sigkill_of_another_guardian_leaves_nothing_but_who_started_it(mark: str) -> None:
    with subprocess.Popen(["sleep", "500"]) as guardian, start_guarded(guardian.pid) as guarded:
        wait_for_sleeps(mark, 4)
        guardian.kill()
        guardian.wait()
        wait_until(
            "only who started it is left",
            lambda: [process.pid for process in marked(mark)] == [guarded.pid],
            5,
        )
        guarded.kill()


def test_sigkill_of_the_warden_itself_ends_its_command(mark: str) -> None:
    warden = start_under_warden(["sleep", "1000"], env=dict(os.environ))
    wait_for_sleeps(mark, 1)
    warden.kill()
    warden.wait(60)
    wait_until_nothing_is_left(mark)


def test_an_orphan_is_ended_while_the_command_goes_on(mark: str) -> None:
    warden = start_under_warden(["sh", "-c", TREE], env=dict(os.environ))
    wait_for_sleeps(mark, 3)
    wait_until(
        "the daemon alone is gone",
        lambda: sum(process.name() == "sleep" for process in marked(mark)) == 2,
    )
    assert warden.poll() is None
    warden.terminate()
    warden.wait(60)
    wait_until_nothing_is_left(mark)


def test_a_command_with_daemons_of_its_own_keeps_them_until_it_ends(
    mark: str, tmp_path: Path
) -> None:
    outlived = tmp_path / "outlived"
    # Longer than the warden needs for the two looks after which it would end an orphan.
    daemon = f"sleep 2.5; touch {outlived}; sleep 1000"
    warden = start_under_warden(
        ["sh", "-c", f"(setsid sh -c '{daemon}' &) ; sleep 3000"],
        env=dict(os.environ),
        has_daemons=True,
    )
    wait_until("the daemon has outlived the looks", outlived.exists)
    warden.terminate()
    warden.wait(60)
    wait_until_nothing_is_left(mark)


def test_sigterm_ends_what_is_below_and_tells_how(mark: str) -> None:
    warden = start_under_warden(["sh", "-c", TREE], env=dict(os.environ))
    wait_for_sleeps(mark, 3)
    warden.terminate()
    assert warden.wait(60) == 128 + signal.SIGKILL
    wait_until_nothing_is_left(mark)


def test_the_end_of_the_command_ends_its_daemons_and_passes_its_code_on(mark: str) -> None:
    warden = start_under_warden(
        ["sh", "-c", "(setsid sleep 1000 &) ; exit 7"], env=dict(os.environ)
    )
    assert warden.wait(60) == 7
    wait_until_nothing_is_left(mark)


def test_a_directory_is_removed_when_everything_has_ended(mark: str, tmp_path: Path) -> None:
    directory = tmp_path / "of-the-command"
    directory.mkdir()
    warden = start_under_warden(["sh", "-c", f"{TREE}"], env=dict(os.environ), remove=directory)
    wait_for_sleeps(mark, 3)
    assert directory.exists()
    warden.terminate()
    warden.wait(60)
    assert not directory.exists()


def test_a_guardian_that_is_gone_already_means_that_nothing_is_started(mark: str) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    warden = start_under_warden(["sleep", "1000"], env=dict(os.environ), other_guardians=[gone.pid])
    assert warden.wait(60) == 1
    wait_until_nothing_is_left(mark)
