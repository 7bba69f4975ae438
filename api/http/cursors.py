"""Cursors: the end of a page, in the form that clients return it."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Final

from layout_tuner.api.errors import PageInvalidError
from layout_tuner.api.schemas.text_types import id_in
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.trials.filter import (
    KNOWN_AT_THE_END,
    MAX_BOUND,
    MAX_KNOB,
    SORT_KEYS,
    PageEnd,
    TrialOrder,
    is_job_key,
)

MAX_CURSOR: Final = 200
"""Most characters of a cursor; those that the service writes are shorter."""

_WHOLE_METRICS: Final = frozenset(name for name, metric in METRICS.items() if metric.is_whole)
_SECONDS_AND_RATES: Final = KNOWN_AT_THE_END - {"ended_at"} - _WHOLE_METRICS
"""Keys whose values are not whole numbers."""

_DIRECTION: Final = {False: "asc", True: "desc"}


def write_cursor(position: int) -> str:
    """The end of a page in a list sorted by id; clients must not interpret it."""
    return _encoded(str(position))


def read_cursor(cursor: str | None) -> int | None:
    """The position in a cursor; PageInvalidError if `write_cursor` did not make it."""
    if cursor is None:
        return None
    try:
        position = id_in(_decoded(cursor))
    except ValueError:
        position = None
    if position is None:
        raise PageInvalidError(f"cursor {cursor[:80]!r} is not one of this service")
    return position


def write_trial_cursor(end: PageEnd, campaign_id: int, order: TrialOrder) -> str:
    """The end of a page of trials; clients must not interpret it."""
    order_parts = [campaign_id, order.key, _DIRECTION[order.descending]]
    return _encoded(json.dumps([*order_parts, end.ended_seq, end.value, end.trial_id]))


def read_trial_cursor(cursor: str, campaign_id: int, order: TrialOrder) -> PageEnd:
    """The end of a page in a cursor; PageInvalidError if it is not a cursor of this list."""
    parts = _parts(cursor)
    if parts is None:
        raise PageInvalidError(
            f"the cursor {cursor[:40]!r} comes from no page of this service; take `next_cursor` of the "
            "page before, or begin without one"
        )
    written_for, end = parts[:3], parts[3:]
    if written_for != [campaign_id, order.key, _DIRECTION[order.descending]]:
        raise PageInvalidError(
            f"the cursor is of campaign {parts[0]} sorted by {parts[1]} {parts[2]}, not of campaign "
            f"{campaign_id} by {order.key} {_DIRECTION[order.descending]}; begin without a cursor"
        )
    return PageEnd(ended_seq=end[0], value=end[1], trial_id=end[2])


def _encoded(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _decoded(cursor: str) -> str:
    padded = cursor + "=" * (-len(cursor) % 4)
    return base64.b64decode(padded, altchars=b"-_", validate=True).decode()


def _parts(cursor: str) -> list[Any] | None:
    """The parts of a cursor of trials; None: this service did not write it."""
    try:
        parts = json.loads(_decoded(cursor))
    except (ValueError, RecursionError):
        return None
    if not isinstance(parts, list) or len(parts) != 6:
        return None
    campaign_id, key, direction, ended_seq, value, trial_id = parts
    texts_fit = (key in SORT_KEYS or is_job_key(str(key))) and direction in ("asc", "desc")
    numbers = (campaign_id, trial_id, ended_seq)
    numbers_fit = all(type(part) is int and 0 <= part <= MAX_KNOB for part in numbers)
    return parts if texts_fit and numbers_fit and _is_value(key, value) else None


def _is_value(key: str, value: object) -> bool:
    """Whether a trial can have this value of a key; databases cannot compare some other values."""
    if key in KNOWN_AT_THE_END and value is None:
        return True
    if key in _SECONDS_AND_RATES:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    most = MAX_BOUND if key in _WHOLE_METRICS or is_job_key(key) else MAX_KNOB
    least = -1 if is_job_key(key) else 0
    return type(value) is int and least <= value <= most
