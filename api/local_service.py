"""The service of this machine: where it listens, and where it says that it does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from results_db.data_dir import DataDir
from results_db.errors import DataDirLockedError

LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
"""Hosts that only this machine reaches."""

SERVE_LOCK: Final = "serve"
LOCK_PATIENCE_S: Final = 1.0
"""How long a service waits for its lock: whoever looks for a service holds it for an instant."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalService:
    """A service as it announced itself."""

    url: str
    pid: int


@contextmanager
def serving(data: DataDir) -> Iterator[None]:
    """Makes this process the only service of a data directory.

    Raises:
        DataDirLockedError: another one runs there.
    """
    with data.lock(SERVE_LOCK, wait_s=LOCK_PATIENCE_S):
        # A service that was killed left it behind, and its port may be anybody's by now.
        data.service_file.unlink(missing_ok=True)
        yield


@contextmanager
def announced(data: DataDir, url: str) -> Iterator[None]:
    """Writes down where the service is, for as long as it is there."""
    written = data.service_file.with_suffix(".new")
    written.write_text(json.dumps({"url": url, "pid": os.getpid()}))
    written.replace(data.service_file)
    try:
        yield
    finally:
        data.service_file.unlink(missing_ok=True)


def find_service(data: DataDir) -> LocalService | None:
    """The service that runs on a data directory; None when there is none.

    What a killed service left behind does not count: another program may listen on its port, and
    would be sent the token.
    """
    announced = _read(data)
    if announced is None or not _is_served(data) or not _is_alive(announced.pid):
        return None
    return announced


def _read(data: DataDir) -> LocalService | None:
    try:
        document = json.loads(data.service_file.read_bytes())
        url, pid = document["url"], document["pid"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(url, str) or type(pid) is not int or pid < 1:
        return None
    return LocalService(url=url, pid=pid)


def _is_served(data: DataDir) -> bool:
    """Whether a process holds the service's lock; it ends with the process, however that ends."""
    try:
        with data.lock(SERVE_LOCK):
            return False
    except DataDirLockedError:
        return True


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        return True
    return True
