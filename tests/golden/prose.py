"""Documents of what people read; a change of wording rewrites them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import click

from api.cli import main, walk_commands
from api.openapi_document import openapi_text
from tests.golden.service import recorded

WIDTH = 100
TEXT_KEYS = ("title", "summary", "description")


def help_texts() -> list[str]:
    """The help of every command."""
    width = {"terminal_width": WIDTH, "max_content_width": WIDTH}
    root = click.Context(main, info_name="layout-tuner", **width, **main.context_settings)
    lines = []
    for context in walk_commands(root):
        lines.append(f"$ {context.command_path} --help")
        lines += context.command.get_help(context).splitlines()
    return lines


def api() -> list[str]:
    """Texts of the API's description, each at the first place that has it."""
    places: dict[str, str] = {}
    for place, text in _texts(json.loads(openapi_text()), "", is_schema=True):
        places.setdefault(text, place)
    return sorted(f"{place}: {json.dumps(text)}" for text, place in places.items())


def _texts(value: Any, place: str, *, is_schema: bool) -> Iterator[tuple[str, str]]:
    children = enumerate(value) if isinstance(value, list) else value.items()
    for key, inner in children:
        where = f"{place}/{key}"
        if is_schema and key in TEXT_KEYS and isinstance(inner, str):
            automatic = place.rpartition("/")[2].replace("_", " ").title()
            if inner != automatic:
                yield where, re.sub(r"\bsearch_spaces(\.\w+)+", "<module>", inner)
        elif isinstance(inner, dict | list) and key not in ("example", "examples"):
            yield from _texts(inner, where, is_schema=key != "properties")


def refusals() -> list[str]:
    """What the service says to requests that it refuses."""
    return recorded()["refusals"]


def exports() -> list[str]:
    """Comments and notes of the exported files."""
    return [line.removeprefix("prose   ") for line in recorded()["exports"] if "prose " in line]
