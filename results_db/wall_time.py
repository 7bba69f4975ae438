"""The wall time of a campaign: how much of it each look at its clock adds."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from layout_tuner.results_db.models.tables import Campaign

MAX_CLOCK_GAP_S: Final = 15.0
"""Longest gap between two ticks of the driver that counts as wall time of a campaign."""


def clock_seconds(campaign: Campaign, now: datetime) -> float:
    """Seconds to add to the campaign's wall time, at most `MAX_CLOCK_GAP_S`.

    In a longer gap no driver was at work.
    """
    if campaign.clock_at is None:
        return 0.0
    return min(max((now - campaign.clock_at).total_seconds(), 0.0), MAX_CLOCK_GAP_S)


def stop_clock(campaign: Campaign, now: datetime) -> None:
    """Adds the wall time up to now, and lets the campaign's clock stand."""
    campaign.wall_time_s += clock_seconds(campaign, now)
    campaign.clock_at = None
