"""Outcomes on disk until the service has taken them, through any restart of either side."""

from __future__ import annotations

import fcntl
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Final, Self

from workers.errors import SpoolInUseError, SpoolUnusableError
from workers.lease_client import OutcomeReport

_LOG = logging.getLogger(__name__)

_LOCK: Final = "lock"
_REJECTED: Final = "rejected"


class Spool:
    """A directory of outcomes that wait to be posted; one worker process owns it at a time.

    Raises:
        SpoolInUseError: at construction, when another process owns it.
        SpoolUnusableError: at construction, when it can't be created or written.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (directory / _LOCK).open("w")
        except OSError as error:
            raise SpoolUnusableError(
                f"the spool directory can't be used ({error}); give another --spool-dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise SpoolInUseError(
                f"another worker uses {directory}; end it, or give this one a --name or a "
                "--spool-dir of its own"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def keep(self, report: OutcomeReport) -> None:
        """Writes an outcome so that it survives a crash of this process or of the machine."""
        path = self._path(report)
        unfinished = path.with_suffix(".tmp")
        with unfinished.open("w") as file:
            json.dump(asdict(report), file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)

    def kept(self) -> list[OutcomeReport]:
        """The outcomes that have not been posted, the oldest first."""
        paths = sorted(self._directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        reports = []
        for path in paths:
            try:
                reports.append(OutcomeReport(**json.loads(path.read_text())))
            except (ValueError, TypeError) as error:
                self._set_aside(path, f"it can't be read ({error})")
        return reports

    def forget(self, report: OutcomeReport) -> None:
        """Removes an outcome that the service has taken."""
        self._path(report).unlink(missing_ok=True)

    def reject(self, report: OutcomeReport, why: str) -> None:
        """Sets an outcome aside that the service will never take."""
        self._set_aside(self._path(report), why)

    def _set_aside(self, path: Path, why: str) -> None:
        aside = self._directory / _REJECTED
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
        _LOG.error("outcome %s is set aside in %s: %s", path.name, aside, why)

    def _path(self, report: OutcomeReport) -> Path:
        return self._directory / f"trial-{report.trial_id}-attempt-{report.attempt}.json"
