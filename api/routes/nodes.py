"""Nodes: listed, set aside, released."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from api.allocation_schemas import ClusterNodeRead, NodePage, NodeQuarantineCreate
from api.allocation_views import cluster_node_read
from api.dependencies import StoreDep

router = APIRouter(prefix="/v1/nodes", tags=["allocations"])

ClusterName = Annotated[str, Path(max_length=200)]
NodeName = Annotated[str, Path(max_length=255)]


@router.get("")
def list_nodes(
    store: StoreDep,
    cluster: Annotated[
        str | None, Query(max_length=200, description="Only this cluster's.")
    ] = None,
) -> NodePage:
    """List the nodes of allocations, and those in quarantine that no allocation has just now."""
    return NodePage(nodes=[cluster_node_read(node) for node in store.nodes(cluster)])


@router.post("/{cluster}/{node}/quarantine")
def quarantine_node(
    cluster: ClusterName,
    node: NodeName,
    store: StoreDep,
    body: NodeQuarantineCreate | None = None,
) -> ClusterNodeRead:
    """Set a node aside: no probe starts there until it is released. Twice is once.

    Its worker is told with its next heartbeat, and workers to come when they register. 404 when no
    allocation of the cluster ever had such a node.
    """
    reason = (body or NodeQuarantineCreate()).reason
    return cluster_node_read(store.quarantine_node(cluster, node, reason))


@router.post("/{cluster}/{node}/release")
def release_node(cluster: ClusterName, node: NodeName, store: StoreDep) -> ClusterNodeRead:
    """Take a node out of quarantine; its worker is told with its next heartbeat, and checks it again.

    409 when it is not in quarantine, 404 when no allocation of the cluster ever had such a node.
    """
    return cluster_node_read(store.release_node(cluster, node))
