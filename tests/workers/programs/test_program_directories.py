"""The directories of programs on a node."""

from __future__ import annotations

import os
import signal
import stat
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from layout_tuner.workers.launchers.local import LocalNodes
from layout_tuner.workers.ranks.scratch import SCRATCH_VARIABLE, directory_of, remove_directories
from tests.kit.python_process import start_python
from tests.workers.process_checks import NOBODY, RANK_PROGRAMS, wait_until_gone, wait_until_released
from tests.workers.programs.test_memory_sample import task


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


def test_a_directory_that_a_link_leads_to_is_left_alone(scratch: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    rank = task()
    directory_of(rank).mkdir(parents=True)
    (directory_of(rank) / "link").symlink_to(outside)
    remove_directories(rank)
    assert not directory_of(rank).exists()
    assert stat.S_IMODE(outside.stat().st_mode) == 0o500


def test_directories_of_jobs_that_are_no_programs_stay(scratch: Path) -> None:
    rank = task(job={"kind": "probe"})
    directory_of(rank).mkdir(parents=True)
    remove_directories(rank)
    assert directory_of(rank).exists()


AGENT = """
import sys
from tests.workers.process_checks import RANK_PROGRAMS, run_group
from layout_tuner.workers.launchers.local import LocalNodes
nodes = LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS)
tell = lambda _: print(nodes.ranks.pids["warden"], nodes.ranks._scratch, flush=True)
run_group(nodes, "hang", num_ranks=1, on_event=tell, deadline_s=900.0)
"""
"""An agent with a rank that hangs until it is killed."""


@pytest.mark.ranks
def test_a_start_removes_what_a_killed_agent_and_warden_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def start() -> closing[LocalNodes]:
        return closing(LocalNodes(num_devices=1, rank_entry=RANK_PROGRAMS))

    with start() as living, start_python(AGENT, TMPDIR=str(tmp_path)) as agent:
        warden, left = agent.stdout.readline().split()
        (Path(left) / "probe-of-it").mkdir()
        for pid in (int(warden), agent.pid):  # the warden first: it would remove the directory
            os.kill(pid, signal.SIGKILL)
        wait_until_gone([int(warden)])
        wait_until_released([Path(left) / "lock"])
        assert (Path(left) / "probe-of-it").exists()
        with start() as nodes:
            assert not Path(left).exists()
            assert living.ranks._scratch.exists()
            assert nodes.ranks._scratch.exists()
    assert list(tmp_path.iterdir()) == []
