"""Texts that would become code, or another text, where they are copied as they are."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any, Final

from hypothesis import strategies as st

Place = tuple[str | int, ...]

PARTS: Final = (
    *("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"),
    *("touch hostile", "import os", "x = 1", "a: 1", "- a", "[a]", "}", ";", "&&", "exit 1", "EOF"),
    *("'", '"', "'''", '"""', "`touch hostile`", "$(touch hostile)", "${x}", "<<EOF", "(", ")"),
    *(
        "#",
        "%",
        "%YAML 1.1",
        "{}",
        "{tp}",
        "{head}",
        "{0}",
        "\\",
        "\\\n",
        "---",
        "...",
        "</script>",
    ),
    *(
        "coding: utf-7 ",
        "+AAo-x=1 ",
        "\t",
        " ",
        "\0",
        "\x1b[2K",
        "\x7f",
        "\ufeff",
        "\ufffe",
        "\ud800",
    ),
    *("\u202e", "\u200f", "\u2066", "\u200b", "\u00e9", "\U0001f386"),
)
"""Ends of lines of every kind, code and marks of the languages, and what cannot be shown."""

hostile_texts: Final = st.lists(
    st.sampled_from(PARTS) | st.characters(), min_size=1, max_size=12
).map("".join)


def walk(document: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """A document and all values in it, each after its place."""
    yield place, document
    inner = document.items() if isinstance(document, dict) else ()
    if isinstance(document, (list, tuple)):
        inner = enumerate(document)
    for name, value in inner:
        yield from walk(value, (*place, name))


def text_places(document: Any) -> list[Place]:
    """Where the texts of a document are."""
    return [place for place, value in walk(document) if isinstance(value, str)]


def mappings(document: Any) -> list[Place]:
    """Where a document has names: a client may choose those of versions and parameters."""
    return [place for place, value in walk(document) if isinstance(value, dict)]


def changed(document: Any, place: Place, value: Any) -> Any:
    """The document with another value, or a further one, at a place; lists in place of tuples."""
    changed = _copied(document)
    holder = changed
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    return changed


def _copied(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: _copied(value) for name, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [_copied(value) for value in document]
    return copy.copy(document)
