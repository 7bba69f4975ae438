"""The service of this machine: where it listens, and where it says that it does."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
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
def announced(data: DataDir, url: str, certificate: Path | None = None) -> Iterator[None]:
    """Writes down where the service is, for as long as it is there."""
    written = data.service_file.with_suffix(".new")
    service = {"url": url, "pid": os.getpid()}
    if certificate is not None:
        service["certificate"] = str(certificate.absolute())
    written.write_text(json.dumps(service))
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
        certificate = document.get("certificate")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(url, str) or type(pid) is not int or pid < 1:
        return None
    if not isinstance(certificate, str | None):
        return None
    return LocalService(url=url, pid=pid, certificate=Path(certificate) if certificate else None)


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
