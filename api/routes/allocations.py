"""Allocations: their nodes, their trials and their cost; nodes, and their quarantine."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated

from fastapi import Path, Query

from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.http.request_bodies import BodyRoute
from layout_tuner.api.routes.etags import UNCHANGED, TagDep
from layout_tuner.api.routes.from_records import allocation_reads
from layout_tuner.api.schemas.allocations import (
    AllocationPage,
    AllocationRead,
    NodePage,
    NodeQuarantineCreate,
)
from layout_tuner.results_db.service_records import ClusterNodeRead

router = LazyRouter(route_class=BodyRoute, prefix="/v1", tags=["allocations"])

AllocationId = Annotated[str, Path(max_length=64)]
ClusterName = Annotated[str, Path(max_length=200)]
NodeName = Annotated[str, Path(max_length=255)]


@router.get("/allocations", responses=UNCHANGED)
def list_allocations(
    store: StoreDep,
    add_tag: TagDep,
    all: Annotated[  # noqa: A002 - the parameter's name in the URL
        bool,
        Query(description="Also those that have ended, or whose workers sent no heartbeat lately."),
    ] = False,
    name: Annotated[
        str | None,
        Query(
            max_length=200, description="Only those with this worker name, job id or session id."
        ),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AllocationPage:
    """List allocations, the newest first: the status of each node, and why trials wait."""
    found = store.allocations.find(live=not all, called=name, limit=limit)
    page = AllocationPage(allocations=allocation_reads(store, found))
    add_tag(page.model_dump_json())
    return page


@router.get("/allocations/{allocation_id}")
def read_allocation(allocation_id: AllocationId, store: StoreDep) -> AllocationRead:
    """Read an allocation, by its worker's session id."""
    (read,) = allocation_reads(store, [store.allocations.get(allocation_id)])
    return read


@router.delete("/allocations/{allocation_id}", status_code=HTTPStatus.NO_CONTENT)
def remove_allocation(allocation_id: AllocationId, store: StoreDep) -> None:
    """Remove an allocation and all that its worker reported.

    A running worker loses its session, returns its trials, and registers again. An allocation that
    ran trials stays in the list, without its nodes and versions.
    """
    store.workers.remove_allocation(allocation_id)


@router.get("/nodes", responses=UNCHANGED)
def list_nodes(
    store: StoreDep,
    add_tag: TagDep,
    cluster: Annotated[
        str | None, Query(max_length=200, description="Only nodes of this cluster.")
    ] = None,
) -> NodePage:
    """List the nodes of allocations, and nodes in quarantine that no allocation has now."""
    page = NodePage(nodes=store.allocations.nodes(cluster))
    add_tag(page.model_dump_json())
    return page


@router.post("/nodes/{cluster}/{node}/quarantine")
def quarantine_node(
    cluster: ClusterName, node: NodeName, store: StoreDep, body: NodeQuarantineCreate | None = None
) -> ClusterNodeRead:
    """Put a node into quarantine: no probe starts there until it is released.

    Repeating it is harmless. Its worker gets the order with its next heartbeat, and later workers
    when they register. 404 if no allocation of the cluster ever had such a node.
    """
    reason = (body or NodeQuarantineCreate()).reason
    return store.allocations.quarantine_node(cluster, node, reason)


@router.post("/nodes/{cluster}/{node}/release")
def release_node(cluster: ClusterName, node: NodeName, store: StoreDep) -> ClusterNodeRead:
    """Release a node from quarantine.

    Its worker gets the order with its next heartbeat, and checks the node. 409 if it is not in
    quarantine, 404 if no allocation of the cluster ever had such a node.
    """
    return store.allocations.release_node(cluster, node)
