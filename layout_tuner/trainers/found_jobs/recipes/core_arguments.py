"""Arguments of Megatron-LM as configurations state them: those of Primus and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.trainers.found_jobs.found_job import AssumedValue, FoundJob, Stated

PRESETS: Final = ("Primus' ", "Megatron-Bridge's ")
"""How the words begin for values that no file of the user's states."""


MOMENTS: Final = ("exp_avg_dtype", "exp_avg_sq_dtype")
_OFFLOADED_LAYERS: Final = "model.cpu_offloading_num_layers"


def presets(values: Mapping[str, Any], source: str) -> dict[str, Stated]:
    """Values of a source that the user's file only names; `source` begins as in `PRESETS`."""
    return {
        name: Stated(value=value, said=f"{source}, {name}: {word_of(value)}")
        for name, value in values.items()
    }


def is_preset(stated: Stated) -> bool:
    return stated.said.startswith(PRESETS)


def is_set(values: Mapping[str, Stated], name: str) -> bool:
    """Whether a value is there that is not null, false or 0, or that is not known."""
    found = values.get(name)
    return found is not None and bool(found.value or found.unknown)


def completed_lists(job: FoundJob, values: Mapping[str, Stated]) -> FoundJob:
    """The job with the places of switches, and what presets alone say among what is assumed."""
    places = {each.said: each.place for each in values.values() if each.place is not None}
    read = [
        each if each.place or each.said not in places else replace(each, place=places[each.said])
        for each in job.read
    ]
    # An option of the user's beside that of a preset counts as read.
    of_presets = [
        each
        for each in read
        if each.said.startswith(PRESETS) and not any(said in each.said for said in places)
    ]
    return replace(
        job,
        read=tuple(each for each in read if each not in of_presets),
        assumed=(
            *job.assumed,
            *(
                AssumedValue(field=each.field, value=each.value, why=each.said)
                for each in of_presets
            ),
        ),
    )


def lever_arguments(stated: Mapping[str, Stated]) -> dict[str, Stated]:
    """Bridge's settings of offload and optimizer states that are in effect, as arguments."""
    found: dict[str, Stated] = {}
    if is_set(stated, "model.cpu_offloading") and is_set(stated, _OFFLOADED_LAYERS):
        found["cpu_offloading_num_layers"] = stated[_OFFLOADED_LAYERS]
    if is_set(stated, offload := "optimizer.optimizer_cpu_offload"):
        # The class's own fraction is 0.
        fraction = replace(stated[offload], value=0.0, said="optimizer_offload_fraction: 0.0")
        found["optimizer_cpu_offload"] = stated[offload]
        found["optimizer_offload_fraction"] = stated.get(
            "optimizer.optimizer_offload_fraction", fraction
        )
    for name in MOMENTS:
        each = stated.get(f"optimizer.{name}")
        if each is not None and each.value in ("bf16", "bfloat16", "torch.bfloat16"):
            found[name] = replace(each, value="bf16")
    return found
