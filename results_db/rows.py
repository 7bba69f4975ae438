"""From rows to records, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Final, cast

from sqlalchemy.orm import joinedload, selectinload
from sqlalchemy.orm.interfaces import ORMOption

from results_db.allocation_records import AllocationState, AttemptPhase, Scheduler
from results_db.cost import Cost
from results_db.models import (
    Attempt,
    BreakdownRow,
    Campaign,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    StageMemory,
    Trial,
)
from results_db.records import (
    AttemptEnding,
    AttemptRecord,
    CampaignRecord,
    CampaignState,
    MeasurementRecord,
    TrialRecord,
    TrialState,
    WorkerRecord,
)
from results_db.worker_tables import Worker
from search_spaces.constraints import Constraints
from search_spaces.layout import LAYOUT_FIELDS, Layout
from search_spaces.outcome import Breakdown, Environment, Iteration, Measurement

MAX_CLOCK_GAP_S: Final = 15.0
"""Longest silence of the driver that still counts as a campaign's wall time."""

COST_COLUMNS: Final = {field.name: f"{field.name}_node_seconds" for field in fields(Cost)}
"""The columns of attempts, trials and campaigns that hold the parts of their cost."""

MEASUREMENT_PARTS: Final = (
    selectinload(MeasurementRow.stages),
    joinedload(MeasurementRow.breakdown),
)
"""Loads what a measurement's record needs beyond its own row."""

WITH_MEASUREMENT: Final[ORMOption] = joinedload(Trial.measurement).options(*MEASUREMENT_PARTS)
"""Loads what a trial record needs, in two statements however many trials there are."""

PLAIN_MEASUREMENT_FIELDS: Final = tuple(
    field.name
    for field in fields(MeasurementRecord)
    if field.name not in ("peak_memory_bytes_by_stage", "peak_reserved_bytes_by_stage", "breakdown")
)
"""Fields of a measurement's record that are columns of its own row."""
_BREAKDOWN_FIELDS: Final = tuple(field.name for field in fields(Breakdown))
_ENVIRONMENT_FIELDS: Final = tuple(field.name for field in fields(Environment))


def clock_seconds(campaign: Campaign, now: datetime) -> float:
    """Seconds since the campaign's wall time was brought up to date, as far as they count.

    Time that the driver was silent for counts up to `MAX_CLOCK_GAP_S`: nobody searched then.
    """
    if campaign.clock_at is None:
        return 0.0
    return min(max((now - campaign.clock_at).total_seconds(), 0.0), MAX_CLOCK_GAP_S)


def objectives_of(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The objectives of a campaign's description, the one that ranks first."""
    objective = spec["objective"]
    return (objective,) if isinstance(objective, str) else tuple(objective)


def max_peak_memory_bytes(spec: Mapping[str, Any]) -> int | None:
    """The largest peak that a campaign's constraints let be ranked; None without constraints."""
    headroom = spec.get("constraints", {}).get("memory_headroom", 0)
    if not headroom:
        return None
    constraints = Constraints(memory_headroom=headroom)
    return int(constraints.allowed_memory_bytes(spec["cluster"]["device_memory_bytes"]))


def probe_deadline_s(spec: Mapping[str, Any]) -> float | None:
    """Longest that a probe of the campaign may take; None where its description does not say."""
    deadline_s = spec.get("probe", {}).get("deadline_s")
    return None if deadline_s is None else float(deadline_s)


def campaign_record(campaign: Campaign, now: datetime) -> CampaignRecord:
    """The campaign's record, its wall time brought up to now."""
    return CampaignRecord(
        id=campaign.id,
        name=campaign.name,
        state=cast("CampaignState", campaign.state),
        reason=campaign.reason,
        message=campaign.message,
        spec=campaign.spec,
        model_name=campaign.model_name,
        cluster_name=campaign.cluster_name,
        objective=campaign.objective,
        objectives=objectives_of(campaign.spec),
        strategy=campaign.strategy,
        num_legal_layouts=campaign.num_legal_layouts,
        max_peak_memory_bytes=campaign.max_peak_memory_bytes,
        created_at=campaign.created_at,
        started_at=campaign.started_at,
        ended_at=campaign.ended_at,
        node_seconds=campaign.node_seconds,
        cost=cost_of(campaign) + Cost(idle=campaign.allocation_idle_node_seconds),
        wall_time_s=campaign.wall_time_s + clock_seconds(campaign, now),
        created_by=campaign.created_by,
        notes=campaign.notes,
    )


def layout_columns(layout: Layout) -> dict[str, Any]:
    """The columns of a trial that follow from its layout."""
    return {
        **layout.to_mapping(),
        "layout_key": layout.key,
        "num_devices": layout.num_devices,
        "global_batch_size": layout.global_batch_size,
    }


def trial_layout(trial: Trial) -> Layout:
    """The layout that a trial's columns spell."""
    return Layout(**{name: getattr(trial, name) for name in LAYOUT_FIELDS})


def trial_record(trial: Trial) -> TrialRecord:
    """The trial's record; the row was loaded with `WITH_MEASUREMENT`."""
    return TrialRecord(
        id=trial.id,
        number=trial.number,
        campaign_id=trial.campaign_id,
        layout=trial_layout(trial),
        layout_key=trial.layout_key,
        state=cast("TrialState", trial.state),
        reason=trial.reason,
        message=trial.message,
        node=trial.node,
        attempt=trial.attempt,
        lost_attempts=trial.lost_attempts,
        iterations_done=trial.iterations_done,
        worker_id=trial.worker_id,
        repeat_of=trial.repeat_of,
        repeat_index=trial.repeat_index,
        node_seconds=trial.node_seconds,
        cost=cost_of(trial),
        measurement=None if trial.measurement is None else measurement_record(trial.measurement),
        created_at=trial.created_at,
        started_at=trial.started_at,
        ended_at=trial.ended_at,
        ended_seq=trial.ended_seq,
    )


def measurement_record(row: MeasurementRow) -> MeasurementRecord:
    """The measurement's record; its stages were loaded."""
    return MeasurementRecord(
        **{name: getattr(row, name) for name in PLAIN_MEASUREMENT_FIELDS},
        peak_memory_bytes_by_stage=tuple(stage.peak_memory_bytes for stage in row.stages),
        peak_reserved_bytes_by_stage=tuple(
            stage.peak_reserved_bytes
            for stage in row.stages
            if stage.peak_reserved_bytes is not None
        ),
        breakdown=None if row.breakdown is None else breakdown_value(row.breakdown),
    )


def stage_rows(trial_id: int, measurement: Measurement) -> list[StageMemory]:
    """The rows of a measurement's peaks, one a stage."""
    peaks = measurement.peak_memory_bytes_by_stage
    reserved = measurement.peak_reserved_bytes_by_stage or (None,) * len(peaks)
    return [
        StageMemory(
            trial_id=trial_id, stage=stage, peak_memory_bytes=peak, peak_reserved_bytes=held
        )
        for stage, (peak, held) in enumerate(zip(peaks, reserved, strict=True))
    ]


def breakdown_value(row: BreakdownRow) -> Breakdown:
    """The breakdown as the vocabulary knows it."""
    return Breakdown(**{name: getattr(row, name) for name in _BREAKDOWN_FIELDS})


def measurement_columns(measurement: Measurement) -> dict[str, Any]:
    """The columns of a measurement's own row."""
    return {name: getattr(measurement, name) for name in PLAIN_MEASUREMENT_FIELDS}


def iteration_value(row: IterationRow) -> Iteration:
    """The iteration as the vocabulary knows it."""
    return Iteration(
        index=row.index,
        kind="warmup" if row.kind == "warmup" else "timed",
        step_time_s=row.step_time_s,
        loss=row.loss,
        grad_norm=row.grad_norm,
    )


def environment_value(row: EnvironmentRow) -> Environment:
    """The environment as the vocabulary knows it."""
    return Environment(**{name: getattr(row, name) for name in _ENVIRONMENT_FIELDS})


def environment_columns(environment: Environment) -> dict[str, str]:
    """The columns of an environment."""
    return {name: getattr(environment, name) for name in _ENVIRONMENT_FIELDS}


def attempt_record(attempt: Attempt, worker: Worker) -> AttemptRecord:
    """The attempt's record, with the name of the worker that made it."""
    return AttemptRecord(
        attempt=attempt.attempt,
        worker_id=attempt.worker_id,
        worker_name=worker.name,
        host=worker.host,
        started_at=attempt.started_at,
        seen_at=attempt.seen_at,
        ended_at=attempt.ended_at,
        ending=cast("AttemptEnding | None", attempt.ending),
        node_seconds=attempt.node_seconds,
        cost=cost_of(attempt),
        phase=cast("AttemptPhase | None", attempt.phase),
        held_s=attempt.held_s,
        nodes_held=attempt.nodes_held,
        iterations_s=attempt.iterations_s,
        waiting_because=attempt.waiting_because,
    )


def worker_record(worker: Worker) -> WorkerRecord:
    """The worker session's record."""
    return WorkerRecord(
        id=worker.id,
        name=worker.name,
        host=worker.host,
        cluster=worker.cluster,
        num_nodes=worker.num_nodes,
        devices_per_node=worker.devices_per_node,
        device=worker.device,
        versions=worker.versions,
        registered_at=worker.registered_at,
        seen_at=worker.seen_at,
        ended_at=worker.ended_at,
        scheduler=cast("Scheduler", worker.scheduler),
        job_id=worker.job_id,
        launcher=worker.launcher,
        ends_at=worker.ends_at,
        shares_nodes=worker.shares_nodes,
        state=cast("AllocationState", worker.state),
        idle_node_seconds=worker.idle_node_seconds,
        status_at=worker.status_at,
    )


def cost_of(row: Campaign | Trial | Attempt) -> Cost:
    """What its attempts cost, or what it did."""
    return Cost(**{name: getattr(row, column) for name, column in COST_COLUMNS.items()})
