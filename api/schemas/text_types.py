"""Types of texts in requests: search texts, notes, times, idempotency keys, ids.

The parser of bodies (`documents.json_and_yaml`) refuses lone surrogates and NUL.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AwareDatetime, BeforeValidator, Field, StringConstraints

from layout_tuner.documents.limits import MAX_ID, visible_text_problem
from layout_tuner.documents.pydantic_hooks import Refuses
from layout_tuner.documents.reading import MAX_NAME_LENGTH

MAX_QUERY_TEXT: Final = 200
MAX_NOTES: Final = 10_000

_FIRST_DAY: Final = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_DAY: Final = datetime(9000, 1, 1, tzinfo=UTC)

QueryText = Annotated[
    str, StringConstraints(min_length=1, max_length=MAX_QUERY_TEXT, pattern=r"^[^\x00-\x1f\x7f]+$")
]
"""A line of text without control characters: no name has any, and PostgreSQL cannot store NUL."""


def _within_reason(moment: datetime) -> datetime:
    if not _FIRST_DAY <= moment <= _LAST_DAY:
        raise ValueError("the time is not between the years 1970 and 9000")
    return moment.astimezone(UTC)


def _refuse_number(value: Any) -> Any:
    """Refuses numbers: pydantic would read 2026 as seconds since 1970."""
    try:
        float(value)
    except (TypeError, ValueError):
        return value
    raise ValueError("a time is written as 2026-01-31T12:00:00Z, not as a number")


Moment = Annotated[AwareDatetime, BeforeValidator(_refuse_number), AfterValidator(_within_reason)]
"""A time with its zone."""


def _refuse_unprintable(notes: str) -> str:
    for character in notes:
        if not character.isprintable() and character not in "\n\t":
            raise ValueError(
                f"the character {character!r} cannot be shown; write text of lines and tabs"
            )
    return notes


Notes = Annotated[str, Field(max_length=MAX_NOTES), AfterValidator(_refuse_unprintable)]
"""Text of several lines."""

Reason = Annotated[str, Field(max_length=1000), Refuses(visible_text_problem)]
"""Why a user does something, on one line."""

IdempotencyKeyText = Annotated[
    str, StringConstraints(min_length=1, max_length=255, pattern=r"^[\x21-\x7e]+$")
]
"""Printable ASCII without spaces, for example a UUID."""


def id_in(text: str) -> int | None:
    """The id in a text, as of a path or header; None: the text is not a possible id."""
    if not (len(text) <= MAX_NAME_LENGTH and text.isascii() and text.isdigit()):
        return None  # Python refuses to convert thousands of digits
    number = int(text)
    return number if number <= MAX_ID else None


def campaign_reference(named: str) -> int | str:
    """The id or the name of a campaign in a path; no name is a number."""
    number = id_in(named)
    return named if number is None else number
