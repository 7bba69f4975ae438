"""Data of reports and pages about campaigns besides their records and leaderboards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from sqlalchemy import delete, func, select
from sqlalchemy.orm import selectinload

from layout_tuner.protocol.measurement import Environment
from layout_tuner.protocol.states import AttemptPhase, TrialState
from layout_tuner.results_db.campaigns.campaigns import conditions
from layout_tuner.results_db.campaigns.filter import CampaignFilter
from layout_tuner.results_db.campaigns.start_from import dependents
from layout_tuner.results_db.database.events import emit
from layout_tuner.results_db.database.locks import lock_campaign
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.results_db.models.tables import (
    AnalysisRow,
    Attempt,
    Campaign,
    EnvironmentRow,
    ImportanceRow,
    StepRow,
    Trial,
    TrialLog,
)
from layout_tuner.results_db.records import Analysis, CampaignState, KnobStepRead, WorkerRecord
from layout_tuner.results_db.rows import columns_of, record_of


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialBrief:
    """A trial that has ended, in brief."""

    id: int
    number: int
    layout_key: str
    state: TrialState
    reason: str | None
    message: str
    node: str
    node_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerShare(WorkerRecord):
    """A worker session, with its attempts for a campaign."""

    num_attempts: int
    num_lost: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningPhase:
    """The progress of a trial's open attempt."""

    phase: AttemptPhase | None
    """None: its worker reported none."""
    waiting_because: str
    """Why it waits for devices; empty: it does not."""


class Reports(StoreSection):
    """The store's methods for reports, analyses, and pages about campaigns."""

    def ended_trials(self, campaign_id: int) -> list[TrialBrief]:
        """Every trial of the campaign that has ended, in the order of their ends."""
        query = (
            select(*(getattr(Trial, each.name) for each in fields(TrialBrief)))
            .where(Trial.campaign_id == campaign_id, Trial.ended_at.is_not(None))
            .order_by(Trial.ended_seq)
        )
        with self._db.read() as session:
            return [TrialBrief(**row._mapping) for row in session.execute(query)]

    def log_tail(self, trial_id: int) -> str:
        """The last lines that a trial's ranks printed; empty if none are stored."""
        return self._scalar(select(TrialLog.tail).where(TrialLog.trial_id == trial_id)) or ""

    def environments(self, campaign_id: int) -> list[tuple[Environment, int]]:
        """The environments of the campaign's trials with their numbers, the most common first."""
        columns = [getattr(EnvironmentRow, each.name) for each in fields(Environment)]
        count = func.count()
        query = (
            select(*columns, count)
            .join(Trial, Trial.id == EnvironmentRow.trial_id)
            .where(Trial.campaign_id == campaign_id)
            .group_by(*columns)
            .order_by(count.desc(), *columns)
        )
        with self._db.read() as session:
            return [(record_of(Environment, row), row[-1]) for row in session.execute(query)]

    def workers_of(self, campaign_id: int) -> list[WorkerShare]:
        """The worker sessions that leased trials of the campaign, in the order of registration."""
        lost = func.count().filter(Attempt.ending == "lost")
        counts = (
            select(Attempt.worker_id, func.count().label("all"), lost.label("lost"))
            .join(Trial, Trial.id == Attempt.trial_id)
            .where(Trial.campaign_id == campaign_id)
            .group_by(Attempt.worker_id)
            .subquery()
        )
        query = (
            select(WorkerRow, counts.c.all, counts.c.lost)
            .join(counts, counts.c.worker_id == WorkerRow.id)
            .order_by(WorkerRow.registered_at, WorkerRow.id)
        )
        with self._db.read() as session:
            return [
                record_of(WorkerShare, worker, num_attempts=num_attempts, num_lost=num_lost)
                for worker, num_attempts, num_lost in session.execute(query)
            ]

    def keep_analysis(self, campaign_id: int, analysis: Analysis) -> None:
        """Stores an analysis; it replaces the campaign's earlier one."""
        with self._db.write() as session:
            lock_campaign(session, campaign_id)
            session.execute(delete(AnalysisRow).where(AnalysisRow.campaign_id == campaign_id))
            own = columns_of(analysis, campaign_id=campaign_id, computed_at=self._clock())
            del own["importances"], own["steps"]  # rows of their own
            session.add(AnalysisRow(**own))
            session.flush()
            session.add_all(
                ImportanceRow(campaign_id=campaign_id, knob=knob, importance=importance)
                for knob, importance in analysis.importances.items()
            )
            session.add_all(
                StepRow(**columns_of(step, campaign_id=campaign_id, also=",".join(step.also)))
                for step in analysis.steps
            )
            emit(session, campaign_id, "campaign.analysed", now=self._clock())

    def analysis(self, campaign_id: int) -> Analysis | None:
        """The campaign's newest analysis; None while there is none."""
        query = (
            select(AnalysisRow)
            .where(AnalysisRow.campaign_id == campaign_id)
            .options(selectinload(AnalysisRow.importances), selectinload(AnalysisRow.steps))
        )
        with self._db.read() as session:
            row = session.scalar(query)
            if row is None:
                return None
            return record_of(
                Analysis,
                row,
                importances={each.knob: each.importance for each in row.importances},
                steps=tuple(
                    record_of(KnobStepRead, step, also=tuple(filter(None, step.also.split(","))))
                    for step in row.steps
                ),
            )

    def count_campaigns(self, chosen: CampaignFilter) -> int:
        query = select(func.count()).select_from(Campaign).where(*conditions(chosen))
        return self._scalar(query) or 0

    def campaign_choices(self) -> Mapping[str, Mapping[str, int]]:
        """The values that campaigns have, with their numbers of campaigns, by column.

        The columns are state, model_name, cluster_name, created_by, visibility; values are sorted.
        """
        of = Campaign
        columns = (of.state, of.model_name, of.cluster_name, of.created_by, of.visibility)
        with self._db.read() as session:
            return {
                column.key: {
                    row[0]: row[1]
                    for row in session.execute(
                        select(column, func.count()).group_by(column).order_by(column)
                    )
                }
                for column in columns
            }

    def campaigns_from(self, campaign_id: int) -> list[tuple[int, str, CampaignState]]:
        """Ids, names and states of the campaigns that start from a campaign, the newest first."""
        with self._db.read() as session:
            return dependents(session, campaign_id)

    def running_phases(self, campaign_id: int) -> dict[int, RunningPhase]:
        """The progress of a campaign's running trials, by their ids."""
        query = (
            select(Attempt)
            .join(Trial, Trial.id == Attempt.trial_id)
            .where(
                Trial.campaign_id == campaign_id, Trial.state == "RUNNING", Attempt.ending.is_(None)
            )
        )
        with self._db.read() as session:
            return {row.trial_id: record_of(RunningPhase, row) for row in session.scalars(query)}
