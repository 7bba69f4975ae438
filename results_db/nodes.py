"""Nodes as users see them, and what users wish of them."""

from __future__ import annotations

from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from results_db.allocation_records import ClusterNode, QuarantineRecord
from results_db.allocations import node_record
from results_db.errors import NodeNotFoundError, NodeStateError
from results_db.node_quarantine import is_shown, keep_quarantine
from results_db.part import StorePart
from results_db.retry import retried
from results_db.worker_tables import AllocationNode, NodeQuarantine, Worker
from results_db.workers import is_there


class Nodes(StorePart):
    """The nodes' part of the store."""

    def nodes(self, cluster: str | None = None) -> list[ClusterNode]:
        """Nodes of allocations that are there, and those in quarantine, by cluster and name."""
        with self._db.read() as session:
            found = {
                (worker.cluster, node.name): (worker, node)
                for worker, node in session.execute(self._live_nodes(cluster))
            }
            query = select(NodeQuarantine)
            if cluster is not None:
                query = query.where(NodeQuarantine.cluster == cluster)
            set_aside = {(row.cluster, row.node): row for row in session.scalars(query)}
            return [
                _cluster_node(key, found.get(key), set_aside.get(key))
                for key in sorted(found.keys() | set_aside.keys())
                if key in found or set_aside[key].released_at is None
            ]

    @retried
    def quarantine_node(self, cluster: str, node: str, reason: str) -> ClusterNode:
        """Sets a node aside; the worker that has it is told. Twice is once.

        Raises:
            NodeNotFoundError: no allocation of the cluster ever named such a node.
        """
        now = self._clock()
        with self._db.write() as session:
            _refuse_unknown(session, cluster, node)
            keep_quarantine(session, cluster, node, reason, now, requested_by_user=True)
            row = session.get_one(NodeQuarantine, (cluster, node), with_for_update=True)
            if row.released_at is not None:
                row.since = now
            row.reason = reason
            row.requested_by_user = True
            row.released_at = row.release_told_at = None
            row.release_pending = False
            session.flush()
            self._audit(session, "node.quarantine", "node", node, cluster=cluster, reason=reason)
            return self._node(session, row)

    @retried
    def release_node(self, cluster: str, node: str) -> ClusterNode:
        """Takes a node out of quarantine; the worker that has it is told.

        Raises:
            NodeNotFoundError: no allocation of the cluster ever named such a node.
            NodeStateError: it is not in quarantine.
        """
        now = self._clock()
        with self._db.write() as session:
            row = session.get(NodeQuarantine, (cluster, node), with_for_update=True)
            if row is None:
                _refuse_unknown(session, cluster, node)
            if row is None or row.released_at is not None:
                raise NodeStateError(f"node {node} of cluster {cluster} is not in quarantine")
            row.released_at = now
            row.release_pending = is_shown(session, row)
            row.release_told_at = None
            session.flush()
            self._audit(session, "node.release", "node", node, cluster=cluster)
            return self._node(session, row)

    def _node(self, session: Session, row: NodeQuarantine) -> ClusterNode:
        query = self._live_nodes(row.cluster).where(AllocationNode.name == row.node)
        found = session.execute(query).first()
        key = (row.cluster, row.node)
        return _cluster_node(key, None if found is None else (found[0], found[1]), row)

    def _live_nodes(self, cluster: str | None) -> Any:
        """Nodes of workers that are there, those that registered last at the end."""
        query = (
            select(Worker, AllocationNode)
            .join(AllocationNode, AllocationNode.worker_id == Worker.id)
            .where(is_there(self._clock()))
            .order_by(Worker.registered_at)
        )
        return query if cluster is None else query.where(Worker.cluster == cluster)


def _refuse_unknown(session: Session, cluster: str, node: str) -> None:
    query = (
        select(AllocationNode.name)
        .join(Worker, Worker.id == AllocationNode.worker_id)
        .where(AllocationNode.name == node, Worker.cluster == cluster)
    )
    if session.scalar(query.limit(1)) is None:
        raise NodeNotFoundError(
            f"no allocation of cluster {cluster!r} has had a node named {node!r}; "
            "`GET /v1/nodes` lists those that are known"
        )


def _cluster_node(
    key: tuple[str, str],
    found: tuple[Worker, AllocationNode] | None,
    quarantine: NodeQuarantine | None,
) -> ClusterNode:
    cluster, name = key
    return ClusterNode(
        cluster=cluster,
        name=name,
        worker_id=None if found is None else found[0].id,
        node=None if found is None else node_record(found[1]),
        quarantine=None if quarantine is None else _quarantine_record(quarantine),
    )


def _quarantine_record(row: NodeQuarantine) -> QuarantineRecord:
    return QuarantineRecord(
        cluster=row.cluster,
        node=row.node,
        reason=row.reason,
        since=row.since,
        requested_by_user=row.requested_by_user,
        released_at=row.released_at,
    )
