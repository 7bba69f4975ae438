"""Workers' sessions: registered, seen, drained."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import ColumnElement, SQLColumnExpression, exists, func, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session

from results_db.allocation_records import AllocationFacts, NodeFacts, SetAside
from results_db.allocation_status import add_nodes, later
from results_db.errors import (
    DatabaseConflictError,
    ResultsDbError,
    WorkerNotFoundError,
    WorkerSupersededError,
)
from results_db.lifecycle import lose_attempt, return_attempt, running_attempt
from results_db.locks import FOR_CHANGE, lock_leased, lock_workers
from results_db.models import Campaign, Trial
from results_db.node_quarantine import active_quarantines
from results_db.part import StorePart
from results_db.records import WorkerRecord
from results_db.retry import retried
from results_db.rows import worker_record
from results_db.session import breaks_unique
from results_db.worker_tables import Worker

WORKER_ALIVE_S: Final = 30.0
"""A worker that was heard of within this many seconds counts as there."""

UNTOLD_ALLOCATION: Final = AllocationFacts()
"""Of a worker that says nothing of its allocation."""


class Workers(StorePart):
    """The workers' part of the store."""

    @retried
    def register_worker(
        self,
        *,
        name: str,
        host: str,
        cluster: str,
        num_nodes: int,
        devices_per_node: int,
        device: str,
        versions: Mapping[str, str],
        allocation: AllocationFacts = UNTOLD_ALLOCATION,
        nodes: Sequence[NodeFacts] = (),
    ) -> WorkerRecord:
        """Begins a session of a worker.

        An earlier session of the same name ends, and its running trials return to PENDING at once:
        an attempt was lost, nothing was learnt.

        Args:
            name: of the worker.
            host: where it runs.
            cluster: name of the cluster that its nodes belong to.
            num_nodes: nodes of its allocation.
            devices_per_node: devices of each.
            device: what one is.
            versions: of its software, by name.
            allocation: what else it knows of its allocation.
            nodes: their names; empty: it does not say.
        """
        now = self._clock()
        with self._db.write() as session:
            _end_earlier(session, name, now)
            # The unique index on live names is not deferred: the earlier session ends first.
            session.flush()
            worker = Worker(
                id=uuid.uuid4().hex,
                name=name,
                host=host,
                cluster=cluster,
                num_nodes=num_nodes,
                devices_per_node=devices_per_node,
                device=device,
                versions=dict(versions),
                registered_at=now,
                seen_at=now,
                scheduler=allocation.scheduler,
                job_id=allocation.job_id,
                launcher=allocation.launcher,
                ends_at=later(now, allocation.ends_in_s),
                shares_nodes=allocation.shares_nodes,
            )
            session.add(worker)
            _flush_unless_taken(session, name)
            add_nodes(session, worker, nodes)
            self._audit(session, "worker.register", "worker", worker.id, name=name, host=host)
            return worker_record(worker)

    @retried
    def drain_worker(self, worker_id: str) -> None:
        """Ends a session in order: what it still leases is given back, and no attempt counts as lost.

        Raises:
            WorkerNotFoundError: no live session has this id.
        """
        now = self._clock()
        with self._db.write() as session:
            lock_leased(session, [worker_id])
            worker = live_worker(session, worker_id)
            for campaign, trials in lock_leased(session, [worker_id]):
                for trial in trials:
                    attempt = running_attempt(session, trial)
                    attempt.seen_at = now
                    return_attempt(campaign, trial, attempt, now, f"worker {worker.name} drained")
            worker.ended_at = now
            worker.seen_at = now
            self._audit(session, "worker.drain", "worker", worker.id, name=worker.name)

    def quarantined_nodes(self, cluster: str) -> list[SetAside]:
        """The cluster's nodes that no probe shall run on, by name."""
        with self._db.read() as session:
            return active_quarantines(session, cluster)

    def workers(self, *, live: bool = True, cluster: str | None = None) -> list[WorkerRecord]:
        """Workers' sessions, the youngest first.

        Args:
            live: only those that are there: seen within `WORKER_ALIVE_S`.
            cluster: only those of this cluster.
        """
        query = select(Worker).order_by(Worker.registered_at.desc(), Worker.id)
        if live:
            query = query.where(is_there(self._clock()))
        if cluster is not None:
            query = query.where(Worker.cluster == cluster)
        with self._db.read() as session:
            return [worker_record(row) for row in session.scalars(query)]

    def count_too_large(self, campaign_id: int) -> int:
        """How many of the campaign's waiting trials fit none of the workers that are there."""
        can_run_it = exists().where(
            Worker.cluster == Campaign.cluster_name,
            is_there(self._clock()),
            fits(Worker.num_nodes, Worker.devices_per_node),
        )
        query = (
            select(func.count())
            .select_from(Trial)
            .join(Campaign, Campaign.id == Trial.campaign_id)
            .where(Trial.campaign_id == campaign_id, Trial.state == "PENDING", ~can_run_it)
        )
        with self._db.read() as session:
            return session.scalar(query) or 0


def _flush_unless_taken(session: Session, name: str) -> None:
    """Writes a new session; one of the same name that began meanwhile is ended by another try."""
    try:
        session.flush()
    except IntegrityError as error:
        if not breaks_unique(error, "workers", "name_live"):
            raise
        raise DatabaseConflictError(f"another worker registers as {name!r} just now") from error


def is_there(now: datetime) -> ColumnElement[bool]:
    """Whether a worker's session goes on, and it was heard of lately.

    One that was heard of in what is the future since the clock was set back is there once it says so.
    """
    lately = timedelta(seconds=WORKER_ALIVE_S)
    return (
        Worker.ended_at.is_(None)
        & (Worker.seen_at > now - lately)
        & (Worker.seen_at < now + lately)
    )


def fits(
    num_nodes: int | SQLColumnExpression[int], devices_per_node: int | SQLColumnExpression[int]
) -> ColumnElement[bool]:
    """Whether a trial's layout fits an allocation; of all workers, given their columns."""
    return (Trial.num_nodes <= num_nodes) & (
        Trial.num_devices <= Trial.num_nodes * devices_per_node
    )


def live_worker(session: Session, worker_id: str, *, lock: bool = True) -> Worker:
    """The session of a worker that has not ended.

    Raises:
        WorkerNotFoundError: no live session has this id.
        WorkerSupersededError: it ended because its name was registered anew.
    """
    worker = session.get(Worker, worker_id, with_for_update=FOR_CHANGE if lock else None)
    refusal = not_live(session, worker_id, worker)
    if worker is None or refusal is not None:
        assert refusal is not None
        raise refusal
    return worker


def not_live(session: Session, worker_id: str, worker: Worker | None) -> ResultsDbError | None:
    """Why a worker's session is not one that goes on; None: it is."""
    if worker is None:
        return WorkerNotFoundError(f"there is no worker {worker_id!r}; register again")
    if worker.ended_at is None:
        return None
    if _name_is_taken(session, worker):
        return WorkerSupersededError(f"another worker has registered as {worker.name!r}")
    return WorkerNotFoundError(
        f"the session {worker_id!r} of worker {worker.name!r} has ended; register again"
    )


def _name_is_taken(session: Session, ended: Worker) -> bool:
    later = exists().where(
        Worker.name == ended.name,
        Worker.id != ended.id,
        Worker.registered_at >= ended.ended_at,
    )
    return bool(session.scalar(select(later)))


def _end_earlier(session: Session, name: str, now: datetime) -> None:
    """Ends the session that goes on under a name, and takes back what it had leased."""
    live = (Worker.name == name, Worker.ended_at.is_(None))
    ids = session.scalars(select(Worker.id).where(*live)).all()
    if not ids:
        return
    # In the order of `locks`: trials before workers. What was leased until those were locked comes after.
    lock_leased(session, ids)
    earlier = {worker.id: worker for worker in lock_workers(session, Worker.id.in_(ids), *live)}
    for campaign, trials in lock_leased(session, list(earlier)):
        for trial in trials:
            attempt = running_attempt(session, trial)
            worker = earlier[attempt.worker_id]
            why = f"worker {worker.name} started anew"
            lose_attempt(campaign, trial, attempt, now, why, host=worker.host)
    for worker in earlier.values():
        worker.ended_at = now
