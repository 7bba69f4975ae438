"""Which campaigns a list shows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from results_db.records import CampaignState


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignFilter:
    """What campaigns must meet, all of it; None and the empty tuple ask nothing."""

    states: Sequence[CampaignState] = ()
    model: str | None = None
    """Name of the model."""
    cluster: str | None = None
    """Name of the cluster."""
    strategy: str | None = None
    objective: str | None = None
    """Any of the campaign's objectives."""
    created_by: str | None = None
    """Name of the token that submitted it."""
    name_contains: str | None = None
    """A part of the campaign's name, in upper or lower case."""
    created_after: datetime | None = None
    """This moment or later."""
    created_before: datetime | None = None
    """Earlier than this moment."""


EVERY_CAMPAIGN: Final = CampaignFilter()
