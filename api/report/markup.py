"""Parts of the report's document."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup

from api.dashboard.drawings.svg import Content, join, tag

__all__ = ["Content", "Markup", "join", "note", "pairs", "section", "table", "tag"]


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
