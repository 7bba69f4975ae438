"""Where a page of trials ended, as clients carry it."""

from __future__ import annotations

import base64
import json
import math
from typing import Any, Final

from api.errors import PageInvalidError
from results_db.trial_filter import MAX_BOUND, MAX_KNOB
from results_db.trial_order import KNOWN_AT_THE_END, SORT_KEYS, PageEnd, TrialOrder

MAX_CURSOR: Final = 200
"""Longest cursor in characters, longer than any that is written."""

_SECONDS_AND_RATES: Final = KNOWN_AT_THE_END - {"ended_at", "peak_memory_bytes"}
"""Keys whose values are no whole numbers."""

_DIRECTION: Final = {False: "asc", True: "desc"}


def write_trial_cursor(end: PageEnd, campaign_id: int, order: TrialOrder) -> str:
    """The end of a page; what is in it is our business."""
    parts = [
        campaign_id,
        order.key,
        _DIRECTION[order.descending],
        end.ended_seq,
        end.value,
        end.trial_id,
    ]
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def read_trial_cursor(cursor: str, campaign_id: int, order: TrialOrder) -> PageEnd:
    """Reads `write_trial_cursor` back.

    Raises:
        PageInvalidError: this service never wrote it, or wrote it for another list.
    """
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


def _parts(cursor: str) -> list[Any] | None:
    """What was written, or None where it was not."""
    try:
        text = base64.b64decode(cursor + "=" * (-len(cursor) % 4), altchars=b"-_", validate=True)
        parts = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(parts, list) or len(parts) != 6:
        return None
    campaign_id, key, direction, ended_seq, value, trial_id = parts
    texts_fit = key in SORT_KEYS and direction in ("asc", "desc")
    ids_fit = all(type(part) is int and 0 <= part <= MAX_KNOB for part in (campaign_id, trial_id))
    seq_fits = type(ended_seq) is int and 0 <= ended_seq <= MAX_KNOB
    return parts if texts_fit and ids_fit and seq_fits and _is_value(key, value) else None


def _is_value(key: str, value: object) -> bool:
    """Whether a trial can have this value of a key; databases refuse to compare some others."""
    if key in KNOWN_AT_THE_END and value is None:
        return True
    if key in _SECONDS_AND_RATES:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]
    most = MAX_BOUND if key == "peak_memory_bytes" else MAX_KNOB
    return type(value) is int and 0 <= value <= most
