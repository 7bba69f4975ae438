"""The option that names the database; every command that opens one takes it.

Apart from all else of this room: `--help` answers at once.
"""

from __future__ import annotations

from typing import Final

import click

DATABASE_VARIABLE: Final = "LAYOUT_TUNER_DATABASE_URL"
"""The environment variable that names the database; a password in it is not in the list of processes."""

database_option = click.option(
    "--database",
    envvar=DATABASE_VARIABLE,
    metavar="URL",
    help=(
        "A PostgreSQL instead of the data directory's SQLite: postgresql://USER@HOST/DATABASE. "
        f"With a password, better as ${DATABASE_VARIABLE} or in ~/.pgpass.  "
        "[default: SQLite in the data directory]"
    ),
)
