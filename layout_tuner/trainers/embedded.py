"""The embedded trainer, `workers.trainer`: the default of campaigns and of exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, SCHEDULES
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob

EMBEDDED_TRAINER: Final = "embedded"
"""Name of the trainer of this project."""

OWN_SOFTWARE: Final = "layout-tuner"
"""What else the option `software` of estimates may call it."""

JOB_FORMAT: Final = "layout-tuner/trainer"
JOB_VERSION: Final = 1
DEFAULT_STEPS: Final = 100


def software_named(trainer: str) -> str:
    """A trainer as estimates and tables name software: empty for the embedded one."""
    return "" if trainer in (OWN_SOFTWARE, EMBEDDED_TRAINER) else trainer


def _values(job: TrainerJob) -> Mapping[str, Any]:
    return {
        "format": JOB_FORMAT,
        "version": JOB_VERSION,
        "model": job.model.to_mapping(),
        "layout": job.layout.to_mapping(),
        "seed": job.seed,
        "steps": DEFAULT_STEPS,
        "warmup": job.warmup,
        "compile": job.compile,
    }


EMBEDDED: Final = TrainerAdapter(
    name=EMBEDDED_TRAINER,
    target_version=f"job version {JOB_VERSION}",
    needs="layout-tuner itself, on every node",
    rank_orders=RANK_ORDERS,
    schedules=SCHEDULES,
    values=_values,
    has_columns=True,
)
