"""Leases: a trial is handed to one worker at a time, for as long as the worker is heard of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import Select, select, update
from sqlalchemy.orm import Session

from results_db.lifecycle import locked_campaign, lose_attempt, running_attempt
from results_db.models import Attempt, Campaign, Trial, Worker
from results_db.part import StorePart
from results_db.records import LeaseRecord, TrialBeat
from results_db.rows import trial_layout
from results_db.workers import fits, live_worker

LEASE_S: Final = 15.0
"""Seconds that a lease holds unless a heartbeat extends it."""

HEARTBEAT_INTERVAL_S: Final = 2.0
"""Seconds between the heartbeats of a worker, and of the driver."""


class Leases(StorePart):
    """The leases' part of the store."""

    def lease(
        self, worker_id: str, max_trials: int, *, lease_s: float = LEASE_S
    ) -> list[LeaseRecord]:
        """Hands waiting trials to a worker, the oldest first: PENDING -> RUNNING, attempt + 1.

        Only trials of RUNNING campaigns on the worker's cluster whose layout fits its allocation.

        Raises:
            WorkerNotFoundError: no live session has this id.
        """
        now = self._clock()
        with self._db.write() as session:
            worker = live_worker(session, worker_id)
            worker.seen_at = now
            return [
                _hand_out(session, worker, trial, now, now + timedelta(seconds=lease_s))
                for trial in session.scalars(
                    _suitable_trials(worker)
                    .limit(max_trials)
                    .with_for_update(of=Trial, skip_locked=True)
                ).all()
            ]

    def has_work(self, worker_id: str) -> bool:
        """Whether `lease` would find something; a look that does not queue for the write lock.

        Raises:
            WorkerNotFoundError: no live session has this id.
        """
        with self._db.read() as session:
            worker = live_worker(session, worker_id, lock=False)
            return session.scalar(_suitable_trials(worker).limit(1)) is not None

    def heartbeat(
        self, worker_id: str, beats: Sequence[TrialBeat], *, lease_s: float = LEASE_S
    ) -> list[int]:
        """Extends a worker's leases.

        Returns:
            Ids of the trials that the worker is to stop: cancelled, ended, or no longer leased by it.

        Raises:
            WorkerNotFoundError: no live session has this id.
        """
        now = self._clock()
        stop: list[int] = []
        with self._db.write() as session:
            worker = live_worker(session, worker_id)
            worker.seen_at = now
            for beat in beats:
                trial = session.get(Trial, beat.trial_id, with_for_update=True)
                if trial is None or not _holds(worker, trial, beat.attempt):
                    stop.append(beat.trial_id)
                    continue
                trial.lease_expires_at = now + timedelta(seconds=lease_s)
                trial.iterations_done = beat.iterations_done
                running_attempt(session, trial).seen_at = now
                if trial.cancel_requested:
                    stop.append(trial.id)
        return stop

    def expire_leases(self) -> list[int]:
        """Takes back the leases that have run out; each is a lost attempt.

        Returns:
            Ids of the trials concerned.
        """
        now = self._clock()
        expired = select(Trial).where(Trial.state == "RUNNING", Trial.lease_expires_at < now)
        with self._db.read() as session:
            # Most sweeps find nothing; those do not queue for the write lock.
            if session.scalar(expired.limit(1)) is None:
                return []
        with self._db.write() as session:
            trials = session.scalars(expired.order_by(Trial.id).with_for_update()).all()
            for trial in trials:
                attempt = running_attempt(session, trial)
                worker = session.get_one(Worker, attempt.worker_id)
                why = f"worker {worker.name} on {worker.host} was not heard of in time"
                lose_attempt(locked_campaign(session, trial.campaign_id), trial, attempt, now, why)
            return [trial.id for trial in trials]

    def extend_leases(self, *, lease_s: float = LEASE_S) -> None:
        """Gives every lease its full time from now; for a service that was down or asleep."""
        until = self._clock() + timedelta(seconds=lease_s)
        with self._db.write() as session:
            session.execute(
                update(Trial)
                .where(Trial.state == "RUNNING", Trial.lease_expires_at < until)
                .values(lease_expires_at=until)
            )


def _suitable_trials(worker: Worker) -> Select[Any]:
    return (
        select(Trial)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(
            Trial.state == "PENDING",
            Campaign.state == "RUNNING",
            Campaign.cluster_name == worker.cluster,
            fits(worker),
        )
        .order_by(Trial.id)
    )


def _hand_out(
    session: Session, worker: Worker, trial: Trial, now: datetime, until: datetime
) -> LeaseRecord:
    campaign = session.get_one(Campaign, trial.campaign_id)
    if campaign.started_at is None:
        campaign.started_at = now
    if trial.started_at is None:
        trial.started_at = now
    trial.state = "RUNNING"
    trial.attempt += 1
    trial.iterations_done = 0
    trial.worker_id = worker.id
    trial.lease_expires_at = until
    session.add(
        Attempt(
            trial_id=trial.id,
            attempt=trial.attempt,
            worker_id=worker.id,
            started_at=now,
            seen_at=now,
            node_seconds=0.0,
        )
    )
    return LeaseRecord(
        trial_id=trial.id,
        number=trial.number,
        attempt=trial.attempt,
        campaign_id=campaign.id,
        campaign_name=campaign.name,
        spec=campaign.spec,
        layout=trial_layout(trial),
        repeat_of=trial.repeat_of,
        lease_expires_at=until,
    )


def _holds(worker: Worker, trial: Trial, attempt: int) -> bool:
    return trial.state == "RUNNING" and trial.worker_id == worker.id and trial.attempt == attempt
