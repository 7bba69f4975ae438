"""Allocations as they stand: nodes, leased trials, cost, and what waits for them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, cast

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from results_db.allocation_records import (
    AttemptPhase,
    LeasedTrial,
    NodeRecord,
    NodeState,
    WaitingTrial,
)
from results_db.cost import Cost
from results_db.errors import WorkerNotFoundError
from results_db.leases import HEARTBEAT_INTERVAL_S
from results_db.locks import lock_campaigns, lock_workers
from results_db.models import Attempt, Campaign, Trial
from results_db.part import StorePart
from results_db.records import WorkerRecord
from results_db.retry import retried
from results_db.rows import COST_COLUMNS, worker_record
from results_db.worker_tables import AllocationNode, Worker
from results_db.workers import is_there
from search_spaces.outcome import DEFAULT_DEADLINE_S

_NEXT_STARTS_WITHIN: Final = timedelta(seconds=HEARTBEAT_INTERVAL_S)
_UNSHARED: Final = Worker.idle_node_seconds > Worker.idle_shared_node_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationRecord:
    """An allocation: its worker's session and all that runs there."""

    worker: WorkerRecord
    is_there: bool
    """Whether the worker was heard of lately."""
    nodes: tuple[NodeRecord, ...]
    """In the worker's order; empty: it did not say."""
    trials: tuple[LeasedTrial, ...]
    """What it has leased, the oldest first."""
    cost: Cost
    """What its ended attempts cost, and what it held for no probe."""


class Allocations(StorePart):
    """The allocations' part of the store."""

    def allocations(
        self,
        *,
        live: bool = True,
        cluster: str | None = None,
        called: str | None = None,
        limit: int | None = None,
    ) -> list[AllocationRecord]:
        """Allocations, the youngest first.

        Args:
            live: only those whose workers were heard of lately.
            cluster: only those of this cluster.
            called: only those whose session, worker or job has this name.
            limit: at most so many.
        """
        query = select(Worker).order_by(Worker.registered_at.desc(), Worker.id).limit(limit)
        if live:
            query = query.where(is_there(self._clock()))
        if cluster is not None:
            query = query.where(Worker.cluster == cluster)
        if called is not None:
            query = query.where(
                (Worker.id == called) | (Worker.name == called) | (Worker.job_id == called)
            )
        with self._db.read() as session:
            return self._records(session, query)

    def allocation(self, worker_id: str) -> AllocationRecord:
        """One allocation, ended or not.

        Raises:
            WorkerNotFoundError: no session has this id.
        """
        with self._db.read() as session:
            found = self._records(session, select(Worker).where(Worker.id == worker_id))
            if not found:
                raise WorkerNotFoundError(f"there is no allocation {worker_id!r}")
            return found[0]

    def share_idle_time(self) -> None:
        """Charges running campaigns, in equal shares, what allocations of their cluster held for nobody.

        Apart from the beats that tell of it: it changes all campaigns of a cluster, and a beat waits for none.
        """
        with self._db.read() as session:
            # Most looks find nothing; those do not queue for the write lock.
            clusters = session.scalars(select(Worker.cluster).where(_UNSHARED).distinct()).all()
        for cluster in sorted(clusters):
            self._share_idle_time_of(cluster)

    @retried
    def _share_idle_time_of(self, cluster: str) -> None:
        with self._db.write() as session:
            sharers = lock_campaigns(
                session, (Campaign.state == "RUNNING") & (Campaign.cluster_name == cluster)
            )
            more = 0.0
            for worker in lock_workers(session, Worker.cluster == cluster, _UNSHARED):
                more += worker.idle_node_seconds - worker.idle_shared_node_seconds
                worker.idle_shared_node_seconds = worker.idle_node_seconds
            for campaign in sharers:
                campaign.allocation_idle_node_seconds += more / len(sharers)

    def waiting_trials(
        self, cluster: str, *, campaign_id: int | None = None, limit: int
    ) -> list[WaitingTrial]:
        """Trials of a cluster that nobody has leased, the oldest first."""
        query = (
            _waiting(cluster, campaign_id)
            .with_only_columns(Trial, Campaign)
            .order_by(Trial.id)
            .limit(limit)
        )
        with self._db.read() as session:
            return [_waiting_trial(trial, campaign) for trial, campaign in session.execute(query)]

    def count_waiting_trials(self, cluster: str) -> int:
        """How many trials of a cluster nobody has leased."""
        query = _waiting(cluster, None).with_only_columns(func.count())
        with self._db.read() as session:
            return session.scalar(query) or 0

    def all_wait_because(self, campaign_id: int) -> str | None:
        """What the first of a campaign's leased trials waits for; None unless all of them wait.

        What was said before a trial ended, or at once afterwards, is out of date: the next one starts.
        """
        last_end = select(func.max(Trial.ended_at)).where(Trial.campaign_id == campaign_id)
        query = (
            select(Attempt.phase, Attempt.waiting_because, Attempt.seen_at)
            .join(Trial, (Trial.id == Attempt.trial_id) & (Trial.attempt == Attempt.attempt))
            .where(Trial.campaign_id == campaign_id, Trial.state == "RUNNING")
            .order_by(Trial.id)
        )
        with self._db.read() as session:
            leased = session.execute(query).all()
            ended_at = session.scalar(last_end)
        if not leased or any(attempt.phase != "waiting" for attempt in leased):
            return None
        if ended_at is not None and leased[0].seen_at <= ended_at + _NEXT_STARTS_WITHIN:
            return None
        return str(leased[0].waiting_because) or None

    def _records(self, session: Session, query: Select[Any]) -> list[AllocationRecord]:
        workers: Sequence[Worker] = session.scalars(query).all()
        ids = [worker.id for worker in workers]
        there = set(session.scalars(select(Worker.id).where(is_there(self._clock()))))
        nodes, trials, costs = _nodes(session, ids), _trials(session, ids), _costs(session, ids)
        return [
            AllocationRecord(
                worker=worker_record(worker),
                is_there=worker.id in there,
                nodes=tuple(nodes[worker.id]),
                trials=tuple(trials[worker.id]),
                cost=costs[worker.id] + Cost(idle=worker.idle_node_seconds),
            )
            for worker in workers
        ]


def _waiting(cluster: str, campaign_id: int | None) -> Select[Any]:
    query = (
        select(Trial)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(
            Trial.state == "PENDING",
            Campaign.state.in_(("RUNNING", "PAUSED")),
            Campaign.cluster_name == cluster,
        )
    )
    return query if campaign_id is None else query.where(Campaign.id == campaign_id)


def _waiting_trial(trial: Trial, campaign: Campaign) -> WaitingTrial:
    deadline_s = campaign.probe_deadline_s
    return WaitingTrial(
        trial_id=trial.id,
        campaign=campaign.name,
        number=trial.number,
        cluster=campaign.cluster_name,
        num_nodes=trial.num_nodes,
        num_devices=trial.num_devices,
        deadline_s=DEFAULT_DEADLINE_S if deadline_s is None else deadline_s,
        is_paused=campaign.state == "PAUSED",
    )


def _nodes(session: Session, ids: Sequence[str]) -> defaultdict[str, list[NodeRecord]]:
    query = (
        select(AllocationNode)
        .where(AllocationNode.worker_id.in_(ids))
        .order_by(AllocationNode.position, AllocationNode.name)
    )
    nodes: defaultdict[str, list[NodeRecord]] = defaultdict(list)
    for row in session.scalars(query):
        nodes[row.worker_id].append(node_record(row))
    return nodes


def node_record(row: AllocationNode) -> NodeRecord:
    """The node's record."""
    return NodeRecord(
        name=row.name,
        num_devices=row.num_devices,
        state=cast("NodeState", row.state),
        doing=row.doing,
        reason=row.reason,
        free_devices=row.free_devices,
        health=row.health,
    )


def _trials(session: Session, ids: Sequence[str]) -> defaultdict[str, list[LeasedTrial]]:
    query = (
        select(Trial, Attempt, Campaign.name)
        .join(Attempt, (Attempt.trial_id == Trial.id) & (Attempt.attempt == Trial.attempt))
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(Trial.state == "RUNNING", Trial.worker_id.in_(ids))
        .order_by(Trial.id)
    )
    trials: defaultdict[str, list[LeasedTrial]] = defaultdict(list)
    for trial, attempt, campaign in session.execute(query):
        trials[attempt.worker_id].append(_leased_trial(trial, attempt, campaign))
    return trials


def _leased_trial(trial: Trial, attempt: Attempt, campaign: str) -> LeasedTrial:
    return LeasedTrial(
        trial_id=trial.id,
        campaign=campaign,
        number=trial.number,
        attempt=trial.attempt,
        num_nodes=trial.num_nodes,
        num_devices=trial.num_devices,
        leased_at=attempt.started_at,
        phase=cast("AttemptPhase | None", attempt.phase),
        iterations_done=trial.iterations_done,
        held_s=attempt.held_s,
        nodes_held=attempt.nodes_held,
        waiting_because=attempt.waiting_because,
    )


def _costs(session: Session, ids: Sequence[str]) -> defaultdict[str, Cost]:
    sums = [func.sum(getattr(Attempt, column)) for column in COST_COLUMNS.values()]
    query = (
        select(Attempt.worker_id, *sums)
        .where(Attempt.worker_id.in_(ids))
        .group_by(Attempt.worker_id)
    )
    costs: defaultdict[str, Cost] = defaultdict(Cost)
    for worker_id, *parts in session.execute(query):
        costs[worker_id] = Cost(**dict(zip(COST_COLUMNS, parts, strict=True)))
    return costs
