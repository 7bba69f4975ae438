"""The status that workers report of their nodes, and quarantines.

A node in quarantine runs no probes, from when a worker or a user sets it aside until a user
releases it. A quarantine row of a node holds the wanted state; workers' statuses hold the actual
state. Where the two differ, every heartbeat's reply tells the worker that has the node, until its
status agrees. Quarantines outlive allocations: a worker gets them when it registers.

What a user requests counts for all workers of the cluster. What a worker reports counts for the
workers of the same token, since another token's worker may not be believed; what a simulated worker
reports counts for its own session, since other seeds have other nodes that fail.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from itertools import groupby
from typing import Any, Final

from sqlalchemy import ColumnElement, case, delete, exists, insert, select, update
from sqlalchemy.orm import Session

from layout_tuner.protocol.states import UNUSABLE_NODE_STATES
from layout_tuner.protocol.worker_messages import NodeBody, NodeStatusBody, SetAside, StatusBody
from layout_tuner.results_db.access.webhooks import notify
from layout_tuner.results_db.models.service_tables import AllocationNode, NodeQuarantine, WorkerRow
from layout_tuner.results_db.models.table_base import insert_many, insert_missing
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER

RELEASE_TIME_S: Final = 30.0
"""Seconds for which a worker may take to act on a release. If it still reports the quarantine after
that, the node failed its check and is in quarantine again."""


def note_quarantines(
    session: Session, worker: WorkerRow, nodes: Sequence[NodeStatusBody], now: datetime
) -> None:
    """Stores the quarantines that a worker reports, and completes releases."""
    shown = {node.name: node.reason for node in nodes if node.state == "quarantined"}
    names, scope = {node.name for node in nodes}, scope_of(worker)
    query = select(NodeQuarantine).where(
        NodeQuarantine.cluster == worker.cluster, NodeQuarantine.scope.in_(("", scope))
    )
    known: defaultdict[str, list[NodeQuarantine]] = defaultdict(list)
    for row in session.scalars(query):
        if row.node in names:
            known[row.node].append(row)
    # In the order of names in every process, to avoid deadlocks.
    for name, reason in sorted(shown.items()):
        rows, by = known[name], worker.registered_by
        if any(not row.released_at or _is_release_on_its_way(row, worker, now) for row in rows):
            continue
        keep_quarantine(session, worker.cluster, name, reason, now, scope=scope, reported_by=by)
        if worker.launcher != SIMULATED_LAUNCHER:
            notify_set_aside(session, worker.cluster, name, now)
        for row in rows:
            if row.scope == scope:
                quarantine_again(row, reason, now, reported_by=by)
    for name, rows in known.items():
        for row in rows:
            if row.release_pending and name not in shown:
                row.release_pending = is_shown(session, row)
    session.flush()


def scope_of(worker: WorkerRow) -> str:
    """The scope of what a worker reports."""
    return worker.id if worker.launcher == SIMULATED_LAUNCHER else worker.registered_by


def counts_for_worker() -> ColumnElement[bool]:
    """Whether a row of the quarantines counts for a row of the workers."""
    is_simulated = WorkerRow.launcher == SIMULATED_LAUNCHER
    own = case((is_simulated, WorkerRow.id), else_=WorkerRow.registered_by)
    in_scope = (NodeQuarantine.scope == "") | (NodeQuarantine.scope == own)
    return (NodeQuarantine.cluster == WorkerRow.cluster) & in_scope


def end_simulated_quarantines(session: Session, worker_ids: Sequence[str]) -> None:
    """Deletes the quarantines of simulated workers whose sessions end."""
    session.execute(delete(NodeQuarantine).where(NodeQuarantine.scope.in_(worker_ids)))


def node_orders(
    session: Session, workers: Sequence[WorkerRow], now: datetime
) -> tuple[Mapping[str, list[str]], Mapping[str, list[SetAside]]]:
    """The nodes that workers must release and set aside, by session."""
    release: defaultdict[str, list[str]] = defaultdict(list)
    quarantine: defaultdict[str, list[SetAside]] = defaultdict(list)
    ids = [worker.id for worker in workers]
    query = (
        select(AllocationNode.worker_id, AllocationNode.state, NodeQuarantine)
        .join(AllocationNode, AllocationNode.name == NodeQuarantine.node)
        .join(WorkerRow, WorkerRow.id == AllocationNode.worker_id)
        .where(counts_for_worker(), WorkerRow.id.in_(ids))
        .order_by(AllocationNode.worker_id, AllocationNode.position, NodeQuarantine.scope)
    )
    found = session.execute(query).all()
    for (worker_id, state, node), each in groupby(found, lambda r: (r[0], r[1], r[2].node)):
        rows = [row for *_, row in each]
        wanted = next((row for row in rows if row.released_at is None), None)
        pending = [row for row in rows if row.release_pending]
        if wanted is not None and state != "quarantined":
            quarantine[worker_id].append(SetAside(node=node, reason=wanted.reason))
        elif wanted is None and pending and state == "quarantined":
            release[worker_id].append(node)
            for row in pending:
                row.release_told_at = row.release_told_at or now
    return release, quarantine


def keep_quarantine(
    session: Session,
    cluster: str,
    node: str,
    reason: str,
    now: datetime,
    *,
    scope: str,
    reported_by: str,
    requested_by_user: bool = False,
) -> None:
    """Adds the quarantine of a node, unless it has a row; another process may just have added one.

    If another process is adding it, this waits for that row, which stays.
    """
    row: dict[str, Any] = {
        "cluster": cluster,
        "node": node,
        "scope": scope,
        "reported_by": reported_by,
        "reason": reason,
        "since": now,
        "requested_by_user": requested_by_user,
        "release_pending": False,
    }
    insert_missing(session, NodeQuarantine, [row])


def notify_set_aside(session: Session, cluster: str, node: str, since: datetime) -> None:
    """Sends word to webhooks; the reason is not in it, since it may name a campaign."""
    data = {"cluster": cluster, "node": node, "text": f"Node {node} of {cluster} is set aside"}
    notify(session, "node.set_aside", now=since, key=f"{cluster} {node} {since}", data=data)


def quarantine_again(
    row: NodeQuarantine,
    reason: str,
    since: datetime,
    *,
    reported_by: str,
    requested_by_user: bool = False,
) -> None:
    """Puts a node that has a row into quarantine."""
    row.reason = reason
    row.reported_by = reported_by
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
    """Whether the last status of a worker in its scope has the node in quarantine."""
    shown = exists().where(
        AllocationNode.name == row.node,
        AllocationNode.state == "quarantined",
        AllocationNode.worker_id == WorkerRow.id,
        AllocationNode.name == NodeQuarantine.node,
        NodeQuarantine.cluster == row.cluster,
        NodeQuarantine.scope == row.scope,
        counts_for_worker(),
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
        worker.num_unusable = sum(n.state in UNUSABLE_NODE_STATES for n in status.nodes)
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
