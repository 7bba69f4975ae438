"""Points in time as requests have them: a date with a time of day and a zone, never a bare number."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AwareDatetime, BeforeValidator


def _refuse_numbers(value: Any) -> Any:
    """2026 would be read as half an hour after midnight of 1 January 1970."""
    try:
        float(value)
    except (TypeError, ValueError):
        return value
    raise ValueError("a time is written as 2026-01-31T12:00:00Z, not as a number")


Moment = Annotated[AwareDatetime, BeforeValidator(_refuse_numbers)]
"""A point in time that a request names."""
