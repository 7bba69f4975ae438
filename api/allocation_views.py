"""From the store's allocations and nodes to the API's documents."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from datetime import datetime
from typing import Final

from api.allocation_schemas import (
    AllocationNodeRead,
    AllocationRead,
    ClusterNodeRead,
    LeasedTrialRead,
    NotLeasedRead,
    QuarantineRead,
    ShownState,
)
from api.views import cost_read
from api.waiting import why_not_leased
from results_db.allocation_records import ClusterNode, LeasedTrial, NodeRecord, WaitingTrial
from results_db.allocations import AllocationRecord
from results_db.store import Store

NOT_LEASED_SHOWN: Final = 20
"""Trials that nobody has leased of which an allocation says why."""


def allocation_reads(store: Store, allocations: Iterable[AllocationRecord]) -> list[AllocationRead]:
    """Allocations, each with what waits for it."""
    now = store.now()
    by_cluster: dict[str, tuple[list[WaitingTrial], int]] = {}
    reads = []
    for allocation in allocations:
        cluster = allocation.worker.cluster
        if cluster not in by_cluster:
            waiting = store.waiting_trials(cluster, limit=NOT_LEASED_SHOWN)
            by_cluster[cluster] = waiting, store.count_waiting_trials(cluster)
        waiting, count = by_cluster[cluster]
        reads.append(_allocation_read(allocation, waiting, count, now))
    return reads


def _allocation_read(
    allocation: AllocationRecord, waiting: list[WaitingTrial], num_waiting: int, now: datetime
) -> AllocationRead:
    worker = allocation.worker
    left_s = None if worker.ends_at is None else (worker.ends_at - now).total_seconds()
    over = worker.ended_at is not None
    return AllocationRead(
        id=worker.id,
        name=worker.name,
        host=worker.host,
        cluster=worker.cluster,
        scheduler=worker.scheduler,
        job_id=worker.job_id,
        launcher=worker.launcher,
        device=worker.device,
        num_nodes=worker.num_nodes,
        devices_per_node=worker.devices_per_node,
        shares_nodes=worker.shares_nodes,
        state=_state(allocation),
        seconds_left=None if left_s is None else max(left_s, 0.0),
        registered_at=worker.registered_at,
        seen_at=worker.seen_at,
        status_at=worker.status_at,
        ended_at=worker.ended_at,
        nodes=[node_read(node) for node in allocation.nodes],
        running=[_leased(trial) for trial in allocation.trials if trial.phase != "waiting"],
        waiting=[_leased(trial) for trial in allocation.trials if trial.phase == "waiting"],
        num_not_leased=0 if over else num_waiting,
        not_leased=[] if over else [_not_leased(trial, allocation, now) for trial in waiting],
        cost=cost_read(allocation.cost),
    )


def _state(allocation: AllocationRecord) -> ShownState:
    if allocation.worker.ended_at is not None:
        return "ended"
    return allocation.worker.state if allocation.is_there else "silent"


def _leased(trial: LeasedTrial) -> LeasedTrialRead:
    return LeasedTrialRead(**asdict(trial))


def _not_leased(trial: WaitingTrial, allocation: AllocationRecord, now: datetime) -> NotLeasedRead:
    return NotLeasedRead(
        trial_id=trial.trial_id,
        campaign=trial.campaign,
        number=trial.number,
        num_nodes=trial.num_nodes,
        num_devices=trial.num_devices,
        reason=why_not_leased(trial, allocation, now),
    )


def node_read(node: NodeRecord) -> AllocationNodeRead:
    """A node of an allocation."""
    return AllocationNodeRead(**asdict(node))


def cluster_node_read(found: ClusterNode) -> ClusterNodeRead:
    """A node as the service knows it."""
    quarantine = found.quarantine
    return ClusterNodeRead(
        cluster=found.cluster,
        name=found.name,
        allocation=found.worker_id,
        node=None if found.node is None else node_read(found.node),
        quarantine=None
        if quarantine is None
        else QuarantineRead(
            reason=quarantine.reason,
            since=quarantine.since,
            requested_by_user=quarantine.requested_by_user,
            released_at=quarantine.released_at,
        ),
    )
