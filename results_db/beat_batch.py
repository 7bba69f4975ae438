"""A batch of heartbeats in one transaction: leases extended, and what workers say of their allocations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import select
from sqlalchemy.orm import Session

from results_db.allocation_records import AllocationStatus, HeartbeatAnswer
from results_db.allocation_status import keep_status
from results_db.errors import ResultsDbError
from results_db.locks import lock_trials, lock_workers
from results_db.models import Attempt, Trial
from results_db.node_quarantine import wishes
from results_db.records import TrialBeat
from results_db.worker_tables import Worker
from results_db.workers import not_live


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A worker's heartbeat."""

    worker_id: str
    """The worker's session."""
    trials: Sequence[TrialBeat]
    """What it runs."""
    status: AllocationStatus | None = None
    """Of its allocation; None: as it said before."""


def take_beats(
    session: Session, beats: Sequence[Beat], now: datetime, until: datetime
) -> list[HeartbeatAnswer | ResultsDbError]:
    """Takes heartbeats in a transaction that somebody else holds; leases hold until then.

    The order of locks is that of `results_db.locks`: trials before workers.
    """
    ids = {beat.worker_id for beat in beats}
    stops = _extend(session, beats, now, until)
    workers = {worker.id: worker for worker in lock_workers(session, Worker.id.in_(ids))}
    answers: list[HeartbeatAnswer | ResultsDbError] = []
    live: list[Worker] = []
    for beat, stop in zip(beats, stops, strict=True):
        worker = workers.get(beat.worker_id)
        refusal = not_live(session, beat.worker_id, worker)
        if worker is None or refusal is not None:
            assert refusal is not None
            answers.append(refusal)
            continue
        worker.seen_at = now
        if beat.status is not None:
            keep_status(session, worker, beat.status, now)
        live.append(worker)
        answers.append(HeartbeatAnswer(stop=tuple(stop), release=(), quarantine=()))
    wished = wishes(session, live, now)
    return [
        answer
        if isinstance(answer, ResultsDbError)
        else HeartbeatAnswer(
            stop=answer.stop,
            release=wished[beat.worker_id].release,
            quarantine=wished[beat.worker_id].quarantine,
        )
        for beat, answer in zip(beats, answers, strict=True)
    ]


def _extend(
    session: Session, beats: Sequence[Beat], now: datetime, until: datetime
) -> list[list[int]]:
    """Extends the leases that the workers still hold; for each, the trials that it is to stop."""
    held = _held(session, beats)
    stops = []
    for beat in beats:
        stop = []
        for said in beat.trials:
            trial, attempt = held.get(said.trial_id, (None, None))
            if (
                trial is None
                or attempt is None
                or trial.worker_id != beat.worker_id
                or trial.attempt != said.attempt
            ):
                stop.append(said.trial_id)
                continue
            trial.lease_expires_at = until
            trial.iterations_done = said.iterations_done
            _note(attempt, said, now)
            if trial.cancel_requested:
                stop.append(trial.id)
        stops.append(stop)
    return stops


def _held(session: Session, beats: Sequence[Beat]) -> Mapping[int, tuple[Trial, Attempt]]:
    """The trials that they say they run, as far as they hold them, locked."""
    ids = {said.trial_id for beat in beats for said in beat.trials}
    if not ids:
        return {}
    # Their own alone: a trial that has ended is changed only by those who hold its campaign.
    theirs = Trial.worker_id.in_({beat.worker_id for beat in beats})
    trials = {
        trial.id: trial
        for trial in lock_trials(session, Trial.id.in_(ids), Trial.state == "RUNNING", theirs)
    }
    running = (
        select(Attempt)
        .join(Trial, (Trial.id == Attempt.trial_id) & (Trial.attempt == Attempt.attempt))
        .where(Trial.id.in_(list(trials)))
    )
    return {
        attempt.trial_id: (trials[attempt.trial_id], attempt)
        for attempt in session.scalars(running)
    }


def _note(attempt: Attempt, said: TrialBeat, now: datetime) -> None:
    """Keeps what a worker says of an attempt; a beat that comes late takes nothing back."""
    attempt.seen_at = now
    attempt.phase = said.phase
    attempt.waiting_because = said.waiting_because
    if said.held_s is not None:
        attempt.held_s = max(said.held_s, attempt.held_s or 0.0)
    if said.nodes_held:
        # One that waits for a second run holds none, and is charged for those of the first.
        attempt.nodes_held = said.nodes_held
