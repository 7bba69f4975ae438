"""Addresses of databases: which are understood, and how they are shown without their passwords."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from results_db.errors import DatabaseUrlInvalidError

DATABASE_VARIABLE: Final = "LAYOUT_TUNER_DATABASE_URL"
"""The environment variable that names the database; a password in it is seen by nobody else."""

POSTGRESQL: Final = "postgresql"
_SCHEMES: Final[Sequence[str]] = (POSTGRESQL, "postgres", "postgresql+psycopg")
_EXAMPLE: Final = "postgresql://USER@HOST/DATABASE"
_SECRETS: Final = ("password", "sslpassword")


def postgresql_url(text: str) -> str:
    """The same address as SQLAlchemy takes it, for the driver that comes with us.

    Raises:
        DatabaseUrlInvalidError: it is none, or that of another kind of database.
    """
    url = _parsed(text)
    if url.drivername not in _SCHEMES:
        raise DatabaseUrlInvalidError(
            f"the database's URL begins with {url.drivername}://, and only {_EXAMPLE} is understood; "
            "SQLite needs no URL, its database lies in the data directory (--data-dir)"
        )
    if not url.database:
        raise DatabaseUrlInvalidError(
            f"the database's URL {shown(text)} names no database; write {_EXAMPLE}"
        )
    return url.set(drivername="postgresql+psycopg").render_as_string(hide_password=False)


def shown(text: str) -> str:
    """The address without passwords, for messages and logs."""
    url = _parsed(text)
    if url.get_backend_name() == "sqlite":
        return url.database or ":memory:"
    query = {name: value for name, value in url.query.items() if name not in _SECRETS}
    named = url.set(drivername=POSTGRESQL, query=query, password=None)
    return named.render_as_string(hide_password=True)


def _parsed(text: str) -> URL:
    try:
        return make_url(text)
    except (ArgumentError, ValueError):
        # Neither its text nor the error's: a password with a stray @ or / may be anywhere in them.
        raise DatabaseUrlInvalidError(
            f"the database's URL is none: write {_EXAMPLE}, with %40, %3A and %2F for the @, : and / "
            f"of a password, or leave the password to ~/.pgpass; it comes from --database or ${DATABASE_VARIABLE}"
        ) from None
