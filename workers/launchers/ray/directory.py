"""The directory of one Ray node's files: closed to other users, and removed after its last use.

Ray gives every directory that it creates mode 0777. So it gets a directory below one of mode 0700,
which other users can neither read nor enter.

    TMPDIR/lt-ray-XXXXXXXX/        mode 0700
        lock                       each process that may still use the directory holds a shared lock
        r/                         Ray's own: sockets, logs, packages

`workers/ranks/scratch.py` has the lock.
"""

from __future__ import annotations

import logging
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from layout_tuner.workers.errors import RayClusterFailedError
from layout_tuner.workers.ranks.scratch import DirectoryGoneError, HeldDirectory, take_lock

_LOG = logging.getLogger(__name__)

DIRECTORY_VARIABLE: Final = "LAYOUT_TUNER_RAY_DIRECTORY"
"""The path of the directory, in the environment of every process that uses it."""

_LAST_RESORT: Final = "/tmp"  # noqa: S108 (for a private directory below it)
PREFIX: Final = "lt-ray-"
_RAYS_OWN: Final = "r"
_RANDOM_BYTES: Final = 8
"""Characters that `tempfile.mkdtemp` appends to the prefix."""
_LONGEST_SOCKET: Final = "session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""The longest socket path below Ray's directory: date, microseconds, highest pid."""
_SOCKET_PATH_BYTES: Final = 107
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


@dataclass(frozen=True, kw_only=True, slots=True)
class RayDirectory(HeldDirectory):
    """The directory of one Ray node, which this process holds until `close`."""

    @classmethod
    def create(cls) -> Self:
        """Creates a directory below that for temporary files, and removes abandoned ones there.

        Raises:
            RayClusterFailedError: there is no safe place for it.
        """
        parent = _parent()
        try:
            return cls.create_below(parent, PREFIX, DIRECTORY_VARIABLE)
        except OSError as error:
            raise RayClusterFailedError(
                f"Ray's files can't be put below {parent}: {error}; set TMPDIR to another place"
            ) from error

    @classmethod
    def hold(cls, path: Path) -> Self:
        """Holds a directory that others hold; RayClusterFailedError if it has been removed."""
        try:
            return cls(path=path, lock_fd=take_lock(path))
        except DirectoryGoneError as error:
            raise RayClusterFailedError(f"{path}, for Ray's files, has been removed") from error

    @property
    def rays_own(self) -> Path:
        """Ray's own directory, which Ray creates."""
        return self.path / _RAYS_OWN

    @property
    def variables(self) -> dict[str, str]:
        """Variables for the environment of the processes that use it."""
        return {DIRECTORY_VARIABLE: str(self.path)}


def _parent() -> Path:
    """The directory for temporary files, or /tmp; RayClusterFailedError if neither is safe."""
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
    longest = place / f"{PREFIX}{'x' * _RANDOM_BYTES}" / _RAYS_OWN / _LONGEST_SOCKET
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
