"""URLs of databases: parsing, and display without passwords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from layout_tuner.protocol.connection.service_address import DATABASE_VARIABLE
from layout_tuner.results_db.errors import DatabaseUrlInvalidError

_SCHEMES: Final[Sequence[str]] = ("postgresql", "postgres", "postgresql+psycopg")
_EXAMPLE: Final = "postgresql://USER@HOST/DATABASE"
_SECRETS: Final = ("password", "sslpassword", "passfile")


def postgresql_url(text: str) -> str:
    """The URL as SQLAlchemy needs it, for the driver psycopg.

    Raises:
        DatabaseUrlInvalidError: it is invalid, or names another kind of database.
    """
    url = _parsed(text)
    if url.drivername not in _SCHEMES:
        raise DatabaseUrlInvalidError(
            f"the database's URL begins with {url.drivername}://, and only {_EXAMPLE} is understood; "
            "SQLite needs no URL, its database lies in the data directory (--data-dir)"
        )
    if not url.database:
        raise DatabaseUrlInvalidError(
            f"the database's URL {shown_url(url)} names no database; write {_EXAMPLE}"
        )
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def shown(text: str) -> str:
    """The URL without passwords, for messages; DatabaseUrlInvalidError if it is malformed."""
    return shown_url(_parsed(text))


def shown_url(url: URL) -> str:
    """The URL without passwords, for messages and logs; for SQLite the file."""
    if url.get_backend_name() == "sqlite":
        return url.database or ":memory:"
    query = {name: value for name, value in url.query.items() if name not in _SECRETS}
    named = URL.create("postgresql", url.username, None, url.host, url.port, url.database, query)
    return named.render_as_string(hide_password=True)


def _parsed(text: str) -> URL:
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        # Without the URL or the text of the error, which may contain a password.
        raise DatabaseUrlInvalidError(
            f"the database's URL is none: write {_EXAMPLE}, with %40, %3A and %2F for the @, : and / "
            "of a password, or leave the password to ~/.pgpass; it was given with --database or "
            f"${DATABASE_VARIABLE}"
        ) from None
