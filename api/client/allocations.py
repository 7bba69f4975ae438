"""Calls about allocations and their nodes."""

from __future__ import annotations

from api.allocation_schemas import AllocationPage, AllocationRead, ClusterNodeRead, NodePage
from api.client.call import Call, get, post, segment
from api.client.route import route


class AllocationCalls:
    """What can be asked about allocations and nodes."""

    @route
    def allocations(
        self, *, ended: bool = False, name: str | None = None, limit: int | None = None
    ) -> Call[AllocationPage]:
        """Allocations, the youngest first: those that are there, or also those that have ended.

        `name`: only those whose worker, job or session is called so.
        """
        return get("/allocations", AllocationPage, all=ended or None, name=name, limit=limit)

    @route
    def allocation(self, allocation_id: str) -> Call[AllocationRead]:
        """One allocation, by the id of its worker's session."""
        return get(f"/allocations/{segment(allocation_id)}", AllocationRead)

    @route
    def nodes(self, cluster: str | None = None) -> Call[NodePage]:
        """Nodes of allocations, and those in quarantine."""
        return get("/nodes", NodePage, cluster=cluster)

    @route
    def quarantine_node(self, cluster: str, node: str, reason: str) -> Call[ClusterNodeRead]:
        """Sets a node aside until it is released."""
        path = f"{_node_path(cluster, node)}/quarantine"
        return post(path, ClusterNodeRead, {"reason": reason})

    @route
    def release_node(self, cluster: str, node: str) -> Call[ClusterNodeRead]:
        """Takes a node out of quarantine."""
        return post(f"{_node_path(cluster, node)}/release", ClusterNodeRead)


def _node_path(cluster: str, node: str) -> str:
    return f"/nodes/{segment(cluster)}/{segment(node)}"
