"""Elements of SVG and HTML from values. A value that is not `Markup` becomes text."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from markupsafe import Markup, escape

from layout_tuner.terminal.console import escaped

WIDTH: Final = 860
"""Width of a plot that fills the page, in its own units."""

_LARGE: Final = 700
"""Plots from this width on may shrink to it, where the page is narrower than they are."""

_COLOURS_OF_TERMINALS: Final = re.compile(r"\x1b\[[0-9;]*m")


Content = Markup | str | int | float | None
"""Content of an element: None is empty; all but markup becomes text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plot:
    """A plot with the sentences that belong to it."""

    svg: Markup
    notes: tuple[str, ...] = ()
    """What it leaves out or assumes."""


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
    # Names of elements and attributes are the code's; values and texts are escaped.
    return Markup(f"<{element}{written}>{join(*content)}</{element}>")  # noqa: S704


def join(*content: Content) -> Markup:
    return Markup("".join(_html(each) for each in content))  # noqa: S704


def number(value: float) -> str:
    """A coordinate with up to two decimals."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


def svg_tag(width: float, height: float, *content: Markup, says: str) -> Markup:
    """A plot that scales with the page; `says` is its text for screen readers.

    With an empty text, screen readers skip it: its numbers stand beside it.
    """
    return tag(
        "svg",
        *content,
        viewBox=f"0 0 {number(width)} {number(height)}",
        width=number(width),
        height=number(height),
        class_="large" if width >= _LARGE else None,
        role="img" if says else None,
        aria_label=says or None,
        aria_hidden=None if says else "true",
    )


def hatching(left: float, top: float, width: float, height: float) -> Markup:
    """Slanted lines over a part of a bar."""
    right, bottom = left + width, top + height
    path = ""
    at = left - height
    while at < right:
        at += 7.0
        start, end = max(at, left), min(at + height, right)
        if end > start:
            rise = f"{number(bottom - (start - at))}L{number(end)} {number(bottom - (end - at))}"
            path += f"M{number(start)} {rise}"
    return tag("path", d=path, class_="hatching")


def visible(value: Any) -> Any:
    """A text without terminal colours, and with its control characters made visible."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return escaped(_COLOURS_OF_TERMINALS.sub("", value).replace("\r\n", "\n"))
    return value


def _html(content: Content) -> str:
    if content is None:
        return ""
    return content if isinstance(content, Markup) else escape(visible(str(content)))


def _attribute(value: str | float) -> str:
    return number(value) if isinstance(value, float) else escape(visible(str(value)))
