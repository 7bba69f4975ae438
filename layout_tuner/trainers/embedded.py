"""The embedded trainer, `workers.trainer`: the default of campaigns and of exports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import RANK_ORDERS, SCHEDULES
from layout_tuner.search_spaces.layouts.schedules import V_SLOTS
from layout_tuner.search_spaces.models.model_fields import ATTENTION_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.untrained_models import UNTRAINED, untrained_sentence
from layout_tuner.trainers.adapter import TrainerAdapter, TrainerJob, TrainerRule, shape_rules
from layout_tuner.trainers.knobs.embedded import EMBEDDED_KNOBS

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


def _untrained(name: str, words: Callable[[ModelShape], str]) -> TrainerRule:
    return TrainerRule(
        name=name,
        source="search_spaces/untrained_models.py",
        broken=lambda _, model: bool(words(model)),
        sentence=lambda _, model: untrained_sentence(words(model)),
    )


EMBEDDED: Final = TrainerAdapter(
    name=EMBEDDED_TRAINER,
    target_version=f"job version {JOB_VERSION}",
    needs="layout-tuner itself, on every node",
    rank_orders=RANK_ORDERS,
    schedules=tuple(each for each in SCHEDULES if each not in V_SLOTS),
    rules=(
        *shape_rules("the embedded trainer", "search_spaces/legality_rules.py", ATTENTION_FIELDS),
        *(_untrained(name, words) for name, words in UNTRAINED.items()),
    ),
    layout_values=_values,
    has_columns=True,
    levers=lambda _layout: ("stages", "modules", "layers", "layers_by_rank", "bf16_states"),
    knobs=EMBEDDED_KNOBS,
)
