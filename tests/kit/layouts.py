"""Layouts for tests: one that leaves no knob at its default, and grids of them."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout

EVERY_KNOB: Final = Layout(
    num_nodes=2,
    tp=2,
    tp_columns=2,
    cp=2,
    pp=2,
    dp=4,
    ep=2,
    etp=2,
    vpp=2,
    schedule="zero_bubble",
    cp_comm_type="p2p",
    pipeline_split="embedding_and_head",
    pipeline_layout="E|tt|t*5|tL",
    rank_order="tp_cp_pp_dp",
    micro_batch_size=2,
    num_microbatches=4,
    zero_stage=1,
    zero_replicas=2,
    recompute="full",
    recompute_layers="1",
    offload="optimizer",
    optimizer_states="bf16",
    sequence_parallel=True,
    precision="bf16",
)
"""No knob has its default."""


def filled_layouts(
    num_devices: int,
    *,
    global_batch: int | None = None,
    fixed: dict[str, Any],
    **knobs: Iterable[Any],
) -> list[Layout]:
    """Layouts of all the values of some knobs, tp and pp among them, in the order of the knobs.

    dp fills the devices; micro-batches make the global batch, where it is stated.
    """
    layouts = []
    for values in product(*knobs.values()):
        chosen = {**fixed, **dict(zip(knobs, values, strict=True))}
        chosen["dp"] = num_devices // (chosen["tp"] * chosen["pp"])
        if global_batch is not None:
            chosen["num_microbatches"] = global_batch // chosen["dp"] // chosen["micro_batch_size"]
        layouts.append(Layout(**chosen))
    return layouts
