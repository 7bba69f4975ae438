"""Finds the service that runs on a data directory of this machine, by the file that it writes."""

from __future__ import annotations

import fcntl
import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from layout_tuner.protocol.connection.tls import trusting

SERVICE_FILE: Final = "service.json"
SERVE_LOCK: Final = "serve"


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalService:
    """A running service, as its file describes it."""

    url: str
    pid: int
    certificate: Path | None = None
    """Its TLS certificate; None: it speaks plain HTTP."""
    supervisor: int | None = None
    """Process id of the `layout-tuner up` that supervises it; None: it has no supervisor."""

    def tls_context(self) -> ssl.SSLContext | None:
        """A client context that trusts only this service; None where it speaks plain HTTP.

        Raises:
            CertificateUnreadableError: its certificate cannot be read.
        """
        return None if self.certificate is None else trusting(self.certificate)


def find_service(data_dir: Path, *, pid: int | None = None) -> LocalService | None:
    """A service that runs on a data directory, perhaps with a certain pid; None: there is none.

    The file of a killed service is ignored: another program may listen on its port, and would get
    the token.
    """
    if not data_dir.is_dir() or not is_locked(data_dir, SERVE_LOCK):
        return None
    shared = [file for file in shared_announcements(data_dir) if is_locked(data_dir, file.stem)]
    for file in (data_dir / SERVICE_FILE, *shared):
        found = _read(file)
        if found is not None and pid in (None, found.pid) and _is_alive(found.pid):
            return found
    return None


def shared_announcements(data_dir: Path) -> list[Path]:
    """Files of services that share a data directory, running or not."""
    return sorted(data_dir.glob("service-*.json"))


def is_locked(data_dir: Path, name: str) -> bool:
    """Whether a process holds a lock of a data directory; the lock ends with the process."""
    try:
        with (data_dir / f"{name}.lock").open("r+b") as file:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        return False
    return False


def _read(file: Path) -> LocalService | None:
    try:
        document = json.loads(file.read_bytes())
        url, pid = document["url"], document["pid"]
        certificate, supervisor = document.get("certificate"), document.get("supervisor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(url, str) or type(pid) is not int or pid < 1:
        return None
    if not isinstance(certificate, str | None):
        return None
    return LocalService(
        url=url,
        pid=pid,
        certificate=Path(certificate) if certificate else None,
        supervisor=supervisor if type(supervisor) is int else None,
    )


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        return True
    return True
