"""Leases: a trial is handed to one worker at a time, for as long as the worker is heard of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, select

from results_db.actor import SYSTEM, Actor
from results_db.allocation_records import AllocationStatus, HeartbeatAnswer, Room
from results_db.apart import apart_if_refused
from results_db.beat_batch import Beat, take_beats
from results_db.errors import ResultsDbError
from results_db.lease_batch import HEARTBEAT_INTERVAL_S, LeaseAsk, LeaseBatch
from results_db.lifecycle import lose_attempt, running_attempt
from results_db.locks import lock_campaign, lock_trials
from results_db.models import Trial
from results_db.part import Clock, StorePart
from results_db.records import LeaseRecord, TrialBeat
from results_db.retry import retried
from results_db.session import Database
from results_db.worker_tables import Worker

LEASE_S: Final = 15.0
"""Seconds that a lease holds unless a heartbeat extends it."""

__all__ = ["HEARTBEAT_INTERVAL_S", "LEASE_S", "Leases"]


@dataclass(slots=True)
class _LastLook:
    """What the last look at the waiting trials came to, for all threads of a process."""

    found: bool = False


class Leases(StorePart):
    """The leases' part of the store."""

    def __init__(self, database: Database, clock: Clock, actor: Actor = SYSTEM) -> None:
        super().__init__(database, clock, actor)
        self._last_look = _LastLook()

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

        Only trials of RUNNING campaigns on a worker's cluster whose layout fits its allocation. While
        looks find nothing they do not queue for the write lock, unless a worker was not heard of lately.

        Args:
            asks: who asks, and for what.
            lease_s: seconds until the leases run out.

        Returns:
            The leases of each, or why it is refused: `WorkerNotFoundError`, `WorkerSupersededError`.
        """
        now = self._clock()
        if not self._last_look.found:
            with self._db.read() as session:
                batch = LeaseBatch(session, asks, now, lock=False)
                if not batch.is_news() and not batch.finds_any():
                    return batch.answers()
        self._last_look.found = (
            False  # where nothing can be written, looks do not queue for it either
        )
        with self._db.write() as session:
            batch = LeaseBatch(session, asks, now, lock=True)
            self._last_look.found = batch.hand_out(now + timedelta(seconds=lease_s))
            return batch.answers()

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
            WorkerSupersededError: it ended because its name was registered anew.
        """
        beat = Beat(worker_id=worker_id, trials=beats, status=status)
        (answer,) = self.take_beats([beat], lease_s=lease_s)
        if isinstance(answer, ResultsDbError):
            raise answer
        return answer

    def take_beats(
        self, beats: Sequence[Beat], *, lease_s: float = LEASE_S
    ) -> list[HeartbeatAnswer | ResultsDbError]:
        """Takes the heartbeats of workers, all in one transaction.

        Returns:
            What each worker is to do, or why it is refused: `WorkerNotFoundError`, `WorkerSupersededError`.
        """
        return apart_if_refused(lambda some: self._take_beats(some, lease_s), beats)

    @retried
    def _take_beats(
        self, beats: Sequence[Beat], lease_s: float
    ) -> list[HeartbeatAnswer | ResultsDbError]:
        now = self._clock()
        with self._db.write() as session:
            return take_beats(session, beats, now, now + timedelta(seconds=lease_s))

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
