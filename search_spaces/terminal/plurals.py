"""Numbers of things, as sentences have them."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """The number and the thing, which takes an s unless there is one of it."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
