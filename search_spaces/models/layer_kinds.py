"""Layers of several kinds: the words of `layer_kinds`, and the kind of each layer of a model.

A kind names the sublayers of a layer, `MIXER+FEED_FORWARD`, or the one that it has: hybrids such
as Nemotron-H have `mamba2` and `experts` as layers of their own, Qwen3-Next
`gated_delta_net+experts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import cycle, groupby, islice
from typing import Any, Final, Literal, get_args

from layout_tuner.documents.reading import MAX_NAME_LENGTH, nearest, shown

Mixer = Literal["full", "window", "gated_delta_net", "kda", "mamba2"]
"""full and window: softmax attention, to all earlier positions or inside `attention_window`.
gated_delta_net: arXiv:2412.06464. kda: Kimi Delta Attention, arXiv:2510.26692. mamba2:
arXiv:2405.21060."""

FeedForward = Literal["dense", "experts"]

MIXERS: Final[tuple[Mixer, ...]] = get_args(Mixer)
FEED_FORWARDS: Final[tuple[FeedForward, ...]] = get_args(FeedForward)

LAYER_KINDS: Final = (
    *(f"{mixer}+{inner}" for mixer in MIXERS for inner in FEED_FORWARDS),
    *MIXERS,
    *FEED_FORWARDS,
)
"""Every kind of layer."""

SYMBOLS: Final[Mapping[str, str]] = {
    "M": "mamba2",
    "G": "gated_delta_net",
    "*": "full",
    "-": "dense",
    "E": "experts",
}
"""The kinds that the letters of a hybrid's pattern name (Nemotron-H, Megatron-LM)."""

MOST_KINDS: Final = 1 << 14
"""Most layers that a list may name."""


@cache
def sublayers_of(kind: str) -> tuple[Mixer | None, FeedForward | None]:
    """What a kind mixes tokens with, and its feed-forward; None: it has none."""
    words = kind.split("+")
    mixer = next((each for each in MIXERS if each in words), None)
    return mixer, next((each for each in FEED_FORWARDS if each in words), None)


def read_layer_kinds(value: object) -> tuple[str, ...] | str:
    """The kinds that a document lists as words or `{kind: number}`, or what is wrong with it.

    Options and the placeholder of a command write words with commas between them.
    """
    if isinstance(value, str) and value:
        value = value.split(",")
    if not isinstance(value, list | tuple) or not value:
        return f"{shown(value)} is not a list of kinds of layers, such as [full+dense] or [{{mamba2+dense: 3}}, full+dense]"
    kinds: list[str] = []
    for item in value:
        word, number = item, 1
        if isinstance(item, dict) and len(item) == 1:
            word, number = next(iter(item.items()))
        if not isinstance(word, str) or word not in LAYER_KINDS:
            is_short = isinstance(word, str) and len(word) <= MAX_NAME_LENGTH
            return f"{shown(word)} is not a kind of layer{nearest(word, LAYER_KINDS) if is_short else ''}"
        if type(number) is not int or not 1 <= number <= MOST_KINDS:
            return f"{shown(number)} of {word} is not a whole number from 1 to {MOST_KINDS}"
        kinds += [word] * number
        if len(kinds) > MOST_KINDS:
            return f"it names more than {MOST_KINDS} layers"
    return tuple(kinds)


def write_layer_kinds(kinds: Iterable[str]) -> list[Any]:
    """The list of a document: equal kinds in succession as `{kind: number}`."""
    runs = ((kind, sum(1 for _ in same)) for kind, same in groupby(kinds))
    return [kind if number == 1 else {kind: number} for kind, number in runs]


def repeated(kinds: Sequence[str], num_layers: int) -> tuple[str, ...]:
    """The kind of each layer: a pattern is repeated."""
    return tuple(islice(cycle(kinds), num_layers))


def shortest_pattern(kinds: tuple[str, ...]) -> tuple[str, ...]:
    """The shortest beginning that, repeated whole, gives the kinds of all layers."""
    whole = (length for length in range(1, len(kinds)) if len(kinds) % length == 0)
    found = (kinds[:length] for length in whole if repeated(kinds[:length], len(kinds)) == kinds)
    return tuple(next(found, kinds))


SHORT_FORMS: Final = ("full_attention_every", "num_dense_layers", "experts_every")
"""Fields of a model that say the kinds of its layers without a list."""


def kinds_of_short_forms(fields: Mapping[str, Any]) -> Iterator[str]:
    """The kind of each layer of a model that states none, from its fields."""
    every, has_experts = fields.get("full_attention_every"), fields["num_experts"] > 0
    first, step = fields.get("num_dense_layers", 0), fields.get("experts_every") or 1
    for layer in range(fields["num_layers"]):
        is_full = fields["attention_window"] is None or (every and (layer + 1) % every == 0)
        is_expert = has_experts and layer >= first and (layer + 1) % step == 0
        yield f"{'full' if is_full else 'window'}+{'experts' if is_expert else 'dense'}"


def stated_kinds(kinds: Sequence[str]) -> dict[str, Any]:
    """The fields of a document that say the kinds of all layers: short forms where these can."""
    window, experts = ([part in kind for kind in kinds] for part in ("window", "+experts"))
    every = window.index(False) + 1 if True in window and False in window else 0
    first = experts.index(True) if True in experts else 0
    for dense, step in ((first, 0), (0, first + 1)):
        values = zip(SHORT_FORMS, (every, dense, step), strict=True)
        said = {name: value for name, value in values if value}
        own: dict[str, int | None] = {"num_layers": len(kinds), "num_experts": sum(experts), **said}
        own["attention_window"] = len(kinds) if True in window else None
        if tuple(kinds_of_short_forms(own)) == tuple(kinds):
            return said
    return {"layer_kinds": write_layer_kinds(shortest_pattern(tuple(kinds)))}
