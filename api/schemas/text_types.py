"""Texts that clients send outside of documents: in a query, a header, a note."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, StringConstraints

MAX_QUERY_TEXT: Final = 200
MAX_NOTES: Final = 10_000

_FIRST_DAY: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_DAY: Final = datetime(9000, 1, 1, tzinfo=UTC)

QueryText = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_QUERY_TEXT, pattern=r"^[^\x00-\x1f\x7f]+$")
]
"""A line of text: control characters are in no name, and one database takes no NUL."""


def _within_reason(moment: datetime) -> datetime:
    if not _FIRST_DAY <= moment <= _LAST_DAY:
        raise ValueError("the time is not between the years 1970 and 9000")
    return moment.astimezone(UTC)


def _refuse_number(value: Any) -> Any:
    """2026 would be read as half an hour after midnight of 1 January 1970."""
    try:
        float(value)
    except (TypeError, ValueError):
        return value
    raise ValueError("a time is written as 2026-01-31T12:00:00Z, not as a number")


Moment = Annotated[AwareDatetime, BeforeValidator(_refuse_number), AfterValidator(_within_reason)]
"""A point in time with its zone."""


def _refuse_unprintable(notes: str) -> str:
    for character in notes:
        if not character.isprintable() and character not in "\n\t":
            raise ValueError(
                f"the character {character!r} cannot be shown; write text of lines and tabs"
            )
    return notes


Notes = Annotated[str, Field(max_length=MAX_NOTES), AfterValidator(_refuse_unprintable)]
"""Text of several lines."""

IdempotencyKeyText = Annotated[
    str, StringConstraints(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")
]
"""Printable ASCII without spaces, as a UUID."""
