"""Options of several commands: the database, how long its rows are kept, who sees campaigns.

It imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

import click

from layout_tuner.cli.options.command_options import data_dir_option, together
from layout_tuner.protocol.connection.service_address import DATABASE_VARIABLE

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

database_place_options = together(
    data_dir_option("Where the service keeps its database."), database_option
)

default_visibility_option = click.option(
    "--default-visibility",
    type=click.Choice(("private", "group", "everyone")),
    default="everyone",
    envvar="LAYOUT_TUNER_DEFAULT_VISIBILITY",
    show_envvar=True,
    show_default=True,
    help="Who sees a campaign that is submitted without --visibility.",
)

half_life_option = click.option(
    "--share-half-life",
    type=click.FloatRange(1.0, 3650.0),
    envvar="LAYOUT_TUNER_SHARE_HALF_LIFE",
    show_envvar=True,
    default=7.0,
    show_default=True,
    metavar="DAYS",
    help="Time in which what owners have used of a cluster halves, for fair shares.",
)

keep_option = click.option(
    "--keep",
    multiple=True,
    envvar="LAYOUT_TUNER_KEEP",
    show_envvar=True,
    metavar="KIND=DAYS",
    help="Days for which logs, iterations, events, audit, requests or messages are kept; KIND=forever "
    "keeps all. [default: events=30 requests=7 messages=30, all else for ever]",
)
