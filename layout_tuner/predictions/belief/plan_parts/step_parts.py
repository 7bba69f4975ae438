"""What the predicted time of a step goes into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, get_args

from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions
from layout_tuner.predictions.estimates.step_shape import idle_slots
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

StepPart = Literal[
    "compute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "pipeline bubble",
    "pipeline transfers",
    "data parallel",
    "host",
    "optimizer",
]
"""What the time of a step goes into. The bubble: stages that wait for the first and the last
micro-batch, or for a slower stage."""

_TERMS: Final[Mapping[StepPart, tuple[str, ...]]] = {
    "tensor parallel": ("tensor_inside", "tensor_across", "latency_inside", "latency_across"),
    "context parallel": ("context",),
    "expert parallel": ("exchange_inside", "exchange_across", "exchange_latency"),
    "pipeline bubble": ("imbalance", "equal_layers"),
    "pipeline transfers": ("pipeline_inside", "pipeline_across", "pipeline_latency"),
    "data parallel": (
        *("data_inside", "data_across", "data_congestion", "data_latency"),
        *("data_overlap", "shards_overlap", "weights_gather", "gather_latency"),
    ),
    "host": ("host", "host_tensor", "each_microbatch", "each_step", "offload"),
    "optimizer": ("optimizer",),
}
"""The terms of the step time that are not compute, by their part."""

PARTS: Final[Mapping[str, StepPart]] = {
    term: part for part, terms in _TERMS.items() for term in terms
}
"""The part of each term that is not compute."""

_NOT_EACH_SLOT: Final = frozenset({"accumulation", "each_step"})
"""Terms of compute and host that do not repeat in the slots of the pipeline's bubble."""

_SLOTTED: Final = frozenset(
    {
        "compute",
        *("tensor parallel", "context parallel", "expert parallel"),
        *("host", "pipeline transfers"),
    }
)
"""Parts whose terms take m + `idle_slots` slots, of which the latter are the bubble."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """A part of a predicted step."""

    part: StepPart
    share: float
    """Share of the step time."""


def step_shares(layout: Layout, predictions: LayoutPredictions) -> tuple[StepShare, ...]:
    """The parts of a layout's predicted step, the largest first; parts of 0 are left out."""
    seconds: dict[StepPart, float] = defaultdict(float)
    idle = float(idle_slots(LayoutColumns.of(layout)))
    bubble = idle / (layout.num_microbatches + idle)
    for term in predictions.parts(layout):
        part = PARTS.get(term.name, "compute")
        waiting = 0.0
        if part in _SLOTTED and term.name not in _NOT_EACH_SLOT:
            waiting = bubble * term.seconds
        seconds["pipeline bubble"] += waiting
        seconds[part] += term.seconds - waiting
    total = sum(seconds.values())
    shares = [
        StepShare(part=part, share=seconds[part] / total)
        for part in get_args(StepPart)
        if seconds[part] > 0
    ]
    return tuple(sorted(shares, key=lambda each: -each.share))
