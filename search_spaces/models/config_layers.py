"""Which layers of a config.json have windows, and which have experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from layout_tuner.documents.reading import shown
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.config_families import ConfigFamily
from layout_tuner.search_spaces.models.config_features import Feature
from layout_tuner.search_spaces.models.config_words import ConfigWords
from layout_tuner.search_spaces.models.foreign_words import OTHER_LAYERS, WINDOWS
from layout_tuner.search_spaces.models.model_shape import ModelShape

_FULL, _WINDOW, _CHUNK = "full_attention", "sliding_attention", "chunked_attention"
_KINDS: Final = {
    **dict.fromkeys(("attention", "global", "G"), _FULL),
    **dict.fromkeys(("local", "L"), _WINDOW),
}
"""Older names of kinds of layers, and those in a text such as LLLG."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionLayers:
    """The windows of a shape, and what the model has beside them."""

    window: int | None = None
    every: int | None = None
    positions: int = 0
    """Positions of a token's products summed over the layers, as `ModelShape` counts them."""
    what: str = ""
    """How its layers differ from those of the shape; empty: they do not."""

    def features(self, shape: ModelShape) -> Iterator[Feature]:
        if self.what:
            more = self.positions - shape.attention_positions
            yield Feature(name=self.what, forward_flops=4 * shape.query_size * more)


def attention_layers(
    words: ConfigWords, family: ConfigFamily, layers: int, seq_length: int
) -> AttentionLayers:
    """The windows that come nearest to those of the layers, for sequences of this length."""
    kinds = _kinds_of_layers(words, family, layers)
    is_chunked = _CHUNK in kinds
    window = words.whole("attention_chunk_size" if is_chunked else "sliding_window")
    window = window if is_chunked else window or words.whole("window_size")
    if not window or window >= seq_length or set(kinds) == {_FULL}:
        return AttentionLayers()
    inside = window if is_chunked else _positions(window, seq_length)
    full = kinds.count(_FULL)
    positions = full * seq_length + (layers - full) * inside
    if full == 0 and not is_chunked:
        return AttentionLayers(window=window)
    first = kinds.index(_FULL) + 1 if full else 0
    if not is_chunked and first > 1:
        pattern = [_WINDOW if (layer + 1) % first else _FULL for layer in range(layers)]
        if kinds == pattern:
            return AttentionLayers(window=window, every=first)
    # None of all windows, or all layers but every n-th: whichever does nearly as much work.
    every = min(
        range(1, layers + 2),
        key=lambda n: abs(
            layers // n * seq_length
            + (layers - layers // n) * _positions(window, seq_length)
            - positions
        ),
    )
    what = f"attention in chunks of {window} tokens" if is_chunked else WINDOWS
    if every == 1:
        return AttentionLayers(positions=positions, what=what)
    return AttentionLayers(
        window=window, every=every if every <= layers else None, positions=positions, what=what
    )


def _positions(window: int, seq_length: int) -> int:
    """Positions of a token in a window, as `ModelShape.attention_positions` counts them."""
    return window * (2 * seq_length - window) // seq_length


def _kinds_of_layers(words: ConfigWords, family: ConfigFamily, layers: int) -> list[str]:
    pattern = words.get("sliding_window_pattern", "global_attn_every_n_layers", "every")
    use = words.get("use_sliding_window")
    stated = words.names("layer_types", layers) or words.names("attention_layers", layers)
    if 0 in (words.whole_numbers("attn_type_list") or ()):
        stated = ["lightning_attention"]
    if stated is None and isinstance(pattern, str) and re.fullmatch("[LG]+", pattern):
        stated = [pattern[layer % len(pattern)] for layer in range(layers)]
    if stated is not None:
        kinds = [_KINDS.get(each, each) for each in stated]
        others = sorted({*kinds} - {_FULL, _WINDOW, _CHUNK})
        if others:
            raise ModelShapeInvalidError(
                f"layer_types has {shown(others[0])}: no field of a model says {OTHER_LAYERS}"
            )
        return [_FULL] * layers if use is False else kinds
    if use is False or (words.get("sliding_window") is None and family.windows == "full_last"):
        return [_FULL] * layers
    if use and not family.windows:
        raise ModelShapeInvalidError(f"use_sliding_window=true: no field of a model says {WINDOWS}")
    every = pattern if isinstance(pattern, int) and pattern > 0 else layers + 1
    rotated = _rotated(words, layers) if family.windows in ("rotated", "unrotated") else []
    windows: Mapping[str, Callable[[int], bool]] = {
        "all": lambda _: True,
        "full_last": lambda layer: (layer + 1) % every != 0,
        "full_first": lambda layer: layer % every != 0,
        "from_layer": lambda layer: layer >= (words.whole("max_window_layers") or 0),
        "rotated": lambda layer: rotated[layer],
        "unrotated": lambda layer: not rotated[layer],
        "flint": lambda layer: layer > 1 and layer % 4 != 1 and layer != layers - 1,
        "": lambda _: False,
    }
    has_window = windows[family.windows]
    kind = _CHUNK if family.windows == "rotated" else _WINDOW
    return [kind if has_window(layer) else _FULL for layer in range(layers)]


def _rotated(words: ConfigWords, layers: int) -> list[bool]:
    """Whether each layer has rotary positions."""
    if stated := words.whole_numbers("no_rope_layers", layers):
        return [bool(each) for each in stated]
    interval = words.whole("no_rope_layer_interval") or layers + 1
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def layers_with_experts(words: ConfigWords, layers: int) -> list[bool]:
    """Whether each layer's feed-forward is a mixture of experts.

    Hugging Face's "every n-th" are layers n - 1, 2 n - 1, ...; those of DeepSeek's `moe_layer_freq`
    are layers 0, n, ...
    """
    if (kinds := words.names("mlp_layer_types", layers)) is not None:
        return [kind == "sparse" for kind in kinds]
    if (listed := words.whole_numbers("moe_layers")) is not None:
        sparse = frozenset(listed)
        return [layer in sparse for layer in range(layers)]
    first = words.whole(
        "first_k_dense_replace", "num_dense_layers", "n_dense_layers", "moe_layer_start_index"
    )
    last = words.whole("moe_layer_end_index")
    step = words.whole("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
    frequency = words.get("moe_layer_freq")
    dense = frozenset(words.whole_numbers("mlp_only_layers") or ())
    if isinstance(frequency, list):
        dense |= {layer for layer, is_sparse in enumerate(frequency) if not is_sparse}
    by_frequency = isinstance(frequency, int) and frequency > 1
    return [
        layer >= (first or 0)
        and (last in (None, -1) or layer <= last)
        and (layer + 1) % (step or 1) == 0
        and layer not in dense
        and not (by_frequency and layer % frequency)
        for layer in range(layers)
    ]
