"""Leases: a trial is handed to one worker at a time, for as long as the worker is heard of."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, select, update
from sqlalchemy.orm import Session

from results_db.allocation_records import AllocationStatus, HeartbeatAnswer, Room
from results_db.allocation_status import keep_status
from results_db.events import tell
from results_db.lifecycle import lose_attempt, running_attempt
from results_db.locks import lock_campaign, lock_trials
from results_db.models import Attempt, Campaign, Trial
from results_db.node_quarantine import wishes
from results_db.part import StorePart
from results_db.records import LeaseRecord, TrialBeat
from results_db.retry import retried
from results_db.rows import trial_layout
from results_db.worker_tables import Worker
from results_db.workers import fits, live_worker
from search_spaces.outcome import DEFAULT_DEADLINE_S

LEASE_S: Final = 15.0
"""Seconds that a lease holds unless a heartbeat extends it."""

HEARTBEAT_INTERVAL_S: Final = 2.0
"""Seconds between the heartbeats of a worker, and of the driver."""


class Leases(StorePart):
    """The leases' part of the store."""

    @retried
    def lease(
        self,
        worker_id: str,
        max_trials: int,
        *,
        room: Room | None = None,
        longest_s: float | None = None,
        lease_s: float = LEASE_S,
    ) -> list[LeaseRecord]:
        """Hands waiting trials to a worker, the oldest first: PENDING -> RUNNING, attempt + 1.

        Only trials of RUNNING campaigns on the worker's cluster whose layout fits its allocation. A look
        that finds nothing does not queue for the write lock, unless the worker was not heard of lately.

        Args:
            worker_id: the worker's session.
            max_trials: hand out at most so many.
            room: only trials that fit there; each by itself, not all together.
            longest_s: only trials whose probe ends within so many seconds, by its deadline.
            lease_s: seconds until the leases run out.

        Raises:
            WorkerNotFoundError: no live session has this id.
        """
        now = self._clock()
        with self._db.read() as session:
            worker = live_worker(session, worker_id, lock=False)
            # A worker that asks is there, though it may send no heartbeats.
            is_news = now - worker.seen_at >= timedelta(seconds=HEARTBEAT_INTERVAL_S)
            found = session.scalar(_suitable_trials(worker, room, longest_s).limit(1))
            if found is None and not is_news:
                return []
        with self._db.write() as session:
            worker = live_worker(session, worker_id)
            worker.seen_at = now
            query = _suitable_trials(worker, room, longest_s).limit(max_trials)
            # What somebody holds is being leased, cancelled or returned: never waited for.
            trials = session.scalars(
                query.with_for_update(key_share=True, of=Trial, skip_locked=True)
            ).all()
            until = now + timedelta(seconds=lease_s)
            leases = [_hand_out(session, worker, trial, now, until) for trial in trials]
            _note_start(session, trials, now)
            return leases

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


def _suitable_trials(worker: Worker, room: Room | None, longest_s: float | None) -> Select[Any]:
    query = (
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
    if room is not None:
        query = query.where(_fits_in(room, worker.devices_per_node))
    if longest_s is not None:
        deadline_s = func.coalesce(Campaign.probe_deadline_s, DEFAULT_DEADLINE_S)
        query = query.where(deadline_s <= longest_s)
    return query


def _fits_in(room: Room, devices_per_node: int) -> ColumnElement[bool]:
    """Whether a trial fits what is free: on a part of a node, or on whole ones."""
    devices = max(room.devices, devices_per_node if room.nodes else 0)
    on_one_node = (Trial.num_nodes == 1) & (Trial.num_devices <= devices)
    return on_one_node | ((Trial.num_nodes > 1) & (Trial.num_nodes <= room.nodes))


def _note_start(session: Session, trials: Sequence[Trial], now: datetime) -> None:
    """Campaigns of which a trial is leased for the first time have begun.

    A campaign's row that somebody holds is left to the end of its first attempt: a lease holds trials,
    and whoever holds the campaign may be about to wait for one of them.
    """
    new = {
        trial.campaign_id
        for trial in trials
        if session.get_one(Campaign, trial.campaign_id).started_at is None
    }
    if new:
        free = (
            select(Campaign.id)
            .where(Campaign.id.in_(new), Campaign.started_at.is_(None))
            .with_for_update(key_share=True, skip_locked=True)
        )
        session.execute(
            update(Campaign).where(Campaign.id.in_(free)).values(started_at=now),
            execution_options={"synchronize_session": False},
        )


def _hand_out(
    session: Session, worker: Worker, trial: Trial, now: datetime, until: datetime
) -> LeaseRecord:
    campaign = session.get_one(Campaign, trial.campaign_id)
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
    tell(trial, "trial.leased", now)
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
