"""What a report tells of a campaign beyond its leaderboard: every trial in brief, machines, software."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, cast

from sqlalchemy import func, select

from results_db.models import Attempt, EnvironmentRow, MeasurementRow, Trial, TrialLog
from results_db.part import StorePart
from results_db.records import TrialState
from results_db.worker_tables import Worker
from search_spaces.outcome import Environment


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialPoint:
    """A trial that has ended, as far as a plot shows it; the figures are None without a measurement."""

    trial_id: int
    number: int
    layout_key: str
    num_nodes: int
    state: TrialState
    reason: str | None
    message: str
    node: str
    is_repeat: bool
    node_seconds: float
    shortened: bool | None
    oversubscribed: bool | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    model_tflops_per_device: float | None
    hardware_tflops_per_device: float | None
    peak_memory_bytes: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerShare:
    """A session of a worker, and what it did for a campaign."""

    name: str
    host: str
    num_nodes: int
    devices_per_node: int
    device: str
    launcher: str
    job_id: str | None
    versions: Mapping[str, Any]
    num_attempts: int
    num_lost: int


_OF_TRIAL: Final = ("number", "layout_key", "num_nodes", "state", "reason", "message", "node")
_MEASURED: Final = (
    "shortened",
    "oversubscribed",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "peak_memory_bytes",
)
_ENVIRONMENT: Final = tuple(field.name for field in fields(Environment))


class Reports(StorePart):
    """The part of the store that reports are made from."""

    def ended_trials(self, campaign_id: int) -> list[TrialPoint]:
        """Every trial of the campaign that has ended, in the order in which they did."""
        query = (
            select(
                Trial.id.label("trial_id"),
                *(getattr(Trial, name) for name in _OF_TRIAL),
                Trial.repeat_of.is_not(None).label("is_repeat"),
                Trial.node_seconds,
                *(getattr(MeasurementRow, name) for name in _MEASURED),
            )
            .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(Trial.campaign_id == campaign_id, Trial.ended_at.is_not(None))
            .order_by(Trial.ended_seq)
        )
        with self._db.read() as session:
            return [TrialPoint(**row._mapping) for row in session.execute(query)]

    def log_tail(self, trial_id: int) -> str:
        """The last lines that a trial's ranks printed; empty where none were kept."""
        with self._db.read() as session:
            return session.scalar(select(TrialLog.tail).where(TrialLog.trial_id == trial_id)) or ""

    def environments(self, campaign_id: int) -> list[tuple[Environment, int]]:
        """What the campaign's trials ran on, each with the number of trials, the most common first."""
        columns = [getattr(EnvironmentRow, name) for name in _ENVIRONMENT]
        count = func.count()
        query = (
            select(*columns, count)
            .join(Trial, Trial.id == EnvironmentRow.trial_id)
            .where(Trial.campaign_id == campaign_id)
            .group_by(*columns)
            .order_by(count.desc(), *columns)
        )
        with self._db.read() as session:
            return [
                (Environment(**dict(zip(_ENVIRONMENT, row[:-1], strict=True))), row[-1])
                for row in session.execute(query)
            ]

    def workers_of(self, campaign_id: int) -> list[WorkerShare]:
        """The sessions of workers that had trials of the campaign, in the order of their registration."""
        lost = func.count().filter(Attempt.ending == "lost")
        counts = (
            select(Attempt.worker_id, func.count().label("all"), lost.label("lost"))
            .join(Trial, Trial.id == Attempt.trial_id)
            .where(Trial.campaign_id == campaign_id)
            .group_by(Attempt.worker_id)
            .subquery()
        )
        query = (
            select(Worker, counts.c.all, counts.c.lost)
            .join(counts, counts.c.worker_id == Worker.id)
            .order_by(Worker.registered_at, Worker.id)
        )
        with self._db.read() as session:
            return [_share(*row) for row in session.execute(query)]


def _share(worker: Worker, num_attempts: int, num_lost: int) -> WorkerShare:
    return WorkerShare(
        name=worker.name,
        host=worker.host,
        num_nodes=worker.num_nodes,
        devices_per_node=worker.devices_per_node,
        device=worker.device,
        launcher=worker.launcher,
        job_id=worker.job_id,
        versions=cast("Mapping[str, Any]", worker.versions),
        num_attempts=num_attempts,
        num_lost=num_lost,
    )
