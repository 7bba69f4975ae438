"""Legality of the levers of memory: recomputation by module and layer, offload, 16-bit states."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from layout_tuner.array_types import Bools
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape


class LeverRule(NamedTuple):
    """A rule of legality (`legality_rules.Rule`) that is about layout and model alone."""

    name: str
    scope: Literal["model", "redundant", "trainer"]
    illegal: Callable[[LayoutColumns, ModelShape], Bools | Any]
    sentence: Callable[[Layout, ModelShape], str]


def _most_layers(layout: Layout | LayoutColumns, model: ModelShape) -> Any:
    """The most layers that a stage has: of those written out, or if they are split evenly."""
    columns = LayoutColumns.of(layout)
    even = -(-model.num_layers // (columns.pp * columns.vpp))
    return np.where(columns.pipeline_layout != 0, columns.of_stages(max), even)


LEVER_RULES: Final = (
    LeverRule(
        "moe_act_needs_experts",
        "model",
        lambda c, model: c.repeats("moe_act") & (model.num_experts == 0),
        lambda layout, _: (
            f"recompute={layout.recompute}: moe_act is the activation of experts, and the model has "
            "none; leave it out"
        ),
    ),
    LeverRule(
        "mlp_needs_dense_layers",
        "model",
        lambda c, model: c.repeats("mlp") & (model.num_experts > 0) & (model.num_dense_layers == 0),
        lambda layout, _: (
            f"recompute={layout.recompute}: mlp is the feed-forward of dense layers, and all layers "
            "of the model have experts; leave it out, or take moe_act"
        ),
    ),
    LeverRule(
        "mla_up_proj_needs_latent_attention",
        "model",
        lambda c, _: c.repeats("mla_up_proj"),
        lambda layout, _: (
            f"recompute={layout.recompute}: mla_up_proj is a part of latent attention, which no "
            "model here can state; leave it out"
        ),
    ),
    LeverRule(
        "recompute_layers_by_rank",
        "model",
        lambda c, _: (c.of_recompute_layers(len) > 1) & (c.of_recompute_layers(len) != c.pp),
        lambda layout, _: (
            f"recompute_layers={layout.recompute_layers} has "
            f"{layout.recompute_layers.count('/') + 1} numbers, and pp={layout.pp}: give one for "
            "each pipeline rank, or one for all"
        ),
    ),
    LeverRule(
        "recompute_layers_without_recompute",
        "redundant",
        lambda c, _: (c.recompute == 0) & (c.recompute_layers != 0),
        lambda layout, _: (
            f"recompute_layers={layout.recompute_layers} with recompute=none is the same job as "
            "recompute_layers=all"
        ),
    ),
    LeverRule(
        "recompute_layers_are_some",
        "redundant",
        lambda c, model: (
            (c.recompute_layers != 0)
            & (
                (c.of_recompute_layers(lambda each: max(each, default=0)) == 0)
                | (
                    c.of_recompute_layers(lambda each: min(each, default=0))
                    >= _most_layers(c, model)
                )
            )
        ),
        lambda layout, model: (
            f"recompute_layers={layout.recompute_layers} of {_most_layers(layout, model)} layers "
            "of a stage is the same job as recompute=none, or as recompute_layers=all"
        ),
    ),
    LeverRule(
        "offload_of_activations",
        "model",
        lambda c, _: (c.offload == 1) & ((c.pp > 1) | (c.recompute != 0)),
        lambda layout, _: (
            f"offload=activations with pp={layout.pp} and recompute={layout.recompute}: activations "
            "are offloaded without a pipeline and without recomputation alone, as Megatron-LM has it"
        ),
    ),
    LeverRule(
        "trainer_offload",
        "trainer",
        lambda c, _: c.offload != 0,
        lambda layout, _: (
            f"offload={layout.offload}: the embedded trainer keeps everything on the device; leave "
            "it out, or name another trainer"
        ),
    ),
)
"""The rules of layout and model. Adapters have those of trainers and their optimizers."""
