"""The page of a trainer: the job knobs that campaigns can search."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import HTMLResponse

from layout_tuner.api.dependencies import StoreDep
from layout_tuner.api.html.rendering import render
from layout_tuner.api.http.lazy_routes import LazyRouter
from layout_tuner.api.routes.trainers import TrainerName, trainer_of
from layout_tuner.trainers.registry import ADAPTERS

router = LazyRouter()


@router.get("/trainers/{name}")
def show_trainer(request: Request, name: TrainerName, store: StoreDep) -> HTMLResponse:
    """A trainer's job knobs, with what each is expected to do and how it is written."""
    with_knobs = [each.name for each in ADAPTERS.values() if each.knobs]
    return render(request, "trainer.html", trainer=trainer_of(store, name), names=with_knobs)
