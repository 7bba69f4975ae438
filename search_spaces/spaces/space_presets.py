"""Presets of search spaces."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.documents.reading import nearest, read_mapping, shown
from layout_tuner.errors import SpaceInvalidError
from layout_tuner.search_spaces.layouts.layout import Precision
from layout_tuner.search_spaces.spaces.search_space import SearchSpace

# Table V of Dash et al. (arXiv:2312.12705), for gpt-175b on frontier. The recipe that the same
# paper publishes as its best for that model (TP 4, PP 16, micro-batch 1, 640 sequences a replica)
# lies outside: the table's micro-batches start at 4 and its accumulation ends at 10 steps, where a
# pipeline of 16 stages idles 60 % of the ideal time (the bubble is (pp - 1) / num_microbatches of
# it). A space meant to find the best should let micro_batch_size start at 1 and fix
# global_batch_size. The bounds of the batch here are those of the table itself.
_PAPER_TABLE_V: Final = SearchSpace(
    num_nodes=[12, 16],
    tp=[1, 2, 4, 8],
    pp=[1, 2, 4, 8, 12, 16],
    micro_batch_size={"from": 4, "to": 20, "step": 1},
    num_microbatches=[5, 10],
    zero_stage=[0, 1],
    recompute="full",
    precision="fp16",
    global_batch_size={"min": 1, "max": 16 * 8 * 20 * 10},
)

SPACE_PRESETS: Final[Mapping[str, SearchSpace]] = {"paper-table-v": _PAPER_TABLE_V}


def resolve_space(
    described: str | Mapping[str, Any], *, precision: Precision = "fp32"
) -> SearchSpace:
    """The space that a user described: a preset's name, knobs, or a preset with other knobs.

    One that names no precision has the given one.

    Raises:
        SpaceInvalidError: the preset or a knob is unknown, or a value impossible.
    """
    return SearchSpace.from_mapping({"precision": precision, **space_knobs(described)})


def space_knobs(described: str | Mapping[str, Any]) -> dict[str, Any]:
    """The knobs of a description and of its preset; SpaceInvalidError if either is no such."""
    if isinstance(described, str):
        described = {"preset": described}
    values = read_mapping(described, SpaceInvalidError, "the search space")
    if "preset" not in values:
        return values
    name = values.pop("preset")
    if not isinstance(name, str) or name not in SPACE_PRESETS:
        raise SpaceInvalidError(f"unknown search space {shown(name)}{nearest(name, SPACE_PRESETS)}")
    base = SPACE_PRESETS[name].to_mapping()
    if isinstance(values.get("global_batch_size"), int) and "num_microbatches" not in values:
        del base["num_microbatches"]  # a batch that is now fixed derives them
    return base | values
