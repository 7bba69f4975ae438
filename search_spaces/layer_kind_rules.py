"""Legality of kinds of layers: what columns and cp divide, and what the embedded trainer lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from layout_tuner.array_types import Bools
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import heads_of
from layout_tuner.search_spaces.rule import Rule, RuleContext
from layout_tuner.search_spaces.untrained_models import UNTRAINED, untrained_sentence


def undivided(sizes: Mapping[str, int], ranks: int) -> str:
    """The first size, as `NAME=SIZE`, that so many ranks do not divide."""
    return next(f"{name}={size}" for name, size in sizes.items() if size % ranks)


def _without_columns(model: ModelShape) -> str:
    """What of a model no trainer divides by columns; empty: nothing."""
    plain = ("full+dense", "window+dense", "full+experts", "window+experts")
    kinds = (f"layers of the kind {each.kind}" for each in model.kinds if each.kind not in plain)
    return next(kinds, "multi-token prediction" if model.num_mtp_layers else "")


def _states(model: ModelShape) -> tuple[dict[str, int], int]:
    """Heads of recurrences, and the groups of those of Mamba-2."""
    heads = heads_of(model, "gated_delta_net", "kda", "mamba2")
    return heads, heads.pop("mamba_num_groups", 0)


def _states_are_split(c: LayoutColumns, x: RuleContext) -> Bools:
    """Where tp does not divide the heads or groups, its rule gives the reason."""
    heads, groups = _states(x.model)
    own = np.maximum(groups // c.tp, 1)
    broken = math.gcd(*heads.values()) % (c.tp * c.cp) != 0
    broken |= (groups > 0) & (own % c.cp != 0) & (c.cp % own != 0)
    is_split: Bools = (c.cp > 1) & (math.gcd(*heads.values(), groups) % c.tp == 0) & broken
    return is_split


def _states_sentence(layout: Layout, x: RuleContext) -> str:
    (heads, groups), ranks = _states(x.model), layout.tp * layout.cp
    if any(size % ranks for size in heads.values()):
        return (
            f"{undivided(heads, ranks)} is not divisible by tp*cp={layout.tp}*{layout.cp}={ranks}: "
            "layers without softmax attention exchange tokens for heads"
        )
    return (
        f"cp={layout.cp} neither divides mamba_num_groups/tp={groups}/{layout.tp} nor is a multiple "
        "of it: the ranks of cp exchange tokens for heads, and share the groups"
    )


def _trainer_rule(name: str, words: Callable[[ModelShape], str]) -> Rule:
    return Rule(
        name=f"trainer_{name}",
        scope="trainer",
        illegal=lambda _, x: bool(words(x.model)),
        sentence=lambda _, x: untrained_sentence(words(x.model)),
    )


LAYER_KIND_RULES: Final[tuple[Rule, ...]] = (
    Rule(
        name="columns_without_kinds",
        illegal=lambda c, x: (c.tp_columns > 1) & bool(_without_columns(x.model)),
        sentence=lambda layout, x: (
            f"tp_columns={layout.tp_columns}: no trainer divides {_without_columns(x.model)} by "
            "columns; use tp"
        ),
    ),
    Rule(name="states_over_cp", illegal=_states_are_split, sentence=_states_sentence),
    *(_trainer_rule(name, words) for name, words in UNTRAINED.items()),
)
