"""Legality of the levers of memory: recomputation by module and layer, offload, 16-bit states."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

import numpy as np

from layout_tuner.array_types import Bools
from layout_tuner.search_spaces.layouts.layout import PIPELINE_SPLITS, SCHEDULES, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, different_combinations
from layout_tuner.search_spaces.layouts.pipeline_layout import stage_layers
from layout_tuner.search_spaces.layouts.recomputation import (
    ALL_LAYERS,
    layers_by_rank,
    read_recompute_layers,
)
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.rule import Rule


def _most_layers(layout: Layout | LayoutColumns, model: ModelShape) -> Any:
    """The most layers that a stage has: of those written out, or if they are split evenly."""
    columns = LayoutColumns.of(layout)
    even = -(-model.num_layers // (columns.pp * columns.vpp))
    return np.where(columns.pipeline_layout != 0, columns.of_stages(max), even)


@lru_cache(maxsize=4096)
def _least_numbers(layout: Layout, num_layers: int) -> str:
    """The shortest text of `recompute_layers` with which a layout is the same job, by rank.

    No number is over the layers of its rank's fullest stage. Of a pipeline whose stages do not go
    with its ranks, which another rule refuses, it is the text itself.
    """
    counts = layers_by_rank(layout.recompute_layers)
    stages = len(stage_layers(layout.pipeline_layout)) if layout.is_written_out else 0
    if len(counts) != layout.pp or stages not in (0, layout.pp * layout.vpp):
        return layout.recompute_layers
    most = [
        max(len(layout.layers_of_stage(stage, num_layers)) for stage in layout.stages_of_rank(rank))
        for rank in range(layout.pp)
    ]
    numbers = [min(pair) for pair in zip(counts, most, strict=True)]
    if numbers == most:
        return ALL_LAYERS
    one = max(numbers)
    is_one = numbers == [min(one, each) for each in most]
    return str(one) if is_one else read_recompute_layers(numbers)


def _has_longer_numbers(columns: LayoutColumns, model: ModelShape) -> Bools:
    """Where numbers by rank are those of another layout."""
    is_by_rank = np.asarray(columns.of_recompute_layers(len) > 1)
    if not is_by_rank.any():
        return is_by_rank
    (texts, text), (splits, split) = map(columns.words, ("recompute_layers", "pipeline_layout"))
    knobs = (columns.pp, columns.vpp, columns.schedule, columns.pipeline_split, split, text)
    found, place = different_combinations([np.where(is_by_rank, knob, 0) for knob in knobs])
    are_longer = []
    for pp, vpp, schedule, cut, written, word in found.T.tolist():
        layout = Layout(
            pp=max(pp, 1),  # 0, with the first text `all`, where the numbers are not by rank
            vpp=max(vpp, 1),
            schedule=SCHEDULES[schedule],
            pipeline_split=PIPELINE_SPLITS[cut],
            pipeline_layout=splits[written],
            recompute_layers=texts[word],
        )
        are_longer.append(_least_numbers(layout, model.num_layers) != texts[word])
    return np.asarray(np.array(are_longer, dtype=np.bool_)[place])


LEVER_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="moe_act_needs_experts",
        illegal=lambda c, x: c.repeats("moe_act") & (x.model.num_experts == 0),
        sentence=lambda layout, _: (
            f"recompute={layout.recompute}: moe_act is the activation of experts, and the model has "
            "none; leave it out"
        ),
    ),
    Rule(
        name="mlp_needs_dense_layers",
        illegal=lambda c, x: (
            c.repeats("mlp") & all(each.shape.feed_forward != "dense" for each in x.model.kinds)
        ),
        sentence=lambda layout, _: (
            f"recompute={layout.recompute}: mlp is the feed-forward of dense layers, and all layers "
            "of the model have experts; leave it out, or take moe_act"
        ),
    ),
    Rule(
        name="mla_up_proj_needs_latent_attention",
        illegal=lambda c, x: c.repeats("mla_up_proj") & (x.model.kv_lora_rank == 0),
        sentence=lambda layout, _: (
            f"recompute={layout.recompute}: mla_up_proj is a part of latent attention, and the "
            "model has none; leave it out"
        ),
    ),
    Rule(
        name="recompute_layers_by_rank",
        illegal=lambda c, _: (
            (c.of_recompute_layers(len) > 1) & (c.of_recompute_layers(len) != c.pp)
        ),
        sentence=lambda layout, _: (
            f"recompute_layers={layout.recompute_layers} has "
            f"{layout.recompute_layers.count('/') + 1} numbers, and pp={layout.pp}: give one for "
            "each pipeline rank, or one for all"
        ),
    ),
    Rule(
        name="recompute_layers_without_recompute",
        scope="redundant",
        illegal=lambda c, _: (c.recompute == 0) & (c.recompute_layers != 0),
        sentence=lambda layout, _: (
            f"recompute_layers={layout.recompute_layers} with recompute=none is the same job as "
            "recompute_layers=all"
        ),
    ),
    Rule(
        name="recompute_layers_are_some",
        scope="redundant",
        illegal=lambda c, x: (
            (c.recompute_layers != 0)
            & (
                (c.of_recompute_layers(lambda each: max(each, default=0)) == 0)
                | (
                    c.of_recompute_layers(lambda each: min(each, default=0))
                    >= _most_layers(c, x.model)
                )
            )
        ),
        sentence=lambda layout, x: (
            f"recompute_layers={layout.recompute_layers} of {_most_layers(layout, x.model)} layers "
            "of a stage is the same job as recompute=none, or as recompute_layers=all"
        ),
    ),
    Rule(
        name="recompute_layers_of_a_rank",
        scope="redundant",
        illegal=lambda c, x: _has_longer_numbers(c, x.model),
        sentence=lambda layout, x: (
            f"recompute_layers={layout.recompute_layers} is the same job as "
            f"recompute_layers={_least_numbers(layout, x.model.num_layers)}, by the layers of each "
            "rank's stages"
        ),
    ),
    Rule(
        name="offload_of_activations",
        illegal=lambda c, _: (c.offload == 1) & ((c.pp > 1) | (c.recompute != 0)),
        sentence=lambda layout, _: (
            f"offload=activations with pp={layout.pp} and recompute={layout.recompute}: activations "
            "are offloaded without a pipeline and without recomputation alone, as Megatron-LM has it"
        ),
    ),
    Rule(
        name="trainer_moe_act",
        scope="trainer_redundant",
        illegal=lambda c, _: c.repeats("moe_act"),
        sentence=lambda layout, _: (
            f"recompute={layout.recompute} is the same job as without moe_act in the embedded "
            "trainer, which always computes the activations of experts again"
        ),
    ),
    Rule(
        name="trainer_offload",
        scope="trainer",
        illegal=lambda c, _: c.offload != 0,
        sentence=lambda layout, _: (
            f"offload={layout.offload}: the embedded trainer keeps everything on the device; leave "
            "it out, or name another trainer"
        ),
    ),
)
"""The rules of layout and model. Adapters have those of trainers and their optimizers."""
