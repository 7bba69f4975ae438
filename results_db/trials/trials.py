"""Trials: written before anything else knows of them, listed, read in full."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.divergence import trials_in_doubt
from results_db.errors import (
    CampaignNotFoundError,
    CampaignStateError,
    TrialDuplicateError,
    TrialLogNotFoundError,
    TrialNotFoundError,
)
from results_db.events import tell
from results_db.locks import lock_campaign
from results_db.models import (
    Attempt,
    Campaign,
    EnvironmentRow,
    IterationRow,
    Trial,
    TrialLog,
)
from results_db.part import StorePart
from results_db.records import (
    ENDED_CAMPAIGN_STATES,
    ENDED_TRIAL_STATES,
    TrialDetail,
    TrialRecord,
    TrialSize,
    TrialState,
)
from results_db.retry import retried
from results_db.rows import (
    WITH_MEASUREMENT,
    attempt_record,
    environment_value,
    iteration_value,
    layout_columns,
    trial_record,
)
from results_db.session import breaks_unique
from results_db.worker_tables import Worker
from search_spaces.layout import Layout
from search_spaces.outcome import Iteration


class Trials(StorePart):
    """The trials' part of the store."""

    @retried
    def add_trial(self, campaign_id: int, layout: Layout) -> TrialRecord:
        """Writes a trial of a layout that the campaign has not tried, PENDING.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            CampaignStateError: the campaign has ended meanwhile (the user was quicker).
            TrialDuplicateError: the campaign has a trial of this layout.
        """
        try:
            with self._db.write() as session:
                campaign = lock_campaign(session, campaign_id)
                if campaign is None:
                    raise CampaignNotFoundError(f"there is no campaign {campaign_id}")
                return trial_record(add_row(session, campaign, layout, self._clock()))
        except IntegrityError as error:
            if not breaks_unique(error, "trials", "campaign_id", "layout_key", "repeat_index"):
                raise
            raise TrialDuplicateError(
                f"campaign {campaign_id} has a trial of {layout.key} already"
            ) from error

    def trial(self, trial_id: int) -> TrialRecord:
        """One trial.

        Raises:
            TrialNotFoundError: there is no such trial.
        """
        with self._db.read() as session:
            return trial_record(by_id(session, trial_id))

    def trial_by_number(self, campaign_id: int, number: int) -> TrialRecord:
        """One trial by its number in its campaign.

        Raises:
            TrialNotFoundError: the campaign has no such trial.
        """
        query = select(Trial).where(Trial.campaign_id == campaign_id, Trial.number == number)
        with self._db.read() as session:
            trial = session.scalar(query.options(WITH_MEASUREMENT))
            if trial is None:
                raise TrialNotFoundError(f"campaign {campaign_id} has no trial number {number}")
            return trial_record(trial)

    def trial_detail(self, trial_id: int) -> TrialDetail:
        """One trial with its iterations, environment, log and attempts.

        Raises:
            TrialNotFoundError: there is no such trial.
        """
        with self._db.read() as session:
            trial = by_id(session, trial_id)
            environment = session.get(EnvironmentRow, trial_id)
            log = session.get(TrialLog, trial_id)
            return TrialDetail(
                trial=trial_record(trial),
                iterations=tuple(_iterations(session, trial_id)),
                environment=None if environment is None else environment_value(environment),
                log_tail="" if log is None else log.tail,
                attempts=tuple(
                    attempt_record(attempt, worker)
                    for attempt, worker in session.execute(
                        select(Attempt, Worker)
                        .join(Worker, Worker.id == Attempt.worker_id)
                        .where(Attempt.trial_id == trial_id)
                        .order_by(Attempt.attempt)
                    )
                ),
            )

    def trial_log(self, trial_id: int) -> str:
        """The last lines that a trial's ranks printed.

        Raises:
            TrialNotFoundError: there is no such trial.
            TrialLogNotFoundError: none are kept of it.
        """
        with self._db.read() as session:
            log = session.get(TrialLog, trial_id)
            if log is not None:
                return log.tail
            state = by_id(session, trial_id).state
        if state in ENDED_TRIAL_STATES:
            why = "its ranks printed nothing, or the log was pruned"
        else:
            why = "it comes with the outcome"
        raise TrialLogNotFoundError(f"trial {trial_id} is {state} and has no log: {why}")

    def trials(
        self,
        campaign_id: int,
        *,
        states: Sequence[TrialState] = (),
        after_number: int = 0,
        limit: int | None = None,
    ) -> list[TrialRecord]:
        """The campaign's trials in order of their numbers."""
        query = (
            select(Trial)
            .where(Trial.campaign_id == campaign_id, Trial.number > after_number)
            .order_by(Trial.number)
            .options(WITH_MEASUREMENT)
        )
        if states:
            query = query.where(Trial.state.in_(states))
        if limit is not None:
            query = query.limit(limit)
        with self._db.read() as session:
            return [trial_record(row) for row in session.scalars(query)]

    def trials_told_since(self, campaign_id: int, after: int) -> list[TrialRecord]:
        """The campaign's ended trials whose `ended_seq` is over `after`, in the order they ended."""
        query = (
            select(Trial)
            .where(Trial.campaign_id == campaign_id, Trial.ended_seq > after)
            .order_by(Trial.ended_seq)
            .options(WITH_MEASUREMENT)
        )
        with self._db.read() as session:
            return [trial_record(row) for row in session.scalars(query)]

    def trials_in_doubt(self, campaign_id: int) -> list[int]:
        """Ids of trials to be repeated: of several losses nobody knows yet which are right."""
        with self._db.read() as session:
            return trials_in_doubt(session, campaign_id)

    def count_repeats(self, campaign_id: int) -> dict[str, int]:
        """By layout key, how often a layout was measured again or is about to be, cancelled ones aside."""
        query = (
            select(Trial.layout_key, func.count())
            .where(
                Trial.campaign_id == campaign_id,
                Trial.repeat_of.is_not(None),
                Trial.state != "CANCELLED",
            )
            .group_by(Trial.layout_key)
        )
        with self._db.read() as session:
            return {row[0]: row[1] for row in session.execute(query)}

    def count_open_trials(self, campaign_id: int) -> int:
        """Trials that wait or run."""
        query = select(func.count()).where(
            Trial.campaign_id == campaign_id, Trial.state.in_(("PENDING", "RUNNING"))
        )
        with self._db.read() as session:
            return session.scalar(query) or 0

    def open_trial_sizes(self, campaign_id: int) -> list[TrialSize]:
        """What the trials that wait or run need, the oldest first."""
        query = (
            select(Trial.num_nodes, Trial.num_devices, Trial.state)
            .where(Trial.campaign_id == campaign_id, Trial.state.in_(("PENDING", "RUNNING")))
            .order_by(Trial.id)
        )
        with self._db.read() as session:
            return [
                TrialSize(num_nodes=nodes, num_devices=devices, is_waiting=state == "PENDING")
                for nodes, devices, state in session.execute(query)
            ]


def add_row(
    session: Session,
    campaign: Campaign,
    layout: Layout,
    now: datetime,
    *,
    repeat_of: int | None = None,
    repeat_index: int = 0,
) -> Trial:
    """Adds a trial, PENDING, to a campaign whose row is locked.

    Raises:
        CampaignStateError: the campaign has ended.
    """
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
        **layout_columns(layout),
    )
    session.add(trial)
    session.flush()
    tell(trial, "trial.added", now)
    return trial


def by_id(session: Session, trial_id: int) -> Trial:
    """A trial's row, with its measurement.

    Raises:
        TrialNotFoundError: there is no such trial.
    """
    trial = session.get(Trial, trial_id, options=[WITH_MEASUREMENT])
    if trial is None:
        raise TrialNotFoundError(f"there is no trial {trial_id}")
    return trial


def _iterations(session: Session, trial_id: int) -> list[Iteration]:
    query = (
        select(IterationRow).where(IterationRow.trial_id == trial_id).order_by(IterationRow.index)
    )
    return [iteration_value(row) for row in session.scalars(query)]
