"""The data directory: where a service keeps its database, token and logs."""

from __future__ import annotations

import fcntl
import os
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from layout_tuner.protocol.connection.data_home import (
    DATA_DIR_VARIABLE,
    TOKEN_FILE,
    WORKER_TOKEN_FILE,
    default_data_dir,
)
from layout_tuner.protocol.connection.running_service import SERVICE_FILE
from layout_tuner.results_db.errors import DataDirInvalidError, DataDirLockedError

_LOCK_POLL_S: Final = 0.05
_REMEDY: Final = f"choose another with --data-dir or ${DATA_DIR_VARIABLE}"


@dataclass(frozen=True, slots=True)
class DataDir:
    """A data directory; it need not exist yet."""

    path: Path

    @classmethod
    def default(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """The data directory that `protocol.connection.data_home` finds in the environment."""
        return cls(default_data_dir(environ))

    @property
    def database_url(self) -> str:
        return f"sqlite:///{self._database.absolute()}"

    @property
    def _database(self) -> Path:
        return self.path / "results.sqlite3"

    @property
    def token_file(self) -> Path:
        """The admin token of the service; only the owner of the file can read it."""
        return self.path / TOKEN_FILE

    @property
    def worker_token_file(self) -> Path:
        """The token of workers on this machine; only the owner of the file can read it."""
        return self.path / WORKER_TOKEN_FILE

    @property
    def service_file(self) -> Path:
        """URL and process id of the running service, as JSON; exists while it runs."""
        return self.path / SERVICE_FILE

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    def create(self) -> None:
        """Creates missing folders, accessible to the owner only; existing ones keep their mode.

        Raises:
            DataDirInvalidError: it cannot be created or written to, everybody can write to it, or
                its path cannot be part of the database's URL.
        """
        if set("?%") & set(str(self.path.absolute())):
            raise DataDirInvalidError(
                f"the data directory {self.path} has ? or % in its path; {_REMEDY}"
            )
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._refuse_open_to_all()
            self.logs.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            raise DataDirInvalidError(
                f"the data directory {self.path} cannot be created: {error.strerror}; {_REMEDY}"
            ) from error
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise DataDirInvalidError(f"the data directory {self.path} is not writable; {_REMEDY}")

    def _refuse_open_to_all(self) -> None:
        mode = stat.S_IMODE(self.path.stat().st_mode)
        if mode & stat.S_IWOTH:
            raise DataDirInvalidError(
                f"every user of this machine can replace the files in the data directory {self.path} "
                f"(mode {mode:o}): chmod o-w it, or choose a directory below it with --data-dir or "
                f"${DATA_DIR_VARIABLE}"
            )

    def create_database(self) -> None:
        """Creates an empty database if there is none; DataDirInvalidError if that is impossible.

        Only its owner can read it: SQLite would create it with the mode of the umask. The files
        that SQLite creates beside the database get the mode of the database.
        """
        try:
            # An existing file is not opened: closing it would drop the locks of this process on it.
            with suppress(FileExistsError):
                os.close(os.open(self._database, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except OSError as error:
            raise DataDirInvalidError(
                f"the database {self._database} cannot be created: {error.strerror}; "
                f"choose another data directory with --data-dir or ${DATA_DIR_VARIABLE}"
            ) from error

    @contextmanager
    def lock(self, name: str, *, wait_s: float = 0.0, shared: bool = False) -> Iterator[None]:
        """Holds a lock that ends with the process, however it ends.

        It waits `wait_s` seconds for other holders; others may hold a shared one too.

        Raises:
            DataDirLockedError: another process holds it, and has for `wait_s` seconds.
        """
        deadline = time.monotonic() + wait_s
        kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        with (self.path / f"{name}.lock").open("a+") as file:
            while True:
                try:
                    fcntl.flock(file, kind | fcntl.LOCK_NB)
                    break
                except BlockingIOError as error:
                    if time.monotonic() >= deadline:
                        raise DataDirLockedError(
                            f"another process holds the {name} lock of the data directory "
                            f"{self.path}; end it, or choose another directory with --data-dir"
                        ) from error
                time.sleep(_LOCK_POLL_S)
            yield
