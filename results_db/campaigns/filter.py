"""The filter of lists of campaigns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from layout_tuner.results_db.records import CampaignState, Visibility


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFilter:
    """Conditions that campaigns must all meet; None and the empty tuple set no condition."""

    states: Sequence[CampaignState] = ()
    model: str | None = None
    cluster: str | None = None
    strategy: str | None = None
    objective: str | None = None
    """Any of the campaign's objectives."""
    created_by: str | None = None
    """Its owner."""
    visibility: Visibility | None = None
    group: str | None = None
    name_contains: str | None = None
    """A part of the campaign's name, without regard to case."""
    created_after: datetime | None = None
    """At this time or later."""
    created_before: datetime | None = None


EVERY_CAMPAIGN: Final = CampaignFilter()
