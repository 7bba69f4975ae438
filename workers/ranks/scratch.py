"""Directories for temporary files: those of a node's ranks and of Ray, and their removal.

Each process that may still use a directory holds a shared lock of the file `lock` in it. The kernel
releases the lock with the last process that holds it. So a directory whose lock can be taken
exclusively is abandoned, and the next start removes it. A process that creates a directory may lose
it before it holds the lock; it notices that and creates another one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from layout_tuner.workers.errors import RanksLeftError
from layout_tuner.workers.ranks.processes import end_marked
from layout_tuner.workers.ranks.rank_task import RankTask

_LOG = logging.getLogger(__name__)

_END_WITHIN_S: Final = 5.0
_OLD_AFTER_S: Final = 60.0
"""An unlocked directory that has not changed for this time is abandoned."""

PROGRAM: Final = "program"
"""Kind of the job."""

SCRATCH_VARIABLE: Final = "LAYOUT_TUNER_SCRATCH"
"""Directory of a node's ranks, which its warden removes at the end."""

LOCK: Final = "lock"
"""Name of a lock file in a directory; it is removed last."""


class DirectoryGoneError(Exception):
    """Another process removes the directory, or has removed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldDirectory:
    """A directory that this process holds until `close`, closed to other users."""

    path: Path
    lock_fd: int
    """Descriptor of the lock: a process that inherits it holds the directory too."""

    @classmethod
    def create_below(cls, parent: Path, prefix: str, variable: str) -> Self:
        """Creates a directory whose name begins with the prefix; OSError if it can't.

        Removes abandoned ones there, as `remove_abandoned` does.
        """
        remove_abandoned(parent, prefix, variable)
        while True:
            path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            try:
                return cls(path=path, lock_fd=take_lock(path))
            except (DirectoryGoneError, OSError) as error:
                with suppress(OSError):
                    remove(path)
                if isinstance(error, OSError):
                    raise
                # Another start has locked it to check whether it is abandoned.

    def close(self) -> None:
        """Releases it; processes that inherited the lock still hold it."""
        os.close(self.lock_fd)


def remove_abandoned(parent: Path, prefix: str, variable: str) -> None:
    """Removes this user's directories that no process holds, and ends processes that use them.

    `variable` has the path of a directory in the environment of the processes that use it.
    """
    for path in parent.glob(f"{prefix}*"):
        try:
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_if_abandoned(path, variable)
        except FileNotFoundError:  # another start removes it
            continue
        except (OSError, RanksLeftError) as error:
            _LOG.warning("%s, left by a worker that has ended, can't be removed: %s", path, error)


def _remove_if_abandoned(path: Path, variable: str) -> None:
    with _exclusively(path) as is_abandoned:
        if not is_abandoned:
            return
        end_marked(variable, str(path), within_s=_END_WITHIN_S)
        remove(path)
        _LOG.info("%s was left by a worker that has ended, and is removed", path)


@contextmanager
def _exclusively(path: Path) -> Iterator[bool]:
    """Holds the lock of a directory exclusively; yields whether the directory is abandoned."""
    try:
        lock_fd = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        # Its owner is creating or removing it, or ended at one of these moments.
        if _is_old(path) and not any(path.iterdir()):
            path.rmdir()
        yield False
        return
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        written = os.pread(lock_fd, 1024, 0).decode(errors="replace")
        yield _is_of_this_machine(written) if written else _is_old(path)
    except BlockingIOError:
        yield False
    finally:
        os.close(lock_fd)


def take_lock(path: Path) -> int:
    """Takes the lock of a directory, shared with others of its processes; returns its descriptor.

    Raises:
        DirectoryGoneError: another process removes it, or has removed it.
    """
    lock = path / LOCK
    try:
        lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise DirectoryGoneError from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(lock_fd).st_nlink:
            raise DirectoryGoneError
        os.pwrite(lock_fd, _this_machine().encode(), 0)
    except BaseException as error:
        os.close(lock_fd)
        if isinstance(error, BlockingIOError):
            raise DirectoryGoneError from error
        raise
    return lock_fd


def _is_old(path: Path) -> bool:
    return time.time() - path.stat().st_mtime > _OLD_AFTER_S


def _this_machine() -> str:
    """The host's name and the kernel's number of this boot."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot}"


def _is_of_this_machine(written: str) -> bool:
    """Whether a lock was taken on this machine: locks of other hosts may not be visible here."""
    return bool(set(written.split()) & set(_this_machine().split()))


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
            with suppress(OSError) if ignore_errors else nullcontext():
                entry.unlink(missing_ok=True)
