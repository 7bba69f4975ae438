"""The rules between rows that constraints cannot express.

A rule is a query for the keys of rows that break it. It is the same on every database, and returns
no rows from an intact one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, not_, or_, select
from sqlalchemy.orm import aliased

from results_db.models.service_tables import WorkerRow
from results_db.models.tables import Attempt, Campaign, MeasurementRow, StageMemoryRow, Trial
from results_db.records import ENDED_CAMPAIGN_STATES
from results_db.rows import COST_COLUMNS
from results_db.trials.loss_check import DIVERGED
from search_spaces.campaigns.fidelity import PART

_COSTS: Final = ("node_seconds", *COST_COLUMNS.values())

COST_TOLERANCE: Final = 1e-6
"""Relative tolerance of sums of costs, for rounding in any order of addition."""

Keys = Callable[[], Select[*tuple[Any, ...]]]

RULES: Final[dict[str, tuple[str, Keys]]] = {}
"""By a short name: what the rows are that break the rule, and the query for their keys."""


def _rule(name: str, broken: str) -> Callable[[Keys], Keys]:
    def add(keys: Keys) -> Keys:
        RULES[name] = (broken, keys)
        return keys

    return add


@_rule("measured", "completed trials without a measurement")
def _completed_without_measurement() -> Select[Any]:
    return select(Trial.id).where(Trial.state == "COMPLETED", ~_has_measurement())


@_rule("measurement-of-no-result", "trials with a measurement that neither completed nor diverged")
def _measured_out_of_place() -> Select[Any]:
    may_be = or_(
        Trial.state == "COMPLETED", and_(Trial.state == "FAILED", Trial.reason == DIVERGED)
    )
    return select(Trial.id).where(_has_measurement(), not_(may_be))


def _has_measurement() -> ColumnElement[bool]:
    return exists().where(MeasurementRow.trial_id == Trial.id)


@_rule("running", "running trials without an attempt that runs")
def _running_without_attempt() -> Select[Any]:
    its_own = exists().where(
        Attempt.trial_id == Trial.id,
        Attempt.attempt == Trial.attempt,
        Attempt.worker_id == Trial.worker_id,
        Attempt.ending.is_(None),
    )
    return select(Trial.id).where(Trial.state == "RUNNING", ~its_own)


@_rule("attempts-open", "attempts that never ended, of trials that are not in them")
def _attempts_left_open() -> Select[int, int]:
    keys = select(Attempt.trial_id, Attempt.attempt)
    return keys.join(Trial, Trial.id == Attempt.trial_id).where(
        Attempt.ending.is_(None), or_(Trial.state != "RUNNING", Trial.attempt != Attempt.attempt)
    )


@_rule("attempts-counted", "trials whose attempt is not the latest of their attempts")
def _miscounted_attempts() -> Select[Any]:
    latest = (
        select(func.coalesce(func.max(Attempt.attempt), 0))
        .where(Attempt.trial_id == Trial.id)
        .scalar_subquery()
    )
    return select(Trial.id).where(Trial.attempt != latest)


@_rule("leases", "running trials leased by workers whose session has ended")
def _leased_by_ended_workers() -> Select[Any]:
    return (
        select(Trial.id)
        .join(WorkerRow, WorkerRow.id == Trial.worker_id)
        .where(Trial.state == "RUNNING", WorkerRow.ended_at.is_not(None))
    )


@_rule(
    "ended-campaigns",
    "pending trials, or running ones that are not to end, in campaigns that have ended",
)
def _open_in_an_ended_campaign() -> Select[Any]:
    goes_on = or_(
        Trial.state == "PENDING", and_(Trial.state == "RUNNING", not_(Trial.cancel_requested))
    )
    return (
        select(Trial.id)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(Campaign.state.in_(ENDED_CAMPAIGN_STATES), goes_on)
    )


@_rule("counters", "trials with a number or place that their campaign has not given yet")
def _past_the_counters() -> Select[Any]:
    return (
        select(Trial.id)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(or_(Trial.number > Campaign.last_number, Trial.ended_seq > Campaign.last_ended_seq))
    )


@_rule("repeats", "repeats of another layout, or of another campaign's trial")
def _repeats_of_another() -> Select[Any]:
    first = aliased(Trial)
    return (
        select(Trial.id)
        .join(first, first.id == Trial.repeat_of)
        .where(or_(first.campaign_id != Trial.campaign_id, first.layout_key != Trial.layout_key))
    )


@_rule("cheap-probes", "trials that say only in part which layout they stand for")
def _cheap_in_part() -> Select[Any]:
    parts = (Trial.full_num_nodes, Trial.full_dp, Trial.full_num_microbatches)
    is_cheap = Trial.num_layers.is_not(None)
    differs = (each.is_not(None) != is_cheap for each in parts)
    return select(Trial.id).where(or_(Trial.layout_key.contains(PART) != is_cheap, *differs))


@_rule("stages", "trials with peaks of more or fewer stages than they have")
def _wrong_number_of_stages() -> Select[Any]:
    stages = (
        select(StageMemoryRow.trial_id, func.count().label("number"))
        .group_by(StageMemoryRow.trial_id)
        .subquery()
    )
    return (
        select(Trial.id)
        .join(stages, stages.c.trial_id == Trial.id)
        .where(stages.c.number != Trial.pp)
    )


def _differs(total: ColumnElement[Any], parts: ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether a sum differs from the sum of its parts by more than rounding."""
    scale = case((func.abs(total) > 1, func.abs(total)), else_=1.0)
    return func.abs(total - parts) > COST_TOLERANCE * scale


def _sum_of(column: Any, *which: ColumnElement[bool]) -> ColumnElement[Any]:
    return func.coalesce(select(func.sum(column)).where(*which).scalar_subquery(), 0.0)


@_rule("trial-costs", "trials whose cost is not that of their attempts")
def _costs_of_attempts() -> Select[Any]:
    off = [
        _differs(
            getattr(Trial, column), _sum_of(getattr(Attempt, column), Attempt.trial_id == Trial.id)
        )
        for column in _COSTS
    ]
    return select(Trial.id).where(or_(*off))


@_rule("campaign-costs", "campaigns whose cost is not that of their trials")
def _costs_of_trials() -> Select[Any]:
    off = [
        _differs(
            getattr(Campaign, column),
            _sum_of(getattr(Trial, column), Trial.campaign_id == Campaign.id),
        )
        for column in _COSTS
    ]
    return select(Campaign.id).where(or_(*off))
