"""`db restore`: replaces a database of either kind by a backup.

The backup is copied, checked and upgraded in a temporary file. Only then it replaces the database,
in one step. The old database is kept (SQLite), or dropped in the same transaction (PostgreSQL).
"""

from __future__ import annotations

import dataclasses
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

from layout_tuner.results_db.admin.backup_file import (
    count_rows,
    extract,
    forget_sign_ins,
    make_one_file,
    new_file,
    refuse_damaged,
    writing,
)
from layout_tuner.results_db.admin.integrity import Finding, check_database
from layout_tuner.results_db.admin.transfer import to_postgresql
from layout_tuner.results_db.database.data_dir import DataDir
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.postgresql import take_migration_lock
from layout_tuner.results_db.database.url import shown
from layout_tuner.results_db.errors import (
    DatabaseInUseError,
    DatabaseNotEmptyError,
    DataDirLockedError,
)
from layout_tuner.results_db.migrations import migrate
from layout_tuner.results_db.models.all_tables import METADATA

LOCKS: Final = ("serve", "driver", "migration")
"""Locks of a data directory whose holders use the database."""

_SKIPPED_IDS: Final = {"campaigns": 1_000, "trials": 100_000}
"""More ids than a service assigns between two backups."""

_VALUABLE: Final = ("campaigns", "workers", "tokens", "user_models", "user_clusters", "audit")
"""Tables whose rows are not dropped without --force."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RestoreReport:
    """The result of a restore."""

    revision: str
    """The revision of the backup's schema; the database now has this version's."""
    num_campaigns: int
    num_trials: int
    findings: tuple[Finding, ...]
    """Findings of a check of the restored database."""
    set_aside: Path | None = None
    """Where the old database is kept; None: there was none, or it was a PostgreSQL."""


def restore_into_data_dir(path: Path, data_dir: DataDir, *, replace: bool = False) -> RestoreReport:
    """Replaces the database of a data directory by a backup.

    The old database is renamed, never deleted. The directory is created if it is missing. A
    database that contains data is replaced only if `replace`.

    Raises:
        BackupPathError: the backup cannot be read, or the database cannot be written.
        BackupInvalidError: the file is not a backup, or is damaged.
        SchemaNewerError: a version that this one does not know wrote it.
        DatabaseNotEmptyError: the database contains data.
        DatabaseInUseError: a service or a driver uses it.
    """
    data_dir.create()
    place = Path(data_dir.database_url.removeprefix("sqlite:///"))
    with _exclusive(data_dir), new_file(place) as part:
        report = _prepare(path, part)
        aside = _set_aside(place, replace=replace)
    return dataclasses.replace(report, set_aside=aside)


def restore_into_postgresql(path: Path, url: str, *, replace: bool = False) -> RestoreReport:
    """Replaces the tables of a PostgreSQL by a backup, in one transaction.

    Tables that contain data are dropped only if `replace`.

    Raises the errors of `restore_into_data_dir`, BackupInvalidError also for rows that PostgreSQL
    cannot store, and:
        DatabaseUnavailableError: it does not answer, or refuses to create tables.
    """
    with TemporaryDirectory() as folder, closing(Database(url)) as target:
        part = Path(folder) / "backup.sqlite3"
        with writing(part):
            report = _prepare(path, part)
        with target.write() as session, closing(Database(f"sqlite:///{part}")) as source:
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
    """Copies a backup, refuses a damaged one, and upgrades the copy."""
    extract(path, part)
    revision = refuse_damaged(part)
    migrate.upgrade(f"sqlite:///{part}")
    forget_sign_ins(part)
    _begin_anew(part)
    findings = check_database(f"sqlite:///{part}").findings
    make_one_file(part)
    campaigns, trials = count_rows(part)
    return RestoreReport(
        revision=revision, num_campaigns=campaigns, num_trials=trials, findings=findings
    )


def _begin_anew(part: Path) -> None:
    """Stops the wall time of campaigns, and skips ids that may have been assigned after the backup.

    The time since the backup must not count. Workers may still post outcomes of trials with those
    ids, which must not be taken for outcomes of new ones.
    """
    with closing(sqlite3.connect(part)) as connection, connection:
        connection.execute("UPDATE campaigns SET clock_at = NULL")
        for table, number in _SKIPPED_IDS.items():
            largest = f"SELECT coalesce(max(id), 0) FROM {table}"  # noqa: S608 - a name of ours
            (last,) = connection.execute(largest).fetchone()
            given = "SELECT seq FROM sqlite_sequence WHERE name = ?"
            row = connection.execute(given, (table,)).fetchone()
            last = max(last, row[0] if row else 0)
            connection.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
            connection.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, last + number))


@contextmanager
def _exclusive(data_dir: DataDir) -> Iterator[None]:
    """Holds the locks of all processes that use a data directory's database."""
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
    """Renames the old database; one without data is replaced."""
    if not place.exists() or _is_empty(place):
        return None
    if not replace:
        raise DatabaseNotEmptyError(
            f"{place} holds a database already: --force sets it aside under another name"
        )
    now = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    aside = place.with_name(f"{place.name}.before-restore-{now}")
    for end in ("-wal", "-shm"):
        # The write-ahead log of a damaged database must not be applied to the new one.
        with suppress(FileNotFoundError):
            place.with_name(place.name + end).rename(aside.with_name(aside.name + end))
    try:
        # A hard link first: at no time the database is missing.
        os.link(place, aside)
    except PermissionError:  # the file system has no hard links
        place.rename(aside)
    return aside


def _is_empty(place: Path) -> bool:
    """Merges the write-ahead log into a database, and returns whether it contains no data."""
    try:
        with closing(sqlite3.connect(place, timeout=0)) as connection:
            connection.execute("PRAGMA journal_mode = DELETE").fetchone()
            tables = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            names = {name for (name,) in tables.fetchall()}
            return not any(
                connection.execute(f"SELECT 1 FROM {name} LIMIT 1").fetchone()  # noqa: S608
                for name in _VALUABLE
                if name in names
            )
    except sqlite3.OperationalError as error:
        if "locked" in str(error):
            raise DatabaseInUseError(f"a process has {place} open; end it first") from error
        return False
    except sqlite3.DatabaseError:
        # Damaged, perhaps the reason for the restore: it is kept as it is.
        return False


def _refuse_busy(connection: Connection, url: str) -> None:
    query = (
        "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND application_name = 'layout-tuner'"
    )
    if others := connection.execute(text(query)).scalar_one():
        raise DatabaseInUseError(
            f"services or drivers have {others} connections to {shown(url)}; stop them first"
        )


def _drop_tables(connection: Connection, url: str, *, replace: bool) -> None:
    found = set(inspect(connection).get_table_names())
    ours = found & {"alembic_version", *METADATA.tables}
    holding = [
        name
        for name in _VALUABLE
        if name in ours and connection.execute(text(f"SELECT 1 FROM {name} LIMIT 1")).first()  # noqa: S608
    ]
    if holding and not replace:
        raise DatabaseNotEmptyError(
            f"{shown(url)} has rows in {', '.join(holding)}: --force drops all tables of ours first"
        )
    for name in sorted(ours):
        connection.execute(text(f'DROP TABLE "{name}" CASCADE'))
