"""Converts rows to records, and values to columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from datetime import datetime
from functools import cache
from typing import Any, Final, TypeVar, cast

from sqlalchemy import ColumnElement, case, select
from sqlalchemy.orm import Session, joinedload, selectinload
from sqlalchemy.orm.interfaces import ORMOption

from layout_tuner.protocol.measurement import Breakdown
from layout_tuner.results_db.models.plain_columns import plain_columns
from layout_tuner.results_db.models.tables import Attempt, Campaign, MeasurementRow, Trial
from layout_tuner.results_db.records import CampaignRecord, Cost, MeasurementRecord, TrialRecord
from layout_tuner.results_db.wall_time import clock_seconds
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape

COST_COLUMNS: Final = {field.name: f"{field.name}_node_seconds" for field in fields(Cost)}
"""By part of the cost, the column of attempts, trials and campaigns that holds it."""

MEASUREMENT_PARTS: Final = (
    selectinload(MeasurementRow.stages),
    joinedload(MeasurementRow.breakdown),
)
"""Loads the other rows that a measurement's record needs."""

WITH_MEASUREMENT: Final[ORMOption] = joinedload(Trial.measurement).options(*MEASUREMENT_PARTS)
"""Loads the rows that trial records need, in two statements for any number of trials."""

PLAIN_MEASUREMENT_FIELDS: Final = tuple(each.name for each in plain_columns(MeasurementRecord))
"""Fields of a measurement's record that are columns of its own row."""

_IDS_AT_ONCE: Final = 1000
"""Trial ids in one statement: SQLite limits the parameters of one."""

R = TypeVar("R")


def record_of(kind: Callable[..., R], row: object, **named: Any) -> R:
    """Makes a record of a row: copies the fields that have the same name in both.

    The others are `named`, or values in place of columns.
    """
    names = (name for name in _names_of(kind) if name not in named)
    return kind(**{name: getattr(row, name) for name in names}, **named)


def columns_of(record: Any, **named: Any) -> dict[str, Any]:
    """The fields of a record as columns of its row; `named` are other values or columns."""
    return {name: getattr(record, name) for name in _names_of(record.__class__)} | named


@cache
def _names_of(kind: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cast("Any", kind)))


def own_first(owner: str) -> tuple[ColumnElement[int], ColumnElement[int]]:
    """The order in which a name finds campaigns: an owner's own, then the oldest.

    Owners do not see all names that are taken, so campaigns of several owners may have one name.
    """
    return case((Campaign.created_by == owner, 0), else_=1), Campaign.id.expression


def campaign_record(campaign: Campaign, now: datetime) -> CampaignRecord:
    """The campaign's record, with its wall time up to now."""
    stored = campaign.stored
    return record_of(
        CampaignRecord,
        campaign,
        stored=stored,
        objectives=stored.objectives or (campaign.objective,),
        cost=cost_of(campaign) + Cost(idle=campaign.allocation_idle_node_seconds),
        wall_time_s=campaign.wall_time_s + clock_seconds(campaign, now),
    )


def cheap_columns(layout: Layout, fidelity: Fidelity, model: ModelShape) -> dict[str, Any]:
    """The columns of a trial that runs a part of a layout."""
    return {
        **layout_columns(fidelity.reduced(layout)),
        "layout_key": fidelity.key(layout, model),
        "full_num_nodes": layout.num_nodes,
        "full_dp": layout.dp,
        "full_num_microbatches": layout.num_microbatches,
        "num_layers": fidelity.num_layers,
    }


def layout_columns(layout: Layout) -> dict[str, Any]:
    """The columns of a trial that follow from the layout that it runs."""
    return {
        **layout.without_job.to_mapping(every_knob=True),
        "job": layout.job,
        "layout_key": layout.key,
        "num_devices": layout.num_devices,
        "global_batch_size": layout.global_batch_size,
    }


def trial_layout(trial: Trial) -> Layout:
    return Layout(**{name: getattr(trial, name) for name in LAYOUT_FIELDS}, job=trial.job)


def full_layout_of(trial: Trial) -> Layout | None:
    """The layout that a cheap probe stands for; None: the trial runs its layout in full."""
    if trial.full_num_nodes is None or trial.full_dp is None or trial.full_num_microbatches is None:
        return None
    return replace(
        trial_layout(trial),
        num_nodes=trial.full_num_nodes,
        dp=trial.full_dp,
        num_microbatches=trial.full_num_microbatches,
    )


def trial_words(campaign: Campaign, trial: Trial) -> str:
    """A trial in a message: by campaign and number, and by id."""
    return f"trial {campaign.name}/{trial.number} (id {trial.id})"


def trial_record(trial: Trial) -> TrialRecord:
    """The trial's record; the row was loaded with `WITH_MEASUREMENT`."""
    measurement = trial.measurement
    return record_of(
        TrialRecord,
        trial,
        layout=trial_layout(trial),
        full_layout=full_layout_of(trial),
        cost=cost_of(trial),
        measurement=None if measurement is None else measurement_record(measurement),
    )


def trials_by_id(session: Session, trial_ids: Sequence[int]) -> dict[int, TrialRecord]:
    """The records of those trials that there are."""
    query = select(Trial).options(WITH_MEASUREMENT)
    return {
        row.id: trial_record(row)
        for some in in_parts(trial_ids)
        for row in session.scalars(query.where(Trial.id.in_(some)))
    }


def in_parts(trial_ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """Trial ids in parts of which one statement selects each."""
    for begin in range(0, len(trial_ids), _IDS_AT_ONCE):
        yield trial_ids[begin : begin + _IDS_AT_ONCE]


def measurement_record(row: MeasurementRow) -> MeasurementRecord:
    """The measurement's record; its stages were loaded."""
    reserved = (stage.peak_reserved_bytes for stage in row.stages)
    return record_of(
        MeasurementRecord,
        row,
        peak_memory_bytes_by_stage=tuple(stage.peak_memory_bytes for stage in row.stages),
        peak_reserved_bytes_by_stage=tuple(peak for peak in reserved if peak is not None),
        breakdown=None if row.breakdown is None else record_of(Breakdown, row.breakdown),
    )


def cost_of(row: Campaign | Trial | Attempt) -> Cost:
    """The cost of a row: the sum over attempts, or that of one attempt."""
    return Cost(**{name: getattr(row, column) for name, column in COST_COLUMNS.items()})
