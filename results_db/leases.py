"""Leases: a trial is handed to one worker at a time, for as long as the worker is heard of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, select
from sqlalchemy.orm import Session

from results_db.allocation_records import AllocationStatus, HeartbeatAnswer, Room
from results_db.allocation_status import keep_status
from results_db.errors import ResultsDbError
from results_db.lease_batch import HEARTBEAT_INTERVAL_S, LeaseAsk, LeaseBatch
from results_db.lifecycle import lose_attempt, running_attempt
from results_db.locks import lock_campaign, lock_trials
from results_db.models import Attempt, Trial
from results_db.node_quarantine import wishes
from results_db.part import StorePart
from results_db.records import LeaseRecord, TrialBeat
from results_db.retry import retried
from results_db.worker_tables import Worker
from results_db.workers import live_worker

LEASE_S: Final = 15.0
"""Seconds that a lease holds unless a heartbeat extends it."""

__all__ = ["HEARTBEAT_INTERVAL_S", "LEASE_S", "Leases"]


class Leases(StorePart):
    """The leases' part of the store."""

    def lease(
        self,
        worker_id: str,
        max_trials: int,
        *,
        room: Room | None = None,
        longest_s: float | None = None,
        lease_s: float = LEASE_S,
    ) -> list[LeaseRecord]:
        """Hands waiting trials to a worker; as `lease_many`, with the fields of `LeaseAsk`.

        Raises:
            WorkerNotFoundError: no live session has this id.
            WorkerSupersededError: it ended because its name was registered anew.
        """
        ask = LeaseAsk(worker_id=worker_id, max_trials=max_trials, room=room, longest_s=longest_s)
        (answer,) = self.lease_many([ask], lease_s=lease_s)
        if isinstance(answer, ResultsDbError):
            raise answer
        return answer

    @retried
    def lease_many(
        self, asks: Sequence[LeaseAsk], *, lease_s: float = LEASE_S
    ) -> list[list[LeaseRecord] | ResultsDbError]:
        """Hands waiting trials to workers, the oldest first: PENDING -> RUNNING, attempt + 1.

        Only trials of RUNNING campaigns on a worker's cluster whose layout fits its allocation. A look
        that finds nothing does not queue for the write lock, unless a worker was not heard of lately.

        Args:
            asks: who asks, and for what.
            lease_s: seconds until the leases run out.

        Returns:
            The leases of each, or why it is refused: `WorkerNotFoundError`, `WorkerSupersededError`.
        """
        now = self._clock()
        with self._db.read() as session:
            batch = LeaseBatch(session, asks, now, lock=False)
            if not batch.is_news() and not batch.finds_any():
                return batch.answers()
        with self._db.write() as session:
            batch = LeaseBatch(session, asks, now, lock=True)
            batch.hand_out(now + timedelta(seconds=lease_s))
            return batch.answers()

    @retried
    def heartbeat(
        self,
        worker_id: str,
        beats: Sequence[TrialBeat],
        *,
        status: AllocationStatus | None = None,
        lease_s: float = LEASE_S,
    ) -> HeartbeatAnswer:
        """Extends a worker's leases, and keeps what it says of its allocation.

        Returns:
            What the worker is to do: trials to stop, nodes to release and to set aside.

        Raises:
            WorkerNotFoundError: no live session has this id.
        """
        now = self._clock()
        with self._db.write() as session:
            live_worker(session, worker_id, lock=False)
            stop = _extend(session, worker_id, beats, now, now + timedelta(seconds=lease_s))
            worker = live_worker(session, worker_id)
            worker.seen_at = now
            if status is not None:
                keep_status(session, worker, status, now)
            release, quarantine = wishes(session, worker, now)
        return HeartbeatAnswer(stop=tuple(stop), release=release, quarantine=quarantine)

    def expire_leases(self) -> list[int]:
        """Takes back the leases that have run out; each is a lost attempt.

        Returns:
            Ids of the trials concerned.
        """
        now = self._clock()
        expired = (Trial.state == "RUNNING") & (Trial.lease_expires_at < now)
        concerned = select(Trial.campaign_id).where(expired).distinct()
        with self._db.read() as session:
            # Most sweeps find nothing; those do not queue for the write lock.
            campaign_ids = sorted(session.scalars(concerned))
        return [
            trial_id
            for campaign_id in campaign_ids
            for trial_id in self._expire(campaign_id, expired, now)
        ]

    @retried
    def _expire(self, campaign_id: int, expired: ColumnElement[bool], now: datetime) -> list[int]:
        """Takes back a campaign's leases that have run out and were not extended meanwhile."""
        with self._db.write() as session:
            campaign = lock_campaign(session, campaign_id)
            if campaign is None:
                return []
            trials = lock_trials(session, Trial.campaign_id == campaign_id, expired)
            for trial in trials:
                attempt = running_attempt(session, trial)
                worker = session.get_one(Worker, attempt.worker_id)
                why = f"worker {worker.name} on {worker.host} was not heard of in time"
                lose_attempt(campaign, trial, attempt, now, why, host=worker.host)
            return [trial.id for trial in trials]

    def extend_leases(self, *, lease_s: float = LEASE_S) -> None:
        """Gives every lease its full time from now; for a service that was down or asleep."""
        until = self._clock() + timedelta(seconds=lease_s)
        self._set_leases(until, Trial.lease_expires_at < until)

    def cut_leases(self, *, lease_s: float = LEASE_S) -> None:
        """Takes from every lease what goes beyond its full time from now; for a clock that was set back."""
        until = self._clock() + timedelta(seconds=lease_s)
        self._set_leases(until, Trial.lease_expires_at > until)

    @retried
    def _set_leases(self, until: datetime, which: ColumnElement[bool]) -> None:
        with self._db.write() as session:
            for trial in lock_trials(session, Trial.state == "RUNNING", which):
                trial.lease_expires_at = until


def _extend(
    session: Session, worker_id: str, beats: Sequence[TrialBeat], now: datetime, until: datetime
) -> list[int]:
    """Extends the leases that the worker still holds; returns the trials that it is to stop."""
    ids = [beat.trial_id for beat in beats]
    # Its own alone: a trial that has ended is changed only by those who hold its campaign.
    held = (Trial.id.in_(ids), Trial.state == "RUNNING", Trial.worker_id == worker_id)
    trials = {trial.id: trial for trial in lock_trials(session, *held)} if ids else {}
    running = select(Attempt).join(
        Trial, (Trial.id == Attempt.trial_id) & (Trial.attempt == Attempt.attempt)
    )
    attempts = {
        attempt.trial_id: attempt
        for attempt in session.scalars(running.where(Trial.id.in_(list(trials))))
    }
    stop: list[int] = []
    for beat in beats:
        trial = trials.get(beat.trial_id)
        if trial is None or trial.attempt != beat.attempt:
            stop.append(beat.trial_id)
            continue
        trial.lease_expires_at = until
        trial.iterations_done = beat.iterations_done
        _note(attempts[trial.id], beat, now)
        if trial.cancel_requested:
            stop.append(trial.id)
    return stop


def _note(attempt: Attempt, beat: TrialBeat, now: datetime) -> None:
    """Keeps what a worker says of an attempt; a beat that comes late takes nothing back."""
    attempt.seen_at = now
    attempt.phase = beat.phase
    attempt.waiting_because = beat.waiting_because
    if beat.held_s is not None:
        attempt.held_s = max(beat.held_s, attempt.held_s or 0.0)
    if beat.nodes_held:
        # One that waits for a second run holds none, and is charged for those of the first.
        attempt.nodes_held = beat.nodes_held
