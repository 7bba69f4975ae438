"""The directories of programs on a node."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kit.waiting import wait_until
from tests.workers.process_checks import is_alive
from tests.workers.programs.test_memory_sample import task
from workers.launchers.local import LocalNodes
from workers.ranks.scratch import SCRATCH_VARIABLE, directory_of, remove_directories

NOBODY = 65534


@pytest.fixture
def scratch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory that every user can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setenv(SCRATCH_VARIABLE, path)
        Path(path).chmod(0o777)
        yield Path(path)


@pytest.mark.ranks
def test_directories_that_a_program_has_locked_are_removed(scratch: Path) -> None:
    """By a user for whom modes count, which they do not for root."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if os.geteuid() == 0:
                os.setuid(NOBODY)
            own = directory_of(task())
            (own / "a" / "b").mkdir(parents=True)
            (own / "a" / "b" / "file").touch()
            for each in (own / "a" / "b", own / "a", own):
                each.chmod(0)
            remove_directories(task(group=own.parent.name.removeprefix("probe-")))
            code = 2 if own.parent.exists() else 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert list(scratch.iterdir()) == []


def test_what_a_link_leads_to_is_left_alone(scratch: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    rank = task()
    directory_of(rank).mkdir(parents=True)
    (directory_of(rank) / "link").symlink_to(outside)
    remove_directories(rank)
    assert not directory_of(rank).exists()
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500


def test_other_jobs_have_no_directories(scratch: Path) -> None:
    rank = task(job={"kind": "probe"})
    directory_of(rank).mkdir(parents=True)
    remove_directories(rank)
    assert directory_of(rank).exists()


AGENT = """
import os, sys, time
from tests.workers.programs.programs import python_trainer, run
from workers.launchers.local import LocalNodes
nodes = LocalNodes(num_devices=2)
print(nodes.ranks.pids["warden"], nodes.ranks._scratch, flush=True)
run(nodes, python_trainer("train(1); time.sleep(1000)"), deadline_s=900.0)
"""
"""An agent with a program that runs until it is killed."""


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Callable[[], tuple[list[int], Path]]]:
    """Starts agents in processes of their own; returns pids of agent and warden, and directory."""
    started: list[subprocess.Popen[str]] = []

    def start() -> tuple[list[int], Path]:
        agent = subprocess.Popen(
            [sys.executable, "-c", AGENT],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "TMPDIR": str(tmp_path)},
        )
        started.append(agent)
        assert agent.stdout is not None
        warden, directory = agent.stdout.readline().split()
        wait_until("the program runs", lambda: list(Path(directory).glob("probe-*/*")))
        return [agent.pid, int(warden)], Path(directory)

    yield start
    for agent in started:
        agent.kill()
        agent.wait()
        assert agent.stdout is not None
        agent.stdout.close()


@pytest.mark.ranks
def test_a_start_removes_the_directory_of_an_agent_and_a_warden_that_were_killed(
    agents: Callable[[], tuple[list[int], Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed, left = agents()
    _, of_living = agents()
    for pid in reversed(killed):  # the warden first: it would remove the directory
        os.kill(pid, signal.SIGKILL)
    wait_until("the warden has ended", lambda: not is_alive(killed[1]))
    assert list(left.glob("probe-*/*"))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with closing(LocalNodes(num_devices=1)) as nodes:
        assert not left.exists()
        assert list(of_living.glob("probe-*/*"))
        assert nodes.ranks._scratch.exists()
    assert {each.name for each in tmp_path.iterdir()} == {of_living.name}
