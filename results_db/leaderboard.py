"""The leaderboard: completed trials of a campaign, ranked."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from sqlalchemy import ColumnElement, and_, func, select, true
from sqlalchemy.orm import contains_eager

from results_db.errors import ObjectiveUnknownError
from results_db.models import Campaign, MeasurementRow, Trial
from results_db.part import StorePart
from results_db.records import CampaignRecord, TrialRecord
from results_db.rows import MEASUREMENT_PARTS, trial_record
from search_spaces.objectives import (
    OBJECTIVES,
    SECONDS_PER_HOUR,
    measured_objective,
    pareto_front,
)


class Leaderboard(StorePart):
    """The leaderboard's part of the store."""

    def leaderboard(
        self,
        campaign_id: int,
        objective: str,
        *,
        among: Collection[int] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[TrialRecord]:
        """The campaign's completed trials, the best first; of equals, the earlier one.

        Oversubscribed measurements are never ranked: their ranks shared devices. Nor are those that
        break the campaign's constraints.

        Args:
            campaign_id: of the campaign.
            objective: what to rank by.
            among: ids of the trials to list; None: every ranked one.
            limit: most trials to return.
            offset: how many of the best to pass over.

        Raises:
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        query = (
            select(Trial)
            .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(ranked(campaign_id))
            .where(true() if among is None else Trial.id.in_(among))
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
                .where(ranked(campaign_id))
            )
            return session.scalar(query) or 0

    def count_constrained(self, campaign_id: int) -> int:
        """How many completed trials are not ranked since they break the campaign's constraints."""
        with self._db.read() as session:
            query = (
                select(func.count())
                .select_from(Trial)
                .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
                .where(_counts(campaign_id), ~_keeps_constraints(campaign_id))
            )
            return session.scalar(query) or 0

    def front(self, campaign: CampaignRecord) -> frozenset[int]:
        """Ids of the ranked trials that no other beats, over all objectives of the campaign."""
        query = (
            select(
                Trial.id,
                Trial.num_nodes,
                MeasurementRow.tokens_per_s,
                MeasurementRow.tokens_per_s_per_device,
                MeasurementRow.model_tflops_per_device,
                MeasurementRow.hardware_tflops_per_device,
                MeasurementRow.peak_memory_bytes,
            )
            .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(ranked(campaign.id))
            .order_by(Trial.id)
        )
        with self._db.read() as session:
            rows = session.execute(query).all()
        device_memory_bytes = campaign.spec["cluster"].get("device_memory_bytes")
        values = [
            [
                measured_objective(
                    name, row, num_nodes=row.num_nodes, device_memory_bytes=device_memory_bytes
                )
                for name in campaign.objectives
            ]
            for row in rows
        ]
        is_front = pareto_front(np.array(values, dtype=np.float64))
        return frozenset(row.id for row, stands in zip(rows, is_front, strict=True) if stands)


def ranked(campaign_id: int) -> ColumnElement[bool]:
    """The trials of a campaign, joined with their measurements, that its leaderboard has."""
    return and_(_counts(campaign_id), _keeps_constraints(campaign_id))


def _counts(campaign_id: int) -> ColumnElement[bool]:
    # A measurement whose losses are off is kept, and its trial is not COMPLETED.
    return and_(
        MeasurementRow.campaign_id == campaign_id,
        MeasurementRow.oversubscribed.is_(False),
        Trial.state == "COMPLETED",
    )


def _keeps_constraints(campaign_id: int) -> ColumnElement[bool]:
    bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
    allowed = func.coalesce(bound.scalar_subquery(), MeasurementRow.peak_memory_bytes)
    return MeasurementRow.peak_memory_bytes <= allowed


def _column(objective: str) -> ColumnElement[float]:
    if objective not in OBJECTIVES:
        raise ObjectiveUnknownError(
            f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}"
        )
    if objective == "tokens_per_node_hour":
        return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes
    column: ColumnElement[float] = getattr(MeasurementRow, objective)
    return column
