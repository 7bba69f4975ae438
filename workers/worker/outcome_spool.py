"""Outcomes on disk until they are posted; they survive restarts of worker and service."""

from __future__ import annotations

import fcntl
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Self

from layout_tuner.documents.reading import why_unreadable
from layout_tuner.workers.errors import SpoolInUseError, SpoolUnusableError
from layout_tuner.workers.service.lease_client import EncodedOutcome

_LOG = logging.getLogger(__name__)

_NAME: Final = re.compile(r"trial-(\d{1,18})-attempt-(\d{1,18})\.json")
_LOCK: Final = "lock"
_REJECTED: Final = "rejected"


class Spool:
    """A directory of outcomes that wait to be posted; one worker process owns it at a time.

    Raises:
        SpoolInUseError: at construction, when another process owns it.
        SpoolUnusableError: at construction, and by every method, when the directory or a file
            can't be created, read, written or removed.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = (directory / _LOCK).open("w")
        except OSError as error:
            raise SpoolUnusableError(
                f"the spool directory {directory} can't be used ({why_unreadable(error)}); give another --spool-dir"
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

    def keep(self, outcome: EncodedOutcome) -> None:
        """Writes an outcome so that it survives a crash of this process or of the machine."""
        with _usable("the outcome can't be written"):
            _write(self._path(outcome), outcome.body)

    def kept(self) -> list[EncodedOutcome]:
        """The outcomes that have not been posted, the oldest first.

        A file whose name is not that of an outcome is set aside, and so is one that the service
        refuses; one that can't be read is left for the next process.
        """
        with _usable("the outcomes can't be read"):
            paths = [path for path in self.directory.iterdir() if path.suffix == ".json"]
            paths.sort(key=lambda path: path.stat().st_mtime_ns)
        outcomes = []
        for path in paths:
            try:
                outcomes += self._read(path)
            except SpoolUnusableError as error:
                _LOG.error("%s; it has to wait", error)
        return outcomes

    def forget(self, outcome: EncodedOutcome) -> None:
        """Removes an outcome that has been posted."""
        with _usable("the outcome can't be removed"):
            self._path(outcome).unlink(missing_ok=True)

    def reject(
        self, outcome: EncodedOutcome, why: str, instead: EncodedOutcome | None = None
    ) -> None:
        """Sets an outcome aside that the service refuses, whether it is on disk or not.

        Another may wait in its place; a crash leaves one of the two.
        """
        self._set_aside(self._path(outcome).name, outcome.body, why)
        if instead is None:
            self.forget(outcome)
        else:
            self.keep(instead)

    def _read(self, path: Path) -> list[EncodedOutcome]:
        with _usable("an outcome can't be read"):
            body = path.read_bytes()
        if (name := _NAME.fullmatch(path.name)) is None:
            self._set_aside(path.name, body, "its name is not that of an outcome")
            with _usable("what is set aside can't be removed"):
                path.unlink()
            return []
        trial_id, attempt = map(int, name.groups())
        return [EncodedOutcome(trial_id=trial_id, attempt=attempt, body=body)]

    def _set_aside(self, name: str, body: bytes, why: str) -> None:
        path = self.directory / _REJECTED / name
        with _usable("the outcome can't be set aside"):
            path.parent.mkdir(exist_ok=True)
            while path.exists():  # what was told in its place is refused too
                path = path.with_stem(f"{path.stem}-again")
            _write(path, body)
        _LOG.error("outcome %s is set aside in %s: %s", name, path.parent, why)

    def _path(self, outcome: EncodedOutcome) -> Path:
        return self.directory / f"trial-{outcome.trial_id}-attempt-{outcome.attempt}.json"


def adopt_abandoned(spool: Spool, pattern: str) -> None:
    """Moves outcomes that workers of other names have left beside this spool into it.

    The pattern is that of the names of directories of the same service.

    A worker is named after its job, and may have been killed before it posted all outcomes; the
    worker of the next job posts them.
    """
    for directory in spool.directory.parent.glob(pattern):
        if directory == spool.directory:
            continue
        # Its worker may still run, or it can't be read.
        with suppress(SpoolInUseError, SpoolUnusableError, OSError), Spool(directory):
            for path in directory.glob("*.json"):
                path.rename(spool.directory / path.name)
                _LOG.info("outcome %s was left behind in %s", path.name, directory)


def _write(path: Path, body: bytes) -> None:
    """Writes a file so that it and its name survive a crash of the machine."""
    unfinished = path.with_suffix(".tmp")
    with unfinished.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


@contextmanager
def _usable(what: str) -> Iterator[None]:
    """Turns errors of the disk into `SpoolUnusableError`."""
    try:
        yield
    except OSError as error:
        raise SpoolUnusableError(f"{what} ({error})") from error
