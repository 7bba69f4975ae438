"""Migrations: Alembic without an ini file, from the scripts in the package.

Alembic is imported where something is to be migrated: a start on a database that is up to date does without it.
"""

from __future__ import annotations

import functools
import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.exc import IntegrityError

from results_db.errors import DatabaseInvalidError, SchemaNewerError, SchemaOutdatedError
from results_db.maintenance import take_migration_lock
from results_db.session import Database
from results_db.standing_repair import bring_standings_up_to_date

if TYPE_CHECKING:
    from alembic.config import Config
    from alembic.script import ScriptDirectory

SCRIPTS: Final = Path(__file__).with_name("migrations")

EARLIER_TABLES: Final = ("driver_beats",)
"""Tables that earlier schemas had, and this one has not."""

TRIGGER_FUNCTIONS: Final = (
    "campaigns_end_once",
    "trials_end_once",
    "attempts_end_once",
    "measurements_are_results",
    "measurements_stay",
)
"""Functions of the schema's triggers on PostgreSQL, each named as its trigger."""


def upgrade(url: str, revision: str = "head") -> None:
    """Brings the database to this version's schema; creates it where there is none.

    What follows from its measurements is made anew where another version kept it.

    Raises:
        DatabaseUnavailableError: it is no database, or cannot be opened.
        SchemaNewerError: a newer version wrote the database; nothing was changed.
    """
    database = Database(url)
    event.listen(database.engine, "connect", _leave_references_alone)
    try:
        if not _is_at_head(database):
            with database.write() as session:
                upgrade_within(session.connection(), revision)
        if _is_at_head(database):
            bring_standings_up_to_date(database)
    finally:
        database.close()


def upgrade_within(connection: Connection, revision: str = "head") -> None:
    """The same in a transaction that somebody else commits; others that do it wait."""
    from alembic import command

    take_migration_lock(connection)
    _known_revision(connection)
    try:
        command.upgrade(_config(connection), revision)
    except IntegrityError as error:
        said = " ".join(str(error.orig).split())
        raise DatabaseInvalidError(
            f"the database holds what this version's schema refuses: {said}; it is left as it was: put those "
            "rows right, or restore a backup"
        ) from error
    _refuse_orphans(connection)


def downgrade(url: str, revision: str) -> None:
    """Takes the database back to an earlier revision; "base" removes every table."""
    from alembic import command

    database = Database(url)
    event.listen(database.engine, "connect", _leave_references_alone)
    try:
        with database.write() as session:
            connection = session.connection()
            take_migration_lock(connection)
            command.downgrade(_config(connection), revision)
            _refuse_orphans(connection)
    finally:
        database.close()


def revision(url: str) -> str | None:
    """The revision of a database's schema; None where it has none.

    Raises:
        DatabaseUnavailableError: it is no database, or cannot be opened.
        SchemaNewerError: a newer version wrote it.
    """
    database = Database(url)
    try:
        with database.read() as session:
            return _known_revision(session.connection())
    finally:
        database.close()


def check(url: str) -> str:
    """Refuses a database that is not at this version's schema; returns the schema's revision.

    Raises:
        DatabaseUnavailableError: it is no database, or cannot be opened.
        SchemaNewerError: a newer version wrote it.
        SchemaOutdatedError: it has not been upgraded.
    """
    found = revision(url)
    if found != head():
        raise SchemaOutdatedError(
            f"the database is at revision {found or 'none'}, this version needs {head()}; "
            "upgrade it with `layout-tuner db upgrade`, or by starting the service once"
        )
    assert found is not None  # the head is
    return found


def _leave_references_alone(connection: Any, _record: object) -> None:
    """On SQLite a table is changed by building another in its place: rows that refer to it stay."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA foreign_keys = OFF").close()


def _refuse_orphans(connection: Connection) -> None:
    """References were not looked at while SQLite's tables were rebuilt: they are now."""
    if connection.dialect.name != "sqlite":
        return
    orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
    if orphan is not None:
        raise DatabaseInvalidError(
            f"row {orphan[1]} of {orphan[0]} refers to a row of {orphan[2]} that is not there; the "
            "database is left as it was: restore a backup of it"
        )


def _is_at_head(database: Database) -> bool:
    with database.read() as session:
        return _known_revision(session.connection()) == head()


def _known_revision(connection: Connection) -> str | None:
    revision = _written_revision(connection)
    if revision is not None and revision not in _revisions():
        raise SchemaNewerError(
            f"the database is at revision {revision}, which this version does not know: a newer "
            "version of layout-tuner wrote it; upgrade layout-tuner, or choose another data directory"
        )
    return revision


def _written_revision(connection: Connection) -> str | None:
    """What Alembic wrote down; None where it never did."""
    if not inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()


@functools.cache
def _revisions() -> frozenset[str]:
    """The revisions of the scripts, whose files are named after them."""
    return frozenset(path.name[:4] for path in (SCRIPTS / "versions").glob("[0-9]*_*.py"))


@functools.cache
def head() -> str:
    """The revision of this version's schema."""
    return max(_revisions())


def scripts() -> ScriptDirectory:
    """The migrations of this version."""
    from alembic.script import ScriptDirectory

    return ScriptDirectory(str(SCRIPTS))


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
