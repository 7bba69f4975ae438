"""Ranked layouts by the values of one knob or of two, for plots of knobs."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import func, select

from results_db.database.store_base import StoreSection
from results_db.events.event_log import CampaignResults
from results_db.models.standings import LeaderboardRow


class KnobCell(NamedTuple):
    """The ranked layouts with some values of knobs."""

    values: tuple[Any, ...]
    """One for each knob."""
    num_layouts: int
    best: float
    """The campaign's own objective of the best of them."""


class LeaderboardCells(StoreSection):
    """The store's method for plots of knobs."""

    def knob_cells(self, campaign_id: int, *knobs: str) -> list[KnobCell]:
        """All ranked layouts of a campaign by the values of knobs, however many there are.

        Args:
            campaign_id: the campaign.
            knobs: names of fields of a layout.
        """
        columns = [getattr(LeaderboardRow, name) for name in knobs]
        query = (
            select(*columns, func.count(), func.max(LeaderboardRow.value))
            .where(LeaderboardRow.campaign_id == campaign_id)
            .group_by(*columns)
        )
        with self._db.read() as session:
            return CampaignResults(self._cache, session, campaign_id).get(
                ("knob cells", knobs),
                lambda: [
                    KnobCell(tuple(values), count, best)
                    for *values, count, best in session.execute(query)
                ],
            )
