"""How tables look in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from api.figures import duration as duration
from api.figures import figure as figure
from api.figures import layout_extras as layout_extras
from api.figures import memory as memory
from api.figures import objective_figure as objective_figure
from api.figures import unit as unit
from api.figures import zero as zero


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Prints a table; a column whose name begins with ">" stands to the right."""
    # Plain text throughout: what users named with brackets would be taken for rich's markup.
    table = Table(title=Text(title) if title else None, box=box.SIMPLE_HEAD, title_justify="left")
    for column in columns:
        right = column.startswith(">")
        table.add_column(
            column.removeprefix(">"), justify="right" if right else "left", no_wrap=True
        )
    for row in rows:
        table.add_row(*map(Text, row))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    # In a file nobody sees where a line ends: do not cut it to 80 columns, and do not pad it.
    console = Console(highlight=False, width=240)
    with console.capture() as captured:
        console.print(table)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())
