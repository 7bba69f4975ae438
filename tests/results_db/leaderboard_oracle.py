"""The leaderboard, computed from all measurements in another way than the product does.

Tests compare the product with it. It is kept unchanged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, variance
from typing import Any

import numpy as np
from sqlalchemy import ColumnElement, and_, func, or_, select
from sqlalchemy.orm import Session

from results_db.leaderboard.leaderboard_records import RankedLayout
from results_db.models.tables import Campaign, IterationRow, MeasurementRow, Trial
from results_db.records import CampaignRecord, TrialRecord
from results_db.rows import WITH_MEASUREMENT, trial_record
from search_spaces.spec.objectives import (
    OBJECTIVES,
    measured_objective,
)
from search_spaces.statistics.confidence import Estimate, can_be_told_apart
from search_spaces.statistics.pooling import MEDIAN_VARIANCE, Spread
from search_spaces.units import SECONDS_PER_HOUR


def standings(
    session: Session, campaign_id: int, objective: str, *, among: Collection[int] | None = None
) -> list[RankedLayout]:
    layouts = rank(_runs(session, campaign_id, objective))
    page = layouts
    if among is not None:
        wanted = set(among)
        page = [each for each in layouts if any(run.trial_id in wanted for run in each.runs)]
    return _standings(session, layouts, page)


def count_ranked(session: Session, campaign_id: int) -> int:
    query = (
        select(func.count(Trial.layout_key.distinct()))
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(_ranked(campaign_id))
    )
    return session.scalar(query) or 0


def count_constrained(session: Session, campaign_id: int) -> int:
    query = (
        select(func.count())
        .select_from(Trial)
        .join(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(_counts(campaign_id), ~_keeps_constraints(campaign_id))
    )
    return session.scalar(query) or 0


def front(session: Session, campaign: CampaignRecord) -> frozenset[int]:
    query = (
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
        .where(_ranked(campaign.id))
        .order_by(Trial.id)
    )
    rows = session.execute(query).all()
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
    values = np.array(pooled, dtype=np.float64)
    known = np.where(np.isnan(values), -math.inf, values).tolist()
    return frozenset(
        id_
        for id_, own in zip(first_id.values(), known, strict=True)
        if not any(_dominates(other, own) for other in known)
    )


def _dominates(other: list[float], own: list[float]) -> bool:
    return other != own and all(mine <= theirs for mine, theirs in zip(own, other, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    trial_id: int
    layout_key: str
    value: float
    step_time_s: float
    shortened: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleLayout:
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def shortened(self) -> bool:
        return self.first.shortened

    @property
    def step_time_s(self) -> float:
        return median(run.step_time_s for run in self.runs)

    @property
    def value(self) -> float:
        return self.first.value * (self.first.step_time_s / self.step_time_s)


def rank(runs: Iterable[Run]) -> list[OracleLayout]:
    by_layout: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_layout[run.layout_key].append(run)
    layouts = [OracleLayout(runs=_counting(of_layout)) for of_layout in by_layout.values()]
    layouts.sort(key=lambda layout: (-layout.value, layout.first.trial_id))
    winner = next((layout for layout in layouts if not layout.shortened), None)
    if winner is not None:
        layouts.remove(winner)
        layouts.insert(0, winner)
    return layouts


def _counting(runs: Sequence[Run]) -> tuple[Run, ...]:
    in_order = sorted(runs, key=lambda run: run.trial_id)
    return tuple(run for run in in_order if not run.shortened) or tuple(in_order)


def _pooled(
    runs: Sequence[tuple[float, Sequence[float | None]]], is_rate: Sequence[bool]
) -> Sequence[float | None]:
    (first_s, first), *others = runs
    if not others:
        return first
    times_longer = np.median([step_time_s for step_time_s, _ in runs]) / first_s
    values = np.array([values for _, values in runs], dtype=np.float64)
    pooled: list[float | None] = np.where(
        is_rate, values[0] / times_longer, np.median(values, axis=0)
    ).tolist()
    return pooled


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
        .where(_ranked(campaign_id))
    )
    return [
        Run(
            trial_id=trial_id, layout_key=key, value=value, step_time_s=seconds, shortened=shortened
        )
        for trial_id, key, value, seconds, shortened in session.execute(query)
    ]


def _standings(
    session: Session, layouts: Sequence[OracleLayout], page: Sequence[OracleLayout]
) -> list[RankedLayout]:
    if not page:
        return []
    spread = _spread_of_runs([run.step_time_s for run in layout.runs] for layout in layouts)
    first = layouts[0]
    timed = _timed_iterations(session, [*page, first])
    trials = _first_trials(session, page)

    def estimate(layout: OracleLayout) -> Estimate | None:
        runs = [timed.get(run.trial_id) or [run.step_time_s] for run in layout.runs]
        return _pooled_estimate(runs, spread)

    best = estimate(first)
    return [
        _standing(
            layout,
            layouts.index(layout) + 1,
            trials[layout.first.trial_id],
            estimate(layout),
            first,
            best,
        )
        for layout in page
    ]


def _standing(
    layout: OracleLayout,
    rank: int,
    trial: TrialRecord,
    estimate: Estimate | None,
    first: OracleLayout,
    best: Estimate | None,
) -> RankedLayout:
    value, seconds = layout.value, layout.step_time_s
    if estimate is None or best is None:
        is_tied = value == first.value
    else:
        apart = replace(estimate, log_s=best.log_s + math.log(value / first.value))
        is_tied = not can_be_told_apart(best, apart)
    factor = None if estimate is None else estimate.factor
    return RankedLayout(
        trial=trial,
        rank=rank,
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


def _spread_of_runs(layouts: Iterable[Sequence[float]]) -> Spread | None:
    squares, dof = 0.0, 0
    for step_times_s in layouts:
        logs = [math.log(seconds) for seconds in step_times_s]
        squares += (len(logs) - 1) * variance(logs) if len(logs) > 1 else 0.0
        dof += max(len(logs) - 1, 0)
    return Spread(log_variance=squares / dof, dof=dof) if dof else None


def _pooled_estimate(runs: Sequence[Sequence[float]], spread: Spread | None) -> Estimate | None:
    log_s = math.log(median([median(run) for run in runs]))
    of_median = MEDIAN_VARIANCE if len(runs) > 2 else 1.0
    errors = []
    dof = sum(len(run) - 1 for run in runs)
    if min(len(run) for run in runs) > 1:
        within = fmean(
            MEDIAN_VARIANCE * variance([math.log(seconds) for seconds in run]) / len(run)
            for run in runs
        )
        errors.append((of_median * within / len(runs), dof))
    if spread is not None:
        errors.append((of_median * spread.log_variance / len(runs), spread.dof))
    if not errors:
        return None
    worse, dof = max(errors)
    return Estimate(log_s=log_s, error=math.sqrt(worse), dof=dof)


def _timed_iterations(
    session: Session, layouts: Sequence[OracleLayout]
) -> Mapping[int, list[float]]:
    ids = {run.trial_id for layout in layouts for run in layout.runs}
    query = select(IterationRow.trial_id, IterationRow.step_time_s).where(
        IterationRow.trial_id.in_(ids), IterationRow.kind == "timed"
    )
    found: defaultdict[int, list[float]] = defaultdict(list)
    for trial_id, seconds in session.execute(query):
        found[trial_id].append(seconds)
    return found


def _first_trials(session: Session, page: Sequence[OracleLayout]) -> Mapping[int, TrialRecord]:
    query = select(Trial).where(Trial.id.in_([layout.first.trial_id for layout in page]))
    rows = session.scalars(query.options(WITH_MEASUREMENT))
    return {row.id: trial_record(row) for row in rows}


def _ranked(campaign_id: int) -> ColumnElement[bool]:
    return and_(_counts(campaign_id), _keeps_constraints(campaign_id))


def _counts(campaign_id: int) -> ColumnElement[bool]:
    return and_(
        MeasurementRow.campaign_id == campaign_id,
        MeasurementRow.oversubscribed.is_(False),
        Trial.state == "COMPLETED",
    )


def _keeps_constraints(campaign_id: int) -> ColumnElement[bool]:
    bound = select(Campaign.max_peak_memory_bytes).where(Campaign.id == campaign_id)
    allowed = bound.scalar_subquery()
    return or_(allowed.is_(None), MeasurementRow.peak_memory_bytes <= allowed)


def _column(objective: str) -> ColumnElement[Any]:
    if objective == "tokens_per_node_hour":
        return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes
    column: ColumnElement[Any] = getattr(MeasurementRow, objective)
    return column
