"""HTML from values. A value that is not `Markup` becomes text, so that all text is escaped."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from search_spaces.terminal.console import escaped

_COLOURS_OF_TERMINALS: Final = re.compile(r"\x1b\[[0-9;]*m")
_FOLLOWED_BY_NOTHING: Final = frozenset({"meta", "br"})


class Markup:
    """HTML made by this module. It is no str: adding it to a text by accident raises."""

    def __init__(self, html: str) -> None:
        self.html = html


Content = Markup | str | int | float | None
"""Content of an element: None is empty; all but markup becomes text."""


def text(value: str) -> Markup:
    """A text. Terminal colours are removed; invisible characters are escaped as in a terminal."""
    plain = _COLOURS_OF_TERMINALS.sub("", value).replace("\r\n", "\n")
    return Markup(escape(escaped(plain)))


def tag(element: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """An element.

    In names of attributes an underscore becomes a hyphen, and one at the end is dropped. An
    attribute that is None is left out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in _FOLLOWED_BY_NOTHING:
        return Markup(f"<{element}{written}>")
    return Markup(f"<{element}{written}>{join(*content).html}</{element}>")


def join(*content: Content) -> Markup:
    """Several pieces in one."""
    return Markup("".join(_html(each) for each in content))


def table(columns: Sequence[str], rows: Iterable[Sequence[Content]]) -> Markup:
    """A table; a column whose name begins with ">" is right-aligned."""
    kinds = ["number" if column.startswith(">") else None for column in columns]
    heads = [
        tag("th", column.removeprefix(">"), class_=kind)
        for column, kind in zip(columns, kinds, strict=True)
    ]
    body = [
        tag(
            "tr",
            *(tag("td", cell, class_=kind) for cell, kind in zip(row, kinds, strict=True)),
        )
        for row in rows
    ]
    head = tag("thead", tag("tr", *heads))
    return tag("div", tag("table", head, tag("tbody", *body)), class_="wide")


def pairs(rows: Iterable[tuple[str, Content]]) -> Markup:
    """A table of names and values."""
    return tag(
        "table",
        *(tag("tr", tag("th", name, scope="row"), tag("td", value)) for name, value in rows),
        class_="pairs",
    )


def section(title: str, *content: Content) -> Markup:
    """A section of the report with its title."""
    return tag("section", tag("h2", title), *content)


def note(*content: Content) -> Markup:
    """A remark in small type."""
    return tag("p", *content, class_="note")


def _html(content: Content) -> str:
    if content is None:
        return ""
    return (content if isinstance(content, Markup) else text(str(content))).html


def _attribute(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(str(value)).html
