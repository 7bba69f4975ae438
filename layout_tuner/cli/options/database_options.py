"""Options of several commands: the database, how long its rows are kept, who sees campaigns.

It imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

from typing import Final

import click

from layout_tuner.cli.options.command_options import data_dir_option, together
from layout_tuner.cli.options.refusals import refuse
from layout_tuner.documents.duration import read_duration_s
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

HALF_LIFE_VARIABLE: Final = "LAYOUT_TUNER_SHARE_HALF_LIFE"

half_life_option = click.option(
    "--share-half-life",
    envvar=HALF_LIFE_VARIABLE,
    show_envvar=True,
    default="7d",
    show_default=True,
    metavar="TIME",
    help="Time in which what owners have used of a cluster halves, for fair shares.",
)


def read_half_life_s(text: str) -> float:
    """The seconds of a half-life; ends the command unless it is from a second to ten years."""
    seconds = read_duration_s(text, field="--share-half-life")
    if not 1.0 <= seconds <= 3650 * 86_400.0:
        refuse(f"--share-half-life={text} is not from 1s to 3650d; 7d is the default")
    return seconds


keep_option = click.option(
    "--keep",
    multiple=True,
    envvar="LAYOUT_TUNER_KEEP",
    show_envvar=True,
    metavar="KIND=DAYS",
    help="Days for which logs, iterations, events, audit, requests or messages are kept; KIND=forever "
    "keeps all. [default: events=30 requests=7 messages=30, all else for ever]",
)
