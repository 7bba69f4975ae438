"""Making HTML out of values: whatever is not markup already becomes text, so that nothing can be forgotten."""

from __future__ import annotations

import re
from html import escape
from typing import Final

_LINE_BREAKS: Final = frozenset("\n\t")
_COLOURS_OF_TERMINALS: Final = re.compile(r"\x1b\[[0-9;]*m")
_FOLLOWED_BY_NOTHING: Final = frozenset({"meta", "br"})


class Markup:
    """HTML that was made here. No subclass of str: joined to a text by accident, it raises."""

    def __init__(self, html: str) -> None:
        self.html = html


Content = Markup | str | int | float | None
"""What stands in an element: None is nothing, all but markup is text."""


def text(value: str) -> Markup:
    """A text as it is read; what cannot be shown, or would turn a line's direction, is spelled out."""
    plain = _COLOURS_OF_TERMINALS.sub("", value).replace("\r\n", "\n")
    return Markup(escape("".join(map(_shown, plain))))


def tag(element: str, /, *content: Content, **attributes: str | float | None) -> Markup:
    """An element. An attribute's underscore is a hyphen, one at its end is dropped; None leaves it out."""
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{_attribute(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if element in _FOLLOWED_BY_NOTHING:
        return Markup(f"<{element}{written}>")
    return Markup(f"<{element}{written}>{join(*content).html}</{element}>")


def join(*content: Content) -> Markup:
    """Several pieces, one after the other."""
    return Markup("".join(_html(each) for each in content))


def _html(content: Content) -> str:
    if content is None:
        return ""
    return (content if isinstance(content, Markup) else text(str(content))).html


def _attribute(value: str | float) -> str:
    if isinstance(value, float):
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return text(str(value)).html


def _shown(character: str) -> str:
    if character.isprintable() or character in _LINE_BREAKS:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
