"""The status that workers report of their nodes, and quarantines.

A node in quarantine runs no probes, from when a worker or a user sets it aside until a user
releases it. The quarantine row of a node holds the wanted state; workers' statuses hold the actual
state. Where the two differ, every heartbeat's reply tells the worker that has the node, until its
status agrees. Quarantines outlive allocations: a worker gets them when it registers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import delete, exists, insert, select, update
from sqlalchemy.orm import Session

from layout_tuner.protocol.worker_messages import NodeBody, NodeStatusBody, SetAside, StatusBody
from layout_tuner.results_db.models.service_tables import AllocationNode, NodeQuarantine, WorkerRow
from layout_tuner.results_db.models.table_base import insert_many
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER

RELEASE_TIME_S: Final = 30.0
"""Seconds for which a worker may take to act on a release. If it still reports the quarantine after
that, the node failed its check and is in quarantine again."""


def note_quarantines(
    session: Session, worker: WorkerRow, nodes: Sequence[NodeStatusBody], now: datetime
) -> None:
    """Stores the quarantines that a worker reports, and completes releases."""
    shown = {node.name: node.reason for node in nodes if node.state == "quarantined"}
    names = {node.name for node in nodes}
    query = select(NodeQuarantine).where(NodeQuarantine.cluster == worker.cluster)
    known = {row.node: row for row in session.scalars(query) if row.node in names}
    # In the order of names in every process, to avoid deadlocks.
    for name, reason in sorted(shown.items()):
        row = known.get(name)
        if row is None:
            keep_quarantine(session, worker.cluster, name, reason, now)
        elif row.released_at is not None and not _is_release_on_its_way(row, worker, now):
            quarantine_again(row, reason, now)
    for name, row in known.items():
        if row.release_pending and name not in shown:
            row.release_pending = is_shown(session, row)
    session.flush()


def node_orders(
    session: Session, workers: Sequence[WorkerRow], now: datetime
) -> tuple[Mapping[str, list[str]], Mapping[str, list[SetAside]]]:
    """The nodes that workers must release and set aside, by session."""
    release: defaultdict[str, list[str]] = defaultdict(list)
    quarantine: defaultdict[str, list[SetAside]] = defaultdict(list)
    ids = [worker.id for worker in workers]
    query = (
        select(AllocationNode.worker_id, NodeQuarantine, AllocationNode.state)
        .join(AllocationNode, AllocationNode.name == NodeQuarantine.node)
        .join(WorkerRow, WorkerRow.id == AllocationNode.worker_id)
        .where(NodeQuarantine.cluster == WorkerRow.cluster, WorkerRow.id.in_(ids))
        .order_by(AllocationNode.worker_id, AllocationNode.position)
    )
    for worker_id, row, state in session.execute(query):
        is_shown = state == "quarantined"
        if row.released_at is None and not is_shown:
            quarantine[worker_id].append(SetAside(node=row.node, reason=row.reason))
        elif row.release_pending and is_shown:
            release[worker_id].append(row.node)
            row.release_told_at = row.release_told_at or now
    return release, quarantine


def keep_quarantine(
    session: Session,
    cluster: str,
    node: str,
    reason: str,
    now: datetime,
    *,
    requested_by_user: bool = False,
) -> None:
    """Adds the quarantine of a node, unless it has a row; another process may just have added one.

    If another process is adding it, this waits for that row, which stays.
    """
    row: dict[str, Any] = {
        "cluster": cluster,
        "node": node,
        "reason": reason,
        "since": now,
        "requested_by_user": requested_by_user,
        "release_pending": False,
    }
    session.execute(_insert_of(session)(NodeQuarantine).values(row).on_conflict_do_nothing())


def _insert_of(session: Session) -> Any:
    # Imported where it is used: the dialect of PostgreSQL is slow to import.
    if session.get_bind().dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def quarantine_again(
    row: NodeQuarantine, reason: str, since: datetime, *, requested_by_user: bool = False
) -> None:
    """Puts a node that has a row into quarantine."""
    row.reason = reason
    row.since = since
    row.requested_by_user = requested_by_user
    row.released_at = row.release_told_at = None
    row.release_pending = False


def _is_release_on_its_way(row: NodeQuarantine, worker: WorkerRow, now: datetime) -> bool:
    """Whether the worker reports a quarantine only because it has not acted on the release yet."""
    if not row.release_pending or row.released_at is None or worker.registered_at > row.released_at:
        return False
    told_at = row.release_told_at
    return told_at is None or abs(now - told_at) < timedelta(seconds=RELEASE_TIME_S)


def is_shown(session: Session, row: NodeQuarantine) -> bool:
    """Whether the last status of a worker has the node in quarantine."""
    shown = exists().where(
        AllocationNode.name == row.node,
        AllocationNode.state == "quarantined",
        AllocationNode.worker_id == WorkerRow.id,
        WorkerRow.cluster == row.cluster,
        WorkerRow.ended_at.is_(None),
    )
    return bool(session.scalar(select(shown)))


_SAID: Final = (
    AllocationNode.position,
    AllocationNode.state,
    AllocationNode.doing,
    AllocationNode.reason,
    AllocationNode.free_devices,
)
"""The columns of a node that every status sets."""


def later(now: datetime, seconds: float | None) -> datetime | None:
    """The time so many seconds after `now`; None: never."""
    return None if seconds is None else now + timedelta(seconds=seconds)


def add_nodes(session: Session, worker: WorkerRow, nodes: Sequence[NodeBody]) -> None:
    """Adds the nodes with which a worker registers; their state is not known yet."""
    insert_many(
        session,
        AllocationNode,
        [
            {
                "worker_id": worker.id,
                "name": node.name,
                "position": position,
                "num_devices": node.num_devices,
                "state": "starting",
                "doing": "",
                "reason": "",
            }
            for position, node in enumerate(nodes)
        ],
    )


def keep_status(session: Session, worker: WorkerRow, status: StatusBody, now: datetime) -> None:
    """Stores the status that a worker reports of its allocation; repeating it changes nothing."""
    worker.state = status.state
    worker.status_at = now
    if status.ends_in_s is not None:
        worker.ends_at = later(now, status.ends_in_s)
    # Nodes may join later.
    worker.num_nodes = max(worker.num_nodes, len(status.nodes))
    # Workers report the sum of the session, so that lost or repeated heartbeats do no harm. It is
    # charged to campaigns, so it is limited to what passed.
    most_s = max((now - worker.registered_at).total_seconds(), 0.0) * worker.num_nodes
    if worker.launcher == SIMULATED_LAUNCHER:  # its clock is another
        most_s = math.inf
    worker.idle_node_seconds = max(worker.idle_node_seconds, min(status.idle_node_s, most_s))
    if status.nodes:
        _keep_nodes(session, worker, status.nodes)
        note_quarantines(session, worker, status.nodes, now)


def _keep_nodes(session: Session, worker: WorkerRow, nodes: Sequence[NodeStatusBody]) -> None:
    """Writes only nodes that changed, and reads no reports: an allocation may have a thousand."""
    query = select(AllocationNode.name, *_SAID).where(AllocationNode.worker_id == worker.id)
    known = {name: said for name, *said in session.execute(query)}
    new: list[dict[str, Any]] = []
    changed: list[dict[str, Any]] = []
    for position, node in enumerate(nodes):
        said = [position, node.state, node.doing, node.reason, node.free_devices]
        before = known.pop(node.name, None)
        # A worker sends the report of a check once; without one, the last report still holds.
        if said != before or node.health is not None:
            row: dict[str, Any] = {"worker_id": worker.id, "name": node.name}
            row |= {column.key: value for column, value in zip(_SAID, said, strict=True)}
            if node.health is not None:
                row["health"] = dict(node.health)
            if before is None:
                new.append(row | {"num_devices": worker.devices_per_node})
            else:
                changed.append(row)
    if new:
        session.execute(insert(AllocationNode), new)
    if changed:
        session.execute(update(AllocationNode), changed)
    if known:
        session.execute(
            delete(AllocationNode).where(
                AllocationNode.worker_id == worker.id, AllocationNode.name.in_(known)
            )
        )
