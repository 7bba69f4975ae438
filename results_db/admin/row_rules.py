"""The rules between rows that constraints cannot express.

A rule is a query for the keys of rows that break it. It is the same on every database, and returns
no rows from an intact one.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import ColumnElement, Select, and_, case, exists, func, not_, or_, select
from sqlalchemy.orm import aliased

from layout_tuner.results_db.models.service_tables import GroupRow, OwnerRow, WorkerRow
from layout_tuner.results_db.models.tables import (
    Attempt,
    Campaign,
    MeasurementRow,
    StageMemoryRow,
    Trial,
)
from layout_tuner.results_db.records import ENDED_CAMPAIGN_STATES
from layout_tuner.results_db.rows import COST_COLUMNS
from layout_tuner.results_db.trials.loss_check import DIVERGED
from layout_tuner.search_spaces.campaigns.fidelity import PART

_COSTS: Final = ("node_seconds", *COST_COLUMNS.values())

COST_TOLERANCE: Final = 1e-6
"""Relative tolerance of sums of costs, for rounding in any order of addition."""


def _has_measurement() -> ColumnElement[bool]:
    return exists().where(MeasurementRow.trial_id == Trial.id)


def _differs(total: ColumnElement[Any], parts: ColumnElement[Any]) -> ColumnElement[bool]:
    """Whether a sum differs from the sum of its parts by more than rounding."""
    scale = case((func.abs(total) > 1, func.abs(total)), else_=1.0)
    return func.abs(total - parts) > COST_TOLERANCE * scale


def _costs_off(whole: Any, part: Any, is_part: ColumnElement[bool]) -> Select[Any]:
    """Selects rows whose stored cost differs from the sum over their parts."""
    sums = {
        column: select(func.sum(getattr(part, column))).where(is_part).scalar_subquery()
        for column in _COSTS
    }
    off = (
        _differs(getattr(whole, column), func.coalesce(total, 0.0))
        for column, total in sums.items()
    )
    return select(whole.id).where(or_(*off))


_FIRST: Final = aliased(Trial)

_LATEST_ATTEMPT: Final = (
    select(func.coalesce(func.max(Attempt.attempt), 0))
    .where(Attempt.trial_id == Trial.id)
    .scalar_subquery()
)

_STAGES: Final = (
    select(StageMemoryRow.trial_id, func.count().label("number"))
    .group_by(StageMemoryRow.trial_id)
    .subquery()
)

_IS_CHEAP: Final = Trial.num_layers.is_not(None)


def _without(text: str) -> ColumnElement[int]:
    return func.length(func.replace(Trial.layout_key, text, ""))


_HAS_PART: Final = _without(PART) < _without(".")
"""Whether the key is that of a cheap probe (`fidelity.is_cheap`)."""

_OF_CAMPAIGN: Final = select(Trial.id).join(Campaign, Campaign.id == Trial.campaign_id)

RULES: Final[dict[str, tuple[str, Select[*tuple[Any, ...]]]]] = {
    "measured": (
        "completed trials without a measurement",
        select(Trial.id).where(Trial.state == "COMPLETED", ~_has_measurement()),
    ),
    "measurement-of-no-result": (
        "trials with a measurement that neither completed nor diverged",
        select(Trial.id).where(
            _has_measurement(),
            Trial.state != "COMPLETED",
            not_(and_(Trial.state == "FAILED", Trial.reason == DIVERGED)),
        ),
    ),
    "running": (
        "running trials without an attempt that runs",
        select(Trial.id).where(
            Trial.state == "RUNNING",
            ~exists().where(
                Attempt.trial_id == Trial.id,
                Attempt.attempt == Trial.attempt,
                Attempt.worker_id == Trial.worker_id,
                Attempt.ending.is_(None),
            ),
        ),
    ),
    "attempts-open": (
        "attempts that never ended, of trials that are not in them",
        select(Attempt.trial_id, Attempt.attempt)
        .join(Trial, Trial.id == Attempt.trial_id)
        .where(
            Attempt.ending.is_(None),
            or_(Trial.state != "RUNNING", Trial.attempt != Attempt.attempt),
        ),
    ),
    "attempts-counted": (
        "trials whose attempt is not the latest of their attempts",
        select(Trial.id).where(Trial.attempt != _LATEST_ATTEMPT),
    ),
    "leases": (
        "running trials leased by workers whose session has ended",
        select(Trial.id)
        .join(WorkerRow, WorkerRow.id == Trial.worker_id)
        .where(Trial.state == "RUNNING", WorkerRow.ended_at.is_not(None)),
    ),
    "ended-campaigns": (
        "pending trials, or running ones that are not to end, in campaigns that have ended",
        _OF_CAMPAIGN.where(
            Campaign.state.in_(ENDED_CAMPAIGN_STATES),
            or_(
                Trial.state == "PENDING",
                and_(Trial.state == "RUNNING", not_(Trial.cancel_requested)),
            ),
        ),
    ),
    "counters": (
        "trials with a number or place that their campaign has not given yet",
        _OF_CAMPAIGN.where(
            or_(Trial.number > Campaign.last_number, Trial.ended_seq > Campaign.last_ended_seq)
        ),
    ),
    "repeats": (
        "repeats of another layout, or of another campaign's trial",
        select(Trial.id)
        .join(_FIRST, _FIRST.id == Trial.repeat_of)
        .where(or_(_FIRST.campaign_id != Trial.campaign_id, _FIRST.layout_key != Trial.layout_key)),
    ),
    "cheap-probes": (
        "trials that say only in part which layout they stand for",
        select(Trial.id).where(
            or_(
                _HAS_PART != _IS_CHEAP,
                Trial.full_num_nodes.is_not(None) != _IS_CHEAP,
                Trial.full_dp.is_not(None) != _IS_CHEAP,
                Trial.full_num_microbatches.is_not(None) != _IS_CHEAP,
            )
        ),
    ),
    "job-settings": (
        "trials whose key does not say that their job has settings, or says so of one without",
        select(Trial.id).where(Trial.layout_key.like(f"%{PART}%.%") != Trial.job.is_not(None)),
    ),
    "stages": (
        "trials with peaks of more or fewer stages than they have",
        select(Trial.id)
        .join(_STAGES, _STAGES.c.trial_id == Trial.id)
        .where(_STAGES.c.number != Trial.pp),
    ),
    "trial-costs": (
        "trials whose cost is not that of their attempts",
        _costs_off(Trial, Attempt, Attempt.trial_id == Trial.id),
    ),
    "owners": (
        "campaigns whose owner is not in the list of owners",
        # Very old campaigns have nobody's name.
        select(Campaign.id).where(
            Campaign.created_by != "", ~exists().where(OwnerRow.name == Campaign.created_by)
        ),
    ),
    "groups": (
        # Those of a deleted group are private, and keep its name.
        "campaigns that are for a group that does not exist",
        select(Campaign.id).where(
            Campaign.visibility == "group", ~exists().where(GroupRow.name == Campaign.group)
        ),
    ),
    "campaign-costs": (
        "campaigns whose cost is not that of their trials",
        _costs_off(Campaign, Trial, Trial.campaign_id == Campaign.id),
    ),
}
"""By a short name: what the rows are that break the rule, and the query for their keys."""
