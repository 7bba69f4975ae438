"""Trials: added, listed, read in full; repeated, requeued and cancelled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import Select, func, insert, select
from sqlalchemy.orm import Session

from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.protocol.measurement import Environment, Iteration
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.database.database import refused_unless_unique
from layout_tuner.results_db.database.events import tell
from layout_tuner.results_db.database.locks import lock_campaign, lock_trial
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import (
    CampaignStateError,
    TrialDuplicateError,
    TrialLogNotFoundError,
    TrialNotFoundError,
    TrialStateError,
)
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.results_db.models.tables import (
    Attempt,
    Campaign,
    EnvironmentRow,
    IterationRow,
    MeasurementRow,
    PredictionRow,
    Trial,
    TrialLog,
)
from layout_tuner.results_db.records import (
    ENDED_CAMPAIGN_STATES,
    ENDED_TRIAL_STATES,
    AttemptRecord,
    PredictedTrial,
    ProbeCount,
    RepeatReason,
    TrialDetail,
    TrialRecord,
    TrialSize,
)
from layout_tuner.results_db.rows import (
    WITH_MEASUREMENT,
    cheap_columns,
    columns_of,
    cost_of,
    layout_columns,
    record_of,
    trial_record,
    trial_words,
)
from layout_tuner.results_db.trials.lifecycle import cancel_trial
from layout_tuner.results_db.trials.loss_check import trials_in_doubt
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.layouts.layout import Layout

MAX_TIMES: Final = 20
"""Most repeats of a trial in one request."""

_OF_LAYOUT: Final = (
    *layout_columns(Layout()),
    *("full_num_nodes", "full_dp", "full_num_microbatches", "num_layers"),
)
"""The columns of a trial that say what it runs."""
_NOT_MEASURED: Final = frozenset({"FAILED", "INFEASIBLE", "CANCELLED"})


class Trials(StoreSection):
    """The store's methods for trials; those of one raise `TrialNotFoundError` if there is none."""

    @retried
    def add(
        self,
        campaign_id: int,
        layout: Layout,
        *,
        fidelity: Fidelity | None = None,
        prediction: Prediction | None = None,
    ) -> TrialRecord:
        """Adds a trial, PENDING, of a layout that the campaign has not tried at this fidelity.

        With a fidelity it runs a part of the layout, as a cheap probe.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            CampaignStateError: the campaign has ended meanwhile.
            TrialDuplicateError: the campaign has a trial of this layout.
        """
        part = "" if fidelity is None else " at the same fidelity"
        known = f"campaign {campaign_id} has a trial of {layout.key}{part} already"
        key = ("campaign_id", "layout_key", "repeat_index")
        with (
            refused_unless_unique(TrialDuplicateError(known), "trials", *key),
            self._db.write() as session,
        ):
            campaign = lock_campaign(session, campaign_id)
            columns = layout_columns(layout)
            if fidelity is not None:
                columns = cheap_columns(layout, fidelity, campaign.stored.spec.model)
            trial = add_row(session, campaign, columns, self._clock())
            if prediction is not None:
                columns = columns_of(prediction, trial_id=trial.id)
                session.execute(insert(PredictionRow).values(columns))
            return trial_record(trial)

    def get(self, trial_id: int) -> TrialRecord:
        with self._db.read() as session:
            return trial_record(by_id(session, trial_id))

    def by_number(self, campaign_id: int, number: int) -> TrialRecord:
        """One trial by its number in its campaign; TrialNotFoundError if there is none."""
        query = select(Trial).where(Trial.campaign_id == campaign_id, Trial.number == number)
        found = self._records(query)
        if not found:
            raise TrialNotFoundError(f"campaign {campaign_id} has no trial number {number}")
        return found[0]

    def detail(self, trial_id: int) -> TrialDetail:
        """One trial with its iterations, environment, log and attempts."""
        with self._db.read() as session:
            trial = by_id(session, trial_id)
            environment = session.get(EnvironmentRow, trial_id)
            log = session.get(TrialLog, trial_id)
            predicted = session.get(PredictionRow, trial_id)
            return TrialDetail(
                trial=trial_record(trial),
                iterations=tuple(
                    record_of(Iteration, row)
                    for row in session.scalars(
                        select(IterationRow)
                        .where(IterationRow.trial_id == trial_id)
                        .order_by(IterationRow.index)
                    )
                ),
                environment=None if environment is None else record_of(Environment, environment),
                log_tail="" if log is None else log.tail,
                attempts=tuple(
                    record_of(
                        AttemptRecord,
                        attempt,
                        worker_name=worker.name,
                        host=worker.host,
                        cost=cost_of(attempt),
                    )
                    for attempt, worker in session.execute(
                        select(Attempt, WorkerRow)
                        .join(WorkerRow, WorkerRow.id == Attempt.worker_id)
                        .where(Attempt.trial_id == trial_id)
                        .order_by(Attempt.attempt)
                    )
                ),
                prediction=None if predicted is None else record_of(Prediction, predicted),
            )

    def predictions(self, campaign_id: int, *, limit: int = 2000) -> list[PredictedTrial]:
        """What was predicted of a campaign's trials, beside what they measured.

        Returns:
            The newest trials with a prediction, at most `limit`, in the order of their numbers.
        """
        query = (
            select(
                Trial.id.label("trial_id"),
                Trial.number,
                Trial.layout_key,
                Trial.state,
                Trial.is_baseline,
                PredictionRow,
                MeasurementRow.step_time_s,
                MeasurementRow.peak_memory_bytes,
            )
            .join(PredictionRow, PredictionRow.trial_id == Trial.id)
            .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
            .where(Trial.campaign_id == campaign_id)
            .order_by(Trial.number.desc())
            .limit(limit)
        )
        with self._db.read() as session:
            newest_first = [
                record_of(PredictedTrial, row, prediction=record_of(Prediction, row.PredictionRow))
                for row in session.execute(query)
            ]
        return newest_first[::-1]

    def log(self, trial_id: int) -> str:
        """The last lines that a trial's ranks printed; TrialLogNotFoundError if none are stored."""
        with self._db.read() as session:
            trial = by_id(session, trial_id)  # first: a reader may not see it
            log = session.get(TrialLog, trial_id)
            if log is not None:
                return log.tail
            state = trial.state
            campaign = session.get_one(Campaign, trial.campaign_id)
            what = trial_words(campaign, trial)
        if state in ENDED_TRIAL_STATES:
            why = "its ranks printed nothing, or the log was pruned"
        else:
            why = "it comes with the outcome"
        raise TrialLogNotFoundError(f"{what} is {state} and has no log: {why}")

    def find(self, campaign_id: int, *, states: Sequence[TrialState] = ()) -> list[TrialRecord]:
        """The campaign's trials in order of their numbers."""
        query = select(Trial).where(Trial.campaign_id == campaign_id).order_by(Trial.number)
        return self._records(query.where(Trial.state.in_(states)) if states else query)

    def ended_since(self, campaign_id: int, after: int) -> list[TrialRecord]:
        """The campaign's ended trials with an `ended_seq` above `after`, in that order."""
        query = (
            select(Trial)
            .where(Trial.campaign_id == campaign_id, Trial.ended_seq > after)
            .order_by(Trial.ended_seq)
        )
        return self._records(query)

    def _records(self, query: Select[Trial]) -> list[TrialRecord]:
        with self._db.read() as session:
            return [trial_record(row) for row in session.scalars(query.options(WITH_MEASUREMENT))]

    def in_doubt(self, campaign_id: int) -> list[int]:
        """Ids of trials to repeat, because it is undecided which of several losses are right."""
        with self._db.read() as session:
            return trials_in_doubt(session, campaign_id)

    def count_repeats(self, campaign_id: int) -> dict[str, RepeatsOfLayout]:
        """The repeats that are not cancelled, including open ones, by layout key."""
        query = (
            select(
                Trial.layout_key,
                func.count(),
                func.count().filter(Trial.repeat_reason == "disturbed"),
                func.count().filter(Trial.repeat_reason == "doubted"),
                func.max(Trial.ended_at),
            )
            .where(
                Trial.campaign_id == campaign_id,
                Trial.repeat_of.is_not(None),
                Trial.state != "CANCELLED",
            )
            .group_by(Trial.layout_key)
        )
        with self._db.read() as session:
            return {row[0]: RepeatsOfLayout(*row[1:]) for row in session.execute(query)}

    def ended_probes(self, campaign_id: int, *, cheap: bool) -> ProbeCount:
        """The ended trials that ran their layouts in full, or the cheap probes among them.

        Cancelled trials do not count.
        """
        query = select(func.count(), func.coalesce(func.sum(Trial.node_seconds), 0.0)).where(
            Trial.campaign_id == campaign_id,
            Trial.num_layers.is_not(None) if cheap else Trial.num_layers.is_(None),
            Trial.state.in_(ENDED_TRIAL_STATES - {"CANCELLED"}),
        )
        with self._db.read() as session:
            number, node_seconds = session.execute(query).one()
        return ProbeCount(number=number, node_seconds=node_seconds)

    def count_open(self, campaign_id: int) -> int:
        query = select(func.count()).where(
            Trial.campaign_id == campaign_id, Trial.state.in_(("PENDING", "RUNNING"))
        )
        return self._scalar(query) or 0

    def open_sizes(self, campaign_id: int) -> list[TrialSize]:
        """The resources that waiting and running trials need, the oldest first."""
        is_waiting = (Trial.state == "PENDING").label("is_waiting")
        query = (
            select(Trial.num_nodes, Trial.num_devices, is_waiting)
            .where(Trial.campaign_id == campaign_id, Trial.state.in_(("PENDING", "RUNNING")))
            .order_by(Trial.id)
        )
        with self._db.read() as session:
            return [record_of(TrialSize, row) for row in session.execute(query)]

    @retried
    def repeat(self, trial_id: int, *, reason: RepeatReason | None = None) -> TrialRecord:
        """Adds a trial of the same layout as one that has ended, for the driver.

        Raises:
            TrialStateError: the trial has not ended.
            CampaignStateError: its campaign has ended.
        """
        with self._db.write() as session:
            campaign, trial = lock_trial(session, trial_id, WITH_MEASUREMENT)
            if trial.state not in ENDED_TRIAL_STATES:
                raise TrialStateError(
                    f"{trial_words(campaign, trial)} is {trial.state}; only an ended trial is repeated"
                )
            return trial_record(self._repeat(session, campaign, trial, reason))

    @retried
    def measure_again(self, trial_id: int, *, times: int = 1) -> list[TrialRecord]:
        """Adds trials that measure the layout of a COMPLETED one again, for a user.

        Raises:
            TrialStateError: it is not COMPLETED.
            CampaignStateError: its campaign has ended.
        """
        assert 1 <= times <= MAX_TIMES, f"{times} times"
        with self._db.write() as session:
            campaign, trial = lock_trial(session, trial_id, WITH_MEASUREMENT)
            if trial.state != "COMPLETED":
                remedy = "requeue it" if trial.state in _NOT_MEASURED else "wait for its end"
                raise TrialStateError(
                    f"{trial_words(campaign, trial)} is {trial.state}; only a COMPLETED one is measured "
                    f"again: {remedy}"
                )
            added = [self._repeat(session, campaign, trial, "request") for _ in range(times)]
            numbers = [each.number for each in added]
            self._audit_trial(session, "trial.repeat", campaign, trial, added=numbers)
            return [trial_record(each) for each in added]

    @retried
    def requeue(self, trial_id: int) -> TrialRecord:
        """Adds a trial of the layout of one that ended without a measurement that counts.

        Raises:
            TrialStateError: it is COMPLETED, or has not ended, or the layout is waiting or running.
            CampaignStateError: its campaign has ended.
        """
        with self._db.write() as session:
            campaign, trial = lock_trial(session, trial_id, WITH_MEASUREMENT)
            if trial.state not in _NOT_MEASURED:
                remedy = "repeat it" if trial.state == "COMPLETED" else "it goes on"
                raise TrialStateError(
                    f"{trial_words(campaign, trial)} is {trial.state}; only a FAILED, INFEASIBLE or "
                    f"CANCELLED one is queued again: {remedy}"
                )
            _refuse_open(session, campaign, trial)
            added = self._repeat(session, campaign, trial, "request")
            self._audit_trial(session, "trial.requeue", campaign, trial, added=added.number)
            return trial_record(added)

    @retried
    def cancel(self, trial_id: int) -> TrialRecord:
        """Cancels a trial: at once if it waits, through its worker if it runs; it can be repeated.

        Raises TrialStateError if it has ended in another way.
        """
        with self._db.write() as session:
            campaign, trial = lock_trial(session, trial_id, WITH_MEASUREMENT)
            if trial.state in ENDED_TRIAL_STATES and trial.state != "CANCELLED":
                raise TrialStateError(
                    f"{trial_words(campaign, trial)} has ended: it is {trial.state}"
                )
            if trial.state != "CANCELLED" and not trial.cancel_requested:
                cancel_trial(campaign, trial, self._clock(), "cancelled by the user")
                self._audit_trial(session, "trial.cancel", campaign, trial)
            return trial_record(trial)

    def _repeat(
        self, session: Session, campaign: Campaign, trial: Trial, reason: RepeatReason | None
    ) -> Trial:
        last = session.scalar(
            select(func.max(Trial.repeat_index)).where(
                Trial.campaign_id == campaign.id, Trial.layout_key == trial.layout_key
            )
        )
        return add_row(
            session,
            campaign,
            {name: getattr(trial, name) for name in _OF_LAYOUT} | {"repeat_reason": reason},
            self._clock(),
            repeat_of=trial.id,
            repeat_index=(last or 0) + 1,
        )

    def _audit_trial(
        self, session: Session, action: str, campaign: Campaign, trial: Trial, **added: Any
    ) -> None:
        named = {"campaign": campaign.name, "number": trial.number}
        self._audit(session, action, "trial", trial.id, **named, **added)


def add_row(
    session: Session,
    campaign: Campaign,
    columns: Mapping[str, Any],
    now: datetime,
    *,
    repeat_of: int | None = None,
    repeat_index: int = 0,
) -> Trial:
    """Adds a trial, PENDING, to a locked campaign; CampaignStateError if that has ended."""
    if campaign.state in ENDED_CAMPAIGN_STATES:
        raise CampaignStateError(
            f"campaign {campaign.name!r} is {campaign.state} and takes no trials"
        )
    campaign.last_number += 1
    trial = Trial(
        campaign_id=campaign.id,
        number=campaign.last_number,
        state="PENDING",
        repeat_of=repeat_of,
        repeat_index=repeat_index,
        created_at=now,
        measurement=None,
        **columns,
    )
    baseline = campaign.stored.baseline
    trial.is_baseline = baseline is not None and trial.layout_key == baseline.key
    session.add(trial)
    session.flush()
    tell(trial, "trial.added", now)
    return trial


def by_id(session: Session, trial_id: int) -> Trial:
    """A trial's row, with its measurement."""
    trial = session.get(Trial, trial_id, options=[WITH_MEASUREMENT])
    if trial is None:
        raise TrialNotFoundError(f"there is no trial {trial_id}")
    return trial


def _refuse_open(session: Session, campaign: Campaign, trial: Trial) -> None:
    """Refuses a layout that is waiting or running: the request may have been sent twice."""
    query = select(Trial.number, Trial.state).where(
        Trial.campaign_id == trial.campaign_id,
        Trial.layout_key == trial.layout_key,
        Trial.state.in_(("PENDING", "RUNNING")),
    )
    row = session.execute(query.order_by(Trial.number).limit(1)).first()
    if row is not None:
        raise TrialStateError(
            f"{trial_words(campaign, trial)} is not queued again: trial number {row.number} is of the same layout, and "
            f"{row.state}"
        )


@dataclass(frozen=True, slots=True)
class RepeatsOfLayout:
    """How often a layout was measured again, cancelled trials apart."""

    total: int = 0
    disturbed: int = 0
    """Repeats because others took its devices during every earlier run."""
    doubted: int = 0
    """Repeats because its measurement was doubted."""
    last_ended_at: datetime | None = None
    """When the last repeat ended; None: none has."""
