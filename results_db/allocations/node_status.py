"""Nodes that no probe shall run on: set aside by workers or users, until a user releases them.

The row of a node says what is wished; workers' statuses say what is. Where the two differ, the worker
that has the node is told with every heartbeat, until its status shows that it has heard. Quarantines
outlive allocations: a worker that registers is told of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, exists, select
from sqlalchemy.orm import Session

from results_db.allocation_records import NodeStatus, SetAside
from results_db.worker_tables import AllocationNode, NodeQuarantine, Worker

RELEASE_TOLD_FOR_S: Final = 30.0
"""Seconds for which a worker is told of a release. One that still shows the quarantine after that has set the
node aside anew: it failed its check."""


def active_quarantines(session: Session, cluster: str) -> list[SetAside]:
    """The cluster's nodes that are in quarantine."""
    query = (
        select(NodeQuarantine)
        .where(NodeQuarantine.cluster == cluster, NodeQuarantine.released_at.is_(None))
        .order_by(NodeQuarantine.node)
    )
    return [SetAside(node=row.node, reason=row.reason) for row in session.scalars(query)]


def note_quarantines(
    session: Session, worker: Worker, nodes: Sequence[NodeStatus], now: datetime
) -> None:
    """Keeps the quarantines that a worker shows, and sees which releases are done."""
    shown = {node.name: node.reason for node in nodes if node.state == "quarantined"}
    names = {node.name for node in nodes}
    query = select(NodeQuarantine).where(NodeQuarantine.cluster == worker.cluster)
    known = {row.node: row for row in session.scalars(query) if row.node in names}
    # In the order of their names, as every process writes them.
    for name, reason in sorted(shown.items()):
        row = known.get(name)
        if row is None:
            keep_quarantine(session, worker.cluster, name, reason, now)
        elif row.released_at is not None and not _is_release_on_its_way(row, worker, now):
            _quarantine_again(row, reason, now)
    for name, row in known.items():
        if row.release_pending and name not in shown:
            row.release_pending = is_shown(session, row)
    session.flush()


@dataclass(slots=True)
class Wishes:
    """What a worker is to do with its nodes."""

    release: tuple[str, ...] = ()
    quarantine: tuple[SetAside, ...] = ()


def wishes(session: Session, workers: Sequence[Worker], now: datetime) -> dict[str, Wishes]:
    """What workers are to do with their nodes, by their sessions."""
    wished = {worker.id: Wishes() for worker in workers}
    query = (
        select(AllocationNode.worker_id, NodeQuarantine, AllocationNode.state)
        .join(AllocationNode, AllocationNode.name == NodeQuarantine.node)
        .join(Worker, Worker.id == AllocationNode.worker_id)
        .where(NodeQuarantine.cluster == Worker.cluster, Worker.id.in_(wished))
        .order_by(AllocationNode.worker_id, AllocationNode.position)
    )
    for worker_id, row, state in session.execute(query):
        wish, is_shown = wished[worker_id], state == "quarantined"
        if row.released_at is None and not is_shown:
            wish.quarantine += (SetAside(node=row.node, reason=row.reason),)
        elif row.release_pending and is_shown:
            wish.release += (row.node,)
            row.release_told_at = row.release_told_at or now
    return wished


def keep_quarantine(
    session: Session,
    cluster: str,
    node: str,
    reason: str,
    now: datetime,
    *,
    requested_by_user: bool = False,
) -> None:
    """Writes that a node is set aside, unless it has a row: another process may just have heard of it.

    One that is being written elsewhere is waited for, and stands.
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
    # Imported where it is used: those of PostgreSQL take as long to import as a tenth of our own modules.
    if session.get_bind().dialect.name == "sqlite":
        from sqlalchemy.dialects import sqlite

        return sqlite.insert
    from sqlalchemy.dialects import postgresql

    return postgresql.insert


def _quarantine_again(row: NodeQuarantine, reason: str, now: datetime) -> None:
    row.reason = reason
    row.since = now
    row.requested_by_user = False
    row.released_at = row.release_told_at = None
    row.release_pending = False


def _is_release_on_its_way(row: NodeQuarantine, worker: Worker, now: datetime) -> bool:
    """Whether the worker shows a quarantine only since it has not acted on the release yet."""
    if not row.release_pending or row.released_at is None or worker.registered_at > row.released_at:
        return False
    told_at = row.release_told_at
    return told_at is None or abs(now - told_at) < timedelta(seconds=RELEASE_TOLD_FOR_S)


def is_shown(session: Session, row: NodeQuarantine) -> bool:
    """Whether a worker's last status shows the node in quarantine."""
    return bool(session.scalar(select(_shown_by_a_worker(row))))


def _shown_by_a_worker(row: NodeQuarantine) -> ColumnElement[bool]:
    return exists().where(
        AllocationNode.name == row.node,
        AllocationNode.state == "quarantined",
        AllocationNode.worker_id == Worker.id,
        Worker.cluster == row.cluster,
        Worker.ended_at.is_(None),
    )
