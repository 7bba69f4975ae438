"""The page of allocations and nodes: what runs where, health, and quarantines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

from fastapi import Form, Query, Request
from fastapi.responses import HTMLResponse, Response

from layout_tuner.api.dependencies import HolderDep, StoreDep
from layout_tuner.api.html.rendering import go_to, render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.routes.access import only_of
from layout_tuner.api.routes.allocations import AllocationId
from layout_tuner.api.routes.from_records import allocation_reads
from layout_tuner.api.schemas.text_types import Reason
from layout_tuner.units import GIB

router = LazyRouter()

SHOWN: Final = 200
"""Most allocations on the page; the newest are shown."""

_Cluster = Annotated[str, Form(max_length=200)]
_Node = Annotated[str, Form(max_length=255)]


@router.get("/allocations")
def show_allocations(
    request: Request,
    store: StoreDep,
    holder: HolderDep,
    all: Annotated[str, Query(max_length=4)] = "",  # noqa: A002 - the parameter's name in the URL
) -> HTMLResponse:
    """Allocations, the newest first, and all nodes."""
    found = store.allocations.find(live=not all, limit=SHOWN)
    reads = allocation_reads(store, found)
    return render(
        request,
        "allocations.html",
        allocations=reads,
        idle_shares={each.worker.id: each.idle_share for each in found},
        shares=store.shares.find(owner=only_of(holder)),
        nodes=store.allocations.nodes(),
        names={each.id: each.name for each in reads},
        is_all=bool(all),
        shown=SHOWN,
        health_words=health_words,
        address=str(request.base_url).rstrip("/"),
    )


@router.post("/allocations/{allocation_id}/remove")
def do_remove_allocation(
    request: Request, allocation_id: AllocationId, store: StoreDep
) -> Response:
    store.workers.remove_allocation(allocation_id)
    return go_to(request, "/allocations", done="removed")


@router.post("/nodes/quarantine")
def do_quarantine(
    request: Request,
    store: StoreDep,
    cluster: _Cluster,
    node: _Node,
    reason: Annotated[Reason, Form()] = "",
) -> Response:
    store.allocations.quarantine_node(cluster, node, reason.strip() or "asked for by a user")
    return go_to(request, "/allocations", done="quarantined")


@router.post("/nodes/release")
def do_release(request: Request, store: StoreDep, cluster: _Cluster, node: _Node) -> Response:
    store.allocations.release_node(cluster, node)
    return go_to(request, "/allocations", done="released")


def health_words(health: Mapping[str, Any] | None) -> str:
    """The figures of a health check that a reader compares between nodes."""
    if not health:
        return ""
    parts = [health["failure"]] if health.get("failure") else []
    if rates := health.get("gemm_tflops"):
        parts.append(f"{min(rates):.3g} to {max(rates):.3g} TFLOP/s")
    if free := health.get("memory_free_bytes"):
        parts.append(f"{free / GIB:.3g} of {health.get('memory_bytes', 0) / GIB:.3g} GiB free")
    for name, words in (("link_gbytes_per_s", "inside"), ("between_gbytes_per_s", "to others")):
        if rate := health.get(name):
            parts.append(f"{rate:.3g} GB/s {words}")
    return ", ".join(parts)
