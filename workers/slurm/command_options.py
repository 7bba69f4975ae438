"""What the commands about allocations share: options, tables, and how they end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from search_spaces.errors import SearchSpaceError
from search_spaces.pinned_certificate import CERTIFICATE_VARIABLE
from workers.command_input import fail, refuse
from workers.errors import WorkerError

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
url_option: Final = click.option(
    "--url",
    envvar="LAYOUT_TUNER_URL",
    required=True,
    show_envvar=True,
    help="Address of the service; for `submit`, as the nodes reach it.",
)
token_file_option: Final = click.option(
    "--token-file",
    envvar="LAYOUT_TUNER_TOKEN_FILE",
    required=True,
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="File that holds a token of the service; for `submit` a worker's, on a disk that the nodes see.",
)
certificate_option: Final = click.option(
    "--certificate",
    envvar=CERTIFICATE_VARIABLE,
    show_envvar=True,
    type=click.Path(path_type=Path),
    help="Certificate of a service that no authority vouches for: it is trusted by itself.",
)


@contextmanager
def refusals() -> Iterator[None]:
    """What a user wrote wrong ends the command with exit code 2, what does not work with 1."""
    try:
        yield
    except SearchSpaceError as error:
        refuse(str(error))
    except WorkerError as error:
        fail(str(error))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Columns of text; one whose name begins with ">" stands to the right."""
    table = [tuple(column.removeprefix(">") for column in columns), *rows]
    widths = [max(len(row[position]) for row in table) for position in range(len(columns))]
    for row in table:
        cells = (
            cell.rjust(width) if column.startswith(">") else cell.ljust(width)
            for cell, width, column in zip(row, widths, columns, strict=True)
        )
        click.echo(f"{indent}{'  '.join(cells)}".rstrip())
