"""The option that names the database; every command that opens one takes it.

It imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

import click

from search_spaces.connection.service_address import DATABASE_VARIABLE as DATABASE_VARIABLE

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
