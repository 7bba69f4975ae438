"""`db restore`: a backup in the place of a database, of either kind.

The backup is copied, looked at and upgraded beside the place where it goes; only what is whole takes
that place, in one step. What was there is kept (SQLite) or goes in the same transaction (PostgreSQL).
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from sqlalchemy import Connection, inspect, text

from results_db import migrate
from results_db.all_tables import METADATA
from results_db.backup import new_file, refuse_damaged, writing
from results_db.data_dir import DataDir
from results_db.database_url import shown
from results_db.errors import (
    BackupInvalidError,
    BackupPathError,
    DatabaseInUseError,
    DatabaseNotEmptyError,
    DataDirLockedError,
)
from results_db.integrity import Finding, check_database
from results_db.maintenance import take_migration_lock
from results_db.session import Database
from results_db.transfer import to_postgresql

LOCKS: Final = ("serve", "driver", "migration")
"""Locks of a data directory whose holders use its database."""

_SKIPPED_IDS: Final = {"campaigns": 1_000, "trials": 100_000}
"""More than any service makes between two backups."""

_TELLING: Final = ("campaigns", "workers", "tokens", "user_models", "user_clusters", "audit")
"""Tables of which one row is something that nobody may lose unasked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """A backup that was restored."""

    revision: str
    """Of the schema that the backup had; the database has this version's."""
    num_campaigns: int
    num_trials: int
    set_aside: Path | None
    """Where the database is kept whose place it took; None: there was none, or it was a PostgreSQL."""
    findings: tuple[Finding, ...]
    """What a check of it found."""


def restore_into_data_dir(path: Path, data_dir: DataDir, *, replace: bool = False) -> RestoreReport:
    """Puts a backup in the place of a data directory's database.

    A database that was there is renamed, never deleted.

    Args:
        path: the backup.
        data_dir: created where it is missing.
        replace: whether a database that holds something may be set aside.

    Raises:
        BackupPathError: the backup cannot be read, or the database not be written.
        BackupInvalidError: the file is no backup, or is damaged.
        SchemaNewerError: a newer version wrote it.
        DatabaseNotEmptyError: there is a database that holds something.
        DatabaseInUseError: a service or a driver works on it.
    """
    data_dir.create()
    place = Path(data_dir.database_url.removeprefix("sqlite:///"))
    with _nobody_else(data_dir), new_file(place) as part:
        report = _prepare(path, part)
        aside = _set_aside(place, replace=replace)
    return RestoreReport(
        revision=report.revision,
        num_campaigns=report.num_campaigns,
        num_trials=report.num_trials,
        set_aside=aside,
        findings=report.findings,
    )


def restore_into_postgresql(path: Path, url: str, *, replace: bool = False) -> RestoreReport:
    """Puts a backup in the place of a PostgreSQL's tables, in one transaction: all of it, or nothing.

    Args:
        path: the backup.
        url: the database; it is there, with or without our tables.
        replace: whether tables that hold something may be dropped.

    Raises:
        BackupPathError: the backup cannot be read, or there is no space for a copy of it.
        BackupInvalidError: the file is no backup, is damaged, or PostgreSQL cannot keep it.
        SchemaNewerError: a newer version wrote it.
        DatabaseNotEmptyError: the database holds something.
        DatabaseInUseError: a service or a driver works on it.
        DatabaseUnavailableError: it does not answer, or does not let us create tables.
    """
    with TemporaryDirectory() as folder, closing(Database(url)) as target:
        part = Path(folder) / "backup.sqlite3"
        with writing(part):
            report = _prepare(path, part)
        with target.write() as session, closing(Database(_url(part))) as source:
            connection = session.connection()
            take_migration_lock(connection)
            _refuse_busy(connection, url)
            _drop_tables(connection, url, replace=replace)
            migrate.upgrade_within(connection)
            with source.read() as copied:
                to_postgresql(copied.connection(), connection)
            connection.execute(text("ANALYZE"))
    return report


def _prepare(path: Path, part: Path) -> RestoreReport:
    """Copies a backup, refuses it where it is damaged, and upgrades the copy."""
    _copy(path, part)
    refuse_damaged(part)
    revision = migrate.revision(_url(part))
    if revision is None:
        raise BackupInvalidError(
            f"{path} is a database of another program: name a file that `layout-tuner db backup` wrote"
        )
    migrate.upgrade(_url(part))
    _skip_ids(part)
    findings = check_database(_url(part)).findings
    with closing(sqlite3.connect(part)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE").fetchone()
        (campaigns,) = connection.execute("SELECT count(*) FROM campaigns").fetchone()
        (trials,) = connection.execute("SELECT count(*) FROM trials").fetchone()
    return RestoreReport(
        revision=revision,
        num_campaigns=campaigns,
        num_trials=trials,
        set_aside=None,
        findings=findings,
    )


def _skip_ids(part: Path) -> None:
    """Leaves out the ids that may have been given since the backup was made.

    Workers may still hold outcomes of those trials, which must not be taken for others'.
    """
    with closing(sqlite3.connect(part)) as connection, connection:
        for table, number in _SKIPPED_IDS.items():
            largest = f"SELECT coalesce(max(id), 0) FROM {table}"  # noqa: S608 - a name of ours
            (last,) = connection.execute(largest).fetchone()
            given = "SELECT seq FROM sqlite_sequence WHERE name = ?"
            row = connection.execute(given, (table,)).fetchone()
            last = max(last, row[0] if row else 0)
            connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
            connection.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last + number))


def _copy(path: Path, part: Path) -> None:
    """Copies the backup; with what its own writer had not folded into it, where it is a live database."""
    if not path.is_file():
        raise BackupPathError(
            f"there is no file {path}; name one that `layout-tuner db backup` wrote"
        )
    try:
        with (
            closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as source,
            closing(sqlite3.connect(part)) as copy,
        ):
            source.execute("SELECT count(*) FROM sqlite_master").fetchone()
            source.backup(copy)
    except sqlite3.OperationalError as error:
        if "unable to open" in str(error):
            raise BackupPathError(f"{path} cannot be read: {error}") from error
        raise
    except sqlite3.DatabaseError as error:
        raise BackupInvalidError(f"{path} is no backup: {error}") from error


def _url(path: Path) -> str:
    return f"sqlite:///{path}"


@contextmanager
def _nobody_else(data_dir: DataDir) -> Iterator[None]:
    """Holds the locks of all that works on a data directory's database."""
    with ExitStack() as stack:
        for name in LOCKS:
            try:
                stack.enter_context(data_dir.lock(name))
            except DataDirLockedError as error:
                raise DatabaseInUseError(
                    f"a process works on the data directory {data_dir.path} (it holds {name}.lock); "
                    "stop it first"
                ) from error
        yield


def _set_aside(place: Path, *, replace: bool) -> Path | None:
    """Gives the database that is there another name; one that holds nothing just makes place."""
    if not place.exists() or _fold(place):
        return None
    if not replace:
        raise DatabaseNotEmptyError(
            f"{place} holds a database already: --force sets it aside under another name"
        )
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    aside = place.with_name(f"{place.name}.before-restore-{now}")
    for end in ("-wal", "-shm"):
        # What a damaged database had not folded into itself must not meet the one that comes.
        with suppress(FileNotFoundError):
            place.with_name(place.name + end).rename(aside.with_name(aside.name + end))
    try:
        # A second name, until the first is the new one's: there is a database at every moment.
        os.link(place, aside)
    except PermissionError:  # as file systems without second names have it
        place.rename(aside)
    return aside


def _fold(place: Path) -> bool:
    """Makes a database one file, and says whether nothing is in it.

    Raises:
        DatabaseInUseError: somebody has it open.
    """
    try:
        with closing(sqlite3.connect(place, timeout=0)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            names = {name for (name,) in tables.fetchall()}
            return not any(
                connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone()  # noqa: S608
                for name in _TELLING
                if name in names
            )
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise DatabaseInUseError(f"a process has {place} open; end it first") from error
        return False
    except sqlite3.DatabaseError:
        # Damaged, which may be why a backup is restored: it is kept as it is.
        return False


def _refuse_busy(connection: Connection, url: str) -> None:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND application_name = 'layout-tuner'"
    )
    others = connection.execute(text(query)).scalar_one()
    if others:
        raise DatabaseInUseError(
            f"services or drivers have {others} connections to {shown(url)}; stop them first"
        )


def _drop_tables(connection: Connection, url: str, *, replace: bool) -> None:
    """Drops our tables, those of newer and older schemas included, and the functions of their triggers."""
    inspector = inspect(connection)
    found = set(inspector.get_table_names())
    ours = found & {"alembic_version", *METADATA.tables, *migrate.EARLIER_TABLES}
    holding = [
        name
        for name in _TELLING
        if name in ours and connection.execute(text(f"SELECT 1 FROM {name} LIMIT 1")).first()  # noqa: S608
    ]
    if holding and not replace:
        raise DatabaseNotEmptyError(
            f"{shown(url)} has rows in {', '.join(holding)}: --force drops all tables of ours first"
        )
    for name in sorted(ours):
        connection.execute(text(f'DROP TABLE "{name}" CASCADE'))
    for name in migrate.TRIGGER_FUNCTIONS:
        connection.execute(text(f"DROP FUNCTION IF EXISTS {name}()"))
