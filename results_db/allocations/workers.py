"""Workers' sessions: registered, kept alive by heartbeats, drained."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Select, SQLColumnExpression, delete, exists, func, or_, select
from sqlalchemy.orm import Session

from layout_tuner.protocol.worker_messages import (
    BeatBody,
    HeartbeatBody,
    HeartbeatReply,
    SetAside,
    WorkerCreate,
)
from layout_tuner.results_db.allocations.node_status import (
    add_nodes,
    counts_for_worker,
    end_simulated_quarantines,
    keep_status,
    later,
    node_orders,
)
from layout_tuner.results_db.database.database import refused_unless_unique
from layout_tuner.results_db.database.locks import FOR_CHANGE, lock_leased, lock_rows
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import (
    DatabaseConflictError,
    ResultsDbError,
    WorkerNotFoundError,
    WorkerOwnedError,
    WorkerSupersededError,
)
from layout_tuner.results_db.models.service_tables import (
    WORKER_ALIVE_S,
    AllocationNode,
    NodeQuarantine,
    WorkerRow,
    is_there,
)
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import WorkerRecord
from layout_tuner.results_db.rows import columns_of, record_of
from layout_tuner.results_db.trials.lifecycle import lose_attempt, return_attempt, running_attempt
from layout_tuner.results_db.trials.outcome_checks import longest_s
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, SIMULATOR_PREFIX


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """A heartbeat and the worker that sent it."""

    worker_id: str
    """The worker's session."""
    heartbeat: HeartbeatBody


def take_beats(
    session: Session, beats: Sequence[Beat], now: datetime, until: datetime
) -> list[HeartbeatReply | ResultsDbError]:
    """Processes heartbeats in a transaction of the caller; extends leases to `until`.

    Locks are taken in the order of `results_db.database.locks`: trials before workers.
    """
    ids = {beat.worker_id for beat in beats}
    stops = _extend(session, beats, now, until)
    workers = {worker.id: worker for worker in lock_rows(session, WorkerRow, WorkerRow.id.in_(ids))}
    senders = [open_session(session, each.worker_id, workers.get(each.worker_id)) for each in beats]
    for beat, sender in zip(beats, senders, strict=True):
        if isinstance(sender, WorkerRow):
            sender.seen_at = now
            if beat.heartbeat.status is not None:
                keep_status(session, sender, beat.heartbeat.status, now)
    live = [sender for sender in senders if isinstance(sender, WorkerRow)]
    release, quarantine = node_orders(session, live, now)
    return [
        sender
        if isinstance(sender, ResultsDbError)
        else HeartbeatReply(
            stop=tuple(stop),
            release=tuple(release[sender.id]),
            quarantine=tuple(quarantine[sender.id]),
        )
        for sender, stop in zip(senders, stops, strict=True)
    ]


def _extend(
    session: Session, beats: Sequence[Beat], now: datetime, until: datetime
) -> list[list[int]]:
    """Extends the leases that workers still hold; returns for each the trials that it must stop."""
    held = _held(session, beats)
    stops = []
    for beat in beats:
        stop = []
        for said in beat.heartbeat.trials:
            trial, attempt, launcher = held.get(said.trial_id, (None, None, ""))
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
            is_simulated = launcher == SIMULATED_LAUNCHER
            _note(trial, attempt, said, longest_s(attempt, now, is_simulated=is_simulated), now)
            if trial.cancel_requested:
                stop.append(trial.id)
        stops.append(stop)
    return stops


def _held(session: Session, beats: Sequence[Beat]) -> Mapping[int, tuple[Trial, Attempt, str]]:
    """The reported trials that their workers still hold, locked, and the workers' launchers."""
    ids = {said.trial_id for beat in beats for said in beat.heartbeat.trials}
    if not ids:
        return {}
    # Only their own: a change of an ended trial needs the lock of its campaign.
    theirs = Trial.worker_id.in_({beat.worker_id for beat in beats})
    trials = {
        trial.id: trial
        for trial in lock_rows(session, Trial, Trial.id.in_(ids), Trial.state == "RUNNING", theirs)
    }
    running = (
        select(Attempt, WorkerRow.launcher)
        .join(Trial, (Trial.id == Attempt.trial_id) & (Trial.attempt == Attempt.attempt))
        .join(WorkerRow, WorkerRow.id == Attempt.worker_id)
        .where(Trial.id.in_(list(trials)))
    )
    return {
        attempt.trial_id: (trials[attempt.trial_id], attempt, launcher)
        for attempt, launcher in session.execute(running)
    }


def _note(trial: Trial, attempt: Attempt, said: BeatBody, longest_s: float, now: datetime) -> None:
    """Stores the reported state of an attempt; a late heartbeat does not decrease sums.

    A lost attempt is charged with it, so it is limited to what passed, and to the layout's nodes.
    """
    attempt.seen_at = now
    attempt.phase = said.phase
    attempt.waiting_because = said.waiting_because
    if said.held_s is not None:
        held_s = min(said.held_s, longest_s)
        attempt.held_s = max(held_s, attempt.held_s or 0.0)
    if said.nodes_held:
        # While it waits for a second run it holds 0 nodes, and is charged for those of the first.
        attempt.nodes_held = min(said.nodes_held, trial.num_nodes)


def campaigns_of_kind(*, is_simulated: bool) -> ColumnElement[bool]:
    """Whether a campaign is simulated, or measured."""
    simulated = Campaign.trainer.startswith(SIMULATOR_PREFIX, autoescape=True)
    return simulated if is_simulated else ~simulated


def workers_of_kind(*, is_simulated: bool) -> ColumnElement[bool]:
    """Whether a worker simulates its nodes, or measures on them."""
    simulated = WorkerRow.launcher == SIMULATED_LAUNCHER
    return simulated if is_simulated else ~simulated


class Workers(StoreSection):
    """The store's methods for workers' sessions."""

    @retried
    def register(self, worker: WorkerCreate) -> WorkerRecord:
        """Starts a session of a worker.

        An earlier session of the same name ends, and its running trials return to PENDING at once
        as lost attempts.

        Raises:
            WorkerOwnedError: it is live, and another token registered it.
        """
        now = self._clock()
        described = columns_of(worker) | columns_of(worker.allocation)
        del described["allocation"], described["nodes"]
        described["ends_at"] = later(now, described.pop("ends_in_s"))
        with self._db.write() as session:
            self._refuse_other_token(session, worker.name, now)
            _end_earlier(session, worker.name, now)
            # The unique index on live names is not deferred: the earlier session ends first.
            session.flush()
            row = WorkerRow(
                id=uuid.uuid4().hex,
                registered_at=now,
                seen_at=now,
                registered_by=self._actor.name,
                **described,
            )
            session.add(row)
            # A retry ends a session of the same name that started meanwhile.
            other = DatabaseConflictError(f"another worker registers as {worker.name!r} just now")
            with refused_unless_unique(other, "workers", "name", only="live"):
                session.flush()
            add_nodes(session, row, worker.nodes)
            self._audit(
                session, "worker.register", "worker", row.id, name=worker.name, host=worker.host
            )
            return record_of(WorkerRecord, row)

    def _refuse_other_token(self, session: Session, name: str, now: datetime) -> None:
        query = select(WorkerRow.registered_by).where(
            WorkerRow.name == name, WorkerRow.registered_by != self._actor.name, is_there(now)
        )
        owner = None if self._actor.role in ("admin", "system") else session.scalar(query)
        if owner is not None:
            raise WorkerOwnedError(
                f"a live worker {name!r} was registered with the token {owner!r}, not with "
                f"{self._actor.name!r}: end it and wait {WORKER_ALIVE_S:.0f} s, or use another --name"
            )

    def owner_of(self, worker_id: str) -> str | None:
        """The name of the token that registered a session; None: there is no such session."""
        return self._scalar(select(WorkerRow.registered_by).where(WorkerRow.id == worker_id))

    @retried
    def drain(self, worker_id: str) -> None:
        """Ends a session: its leases are returned, and no attempt counts as lost.

        Raises:
            WorkerNotFoundError: no open session has this id.
            WorkerSupersededError: it ended because another worker registered under its name.
        """
        now = self._clock()
        with self._db.write() as session:
            lock_leased(session, [worker_id])
            row = session.get(WorkerRow, worker_id, with_for_update=FOR_CHANGE)
            worker = open_session(session, worker_id, row)
            if isinstance(worker, ResultsDbError):
                raise worker
            _end_in_order(session, worker, now, f"worker {worker.name} drained")
            worker.seen_at = now
            self._audit(session, "worker.drain", "worker", worker.id, name=worker.name)

    @retried
    def remove_allocation(self, worker_id: str) -> None:
        """Deletes an allocation with its nodes and versions; WorkerNotFoundError without a session.

        An open session ends, and its leases are returned. If attempts of trials refer to the
        session, the session stays, without nodes and versions.
        """
        with self._db.write() as session:
            lock_leased(session, [worker_id])
            worker = session.get(WorkerRow, worker_id, with_for_update=FOR_CHANGE)
            if worker is None:
                raise WorkerNotFoundError(f"there is no allocation {worker_id!r}")
            if worker.ended_at is None:
                _end_in_order(session, worker, self._clock(), f"worker {worker.name} was removed")
            session.flush()
            session.execute(delete(AllocationNode).where(AllocationNode.worker_id == worker_id))
            is_named = session.scalar(select(exists().where(Attempt.worker_id == worker_id)))
            if is_named:
                worker.versions = {}
            else:
                session.delete(worker)
            self._audit(session, "allocation.remove", "allocation", worker_id, name=worker.name)

    def quarantined_nodes(self, worker_id: str) -> list[SetAside]:
        """The nodes that a worker must set aside when it registers."""
        query = (
            select(NodeQuarantine)
            .join(WorkerRow, counts_for_worker())
            .where(WorkerRow.id == worker_id, NodeQuarantine.released_at.is_(None))
            .order_by(NodeQuarantine.node, NodeQuarantine.scope.desc())
        )
        with self._db.read() as session:
            wanted = {row.node: row.reason for row in session.scalars(query)}
            return [SetAside(node=node, reason=reason) for node, reason in wanted.items()]

    def find(self, *, live: bool = True, cluster: str | None = None) -> list[WorkerRecord]:
        """Worker sessions, the newest first: those seen within `WORKER_ALIVE_S`, or all."""
        query = newest_sessions(self._clock(), live=live, cluster=cluster)
        with self._db.read() as session:
            return [record_of(WorkerRecord, row) for row in session.scalars(query)]

    def largest_allocation(self, cluster: str, *, is_simulated: bool = False) -> int | None:
        """The most nodes that a known worker on a cluster has or had; None: there is none."""
        query = select(func.max(WorkerRow.num_nodes)).where(
            WorkerRow.cluster == cluster, workers_of_kind(is_simulated=is_simulated)
        )
        return self._scalar(query)

    def declared_parameters(self, cluster: str, trainer: str) -> Sequence[Mapping[str, Any] | None]:
        """The parameters that workers of a cluster declare for a trainer, by name.

        Returns:
            Those of each live worker that has the trainer, the newest first; if none is live, of
            the last that was. None: the worker did not report them.
        """
        return self._declared(WorkerRow.trainer_parameters[trainer], cluster, trainer)

    def declared_knobs(self, cluster: str, trainer: str) -> Sequence[Mapping[str, Any] | None]:
        """The job knobs that they declare for it, in the same order."""
        return self._declared(WorkerRow.trainer_knobs[trainer], cluster, trainer)

    def knobs_of_trainer(self, trainer: str) -> tuple[str, Mapping[str, Any] | None] | None:
        """Version and declared job knobs of a trainer, of the newest worker that ever had it."""
        version = WorkerRow.trainers[trainer].as_string()
        query = (
            select(version, WorkerRow.trainer_knobs[trainer])
            .where(version.is_not(None))
            .order_by(WorkerRow.registered_at.desc(), WorkerRow.id)
            .limit(1)
        )
        with self._db.read() as session:
            found = session.execute(query).first()
            return None if found is None else (found[0], found[1])

    def _declared(
        self, column: ColumnElement[Any], cluster: str, trainer: str
    ) -> Sequence[Mapping[str, Any] | None]:
        query = (
            select(column)
            .where(
                WorkerRow.cluster == cluster, WorkerRow.trainers[trainer].as_string().is_not(None)
            )
            .order_by(WorkerRow.registered_at.desc(), WorkerRow.id)
        )
        with self._db.read() as session:
            live = session.scalars(query.where(is_there(self._clock()))).all()
            return live or session.scalars(query.limit(1)).all()

    def count_too_large(self, campaign_id: int) -> int:
        """The number of waiting trials of a campaign that fit no live worker."""
        same_kind = (
            campaigns_of_kind(is_simulated=kind) & workers_of_kind(is_simulated=kind)
            for kind in (True, False)
        )
        can_run_it = exists().where(
            WorkerRow.cluster == Campaign.cluster_name,
            is_there(self._clock()),
            or_(*same_kind),
            fits(WorkerRow.num_nodes, WorkerRow.devices_per_node),
        )
        query = (
            select(func.count())
            .select_from(Trial)
            .join(Campaign, Campaign.id == Trial.campaign_id)
            .where(Trial.campaign_id == campaign_id, Trial.state == "PENDING", ~can_run_it)
        )
        return self._scalar(query) or 0


def newest_sessions(now: datetime, *, live: bool, cluster: str | None) -> Select[WorkerRow]:
    """The sessions of a cluster, or of all, the newest first: those that are live, or all."""
    query = select(WorkerRow).order_by(WorkerRow.registered_at.desc(), WorkerRow.id)
    if live:
        query = query.where(is_there(now))
    return query if cluster is None else query.where(WorkerRow.cluster == cluster)


def _end_in_order(session: Session, worker: WorkerRow, now: datetime, why: str) -> None:
    """Ends a session: its leases are returned, and no attempt counts as lost."""
    for campaign, trials in lock_leased(session, [worker.id]):
        for trial in trials:
            attempt = running_attempt(session, trial)
            attempt.seen_at = now
            return_attempt(campaign, trial, attempt, now, why)
    worker.ended_at = now
    end_simulated_quarantines(session, [worker.id])


def fits(
    num_nodes: int | SQLColumnExpression[int], devices_per_node: int | SQLColumnExpression[int]
) -> ColumnElement[bool]:
    """Whether a trial's layout fits an allocation, given as numbers or as columns of workers."""
    return (Trial.num_nodes <= num_nodes) & (
        Trial.num_devices <= Trial.num_nodes * devices_per_node
    )


def open_session(
    session: Session, worker_id: str, worker: WorkerRow | None
) -> WorkerRow | ResultsDbError:
    """The row of a worker's session if it is open, else the error that says why it is not."""
    if worker is None:
        return WorkerNotFoundError(f"there is no worker {worker_id!r}; register again")
    if worker.ended_at is None:
        return worker
    successor = exists().where(
        WorkerRow.name == worker.name,
        WorkerRow.id != worker.id,
        WorkerRow.registered_at >= worker.ended_at,
    )
    if session.scalar(select(successor)):
        return WorkerSupersededError(f"another worker has registered as {worker.name!r}")
    return WorkerNotFoundError(
        f"the session {worker_id!r} of worker {worker.name!r} has ended; register again"
    )


def _end_earlier(session: Session, name: str, now: datetime) -> None:
    """Ends the open session of a name; its leases are lost attempts."""
    live = (WorkerRow.name == name, WorkerRow.ended_at.is_(None))
    ids = session.scalars(select(WorkerRow.id).where(*live)).all()
    if not ids:
        return
    # In the order of `locks`: trials before workers. Trials leased in between come afterwards.
    lock_leased(session, ids)
    earlier = {
        worker.id: worker for worker in lock_rows(session, WorkerRow, WorkerRow.id.in_(ids), *live)
    }
    for campaign, trials in lock_leased(session, list(earlier)):
        for trial in trials:
            attempt = running_attempt(session, trial)
            worker = earlier[attempt.worker_id]
            why = f"worker {worker.name} started anew"
            lose_attempt(campaign, trial, attempt, now, why, host=worker.host)
    for worker in earlier.values():
        worker.ended_at = now
    end_simulated_quarantines(session, list(earlier))
