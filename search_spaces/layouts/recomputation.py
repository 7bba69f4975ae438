"""What the backward pass computes again, and in which layers: the texts of the layout's two fields.

The modules are those of Megatron-LM's selective recomputation (`--recompute-modules`), and the
numbers of layers those of its block method (`--recompute-num-layers`).
"""

from __future__ import annotations

import re
from itertools import combinations
from typing import Final, Literal, get_args

from layout_tuner.documents.not_covered import known_word
from layout_tuner.documents.reading import shown

RECOMPUTE_MODULES: Final = ("core_attention", "mlp", "moe_act", "layernorm", "mla_up_proj")
"""Parts of a layer that may be recomputed alone: attention between its projections; the
feed-forward of a dense layer; the activations of experts; the two norms; the up-projections of
latent attention."""

Recompute = Literal["none", "selective", "full"]

RECOMPUTE_MODES: Final[tuple[Recompute, ...]] = get_args(Recompute)
"""No part of a layer, its core attention, and all of it."""

_SETS: Final = (
    (),
    ("core_attention",),
    RECOMPUTE_MODULES,
    *(
        modules
        for size in range(1, len(RECOMPUTE_MODULES) + 1)
        for modules in combinations(RECOMPUTE_MODULES, size)
        if modules != ("core_attention",)
    ),
)
"""The modules by the code of a choice; what full recomputation repeats is more than its modules."""

RECOMPUTE_CHOICES: Final = (*RECOMPUTE_MODES, *("+".join(each) for each in _SETS[3:]))
"""The values of `recompute`: the modes, and every other set of modules joined by +."""

ALL_LAYERS: Final = "all"
"""The value of `recompute_layers` that recomputes every layer."""
MAX_LAYERS_TEXT: Final = 64
"""Most characters of numbers of layers by pipeline rank."""
_NUMBERS: Final = re.compile(r"0|[1-9][0-9]{0,5}")


def read_recompute(value: object) -> str:
    """The choice of a list of modules or of a text; ValueError where it is none."""
    if isinstance(value, str) and value in RECOMPUTE_MODES:
        return value
    names = value.split("+") if isinstance(value, str) else value
    if isinstance(names, (list, tuple)) and names:
        ordered = [name for name in RECOMPUTE_MODULES if name in names]
        if len(ordered) == len(names):
            return "selective" if ordered == ["core_attention"] else "+".join(ordered)
    raise ValueError(
        f"{shown(value)} is not one of {', '.join(RECOMPUTE_MODES)}, or different modules as in "
        f"core_attention+mlp, of {', '.join(RECOMPUTE_MODULES)}"
        f"{known_word(value if isinstance(value, str) else f'recompute={shown(value)}')}"
    )


def modules_of(recompute: str) -> tuple[str, ...]:
    """The modules that a choice recomputes alone; none of the modes none and full."""
    return () if recompute == "full" else _SETS[RECOMPUTE_CHOICES.index(recompute)]


def read_recompute_layers(value: object) -> str:
    """The text of `all`, of a number of layers, or of one number a pipeline rank.

    The same number for all ranks is the number. ValueError where the value is none of them.
    """
    if value == ALL_LAYERS:
        return ALL_LAYERS
    listed = value.split("/") if isinstance(value, str) else value
    listed = [listed] if type(listed) is int else listed
    if isinstance(listed, (list, tuple)) and listed:
        numbers = ["" if isinstance(each, bool) else str(each) for each in listed]
        text = numbers[0] if len(set(numbers)) == 1 else "/".join(numbers)
        if len(text) <= MAX_LAYERS_TEXT and all(map(_NUMBERS.fullmatch, numbers)):
            return text
    raise ValueError(
        f"{shown(value)} is not {ALL_LAYERS}, a number of layers of each stage from 0, or one "
        f"number for each pipeline rank as in 8/6/4/0, at most {MAX_LAYERS_TEXT} characters"
    )


def layers_by_rank(text: str) -> tuple[int, ...]:
    """The numbers of layers in a text: one, or one a pipeline rank; of `all` there are none."""
    return () if text == ALL_LAYERS else tuple(map(int, text.split("/")))
