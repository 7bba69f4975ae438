"""The leaderboard: completed trials of a campaign, ranked."""

from __future__ import annotations

from sqlalchemy import ColumnElement, and_, func, select
from sqlalchemy.orm import contains_eager

from results_db.errors import ObjectiveUnknownError
from results_db.models import MeasurementRow, Trial
from results_db.part import StorePart
from results_db.records import TrialRecord
from results_db.rows import MEASUREMENT_PARTS, trial_record
from search_spaces.objectives import OBJECTIVES, SECONDS_PER_HOUR


class Leaderboard(StorePart):
    """The leaderboard's part of the store."""

    def leaderboard(
        self, campaign_id: int, objective: str, *, limit: int | None = None, offset: int = 0
    ) -> list[TrialRecord]:
        """The campaign's completed trials, the best first; of equals, the earlier one.

        Oversubscribed measurements are never ranked: their ranks shared devices.

        Raises:
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        query = (
            select(Trial)
            .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(_ranked(campaign_id))
            .order_by(_column(objective).desc(), MeasurementRow.trial_id)
            .options(contains_eager(Trial.measurement).options(*MEASUREMENT_PARTS))
            .limit(limit)
            .offset(offset)
        )
        with self._db.read() as session:
            return [trial_record(row) for row in session.scalars(query)]

    def count_ranked(self, campaign_id: int) -> int:
        """How many trials the campaign's leaderboard has."""
        with self._db.read() as session:
            query = (
                select(func.count())
                .select_from(Trial)
                .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
                .where(_ranked(campaign_id))
            )
            return session.scalar(query) or 0


def _ranked(campaign_id: int) -> ColumnElement[bool]:
    # A measurement whose losses are off is kept, and its trial is not COMPLETED.
    return and_(
        MeasurementRow.campaign_id == campaign_id,
        MeasurementRow.oversubscribed.is_(False),
        Trial.state == "COMPLETED",
    )


def _column(objective: str) -> ColumnElement[float]:
    if objective not in OBJECTIVES:
        raise ObjectiveUnknownError(
            f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}"
        )
    if objective == "tokens_per_node_hour":
        return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes
    column: ColumnElement[float] = getattr(MeasurementRow, objective)
    return column
