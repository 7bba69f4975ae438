"""How commands print what the service answers: as JSON, or as labels and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import click
from pydantic import BaseModel

_LABEL_WIDTH: Final = 14

json_option: Final = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def print_json(document: BaseModel) -> None:
    """Prints a document of the service as JSON."""
    click.echo(document.model_dump_json(indent=2))


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints labels and values; the further lines of a value are indented like the first."""
    for label, value in facts:
        click.echo(f"{label:<{_LABEL_WIDTH}}{value}".replace("\n", f"\n{'':<{_LABEL_WIDTH}}"))
