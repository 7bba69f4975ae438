"""The service of this machine: where it listens, and where it says that it does."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from results_db.data_dir import DataDir
from results_db.errors import DataDirLockedError
from search_spaces.pinned_certificate import trusting

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
    certificate: Path | None = None
    """What it serves TLS with; None: it speaks plain HTTP."""

    def tls_context(self) -> ssl.SSLContext | None:
        """A client's side of TLS that trusts this service alone; None where it speaks plain HTTP.

        Raises:
            CertificateUnreadableError: its certificate cannot be read (any more).
        """
        return None if self.certificate is None else trusting(self.certificate)


@contextmanager
def serving(data: DataDir, *, shared: bool = False) -> Iterator[None]:
    """Makes this process the only service of a data directory, or one of those that share it.

    Its SQLite has one service; where the database is another, several may keep their token there.

    Raises:
        DataDirLockedError: another one runs there that does not share it.
    """
    with data.lock(SERVE_LOCK, wait_s=LOCK_PATIENCE_S, shared=shared):
        # Services that were killed left them behind, and their ports may be anybody's by now.
        data.service_file.unlink(missing_ok=True)
        for file in _shared_announcements(data):
            if not _is_locked(data, file.stem):
                file.unlink(missing_ok=True)
                file.with_suffix(".lock").unlink(missing_ok=True)
        yield


@contextmanager
def announced(
    data: DataDir, url: str, certificate: Path | None = None, *, shared: bool = False
) -> Iterator[None]:
    """Writes down where the service is, for as long as it is there."""
    pid = os.getpid()
    file = data.path / f"service-{pid}.json" if shared else data.service_file
    service = {"url": url, "pid": pid}
    if certificate is not None:
        service["certificate"] = str(certificate.absolute())
    with data.lock(file.stem) if shared else nullcontext():
        written = file.with_suffix(".new")
        written.write_text(json.dumps(service))
        written.replace(file)
        try:
            yield
        finally:
            file.unlink(missing_ok=True)
            if shared:
                file.with_suffix(".lock").unlink(missing_ok=True)


def find_service(data: DataDir, *, pid: int | None = None) -> LocalService | None:
    """A service that runs on a data directory; None when there is none.

    What a killed service left behind does not count: another program may listen on its port, and
    would be sent the token.

    Args:
        data: the data directory.
        pid: only the service that is this process; None: any.
    """
    if not data.path.is_dir() or not _is_locked(data, SERVE_LOCK):
        return None
    shared = [file for file in _shared_announcements(data) if _is_locked(data, file.stem)]
    for file in (data.service_file, *shared):
        found = _read(file)
        if found is not None and pid in (None, found.pid) and _is_alive(found.pid):
            return found
    return None


def _shared_announcements(data: DataDir) -> list[Path]:
    return sorted(data.path.glob("service-*.json"))


def _read(file: Path) -> LocalService | None:
    try:
        document = json.loads(file.read_bytes())
        url, pid = document["url"], document["pid"]
        certificate = document.get("certificate")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(url, str) or type(pid) is not int or pid < 1:
        return None
    if not isinstance(certificate, str | None):
        return None
    return LocalService(url=url, pid=pid, certificate=Path(certificate) if certificate else None)


def _is_locked(data: DataDir, name: str) -> bool:
    """Whether a process holds a lock; it ends with the process, however that ends."""
    try:
        with data.lock(name):
            return False
    except (FileNotFoundError, NotADirectoryError):  # there is not even a data directory
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
