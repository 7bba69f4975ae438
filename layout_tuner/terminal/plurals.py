"""Counts with singular or plural."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """A number and a noun, which gets an s unless the number is 1."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def figure(value: float, digits: int = 4) -> str:
    """The digits of a number that people read; a thousand and more are whole."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"
