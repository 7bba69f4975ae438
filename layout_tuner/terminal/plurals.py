"""Counts with singular or plural, short lists, and the beginning of a sentence."""

from __future__ import annotations

from collections.abc import Iterable


def capitalised(text: str) -> str:
    """A text with a capital first letter, as a sentence begins; the rest is as it was."""
    return f"{text[:1].upper()}{text[1:]}"


def counted(number: int, thing: str) -> str:
    """A number and a noun, which gets an s unless the number is 1."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def listed(texts: Iterable[str], most: int) -> str:
    """The first texts with commas between them, and the number of the others."""
    every = list(texts)
    more = f" and {len(every) - most} more" if len(every) > most else ""
    return f"{', '.join(every[:most])}{more}"


def figure(value: float, digits: int = 4) -> str:
    """The digits of a number that people read; a thousand and more are whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
