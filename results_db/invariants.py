"""What always holds between rows and no constraint can say: each rule finds the rows that break it.

A rule is a query for keys; a database in order answers every one of them with nothing. They are the
same on every database.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, not_, or_, select
from sqlalchemy.orm import aliased

from results_db.divergence import DIVERGED
from results_db.models import Attempt, Campaign, MeasurementRow, StageMemory, Trial
from results_db.records import ENDED_CAMPAIGN_STATES
from results_db.rows import COST_COLUMNS
from results_db.worker_tables import Worker

COST_TOLERANCE: Final = 1e-6
"""How far a sum of costs may be off, relative to it: sums are made in parts, in whatever order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One thing that always holds."""

    broken: str
    """What rows are that break it, as "completed trials without ...". """
    keys: Callable[[], Select[*tuple[Any, ...]]]
    """Finds the keys of the rows that break it."""


def _completed_without_measurement() -> Select[Any]:
    return select(Trial.id).where(Trial.state == "COMPLETED", ~_has_measurement())


def _measured_out_of_place() -> Select[Any]:
    may_be = or_(
        Trial.state == "COMPLETED", and_(Trial.state == "FAILED", Trial.reason == DIVERGED)
    )
    return select(Trial.id).where(_has_measurement(), not_(may_be))


def _has_measurement() -> ColumnElement[bool]:
    return exists().where(MeasurementRow.trial_id == Trial.id)


def _running_without_attempt() -> Select[Any]:
    its_own = exists().where(
        Attempt.trial_id == Trial.id,
        Attempt.attempt == Trial.attempt,
        Attempt.worker_id == Trial.worker_id,
        Attempt.ending.is_(None),
    )
    return select(Trial.id).where(Trial.state == "RUNNING", ~its_own)


def _attempts_left_open() -> Select[int, int]:
    keys = select(Attempt.trial_id, Attempt.attempt)
    return keys.join(Trial, Trial.id == Attempt.trial_id).where(
        Attempt.ending.is_(None),
        or_(Trial.state != "RUNNING", Trial.attempt != Attempt.attempt),
    )


def _miscounted_attempts() -> Select[Any]:
    latest = (
        select(func.coalesce(func.max(Attempt.attempt), 0))
        .where(Attempt.trial_id == Trial.id)
        .scalar_subquery()
    )
    return select(Trial.id).where(Trial.attempt != latest)


def _leased_by_the_gone() -> Select[Any]:
    return (
        select(Trial.id)
        .join(Worker, Worker.id == Trial.worker_id)
        .where(Trial.state == "RUNNING", Worker.ended_at.is_not(None))
    )


def _open_in_an_ended_campaign() -> Select[Any]:
    not_told = or_(
        Trial.state == "PENDING", and_(Trial.state == "RUNNING", not_(Trial.cancel_requested))
    )
    return (
        select(Trial.id)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(Campaign.state.in_(ENDED_CAMPAIGN_STATES), not_told)
    )


def _beyond_the_counters() -> Select[Any]:
    return (
        select(Trial.id)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(or_(Trial.number > Campaign.last_number, Trial.ended_seq > Campaign.last_ended_seq))
    )


def _repeats_of_another() -> Select[Any]:
    first = aliased(Trial)
    return (
        select(Trial.id)
        .join(first, first.id == Trial.repeat_of)
        .where(or_(first.campaign_id != Trial.campaign_id, first.layout_key != Trial.layout_key))
    )


def _stages_that_are_not() -> Select[Any]:
    stages = (
        select(StageMemory.trial_id, func.count().label("number"))
        .group_by(StageMemory.trial_id)
        .subquery()
    )
    return (
        select(Trial.id)
        .join(stages, stages.c.trial_id == Trial.id)
        .where(stages.c.number != Trial.pp)
    )


def _off(total: ColumnElement[Any], parts: ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether a sum differs from its parts by more than rounding."""
    scale = case((func.abs(total) > 1, func.abs(total)), else_=1.0)
    return func.abs(total - parts) > COST_TOLERANCE * scale


def _sum_of(column: Any, *which: ColumnElement[bool]) -> ColumnElement[Any]:
    return func.coalesce(select(func.sum(column)).where(*which).scalar_subquery(), 0.0)


def _costs_of_attempts() -> Select[Any]:
    off = [
        _off(
            getattr(Trial, column), _sum_of(getattr(Attempt, column), Attempt.trial_id == Trial.id)
        )
        for column in _COSTS
    ]
    return select(Trial.id).where(or_(*off))


def _costs_of_trials() -> Select[Any]:
    off = [
        _off(
            getattr(Campaign, column),
            _sum_of(getattr(Trial, column), Trial.campaign_id == Campaign.id),
        )
        for column in _COSTS
    ]
    return select(Campaign.id).where(or_(*off))


_COSTS: Final = ("node_seconds", *COST_COLUMNS.values())

RULES: Final[dict[str, Rule]] = {
    "measured": Rule(
        broken="completed trials without a measurement", keys=_completed_without_measurement
    ),
    "measurement-of-no-result": Rule(
        broken="trials with a measurement that neither completed nor diverged",
        keys=_measured_out_of_place,
    ),
    "running": Rule(
        broken="running trials without an attempt that runs", keys=_running_without_attempt
    ),
    "attempts-open": Rule(
        broken="attempts that never ended, of trials that are not in them",
        keys=_attempts_left_open,
    ),
    "attempts-counted": Rule(
        broken="trials whose attempt is not the latest of their attempts",
        keys=_miscounted_attempts,
    ),
    "leases": Rule(
        broken="running trials leased by workers whose session has ended",
        keys=_leased_by_the_gone,
    ),
    "ended-campaigns": Rule(
        broken="trials that wait, or run untold, in campaigns that have ended",
        keys=_open_in_an_ended_campaign,
    ),
    "counters": Rule(
        broken="trials with a number or place that their campaign has not given yet",
        keys=_beyond_the_counters,
    ),
    "repeats": Rule(
        broken="repeats of another layout, or of another campaign's trial",
        keys=_repeats_of_another,
    ),
    "stages": Rule(
        broken="trials with peaks of more or fewer stages than they have", keys=_stages_that_are_not
    ),
    "trial-costs": Rule(
        broken="trials whose cost is not that of their attempts", keys=_costs_of_attempts
    ),
    "campaign-costs": Rule(
        broken="campaigns whose cost is not that of their trials", keys=_costs_of_trials
    ),
}
"""By a short name."""
