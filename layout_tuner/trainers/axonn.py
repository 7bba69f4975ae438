"""A user's own script with AxoNN, as of 660a224 of its develop branch (October 2024).

The keys are the arguments of `axonn.axonn.init`, which `axonn.lightning.AxonnStrategy` takes too.
Rows are tp, columns `tp_columns`; depth is ZeRO-3's group of ranks, which divide the batch and the
stored weights (arXiv:2502.08145). Ranks are numbered with columns fastest, then rows, depth and
data, as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import (
    TrainerAdapter,
    TrainerJob,
    TrainerRule,
    narrow_rule,
    or_embedded,
    shape_rules,
)


def _lacking(job: TrainerJob) -> dict[str, str]:
    layout, lacking = job.layout, {}
    if layout.zero_stage in (1, 2):
        lacking["zero_stage"] = (
            "AxoNN shards weights, gradients and optimizer states together (ZeRO-3) or nothing; without "
            f"zero_stage={layout.zero_stage} every replica holds whole states"
        )
    if layout.sequence_parallel:
        lacking["sequence_parallel"] = (
            "AxoNN's layers do not share the sequence over rows; without it activations outside of the "
            f"matrix products are held {layout.tp} times"
        )
    return lacking


def _axis_rule(name: str) -> TrainerRule:
    return TrainerRule(
        name=name,
        source="axonn.py, init",
        broken=lambda layout, _: getattr(layout, name) > 1,
        sentence=lambda layout, model: (
            f"{name}={getattr(layout, name)}: AxoNN's layers have rows, columns, depth and data "
            f"alone; export a trial with {name}=1{or_embedded(model)}"
        ),
    )


def _depth(layout: Layout) -> int:
    return layout.zero_group_size if layout.zero_stage == 3 else 1


def _whole_weights(layout: Layout, model: ModelShape) -> str:
    """The matrices of a rank that depth does not divide, with their elements; empty: all divide."""
    widths = {
        "queries": model.query_size,
        "keys": model.num_kv_heads * model.head_size,
        "feed-forward": model.ffn_hidden_size,
        "head": model.vocab_size,
    }
    sizes = {name: model.hidden_size * width // layout.tp_ranks for name, width in widths.items()}
    return ", ".join(f"{name}={size}" for name, size in sizes.items() if size % _depth(layout))


_RULES: Final = (
    _axis_rule("pp"),
    _axis_rule("cp"),
    TrainerRule(
        name="depth",
        source="intra_layer/communication.py, _drop",
        broken=lambda layout, model: bool(_whole_weights(layout, model)),
        sentence=lambda layout, model: (
            f"elements of a rank's matrices ({_whole_weights(layout, model)}) are not divisible by the "
            f"ZeRO-3 group of {_depth(layout)}, AxoNN's depth; export a trial with another dp or "
            "zero_replicas"
        ),
    ),
    narrow_rule(
        "axonn has no such type", "has no counterpart in AxoNN; search with precision bf16"
    ),
    *shape_rules("AxoNN's layers", "intra_layer/"),
)


AXES: Final = {"G_intra_r": "tp", "G_intra_c": "tp_columns"}
"""Axes of the grid that are fields of a layout."""
BATCH_KEYS: Final = {
    "micro_batch_size": "micro_batch_size",
    "gradient_accumulation_steps": "num_microbatches",
    "global_batch_size": "global_batch_size",
}


def _values(job: TrainerJob) -> Mapping[str, Any]:
    """axonn.json: the grid, and the batch of each rank."""
    layout = job.layout
    depth = _depth(layout)
    return {
        "grid": {
            "G_inter": 1,
            "G_data": layout.dp // depth,
            **{key: getattr(layout, name) for key, name in AXES.items()},
            "G_intra_d": depth,
        },
        **{key: getattr(layout, name) for key, name in BATCH_KEYS.items()},
        "recompute": layout.recompute,
        "precision": layout.precision,
    }


def _notes(job: TrainerJob) -> list[str]:
    notes = [
        "the model is your script's: it reads axonn.json, whose path is its first argument, calls "
        "axonn.axonn.init(**grid), and builds its layers with axonn.intra_layer",
        "each rank of depth and data takes its own sequences: share data * G_intra_d + depth",
        "AxoNN made its grid and layers of such files on a CPU; nothing was trained with them",
    ]
    if job.layout.tp > 1 and job.layout.tp_columns > 1:
        notes.append(
            "AxoNN's Embedding divides its features over rows or over columns, and asserts that the "
            "other is 1: use torch's"
        )
    if job.layout.tp_columns > 1:
        notes.append(
            "with columns AxoNN's port of Megatron normalises each rank's part of the features alone, "
            "which is another model; the probe's norms are those of whole tokens"
        )
    if job.layout.recompute != "none":
        notes.append(f"recompute={job.layout.recompute} is for your script to do")
    return notes


AXONN: Final = TrainerAdapter(
    name="axonn",
    target_version="AxoNN of 2024-10 (660a224)",
    needs="AxoNN, and a training script of your own in TRAIN_SCRIPT",
    has_columns=True,
    lacking=_lacking,
    rules=_RULES,
    layout_values=_values,
    notes=_notes,
)
