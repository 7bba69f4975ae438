"""Jobs that save a checkpoint half way, on forked ranks, and what they told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed as dist

import workers.trainer.job.checkpoint  # noqa: F401 (before ranks are forked: it takes long)
from search_spaces.spec.layout import Layout
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import make_shape
from tests.workers.trainer.ranks import make_context, run_ranks
from workers.trainer.job.checkpoint_directory import CheckpointSettings
from workers.trainer.job.job import TrainJob
from workers.trainer.train import run_train

STEPS, SAVED_AT = 8, 4


def make_job(
    folder: Path, layout: Layout, *, shape: ModelShape | None = None, **changes: Any
) -> TrainJob:
    settings = CheckpointSettings(directory=str(folder / "saved"), every=SAVED_AT)
    fields = {"model": shape or make_shape(), "layout": layout, "steps": STEPS, "warmup": 0}
    return TrainJob(**{**fields, "checkpoint": settings, "clip_grad_norm": 1.0, **changes})


def run_job(job: TrainJob, prepare: Callable[[int], None] = lambda _: None) -> list[dict[str, Any]]:
    """Runs a job on forked ranks; returns what rank 0 told, and last its result."""

    def work(rank: int, store: dist.Store) -> list[Any]:
        prepare(rank)
        told: list[Any] = []
        context = make_context(rank, job.layout.num_devices, store)
        told.append(run_train(job, context, told.append))
        return told

    told: list[dict[str, Any]] = run_ranks(job.layout.num_devices, work, own_group=True)[0]
    return told


def losses_of(told: list[dict[str, Any]]) -> dict[int, float]:
    return {event["index"]: event["loss"] for event in told if event.get("event") == "step"}


def kinds_of(told: list[dict[str, Any]]) -> list[str]:
    return [event["event"] for event in told if event.get("event", "step") != "step"]


def save_half(folder: Path, layout: Layout, **changes: Any) -> list[dict[str, Any]]:
    """The first half of a job, with a checkpoint at its end."""
    return run_job(make_job(folder, layout, **{**changes, "steps": SAVED_AT}))
