"""The directories of programs on a node."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.programs.test_memory_sample import task
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
