"""Trainers: the job knobs that campaigns can search."""

from __future__ import annotations

from typing import Annotated

from fastapi import Path

from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.errors import TrainerNotFoundError
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.schemas.trainer_documents import TrainerPage, TrainerRead
from layout_tuner.documents.reading import nearest, shown
from layout_tuner.protocol.worker_messages import declared_knobs
from layout_tuner.results_db.store import Store
from layout_tuner.trainers.registry import ADAPTERS, adapter_named

router = LazyRouter(prefix="/v1", tags=["trainers"])

TrainerName = Annotated[
    str, Path(max_length=64, pattern=r"^[^\x00-\x1f\x7f]+$", description="Name of a trainer.")
]


@router.get("/trainers")
def list_trainers() -> TrainerPage:
    """List the trainers that the service has an adapter for, with their job knobs."""
    return TrainerPage.of_adapters()


@router.get("/trainers/{name}")
def read_trainer(name: TrainerName, store: StoreDep) -> TrainerRead:
    """Read a trainer: an adapter's, or one that a worker offers, with its job knobs."""
    return trainer_of(store, name)


def trainer_of(store: Store, name: str) -> TrainerRead:
    """A trainer by its name; TrainerNotFoundError if nobody has one of that name."""
    adapter = adapter_named(name)
    found = store.workers.knobs_of_trainer(name)
    if found is not None and (adapter is None or found[1] is not None):
        version, knobs = found
        return TrainerRead.of_worker(name, version, declared_knobs(knobs or {}).values(), adapter)
    if adapter is None:
        raise TrainerNotFoundError(
            f"there is no trainer {shown(name)}{nearest(name, ADAPTERS)}; a worker's own is known "
            "once the worker has registered"
        )
    return TrainerRead.of_adapter(adapter)
