"""Allocations: what each node does, what runs and waits there, and what it cost."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query

from api.allocation_schemas import AllocationPage, AllocationRead
from api.allocation_views import allocation_reads
from api.dependencies import StoreDep

router = APIRouter(prefix="/v1/allocations", tags=["allocations"])


@router.get("")
def list_allocations(
    store: StoreDep,
    all: Annotated[  # noqa: A002 - the parameter's name in the URL
        bool, Query(description="Also those that have ended, or whose workers fell silent.")
    ] = False,
    name: Annotated[
        str | None,
        Query(max_length=200, description="Only those whose worker, job or session is called so."),
    ] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> AllocationPage:
    """List allocations, the youngest first: what each node does, and why trials wait."""
    found = store.allocations(live=not all, called=name, limit=limit)
    return AllocationPage(allocations=allocation_reads(store, found))


@router.get("/{allocation_id}")
def read_allocation(
    allocation_id: Annotated[str, Path(max_length=64)], store: StoreDep
) -> AllocationRead:
    """Read an allocation, by its worker's session."""
    (read,) = allocation_reads(store, [store.allocation(allocation_id)])
    return read
