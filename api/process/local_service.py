"""The announcement and the lock of a service in its data directory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final

from layout_tuner.api.errors import ServiceRunsAlreadyError
from layout_tuner.protocol.connection.running_service import (
    SERVE_LOCK,
    find_service,
    is_locked,
    shared_announcements,
)
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.errors import DataDirLockedError

LOCK_PATIENCE_S: Final = 1.0
"""How long a service waits for its lock: processes that look for a service hold it briefly."""


@contextmanager
def serving(data: DataDir, *, shared: bool = False) -> Iterator[None]:
    """Makes this process the only service of a data directory, or one of several that share it.

    The SQLite database of a data directory has one service. With another database, several services
    may share the directory and its token.

    Raises:
        ServiceRunsAlreadyError: another service uses the directory alone.
        DataDirLockedError: likewise, and it has not announced its address.
    """
    with ExitStack() as held:
        try:
            held.enter_context(data.lock(SERVE_LOCK, wait_s=LOCK_PATIENCE_S, shared=shared))
        except DataDirLockedError as error:
            if running := find_service(data.path):
                # `up` would start the service again if only the service were ended.
                pid = running.supervisor or running.pid
                raise ServiceRunsAlreadyError(
                    f"layout-tuner runs on the data directory {data.path} already, at {running.url} "
                    f"(process {pid}): use it as it is, end it with `kill {pid}`, or start another one "
                    "with another --data-dir and --port"
                ) from error
            raise
        # Killed services leave announcements behind; other programs may have their ports by now.
        data.service_file.unlink(missing_ok=True)
        for file in shared_announcements(data.path):
            if not is_locked(data.path, file.stem):
                file.unlink(missing_ok=True)
                file.with_suffix(".lock").unlink(missing_ok=True)
        yield


@contextmanager
def announced(
    data: DataDir,
    url: str,
    certificate: Path | None = None,
    *,
    shared: bool = False,
    supervisor: int | None = None,
) -> Iterator[None]:
    """Announces the service's address in the data directory for the time of the block."""
    pid = os.getpid()
    file = data.path / f"service-{pid}.json" if shared else data.service_file
    service: dict[str, str | int] = {"url": url, "pid": pid}
    if certificate is not None:
        service["certificate"] = str(certificate.absolute())
    if supervisor is not None:
        service["supervisor"] = supervisor
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
