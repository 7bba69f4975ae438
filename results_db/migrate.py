"""Migrations: Alembic without an ini file, from the scripts in the package."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from results_db.errors import SchemaNewerError, SchemaOutdatedError
from results_db.session import Database

SCRIPTS: Final = Path(__file__).with_name("migrations")


def upgrade(url: str, revision: str = "head") -> None:
    """Brings the database to this version's schema; creates it where there is none.

    Raises:
        DatabaseUnavailableError: it is no database, or cannot be opened.
        SchemaNewerError: a newer version wrote the database; nothing was changed.
    """
    database = Database(url)
    try:
        with database.read() as session:
            if _known_revision(session.connection()) == _scripts().get_current_head():
                return
        with database.write() as session:
            connection = session.connection()
            _known_revision(connection)
            command.upgrade(_config(connection), revision)
    finally:
        database.close()


def downgrade(url: str, revision: str) -> None:
    """Takes the database back to an earlier revision; "base" removes every table."""
    database = Database(url)
    try:
        with database.write() as session:
            command.downgrade(_config(session.connection()), revision)
    finally:
        database.close()


def check(url: str) -> None:
    """Refuses a database that is not at this version's schema.

    Raises:
        DatabaseUnavailableError: it is no database, or cannot be opened.
        SchemaNewerError: a newer version wrote it.
        SchemaOutdatedError: it has not been upgraded.
    """
    database = Database(url)
    try:
        with database.read() as session:
            revision = _known_revision(session.connection())
    finally:
        database.close()
    head = _scripts().get_current_head()
    if revision != head:
        raise SchemaOutdatedError(
            f"the database is at revision {revision or 'none'}, this version needs {head}; "
            "start the service once to upgrade it"
        )


def _known_revision(connection: Connection) -> str | None:
    revision = MigrationContext.configure(connection).get_current_revision()
    if revision is not None and revision not in _revisions():
        raise SchemaNewerError(
            f"the database is at revision {revision}, which this version does not know: a newer "
            "version of layout-tuner wrote it; upgrade layout-tuner, or choose another data directory"
        )
    return revision


def _revisions() -> set[str]:
    return {script.revision for script in _scripts().walk_revisions()}


def _scripts() -> ScriptDirectory:
    return ScriptDirectory(str(SCRIPTS))


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(SCRIPTS).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config
