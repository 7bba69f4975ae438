"""Legality of the levers of memory: recomputation by module and layer, offload, 16-bit states."""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.rule import Rule


def _most_layers(layout: Layout | LayoutColumns, model: ModelShape) -> Any:
    """The most layers that a stage has: of those written out, or if they are split evenly."""
    columns = LayoutColumns.of(layout)
    even = -(-model.num_layers // (columns.pp * columns.vpp))
    return np.where(columns.pipeline_layout != 0, columns.of_stages(max), even)


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
        name="offload_of_activations",
        illegal=lambda c, _: (c.offload == 1) & ((c.pp > 1) | (c.recompute != 0)),
        sentence=lambda layout, _: (
            f"offload=activations with pp={layout.pp} and recompute={layout.recompute}: activations "
            "are offloaded without a pipeline and without recomputation alone, as Megatron-LM has it"
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
