"""Directories of a node's ranks: those of a group's programs, and their removal."""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from workers.ranks.rank_task import RankTask

PROGRAM: Final = "program"
"""Kind of the job."""

SCRATCH_VARIABLE: Final = "LAYOUT_TUNER_SCRATCH"
"""Directory of a node's ranks, which its warden removes at the end."""

LOCK: Final = "lock"
"""Name of a lock file in a directory; it is removed last."""


def directory_of(task: RankTask) -> Path:
    """The directory of a rank's program on its node; it is removed when its group has ended."""
    scratch = os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir()
    return Path(scratch) / f"probe-{task.group}" / str(task.rank)


def make_directory(task: RankTask) -> Path:
    """Makes the directory of a rank's program, which only this user can read."""
    directory = directory_of(task)
    for each in (directory.parents[1], directory.parent, directory):
        each.mkdir(mode=0o700, exist_ok=each != directory)
    return directory


def remove_directories(task: RankTask) -> None:
    """Removes the directories of a group's programs on this node, where it ran any."""
    if task.job["kind"] != PROGRAM:
        return
    ours = directory_of(task).parent
    for folder, inner, _ in os.walk(ours):  # a program may have locked some
        for path in (Path(folder, name) for name in inner):
            with suppress(OSError):
                if not path.is_symlink():
                    path.chmod(0o700)
    shutil.rmtree(ours, ignore_errors=True)


def remove(path: Path) -> None:
    """Removes a directory; its lock last, so that a later start finds the rest of it.

    Raises:
        OSError: a file in it can't be removed; all others are, except the lock.
    """
    _remove_entries(path, ignore_errors=True)
    _remove_entries(path, ignore_errors=False)  # raises the error of the first file that is left
    (path / LOCK).unlink(missing_ok=True)
    path.rmdir()


def _remove_entries(path: Path, *, ignore_errors: bool) -> None:
    for entry in list(path.iterdir()):
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=ignore_errors)
        elif entry.name != LOCK:
            try:
                entry.unlink(missing_ok=True)
            except OSError:
                if not ignore_errors:
                    raise
