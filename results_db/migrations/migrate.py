"""Migrations: Alembic without an ini file, from the scripts in the package.

Alembic is imported only when a migration is needed; most starts do without it.
"""

from __future__ import annotations

import functools
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from sqlalchemy import Connection, event, inspect, text
from sqlalchemy.exc import IntegrityError

from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.postgresql import take_migration_lock
from layout_tuner.results_db.errors import (
    DatabaseInvalidError,
    SchemaNewerError,
    SchemaOutdatedError,
)
from layout_tuner.results_db.models.new_schema import create_schema

if TYPE_CHECKING:
    from alembic.config import Config

SCRIPTS: Final = Path(__file__).parent

_OWN: Final[tuple[Path, ...]] = (SCRIPTS / "versions",)
VERSIONS: Final = _OWN
"""Folders of migrations. A file's name begins with its revision, as in r007_first_schema.py. Tests
replace this value to add a migration of their own."""

_REVISION_TABLE: Final = (
    "CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL, "
    "CONSTRAINT alembic_version_pkc PRIMARY KEY (version_num))"
)
"""As Alembic makes it."""


def upgrade(url: str, revision: str = "head") -> None:
    """Upgrades the database to this version's schema; creates it if there is none.

    Raises:
        DatabaseUnavailableError: it is not a database, or cannot be opened.
        SchemaNewerError: a version that this one does not know wrote it; nothing was changed.
    """
    with closing(Database(url)) as database:
        event.listen(database.engine, "connect", _disable_foreign_keys)
        with database.read() as session:
            is_at_head = _known_revision(session.connection()) == head()
        if not is_at_head:
            with database.write() as session:
                upgrade_within(session.connection(), revision)


def upgrade_within(connection: Connection, revision: str = "head") -> None:
    """Upgrades the schema in a transaction of the caller; other processes that upgrade wait."""
    take_migration_lock(connection)
    is_new = _known_revision(connection) is None and not inspect(connection).get_table_names()
    if is_new and (revision, VERSIONS, connection.dialect.name) == ("head", _OWN, "sqlite"):
        # What all migrations together make of it; importing Alembic takes longer than this.
        # PostgreSQL writes the same checks in other words.
        create_schema(connection)
        connection.execute(text(_REVISION_TABLE))
        connection.execute(text("INSERT INTO alembic_version VALUES (:head)"), {"head": head()})
        return
    from alembic import command

    try:
        command.upgrade(_config(connection), revision)
    except IntegrityError as error:
        said = " ".join(str(error.orig).split())
        raise DatabaseInvalidError(
            f"the database holds what this version's schema refuses: {said}; it is left as it "
            "was: put those rows right, or restore a backup"
        ) from error
    _refuse_orphans(connection)


def downgrade(url: str, revision: str) -> None:
    """Downgrades the database to an earlier revision; "base" drops every table."""
    from alembic import command

    with closing(Database(url)) as database:
        event.listen(database.engine, "connect", _disable_foreign_keys)
        with database.write() as session:
            connection = session.connection()
            take_migration_lock(connection)
            command.downgrade(_config(connection), revision)
            _refuse_orphans(connection)


def revision(url: str) -> str | None:
    """The revision of a database's schema; None where it has none.

    Raises:
        DatabaseUnavailableError: it is not a database, or cannot be opened.
        SchemaNewerError: a version that this one does not know wrote it.
    """
    with closing(Database(url)) as database, database.read() as session:
        return _known_revision(session.connection())


def check(url: str) -> str:
    """Refuses a database that is not at this version's schema; returns the schema's revision.

    Raises:
        DatabaseUnavailableError: it is not a database, or cannot be opened.
        SchemaNewerError: a version that this one does not know wrote it.
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


def _disable_foreign_keys(connection: Any, _record: object) -> None:
    """Turns off foreign keys on SQLite, where changing a table means building a new one."""
    if isinstance(connection, sqlite3.Connection):
        connection.execute("PRAGMA foreign_keys = OFF").close()


def _refuse_orphans(connection: Connection) -> None:
    """Checks references on SQLite, where foreign keys were off during the migration."""
    if connection.dialect.name != "sqlite":
        return
    orphan = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
    if orphan is not None:
        raise DatabaseInvalidError(
            f"row {orphan[1]} of {orphan[0]} refers to a row of {orphan[2]} that is not there; the "
            "database is left as it was: restore a backup of it"
        )


def _known_revision(connection: Connection) -> str | None:
    """The revision that a database states; None where no migration ran."""
    revision = None
    if inspect(connection).has_table("alembic_version"):
        query = text("SELECT version_num FROM alembic_version")
        revision = connection.execute(query).scalar_one_or_none()
    if revision is not None and revision not in revisions(VERSIONS):
        raise SchemaNewerError(
            f"the database is at revision {revision}, which this version ({head()}) does not know: "
            "a newer version of layout-tuner wrote it, or one that was not released; run the "
            "version that wrote it, or choose another data directory or database"
        )
    return revision


@functools.cache
def revisions(folders: tuple[Path, ...]) -> tuple[str, ...]:
    """The revisions of folders of migrations, in order."""
    files = (path for folder in folders for path in folder.glob("r[0-9]*_*.py"))
    return tuple(sorted(path.name.partition("_")[0] for path in files))


def head() -> str:
    """The revision of this version's schema."""
    return revisions(VERSIONS)[-1]


def _config(connection: Connection) -> Config:
    from alembic.config import Config

    config = Config()
    options = {
        "script_location": str(SCRIPTS),
        "version_locations": os.pathsep.join(str(folder) for folder in VERSIONS),
        "path_separator": "os",
        "version_path_separator": "os",  # its name before Alembic 1.16
    }
    for name, value in options.items():
        config.set_main_option(name, value.replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
