"""The directory of one Ray node's files: closed to other users, and removed after its last use.

Ray gives every directory that it creates mode 0777. So it gets a directory below one of mode 0700,
which other users can neither read nor enter.

    TMPDIR/lt-ray-XXXXXXXX/        mode 0700
        lock                       each process that may still use the directory holds a shared lock
        r/                         Ray's own: sockets, logs, packages

The kernel releases the lock with the last process that holds it. So a directory whose lock can be
taken exclusively is abandoned, and the next start removes it. A process that creates a directory
may lose it before it holds the lock; it notices that and creates another one.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from workers.errors import RanksLeftError, RayClusterFailedError
from workers.ranks.processes import end_marked
from workers.ranks.scratch import LOCK, remove

_LOG = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "LAYOUT_TUNER_RAY_DIRECTORY"
"""The path of the directory, in the environment of every process that uses it."""

_LAST_RESORT: Final = "/tmp"  # noqa: S108 (for a private directory below it)
_PREFIX: Final = "lt-ray-"
_RAYS_OWN: Final = "r"
_RANDOM_BYTES: Final = 8
"""Characters that `tempfile.mkdtemp` appends to the prefix."""
_LONGEST_SOCKET: Final = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest socket path below Ray's directory: date, microseconds, highest pid."""
_SOCKET_PATH_BYTES: Final = 107
_END_WITHIN_S: Final = 5.0
_OLD_AFTER_S: Final = 60.0
"""An unlocked directory that has not changed for this time is abandoned."""
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class _DirectoryGoneError(Exception):
    """Another process removes the directory, or has removed it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RayDirectory:
    """A directory that this process holds until `close`."""

    path: Path
    lock_fd: int
    """Descriptor of the lock: a process that inherits it holds the directory too."""

    @classmethod
    def create(cls) -> Self:
        """Creates a directory below that for temporary files, and removes abandoned ones there.

        Raises:
            RayClusterFailedError: there is no safe place for it.
        """
        parent = _parent()
        remove_abandoned(parent)
        while True:
            path: Path | None = None
            try:
                path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
                return cls(path=path, lock_fd=_hold(path))
            except (_DirectoryGoneError, OSError) as error:
                if path is not None:
                    with suppress(OSError):
                        remove(path)
                if isinstance(error, OSError):
                    raise RayClusterFailedError(
                        f"Ray's files can't be put below {parent}: {error}; set TMPDIR to another place"
                    ) from error
                # Another start has locked it to check whether it is abandoned.

    @classmethod
    def hold(cls, path: Path) -> Self:
        """Holds a directory that another process holds now.

        Raises:
            RayClusterFailedError: it has been removed.
        """
        try:
            return cls(path=path, lock_fd=_hold(path))
        except _DirectoryGoneError as error:
            raise RayClusterFailedError(f"{path}, for Ray's files, has been removed") from error

    @property
    def rays_own(self) -> Path:
        """Ray's own directory, which Ray creates."""
        return self.path / _RAYS_OWN

    @property
    def variables(self) -> dict[str, str]:
        """Variables for the environment of the processes that use it."""
        return {DIRECTORY_VARIABLE: str(self.path)}

    def close(self) -> None:
        """Releases it; processes that inherited the lock still hold it."""
        os.close(self.lock_fd)


def remove_abandoned(parent: Path) -> None:
    """Removes this user's directories that no process holds, and ends processes that use them."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
                _remove_if_abandoned(path)
        except FileNotFoundError:  # another start removes it
            continue
        except (OSError, RanksLeftError) as error:
            _LOG.warning("%s, left by a worker that has ended, can't be removed: %s", path, error)


def _remove_if_abandoned(path: Path) -> None:
    with _exclusively(path) as is_abandoned:
        if not is_abandoned:
            return
        end_marked(DIRECTORY_VARIABLE, str(path), within_s=_END_WITHIN_S)
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


def _hold(path: Path) -> int:
    """Takes the lock of a directory, shared with others of its processes; returns its descriptor.

    Raises:
        _DirectoryGoneError: another process removes it, or has removed it.
    """
    lock = path / LOCK
    try:
        lock_fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileNotFoundError as error:
        raise _DirectoryGoneError from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not os.fstat(lock_fd).st_nlink:
            raise _DirectoryGoneError
        os.pwrite(lock_fd, _this_machine().encode(), 0)
    except BaseException as error:
        os.close(lock_fd)
        if isinstance(error, BlockingIOError):
            raise _DirectoryGoneError from error
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


def _parent() -> Path:
    """Where to create it: the directory for temporary files, or else /tmp.

    Raises:
        RayClusterFailedError: neither is safe.
    """
    problems: list[str] = []
    for name in dict.fromkeys([tempfile.gettempdir(), _LAST_RESORT]):
        place = Path(name).resolve()
        problem = _problem(place)
        if problem is None:
            if problems:
                _LOG.info("Ray's files are put below %s: %s", place, "; ".join(problems))
            return place
        problems.append(problem)
    raise RayClusterFailedError(
        f"there is no safe place for Ray's files: {'; '.join(problems)}; set TMPDIR to a short path "
        "to which no other user can write"
    )


def _problem(place: Path) -> str | None:
    """Why Ray's files can't be below a directory, a path without symbolic links; or None."""
    longest = place / f"{_PREFIX}{'x' * _RANDOM_BYTES}" / _RAYS_OWN / _LONGEST_SOCKET
    num_bytes = len(os.fsencode(longest))
    if num_bytes > _SOCKET_PATH_BYTES:
        return (
            f"socket paths below {place} would have {num_bytes} bytes, and the system's limit is "
            f"{_SOCKET_PATH_BYTES}"
        )
    try:
        statuses = [(path, path.stat()) for path in (place, *place.parents)]
    except OSError as error:
        return f"{place} can't be used ({error.strerror})"
    for path, status in statuses:
        if status.st_mode & _OTHERS_MAY_WRITE and not status.st_mode & stat.S_ISVTX:
            return (
                f"other users can replace what is in {path} (mode {stat.S_IMODE(status.st_mode):o} "
                "without the sticky bit)"
            )
        if status.st_uid not in _trusted_owners():
            return f"{path} belongs to another user (uid {status.st_uid})"
    return None


def _trusted_owners() -> set[int]:
    """This user, root, and in a user namespace the root user outside of it."""
    trusted = {0, os.geteuid()}
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str(2**32 - 1)]:
        trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    return trusted
