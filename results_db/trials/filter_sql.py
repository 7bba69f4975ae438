"""A filter of trials as SQL."""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

from sqlalchemy import (
    ColumnElement,
    Integer,
    case,
    cast,
    exists,
    func,
    literal_column,
    null,
    or_,
    select,
)
from sqlalchemy.orm import Session, aliased

from layout_tuner.predictions.statistics.disturbance import DISTURBED_SHARE
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.models.tables import Campaign, MeasurementRow, Trial
from layout_tuner.results_db.trials.filter import LISTED_FIELDS, SINGULAR, TrialFilter
from layout_tuner.results_db.trials.job_values import Knobs, job_condition, job_number, knob_of
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.job_settings import NO_SETTINGS, JobSettings
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.units import SECONDS_PER_HOUR

IS_DISTURBED: Final = or_(
    MeasurementRow.throttled.is_(True),
    func.coalesce(MeasurementRow.others_share, 0.0) >= DISTURBED_SHARE,
)
"""Selects disturbed measurements (`predictions.statistics.disturbance.is_disturbed`)."""


def metric_column(metric: str) -> ColumnElement[Any]:
    """The measured value of a metric, of a trial joined with its measurement."""
    if METRICS[metric].is_measured:
        column: ColumnElement[Any] = getattr(MeasurementRow, metric)
        return column
    return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes


def has_ranked_tokens(campaign_id: Any) -> ColumnElement[bool]:
    """Selects measurements with counted tokens, or all where the campaign has none of those."""
    counted = aliased(MeasurementRow)
    is_counted_elsewhere = exists(literal_column("1")).where(
        counted.campaign_id == campaign_id, counted.tokens == "counted"
    )
    return or_(MeasurementRow.tokens == "counted", ~is_counted_elsewhere)


def knob_number(name: str, column: ColumnElement[Any]) -> ColumnElement[Any]:
    """The value of a knob as a number to sort by: databases order words differently."""
    knob = KNOBS.get(name)
    if knob is None or knob.is_number:
        return column
    if knob.is_switch:
        return cast(column, Integer)
    # Free texts come after the words, in no order of their own.
    else_ = len(knob.choices) if knob.is_text else None
    return case({word: knob.code(word) for word in knob.choices}, value=column, else_=else_)


def job_knobs_of(session: Session, campaign_id: int) -> Knobs:
    """The job knobs of a campaign; none where there is no such campaign."""
    document = session.scalar(select(Campaign.spec).where(Campaign.id == campaign_id))
    return StoredCampaign(document=document).job_knobs


def job_sort_number(session: Session, campaign_id: int, key: str) -> ColumnElement[Any]:
    """The value of a job knob as a number to sort by."""
    knob = knob_of(key, job_knobs_of(session, campaign_id))
    jobs_of: defaultdict[int, list[JobSettings]] = defaultdict(list)
    for each in _settings_of(session, campaign_id):
        jobs_of[job_number(knob, each)].append(each)
    without = job_number(knob, NO_SETTINGS)
    whens = [(Trial.job.in_(jobs), number) for number, jobs in jobs_of.items()]
    return case(*whens, else_=without) if whens else literal_column(str(without), Integer)


def _settings_of(session: Session, campaign_id: int) -> list[JobSettings]:
    """All settings of a campaign's jobs, which an index has: there are few, of many trials."""
    query = select(Trial.job).where(Trial.campaign_id == campaign_id, Trial.job.is_not(null()))
    return list(session.scalars(query.distinct()))


def _job_conditions(
    session: Session, campaign_id: int, wanted: TrialFilter
) -> list[ColumnElement[bool]]:
    """Settings are judged here as those of a leaderboard are; SQL selects those that pass."""
    if not wanted.of_jobs:
        return []
    holds = job_condition(wanted, job_knobs_of(session, campaign_id))
    passing = Trial.job.in_([*filter(holds, _settings_of(session, campaign_id))])
    return [or_(passing, Trial.job.is_(null())) if holds(NO_SETTINGS) else passing]


def conditions(
    session: Session, campaign_id: int, wanted: TrialFilter
) -> list[ColumnElement[bool]]:
    """The conditions of a filter on `Trial`, and on `MeasurementRow` if it bounds a metric.

    A query that uses them joins the two (`TrialFilter.needs_measurement` says whether it must).
    """
    found = [
        getattr(Trial, SINGULAR.get(name, name)).in_(values)
        for name in LISTED_FIELDS
        if (values := getattr(wanted, name))
    ]
    for metric in METRICS:
        column, (low, high) = metric_column(metric), wanted.bounds(metric)
        if low is not None:
            found.append(column >= low)
        if high is not None:
            found.append(column <= high)
    return found + _job_conditions(session, campaign_id, wanted)
