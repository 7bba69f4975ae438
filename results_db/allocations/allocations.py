"""Allocations and nodes: their state, leased and waiting trials, cost, and quarantines by users."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from sqlalchemy import Select, func, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.access.shares import note_use
from layout_tuner.results_db.allocations.leases import HEARTBEAT_INTERVAL_S
from layout_tuner.results_db.allocations.node_status import (
    is_shown,
    keep_quarantine,
    notify_set_aside,
    quarantine_again,
    scope_of,
)
from layout_tuner.results_db.allocations.workers import (
    campaigns_of_kind,
    newest_sessions,
    workers_of_kind,
)
from layout_tuner.results_db.database.database import EYES_OF
from layout_tuner.results_db.database.locks import lock_rows
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import NodeNotFoundError, NodeStateError, WorkerNotFoundError
from layout_tuner.results_db.models.service_tables import (
    AllocationNode,
    NodeQuarantine,
    WorkerRow,
    is_there,
)
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import Cost, LeasedTrialRead, QuarantineRead, WorkerRecord
from layout_tuner.results_db.rows import COST_COLUMNS, record_of
from layout_tuner.results_db.service_records import AllocationNodeRead, ClusterNodeRead
from layout_tuner.search_spaces.probe_defaults import DEFAULT_DEADLINE_S
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingTrial:
    """A trial that no worker has leased."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    cluster: str
    num_nodes: int
    num_devices: int
    deadline_s: float
    """Longest duration of its probe."""
    is_paused: bool
    """Whether its campaign is paused."""


OTHERS_PROBE: Final = "another owner's probe"
"""What a reader gets to know of a probe of a campaign that it may not see."""

_NEXT_STARTS_WITHIN: Final = timedelta(seconds=HEARTBEAT_INTERVAL_S)

_UNSHARED: Final = WorkerRow.idle_node_seconds > WorkerRow.idle_shared_node_seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class AllocationRecord:
    """An allocation: its worker session, nodes, trials and cost."""

    worker: WorkerRecord
    is_there: bool
    """Whether a heartbeat came lately."""
    nodes: tuple[AllocationNodeRead, ...]
    """In the worker's order; empty: not reported."""
    trials: tuple[LeasedTrialRead, ...]
    """Its leased trials, the oldest first."""
    cost: Cost
    """The cost of its ended attempts, and its idle node-seconds."""

    @property
    def idle_share(self) -> float | None:
        """The idle part of its node-seconds, those of running trials included; None: of none."""
        held = sum(
            (each.held_s or 0.0) * (each.num_nodes if each.nodes_held is None else each.nodes_held)
            for each in self.trials
        )
        total = self.cost.total + held
        return self.cost.idle / total if total else None


class Allocations(StoreSection):
    """The store's methods for allocations and nodes."""

    def find(
        self,
        *,
        live: bool = True,
        cluster: str | None = None,
        called: str | None = None,
        limit: int | None = None,
    ) -> list[AllocationRecord]:
        """Allocations, the newest first.

        Those that are `called` so have this session id, worker name or job id; live ones have sent
        a heartbeat lately.
        """
        query = newest_sessions(self._clock(), live=live, cluster=cluster).limit(limit)
        if called is not None:
            query = query.where(
                (WorkerRow.id == called) | (WorkerRow.name == called) | (WorkerRow.job_id == called)
            )
        with self._db.read() as session:
            return self._records(session, query)

    def get(self, worker_id: str) -> AllocationRecord:
        """One allocation, ended or not. Raises WorkerNotFoundError if no session has this id."""
        with self._db.read() as session:
            found = self._records(session, select(WorkerRow).where(WorkerRow.id == worker_id))
            if not found:
                raise WorkerNotFoundError(f"there is no allocation {worker_id!r}")
            return found[0]

    def share_idle_time(self) -> None:
        """Charges running campaigns, in equal shares, with idle time of allocations of the cluster.

        Not done with the heartbeats that report it: it locks all campaigns of a cluster, and
        heartbeats never wait for campaigns.
        """
        with self._db.read() as session:
            # Most calls find nothing, and do not wait for the write lock.
            query = select(WorkerRow.cluster, WorkerRow.launcher).where(_UNSHARED).distinct()
            found = session.execute(query).all()
        kinds = {(cluster, launcher == SIMULATED_LAUNCHER) for cluster, launcher in found}
        for cluster, is_simulated in sorted(kinds):
            self._share_idle_time_of(cluster, is_simulated=is_simulated)

    @retried
    def _share_idle_time_of(self, cluster: str, *, is_simulated: bool) -> None:
        with self._db.write() as session:
            sharers = lock_rows(
                session,
                Campaign,
                (Campaign.state == "RUNNING")
                & (Campaign.cluster_name == cluster)
                & campaigns_of_kind(is_simulated=is_simulated),
            )
            more = 0.0
            kind = workers_of_kind(is_simulated=is_simulated)
            for worker in lock_rows(
                session, WorkerRow, WorkerRow.cluster == cluster, kind, _UNSHARED
            ):
                more += worker.idle_node_seconds - worker.idle_shared_node_seconds
                worker.idle_shared_node_seconds = worker.idle_node_seconds
            for campaign in sharers:
                share = more / len(sharers)
                campaign.allocation_idle_node_seconds += share
                note_use(campaign, self._clock(), idle_allocations=share)

    def waiting_trials(
        self,
        cluster: str,
        *,
        is_simulated: bool = False,
        campaign_id: int | None = None,
        limit: int,
    ) -> list[WaitingTrial]:
        """Trials of a cluster that no worker has leased, simulated or real, the oldest first."""
        query = (
            _waiting(cluster, is_simulated, campaign_id)
            .with_only_columns(
                Trial.id.label("trial_id"),
                Campaign.name.label("campaign"),
                Trial.number,
                Campaign.cluster_name.label("cluster"),
                Trial.num_nodes,
                Trial.num_devices,
                func.coalesce(Campaign.probe_deadline_s, DEFAULT_DEADLINE_S).label("deadline_s"),
                (Campaign.state == "PAUSED").label("is_paused"),
            )
            .order_by(Trial.id)
            .limit(limit)
        )
        with self._db.read() as session:
            return [record_of(WaitingTrial, row) for row in session.execute(query)]

    def count_waiting_trials(self, cluster: str, *, is_simulated: bool = False) -> int:
        """The number of trials of a cluster that no worker has leased, simulated or real."""
        query = _waiting(cluster, is_simulated, None).with_only_columns(func.count())
        return self._scalar(query) or 0

    def waiting_reason(self, campaign_id: int) -> str | None:
        """Why the first of a campaign's leased trials waits; None unless all of them wait.

        A reason that was reported before, or shortly after, a trial ended is out of date: the next
        trial is about to start.
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
        workers: Sequence[WorkerRow] = session.scalars(query).all()
        ids = [worker.id for worker in workers]
        there = set(session.scalars(select(WorkerRow.id).where(is_there(self._clock()))))
        trials, costs = _trials(session, ids), _costs(session, ids)
        nodes = _nodes(session, ids, trials)
        return [
            AllocationRecord(
                worker=record_of(WorkerRecord, worker),
                is_there=worker.id in there,
                nodes=tuple(nodes[worker.id]),
                trials=tuple(trials[worker.id]),
                cost=costs[worker.id] + Cost(idle=worker.idle_node_seconds),
            )
            for worker in workers
        ]

    def nodes(self, cluster: str | None = None) -> list[ClusterNodeRead]:
        """Nodes of live allocations, and nodes in quarantine, by cluster and name."""
        with self._db.read() as session:
            found = {
                (worker.cluster, node.name): (worker, node)
                for worker, node in session.execute(self._live_nodes(cluster))
            }
            query = select(NodeQuarantine)
            if cluster is not None:
                query = query.where(NodeQuarantine.cluster == cluster)
            rows = defaultdict[tuple[str, str], list[NodeQuarantine]](list)
            for row in session.scalars(query):
                rows[row.cluster, row.node].append(row)
            trials = _trials(session, [worker.id for worker, _ in found.values()])
            return [
                _cluster_node(key, found.get(key), rows[key], session, trials)
                for key in sorted(found.keys() | rows.keys())
                if key in found or any(row.released_at is None for row in rows[key])
            ]

    @retried
    def quarantine_node(self, cluster: str, node: str, reason: str) -> ClusterNodeRead:
        """Puts a node into quarantine; its worker gets the order. Repeating it changes nothing.

        Raises:
            NodeNotFoundError: no allocation of the cluster ever had such a node.
        """
        now = self._clock()
        with self._db.write() as session:
            _refuse_unknown(session, cluster, node)
            by = self._actor.name
            keep_quarantine(
                session,
                cluster,
                node,
                reason,
                now,
                scope="",
                reported_by=by,
                requested_by_user=True,
            )
            row = session.get_one(NodeQuarantine, (cluster, node, ""), with_for_update=True)
            since = row.since if row.released_at is None else now
            notify_set_aside(session, cluster, node, since)
            quarantine_again(row, reason, since, reported_by=by, requested_by_user=True)
            session.flush()
            self._audit(session, "node.quarantine", "node", node, cluster=cluster, reason=reason)
            return self._node(session, cluster, node)

    @retried
    def release_node(self, cluster: str, node: str) -> ClusterNodeRead:
        """Releases a node from quarantine, whoever set it aside; its worker gets the order.

        Raises:
            NodeNotFoundError: no allocation of the cluster ever had such a node.
            NodeStateError: it is not in quarantine.
        """
        now = self._clock()
        with self._db.write() as session:
            is_it = (NodeQuarantine.cluster == cluster) & (NodeQuarantine.node == node)
            query = select(NodeQuarantine).where(is_it).order_by(NodeQuarantine.scope)
            rows = session.scalars(query.with_for_update()).all()
            if not rows:
                _refuse_unknown(session, cluster, node)
            held = [row for row in rows if row.released_at is None]
            if not held:
                raise NodeStateError(f"node {node} of cluster {cluster} is not in quarantine")
            for row in held:
                row.released_at = now
                row.release_pending = is_shown(session, row)
                row.release_told_at = None
            session.flush()
            self._audit(session, "node.release", "node", node, cluster=cluster)
            return self._node(session, cluster, node)

    def _node(self, session: Session, cluster: str, node: str) -> ClusterNodeRead:
        query = self._live_nodes(cluster).where(AllocationNode.name == node)
        found = session.execute(query).first()
        is_it = (NodeQuarantine.cluster == cluster) & (NodeQuarantine.node == node)
        rows = session.scalars(select(NodeQuarantine).where(is_it)).all()
        pair = None if found is None else (found[0], found[1])
        return _cluster_node((cluster, node), pair, rows, session, {})

    def _live_nodes(self, cluster: str | None) -> Any:
        """Nodes of live workers, in the order of registration."""
        query = (
            select(WorkerRow, AllocationNode)
            .join(AllocationNode, AllocationNode.worker_id == WorkerRow.id)
            .where(is_there(self._clock()))
            .order_by(WorkerRow.registered_at)
        )
        return query if cluster is None else query.where(WorkerRow.cluster == cluster)


def _waiting(cluster: str, is_simulated: bool, campaign_id: int | None) -> Select[Any]:
    query = (
        select(Trial)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(
            Trial.state == "PENDING",
            Campaign.state.in_(("RUNNING", "PAUSED")),
            Campaign.cluster_name == cluster,
            campaigns_of_kind(is_simulated=is_simulated),
        )
    )
    return query if campaign_id is None else query.where(Campaign.id == campaign_id)


def _node_read(
    session: Session, row: AllocationNode, trials: Mapping[str, Sequence[LeasedTrialRead]]
) -> AllocationNodeRead:
    """A node's record: of the probes there, as its worker reports them, the visible titles."""
    if not session.info[EYES_OF]:
        return record_of(AllocationNodeRead, row)
    seen = {f"trial {each.number} of {each.campaign}" for each in trials.get(row.worker_id, ())}
    said = [
        each if each.partition(" (")[0] in seen else OTHERS_PROBE
        for each in filter(None, re.split(r", (?=trial \d+ of )", row.doing))
    ]
    return record_of(AllocationNodeRead, row, doing=", ".join(dict.fromkeys(said)))


def _nodes(
    session: Session, ids: Sequence[str], trials: Mapping[str, Sequence[LeasedTrialRead]]
) -> defaultdict[str, list[AllocationNodeRead]]:
    query = (
        select(AllocationNode)
        .where(AllocationNode.worker_id.in_(ids))
        .order_by(AllocationNode.position, AllocationNode.name)
    )
    nodes: defaultdict[str, list[AllocationNodeRead]] = defaultdict(list)
    for row in session.scalars(query):
        nodes[row.worker_id].append(_node_read(session, row, trials))
    return nodes


def _trials(session: Session, ids: Sequence[str]) -> defaultdict[str, list[LeasedTrialRead]]:
    query = (
        select(
            Trial.worker_id,
            Trial.id.label("trial_id"),
            Campaign.name.label("campaign"),
            Trial.number,
            Trial.attempt,
            Trial.num_nodes,
            Trial.num_devices,
            Attempt.started_at.label("leased_at"),
            Attempt.phase,
            Trial.iterations_done,
            Attempt.held_s,
            Attempt.nodes_held,
            Attempt.waiting_because,
        )
        .join(Attempt, (Attempt.trial_id == Trial.id) & (Attempt.attempt == Trial.attempt))
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(Trial.state == "RUNNING", Trial.worker_id.in_(ids))
        .order_by(Trial.id)
    )
    trials: defaultdict[str, list[LeasedTrialRead]] = defaultdict(list)
    for row in session.execute(query):
        trials[row.worker_id].append(record_of(LeasedTrialRead, row))
    return trials


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


def _refuse_unknown(session: Session, cluster: str, node: str) -> None:
    query = (
        select(AllocationNode.name)
        .join(WorkerRow, WorkerRow.id == AllocationNode.worker_id)
        .where(AllocationNode.name == node, WorkerRow.cluster == cluster)
    )
    if session.scalar(query.limit(1)) is None:
        raise NodeNotFoundError(
            f"no allocation of cluster {cluster!r} has had a node named {node!r}; "
            "`GET /v1/nodes` lists those that are known"
        )


def _cluster_node(
    key: tuple[str, str],
    found: tuple[WorkerRow, AllocationNode] | None,
    quarantines: Sequence[NodeQuarantine],
    session: Session,
    trials: Mapping[str, Sequence[LeasedTrialRead]],
) -> ClusterNodeRead:
    """A node with the newest of its quarantines: one that holds, for its own worker if possible."""
    cluster, name = key
    scopes = ("",) if found is None else ("", scope_of(found[0]))
    quarantine = max(
        quarantines,
        key=lambda row: (row.released_at is None, row.scope in scopes, row.since),
        default=None,
    )
    return ClusterNodeRead(
        cluster=cluster,
        name=name,
        allocation=None if found is None else found[0].id,
        node=None if found is None else _node_read(session, found[1], trials),
        quarantine=None if quarantine is None else record_of(QuarantineRead, quarantine),
    )
