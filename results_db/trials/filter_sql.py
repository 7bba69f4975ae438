"""A filter of trials as SQL, for lists of trials and for the leaderboard."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import ColumnElement, Integer, case, cast, select

from results_db.models.standings import LeaderboardRow
from results_db.models.tables import MeasurementRow, Trial
from results_db.trials.filter import KNOB_FIELDS, LISTED_FIELDS, TrialFilter
from search_spaces.protocol.metrics import METRICS
from search_spaces.spec.layout import KNOBS
from search_spaces.spec.objectives import SECONDS_PER_HOUR

_COLUMNS: Final = {"numbers": "number", "states": "state", "reasons": "reason", "nodes": "node"}
"""Columns of trials that are not called as the filter's fields are."""

MEASURED_METRICS: Final = {
    name: f"measured_{name}" for name, metric in METRICS.items() if metric.is_measured
}
"""By metric that is a field of the measurement, the column of `LeaderboardRow` that holds it."""


def metric_column(metric: str) -> ColumnElement[Any]:
    """What a trial, joined with its measurement, measured of a metric."""
    if METRICS[metric].is_measured:
        column: ColumnElement[Any] = getattr(MeasurementRow, metric)
        return column
    return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes


def ranked_metric_column(metric: str) -> ColumnElement[Any]:
    """What the first run of a ranked layout measured of a metric, from `LeaderboardRow` alone."""
    if metric in MEASURED_METRICS:
        column: ColumnElement[Any] = getattr(LeaderboardRow, MEASURED_METRICS[metric])
        return column
    # In the order of `metric_column`: the last digits depend on it.
    return LeaderboardRow.measured_tokens_per_s * SECONDS_PER_HOUR / LeaderboardRow.num_nodes


def knob_number(name: str, column: ColumnElement[Any]) -> ColumnElement[Any]:
    """The value of a knob as a number to sort by: databases order words differently.

    Args:
        name: the knob, or another column of numbers.
        column: of any table.
    """
    knob = KNOBS.get(name)
    if knob is None or knob.is_number:
        return column
    if knob.is_switch:
        return cast(column, Integer)
    return case({word: knob.code(word) for word in knob.choices}, value=column)


def conditions(wanted: TrialFilter) -> list[ColumnElement[bool]]:
    """What a filter asks of `Trial`, and of `MeasurementRow` where it bounds a metric.

    A query that uses them joins the two (`TrialFilter.needs_measurement` says whether it must).
    """
    metrics = {name: metric_column(name) for name in METRICS}
    return [*_listed(wanted, LISTED_FIELDS, Trial), *_bounded(wanted, metrics)]


def ranked_conditions(campaign_id: int, wanted: TrialFilter) -> list[ColumnElement[bool]]:
    """What a filter asks of `LeaderboardRow`, for ranked layouts of a campaign.

    A query needs no join: the row has the layout and the metrics of its first run. Only what a
    filter asks of a trial's number, state, reason or node is looked up among the trials.
    """
    metrics = {name: ranked_metric_column(name) for name in METRICS}
    found = [*_listed(wanted, KNOB_FIELDS, LeaderboardRow), *_bounded(wanted, metrics)]
    of_trial = list(_listed(wanted, _COLUMNS, Trial))
    if of_trial:
        ids = select(Trial.id).where(Trial.campaign_id == campaign_id, *of_trial)
        found.append(LeaderboardRow.trial_id.in_(ids))
    return found


def _listed(wanted: TrialFilter, fields: Any, table: Any) -> Iterator[ColumnElement[bool]]:
    for name in fields:
        values = getattr(wanted, name)
        if values:
            yield getattr(table, _COLUMNS.get(name, name)).in_(values)


def _bounded(
    wanted: TrialFilter, metrics: dict[str, ColumnElement[Any]]
) -> Iterator[ColumnElement[bool]]:
    for metric, column in metrics.items():
        low, high = wanted.bounds(metric)
        if low is not None:
            yield column >= low
        if high is not None:
            yield column <= high
