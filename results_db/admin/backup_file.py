"""`db backup`: copies a database in use into one file, which is a SQLite database.

The file has the same revision, whichever kind the source is. It can be inspected, checked, and
restored into either kind. Its last line states its length and checksum. Decision 32 explains why.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Final

from sqlalchemy import make_url

from layout_tuner.results_db.admin.schema_check import schema_differences
from layout_tuner.results_db.admin.transfer import to_sqlite
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.postgresql import lift_limits
from layout_tuner.results_db.errors import (
    BackupInvalidError,
    BackupPathError,
    DatabaseUnavailableError,
)
from layout_tuner.results_db.migrations import migrate

_PAGES_AT_ONCE: Final = 2000
"""Pages of SQLite, of 4 KiB, that are copied between two reports of progress."""

_TRAILER: Final = "\nlayout-tuner backup of {:20} bytes, SHA-256 {:64}\n"
"""The last line of a backup, about the bytes before it. SQLite ignores what follows its pages."""

Say = Callable[[str], None]
"""Called with what is being done, in words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BackupReport:
    """The result of a backup."""

    path: Path
    revision: str
    """The revision of its schema."""
    num_bytes: int
    num_campaigns: int
    num_trials: int


def back_up(
    url: str, path: Path, *, replace: bool = False, say: Say = lambda _: None
) -> BackupReport:
    """Writes a snapshot of a database into a file; the service may run meanwhile.

    The file appears when it is complete. Only its owner can read it, since it contains hashes of
    tokens.

    Raises:
        BackupPathError: the file exists, is the database itself, or cannot be written.
        BackupInvalidError: the copy is damaged, and so is the database; no file is left.
        DatabaseUnavailableError: there is no database, or it cannot be read.
        SchemaNewerError: a version that this one does not know wrote it.
    """
    if _is_database(url, path):
        raise BackupPathError(f"{path} is the database itself; name another file")
    if path.exists() and not replace:
        raise BackupPathError(
            f"{path} is there already; name another file, or replace it with --force"
        )
    revision = migrate.revision(url)
    if revision is None:
        raise DatabaseUnavailableError(
            "there is no database to back up: nothing has been set up yet"
        )
    with new_file(path) as part:
        _copy(url, part, revision, say)
        say("checking the copy")
        refuse_damaged(part)
        forget_sign_ins(part)
        counts = count_rows(part)
        make_one_file(part)
        with part.open("r+b") as file:
            file.write(_trailer(file))
            size = file.tell()
    return BackupReport(
        path=path, revision=revision, num_bytes=size, num_campaigns=counts[0], num_trials=counts[1]
    )


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary file beside `path` that replaces it at the end, or is deleted on an exception.

    Raises BackupPathError if it cannot be written.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with writing(path):
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        try:
            yield part
            _sync(part)
            part.replace(path)
            _sync(path.parent)
        finally:
            # SQLite keeps the others beside an open database.
            for end in ("", "-wal", "-shm", "-journal"):
                part.with_name(part.name + end).unlink(missing_ok=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns errors of writing, such as a full disk, into `BackupPathError`."""
    try:
        yield
    except (OSError, sqlite3.OperationalError) as error:
        said = error.strerror if isinstance(error, OSError) else str(error)
        raise BackupPathError(
            f"{path} cannot be written: {said}; nothing of it is left, free space or name another place"
        ) from error


def forget_sign_ins(path: Path) -> None:
    """Deletes codes and sessions of browsers from a copy of a database.

    After a restore, a session would be valid again that was signed out after the backup.
    """
    with closing(sqlite3.connect(path)) as connection, connection:
        query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = ?"
        (found,) = connection.execute(query, ("browser_sign_ins",)).fetchone()
        if found:
            connection.execute("PRAGMA secure_delete = ON")
            connection.execute("DELETE FROM browser_sign_ins")


def refuse_damaged(path: Path) -> str:
    """Returns the revision of a copy of a database.

    Raises:
        BackupInvalidError: its pages, its references or its schema are damaged.
        SchemaNewerError: a version that this one does not know wrote it.
    """
    try:
        revision = migrate.revision(f"sqlite:///{path}")
        with closing(Database(f"sqlite:///{path}")) as database, database.read() as session:
            connection = session.connection()
            said = connection.exec_driver_sql("PRAGMA integrity_check(1)").scalar_one()
            orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
            if said == "ok" and orphan is not None:
                said = f"a row of {orphan[0]} refers to a row of {orphan[2]} that is not there"
            if said == "ok":
                differences = schema_differences(connection, revision)
                said = "; ".join(differences[:3]) or "ok"
    except DatabaseUnavailableError as error:
        raise BackupInvalidError(f"the copy is damaged: {error}") from error
    if said != "ok" or revision is None:
        raise BackupInvalidError(
            f"the copy is damaged ({said}), and so is what it was made of: look at it with "
            "`layout-tuner db check`, and restore the last good backup"
        )
    return revision


def extract(path: Path, part: Path) -> None:
    """Copies the database in a backup into a file.

    Raises:
        BackupPathError: the backup cannot be read.
        BackupInvalidError: it is not as it was written, or is no backup.
    """
    if not (path.is_file() and os.access(path, os.R_OK)):
        raise BackupPathError(
            f"there is no file {path} to read; name one that `layout-tuner db backup` wrote"
        )
    with path.open("rb") as source, part.open("w+b") as copy:
        shutil.copyfileobj(source, copy)
        copy.truncate(max(copy.tell() - len(_TRAILER.format(0, "")), 0))
        trailer = _trailer(copy)
        source.seek(copy.tell())
        if source.read() != trailer:
            raise BackupInvalidError(
                f"{path} was cut off or changed, or is no backup: it does not end with the length "
                "and checksum of what it holds; name another that `layout-tuner db backup` wrote"
            )


def _trailer(file: BufferedRandom) -> bytes:
    """The last line of a backup whose database is in a file; moves to the end of the file."""
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _TRAILER.format(file.tell(), digest).encode()


def _is_database(url: str, path: Path) -> bool:
    """Whether a file is the database itself, which processes would keep open after its deletion."""
    database = make_url(url).database
    if not url.startswith("sqlite") or database is None:
        return False
    return path.exists() and Path(database).exists() and path.samefile(database)


def _copy(url: str, part: Path, revision: str, say: Say) -> None:
    if not url.startswith("sqlite"):
        migrate.upgrade(f"sqlite:///{part}", revision)
    with closing(Database(url)) as source, source.read() as session:
        connection = session.connection()
        if connection.dialect.name == "sqlite":
            driver = connection.connection.driver_connection
            assert isinstance(driver, sqlite3.Connection)
            # Begins the view: all pages are of this moment, although they are copied in steps.
            driver.execute("SELECT count(*) FROM sqlite_master").fetchone()
            with closing(sqlite3.connect(part)) as copy:
                driver.backup(
                    copy,
                    pages=_PAGES_AT_ONCE,
                    progress=lambda _status, left, of: say(f"copying: {1 - left / max(of, 1):.0%}"),
                )
        else:
            lift_limits(connection)
            with closing(Database(f"sqlite:///{part}")) as target, target.write() as written:
                to_sqlite(
                    connection, written.connection(), say=lambda table: say(f"copying {table}")
                )


def make_one_file(part: Path) -> None:
    """Merges the write-ahead log into a SQLite database."""
    with closing(sqlite3.connect(part)) as copy:
        copy.execute("PRAGMA journal_mode = DELETE").fetchone()


def count_rows(path: Path) -> tuple[int, int]:
    """The numbers of campaigns and of trials in a SQLite file."""
    with closing(sqlite3.connect(path)) as connection:
        (campaigns,) = connection.execute("SELECT count(*) FROM campaigns").fetchone()
        (trials,) = connection.execute("SELECT count(*) FROM trials").fetchone()
    return campaigns, trials


def _sync(path: Path) -> None:
    """Makes sure that a file, or a folder's list of files, survives a power failure."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
