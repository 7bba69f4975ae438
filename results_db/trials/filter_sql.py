"""A filter of trials as SQL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from sqlalchemy import ColumnElement

from results_db.models.tables import MeasurementRow, Trial
from results_db.trials.filter import LISTED_FIELDS, TrialFilter
from search_spaces.protocol.metrics import METRICS
from search_spaces.spec.objectives import SECONDS_PER_HOUR

_COLUMNS: Final = {"numbers": "number", "states": "state", "reasons": "reason", "nodes": "node"}
"""Columns of trials that are not called as the filter's fields are."""


def metric_column(metric: str) -> ColumnElement[Any]:
    """What a trial, joined with its measurement, measured of a metric."""
    if METRICS[metric].is_measured:
        column: ColumnElement[Any] = getattr(MeasurementRow, metric)
        return column
    return MeasurementRow.tokens_per_s * SECONDS_PER_HOUR / Trial.num_nodes


def conditions(wanted: TrialFilter) -> list[ColumnElement[bool]]:
    """What a filter asks of `Trial`, and of `MeasurementRow` where it bounds a metric.

    A query that uses them joins the two (`TrialFilter.needs_measurement` says whether it must).
    """
    return [*_listed(wanted), *_bounded(wanted)]


def _listed(wanted: TrialFilter) -> Iterator[ColumnElement[bool]]:
    for name in LISTED_FIELDS:
        values = getattr(wanted, name)
        if values:
            yield getattr(Trial, _COLUMNS.get(name, name)).in_(values)


def _bounded(wanted: TrialFilter) -> Iterator[ColumnElement[bool]]:
    for metric in METRICS:
        low, high = wanted.bounds(metric)
        column = metric_column(metric)
        if low is not None:
            yield column >= low
        if high is not None:
            yield column <= high
