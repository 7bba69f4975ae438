"""What a worker says of its allocation, kept inside a transaction that somebody else holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import delete, insert, select
from sqlalchemy.orm import Session

from results_db.allocation_records import AllocationStatus, NodeFacts, NodeStatus
from results_db.node_quarantine import note_quarantines
from results_db.worker_tables import AllocationNode, Worker

_SAID: Final = ("position", "state", "doing", "reason", "free_devices", "health")
"""The columns of a node that a status fills."""


def later(now: datetime, seconds: float | None) -> datetime | None:
    """The point in time that is so many seconds away; None: never."""
    return None if seconds is None else now + timedelta(seconds=seconds)


def add_nodes(session: Session, worker: Worker, nodes: Sequence[NodeFacts]) -> None:
    """Writes the nodes that a worker registers with; what they do is not known yet."""
    if not nodes:
        return
    session.execute(
        insert(AllocationNode),
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


def keep_status(session: Session, worker: Worker, status: AllocationStatus, now: datetime) -> None:
    """Takes over what a worker says of its allocation; saying it again changes nothing."""
    worker.state = status.state
    worker.status_at = now
    if status.ends_in_s is not None:
        worker.ends_at = later(now, status.ends_in_s)
    # A worker tells the sum of its session: beats that are lost or repeated count once.
    worker.idle_node_seconds = max(worker.idle_node_seconds, status.idle_node_s)
    if status.nodes:
        # Nodes that join late make room for trials that did not fit.
        worker.num_nodes = max(worker.num_nodes, len(status.nodes))
        _keep_nodes(session, worker, status.nodes)
        note_quarantines(session, worker, status.nodes, now)


def _keep_nodes(session: Session, worker: Worker, nodes: Sequence[NodeStatus]) -> None:
    """Writes the nodes that changed; an allocation may have a thousand, of which most did not."""
    query = select(AllocationNode).where(AllocationNode.worker_id == worker.id)
    known = {row.name: row for row in session.scalars(query)}
    for position, node in enumerate(nodes):
        said = _columns(node, position)
        row = known.pop(node.name, None)
        if row is None:
            session.add(
                AllocationNode(
                    worker_id=worker.id,
                    name=node.name,
                    num_devices=worker.devices_per_node,
                    **said,
                )
            )
        elif any(getattr(row, name) != value for name, value in said.items()):
            for name, value in said.items():
                setattr(row, name, value)
    if known:
        session.execute(
            delete(AllocationNode).where(
                AllocationNode.worker_id == worker.id, AllocationNode.name.in_(known)
            )
        )
    session.flush()


def _columns(node: NodeStatus, position: int) -> Mapping[str, Any]:
    values = {name: getattr(node, name) for name in _SAID if name != "position"}
    if node.health is not None:
        values["health"] = dict(node.health)
    return {**values, "position": position}
