"""The leaderboard: completed trials of a campaign, ranked."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, Select, and_, func, or_, select
from sqlalchemy.orm import Session

from results_db.errors import ObjectiveUnknownError
from results_db.models import Campaign, IterationRow, MeasurementRow, Trial
from results_db.part import StorePart
from results_db.records import CampaignRecord, TrialRecord
from results_db.rows import WITH_MEASUREMENT, trial_record
from results_db.standing import RankedLayout, Run, Standing, rank
from search_spaces.confidence import Estimate, can_be_told_apart
from search_spaces.objectives import (
    OBJECTIVES,
    SECONDS_PER_HOUR,
    measured_objective,
    pareto_front,
)
from search_spaces.pooling import pooled_estimate, spread_of_runs


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
        """The first trial of each layout of `standings`, in that order."""
        found = self.standings(campaign_id, objective, among=among, limit=limit, offset=offset)
        return [standing.trial for standing in found]

    def standings(
        self,
        campaign_id: int,
        objective: str,
        *,
        among: Collection[int] | None = None,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Standing]:
        """The layouts that the campaign measured, the best first; of equals, the earlier one.

        Repeats of a layout count together. Oversubscribed measurements are never ranked: their ranks
        shared devices. Nor are those that break the campaign's constraints. One that was stopped early
        is never the first while any was measured in full.

        Args:
            campaign_id: of the campaign.
            objective: what to rank by.
            among: ids of trials whose layouts are listed; None: every ranked one.
            limit: most layouts to return.
            offset: how many of the best to pass over.

        Raises:
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        with self._db.read() as session:
            layouts = rank(_runs(session, campaign_id, objective))
            if among is not None:
                wanted = set(among)
                layouts = [
                    each for each in layouts if any(run.trial_id in wanted for run in each.runs)
                ]
            page = layouts[offset : None if limit is None else offset + limit]
            return _standings(session, layouts, page)

    def winner(self, campaign_id: int, objective: str) -> Standing | None:
        """The best layout that was measured in full; None while there is none."""
        for standing in self.standings(campaign_id, objective, limit=1):
            return None if standing.shortened else standing
        return None

    def count_ranked(self, campaign_id: int) -> int:
        """How many layouts the campaign's leaderboard has."""
        with self._db.read() as session:
            query = (
                select(func.count(Trial.layout_key.distinct()))
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
        """Ids of the ranked trials that no other beats, over all objectives of the campaign.

        A layout that was measured several times stands with its rates at the median step time, as in
        `standings`, and the median of its memory, by the id of the first of its runs that count: none that
        was stopped early does, while any was measured in full.
        """
        with self._db.read() as session:
            rows = session.execute(_figures(campaign.id)).all()
        in_full = [row for row in rows if not row.shortened]
        device_memory_bytes = campaign.spec["cluster"].get("device_memory_bytes")
        runs: defaultdict[str, list[tuple[float, list[float | None]]]] = defaultdict(list)
        first_id: dict[str, int] = {}
        for row in in_full or rows:
            first_id.setdefault(row.layout_key, row.id)
            values = [
                measured_objective(
                    name, row, num_nodes=row.num_nodes, device_memory_bytes=device_memory_bytes
                )
                for name in campaign.objectives
            ]
            runs[row.layout_key].append((row.step_time_s, values))
        is_rate = [name in OBJECTIVES for name in campaign.objectives]
        pooled = [_pooled(of_layout, is_rate) for of_layout in runs.values()]
        is_front = pareto_front(np.array(pooled, dtype=np.float64))
        ids = first_id.values()
        return frozenset(id_ for id_, stands in zip(ids, is_front, strict=True) if stands)


def _pooled(
    runs: Sequence[tuple[float, Sequence[float | None]]], is_rate: Sequence[bool]
) -> Sequence[float | None]:
    """A layout's objectives from the step time and the objectives of each of its runs."""
    (first_s, first), *others = runs
    if not others:
        return first
    times_longer = np.median([step_time_s for step_time_s, _ in runs]) / first_s
    values = np.array([values for _, values in runs], dtype=np.float64)
    pooled: list[float | None] = np.where(
        is_rate, values[0] / times_longer, np.median(values, axis=0)
    ).tolist()
    return pooled


def _figures(campaign_id: int) -> Select[*tuple[Any, ...]]:
    """What the objectives are made of, of every ranked trial in order."""
    return (
        select(
            Trial.id,
            Trial.layout_key,
            Trial.num_nodes,
            MeasurementRow.shortened,
            MeasurementRow.step_time_s,
            MeasurementRow.tokens_per_s,
            MeasurementRow.tokens_per_s_per_device,
            MeasurementRow.model_tflops_per_device,
            MeasurementRow.hardware_tflops_per_device,
            MeasurementRow.peak_memory_bytes,
        )
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(ranked(campaign_id))
        .order_by(Trial.id)
    )


def _runs(session: Session, campaign_id: int, objective: str) -> list[Run]:
    query = (
        select(
            Trial.id,
            Trial.layout_key,
            _column(objective),
            MeasurementRow.step_time_s,
            MeasurementRow.shortened,
        )
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(ranked(campaign_id))
    )
    return [
        Run(
            trial_id=trial_id, layout_key=key, value=value, step_time_s=seconds, shortened=shortened
        )
        for trial_id, key, value, seconds, shortened in session.execute(query)
    ]


def _standings(
    session: Session, layouts: Sequence[RankedLayout], page: Sequence[RankedLayout]
) -> list[Standing]:
    """The layouts of one page, each compared with the first of all."""
    if not page:
        return []
    spread = spread_of_runs([run.step_time_s for run in layout.runs] for layout in layouts)
    first = layouts[0]
    timed = _timed_iterations(session, [*page, first])
    trials = _first_trials(session, page)

    def estimate(layout: RankedLayout) -> Estimate | None:
        # What was measured elsewhere may have a figure and no iterations.
        runs = [timed.get(run.trial_id) or [run.step_time_s] for run in layout.runs]
        return pooled_estimate(runs, spread)

    best = estimate(first)
    return [
        _standing(layout, trials[layout.first.trial_id], estimate(layout), first, best)
        for layout in page
    ]


def _standing(
    layout: RankedLayout,
    trial: TrialRecord,
    estimate: Estimate | None,
    first: RankedLayout,
    best: Estimate | None,
) -> Standing:
    value, seconds = layout.value, layout.step_time_s
    if estimate is None or best is None:
        is_tied = value == first.value
    else:
        # At equal step times they would be as far apart as their objectives are.
        apart = replace(estimate, log_s=best.log_s + math.log(value / first.value))
        is_tied = not can_be_told_apart(best, apart)
    factor = None if estimate is None else estimate.factor
    return Standing(
        trial=trial,
        value=value,
        low=None if factor is None else value / factor,
        high=None if factor is None else value * factor,
        step_time_s=seconds,
        step_time_low_s=None if factor is None else seconds / factor,
        step_time_high_s=None if factor is None else seconds * factor,
        trial_ids=tuple(run.trial_id for run in layout.runs),
        shortened=layout.shortened,
        is_tied=is_tied,
    )


def _timed_iterations(
    session: Session, layouts: Sequence[RankedLayout]
) -> Mapping[int, list[float]]:
    ids = {run.trial_id for layout in layouts for run in layout.runs}
    query = select(IterationRow.trial_id, IterationRow.step_time_s).where(
        IterationRow.trial_id.in_(ids), IterationRow.kind == "timed"
    )
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trial_id, seconds in session.execute(query):
        found[trial_id].append(seconds)
    return found


def _first_trials(session: Session, page: Sequence[RankedLayout]) -> Mapping[int, TrialRecord]:
    query = select(Trial).where(Trial.id.in_([layout.first.trial_id for layout in page]))
    rows = session.scalars(query.options(WITH_MEASUREMENT))
    return {row.id: trial_record(row) for row in rows}


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
    allowed = bound.scalar_subquery()
    return or_(allowed.is_(None), MeasurementRow.peak_memory_bytes <= allowed)


def _column(objective: str) -> ColumnElement[float]:
    if objective not in OBJECTIVES:
        raise ObjectiveUnknownError(
            f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}"
        )
    if objective == "tokens_per_node_hour":
        return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes
    column: ColumnElement[float] = getattr(MeasurementRow, objective)
    return column
