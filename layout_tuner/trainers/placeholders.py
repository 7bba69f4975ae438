"""Placeholders: a job's numbers under the names that command lines and environments use.

A user writes `python train.py --tp {tp} --batch {micro_batch_size}`, in an export or in the entry
of a worker's trainer, and the same names mean the same in both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Final

from layout_tuner.documents.reading import word_of
from layout_tuner.errors import SearchSpaceError
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob

ENVIRONMENT_PREFIX: Final = "LAYOUT_"
"""The environment variable of `{tp}` is LAYOUT_TP, and so on."""

MODEL_NAME: Final = "model"
"""Placeholder of the model's name; the model's other fields have the names of `ModelShape`."""

_MODEL: Final = {
    MODEL_NAME if each.name == "name" else each.name: each.name for each in fields(ModelShape)
}
_DERIVED: Final[Mapping[str, Callable[[TrainerJob], object]]] = {
    "num_devices": lambda job: job.layout.num_devices,
    "ranks_per_node": lambda job: job.ranks_per_node,
    "global_batch_size": lambda job: job.layout.global_batch_size,
    "tokens_per_step": lambda job: job.layout.global_batch_size * job.model.seq_length,
    "zero_group_size": lambda job: job.layout.zero_group_size,
    "layers_per_stage": lambda job: (
        job.layout.counted_layers(job.model.num_layers) // job.layout.pp
    ),
    "layers_per_virtual_stage": lambda job: (
        job.layout.counted_layers(job.model.num_layers) // (job.layout.pp * job.layout.vpp)
    ),
    "head_size": lambda job: job.model.head_size,
    "seed": lambda job: job.seed,
    "compile": lambda job: job.compile,
}

PLACEHOLDERS: Final[tuple[str, ...]] = (*LAYOUT_FIELDS, *_MODEL, *_DERIVED)
"""Every name: the fields of a layout, those of the model's shape, and what follows from both."""

_PLACEHOLDER: Final = re.compile(r"\{([a-z_][a-z0-9_]*)\}")
_BRACE: Final = "{brace}"
"""Stands for an opening brace: `{brace}name}` is the text `{name}`."""


class PlaceholderUnknownError(SearchSpaceError):
    """A template has a placeholder that no job has a value for."""


def placeholder_values(job: TrainerJob) -> Mapping[str, str]:
    """The value of each placeholder as a program gets it: decimal numbers, true or false, names."""
    values = {
        **{name: getattr(job.layout, name) for name in LAYOUT_FIELDS},
        **{name: getattr(job.model, field) for name, field in _MODEL.items()},
        **{name: derived(job) for name, derived in _DERIVED.items()},
    }
    values |= {"head_dim": job.model.head_size, "attention": job.model.attention or "default"}
    # The shortest pattern, which is repeated; empty: as the fields of windows and experts say.
    values |= {"layer_kinds": ",".join(job.model.layer_kinds), "biases": job.model.biases_of}
    values |= {"activation": job.model.activation_of}
    values |= {"norm": "layer" if job.model.has_layer_norms else "rms"}
    # None: a model without an attention window.
    return {name: "0" if value is None else word_of(value) for name, value in values.items()}


def environment_values(job: TrainerJob) -> Mapping[str, str]:
    """The same values as environment variables: LAYOUT_TP, LAYOUT_MICRO_BATCH_SIZE and so on.

    New knobs at their default are left out (`Knob.is_new`), and fields of experts and others that a
    model may lack are there if it states them. A setting of the job is LAYOUT_JOB_COMPILE and so
    on; settings at the trainer's default are left out.
    """
    stated = job.layout.to_mapping().keys() | job.model.to_mapping().keys()
    unstated = {*LAYOUT_FIELDS, *_MODEL.values()} - stated
    values = {k: v for k, v in placeholder_values(job).items() if k not in unstated}
    settings = {f"job_{name}": word_of(value) for name, value in job.layout.job.items()}
    return {
        f"{ENVIRONMENT_PREFIX}{name.upper()}": value
        for name, value in (*values.items(), *settings.items())
    }


def filled(template: str, values: Mapping[str, str]) -> str:
    """A text with the values of its placeholders; other braces, as of JSON, stay as they are.

    A value is never read as a template again.

    Raises:
        PlaceholderUnknownError: the text has a placeholder without a value.
    """

    def value(found: re.Match[str]) -> str:
        if found[1] not in values and found[0] == _BRACE:
            return "{"
        if found[1] not in values:
            raise PlaceholderUnknownError(
                f"{found[0]} in {template!r} is no placeholder; the placeholders are "
                f"{', '.join(values)}"
            )
        return values[found[1]]

    return _PLACEHOLDER.sub(value, template)


def escaped(text: str) -> str:
    """A template that `filled` turns into this text, whatever braces it has."""
    return _PLACEHOLDER.sub(lambda found: f"{_BRACE}{found[1]}}}", text)
