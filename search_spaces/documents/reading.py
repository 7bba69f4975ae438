"""Reading what a user wrote: the checks that every document shares, each with a clear error."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping
from typing import Any, Final, TypeGuard

from search_spaces.errors import SearchSpaceError

MAX_COUNT: Final = 1 << 20
"""Largest count a knob may have (ranks, micro-batches, sequences): products of three fit 64 bits."""

MAX_WIDTH: Final = 1 << 31
"""Largest size of a model's dimension."""

MAX_NAME_LENGTH: Final = 64

MAX_TEXT_LENGTH: Final = 1000
"""Longest line of free text: what a device is, where numbers come from, a warning."""


_URL_NAME: Final = re.compile(r"(?!\d+$)[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def read_mapping(value: object, error: type[SearchSpaceError], what: str) -> dict[str, Any]:
    """A copy of `value`, once it is known to be a mapping whose keys are strings."""
    if not isinstance(value, Mapping):
        raise error(f"{what} is {shown(value)}, not a mapping of fields to values")
    for key in value:
        if not isinstance(key, str):
            raise error(f"{what} has the key {shown(key)}, which is not a string")
    return dict(value)


def refuse_unknown(
    given: Collection[str], known: Collection[str], error: type[SearchSpaceError], what: str
) -> None:
    """Refuses names outside `known`, suggests the nearest, and lists them all."""
    for name in given:
        if name not in known:
            raise error(f"unknown {what} {shown(name)}{nearest(name, known)}")


def nearest(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name: the nearest known one, then all of them."""
    matches = difflib.get_close_matches(name, known, n=1)
    guess = f" (did you mean {matches[0]!r}?)" if matches else ""
    return f"{guess}; choose from {', '.join(known)}"


def read_choice(
    value: object, choices: Collection[str], error: type[SearchSpaceError], *, field: str
) -> str:
    """One of a few words."""
    if not isinstance(value, str):
        raise error(f"{shown(value)} is not one of {', '.join(choices)}", field=field)
    if value not in choices:
        raise error(f"{shown(value)} is unknown{nearest(value, choices)}", field=field)
    return value


def whole_number_problem(value: object, low: int = 1, high: int = MAX_COUNT) -> str | None:
    """Why `value` is not a whole number from `low` to `high`, or None. A bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, int):
        return f"{shown(value)} is not a whole number of at least {low}"
    if value < low:
        return f"{shown(value)} is not a whole number of at least {low}"
    if value > high:
        return f"{shown(value)} is more than {high}, the largest that is accepted"
    return None


def is_positive_number(value: object) -> TypeGuard[int | float]:
    """Whether `value` is a finite number over 0 (and not a bool)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an int beyond the range of floats
        return False


def is_name(value: object) -> bool:
    """Whether `value` is a short printable string, fit for a table's column."""
    return isinstance(value, str) and 1 <= len(value) <= MAX_NAME_LENGTH and value.isprintable()


def url_name_problem(value: object) -> str | None:
    """Why `value` is no name of a campaign, or of a user's own model or cluster; None: it is one.

    Such names stand in URLs, beside ids: they are neither numbers nor a step up a path.
    """
    if isinstance(value, str) and _URL_NAME.fullmatch(value):
        return None
    return (
        f"{shown(value)} is not 1 to 64 characters of A-Z a-z 0-9 . _ - that begin with a letter or "
        "digit and are not digits alone"
    )


def is_line(value: object) -> bool:
    """Whether `value` is printable text of one line (possibly empty): no lone surrogate either."""
    return isinstance(value, str) and len(value) <= MAX_TEXT_LENGTH and value.isprintable()


def is_encodable(value: str) -> bool:
    """Whether text can be stored and sent: a lone surrogate, which JSON can spell, cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def shown(value: object) -> str:
    """`value` as a message shows it: its repr, cut short."""
    try:
        text = repr(value)
    except ValueError:  # an int of more digits than Python prints
        return "a number of thousands of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."
