"""The kinds of the layers of a config.json: what mixes tokens, and which have experts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from layout_tuner.documents.reading import shown
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.config_families import ConfigFamily
from layout_tuner.search_spaces.models.config_features import Feature
from layout_tuner.search_spaces.models.config_words import EXPERTS, ConfigWords
from layout_tuner.search_spaces.models.foreign_words import OTHER_LAYERS, WINDOWS
from layout_tuner.search_spaces.models.layer_kinds import stated_kinds
from layout_tuner.search_spaces.models.model_shape import ModelShape

_FULL, _WINDOW, _CHUNK, _LINEAR = "full", "window", "chunked_attention", "linear_attention"
_KINDS: Final = {
    **dict.fromkeys(("attention", "full_attention", "global", "G", "*"), _FULL),
    **dict.fromkeys(("sliding_attention", "local", "L"), _WINDOW),
    **dict.fromkeys(("mamba", "M"), _LINEAR),
    **dict.fromkeys(("mlp", "-"), "dense"),
    **dict.fromkeys(("moe", "E"), "experts"),
}
"""Kinds of layers by their names in files, and by the letters of a text such as LLLG or MEM*E."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigLayers:
    """The layers of a model, as fields of a shape, and what they have beside these."""

    kinds: tuple[str, ...]
    """Of each layer."""
    fields: Mapping[str, Any]
    window: int = 0
    """Tokens of a chunk, where layers attend to chunks; these are layers with a window here."""

    note: str = ""
    """What these fields say only nearly; empty: nothing."""

    def features(self, shape: ModelShape) -> Iterator[Feature]:
        if self.note:
            yield Feature(name=self.note)
        if self.window:
            number = sum(kind.startswith(_WINDOW) for kind in self.kinds)
            less = self.window * (shape.seq_length - self.window) // shape.seq_length
            yield Feature(
                name=f"attention in chunks of {self.window} tokens",
                forward_flops=-4 * shape.query_size * number * less,
            )


def kind_named(word: str) -> str:
    """The kind of layer that a file names so; an unknown word stays as it is."""
    return _KINDS.get(word, word)


def config_layers(
    words: ConfigWords, family: ConfigFamily, layers: int, seq_length: int
) -> ConfigLayers:
    """The layers that a file describes, for sequences of this length."""
    kinds = _kinds_of_layers(words, family, layers)
    is_chunked = _CHUNK in kinds
    window = words.whole("attention_chunk_size" if is_chunked else "sliding_window")
    window = window if is_chunked else window or words.whole("window_size")
    if not window or window >= seq_length:
        window = None
    windowed = _WINDOW if window else _FULL
    plain = {_CHUNK: windowed, _WINDOW: windowed, _LINEAR: family.linear}
    kinds = [plain.get(kind, kind) for kind in kinds]
    is_alone = {"dense", "experts"} & {*kinds}
    has_experts = family.kind in ("experts", "wide") and bool(words.needed(EXPERTS))
    sparse = _layers_with_experts(words, layers) if has_experts else [False] * layers
    inner = ["experts" if each else "dense" for each in sparse]
    whole = kinds if is_alone else [f"{a}+{b}" for a, b in zip(kinds, inner, strict=True)]
    said = stated_kinds(whole)
    said |= {"layer_kinds": tuple(whole)} if "layer_kinds" in said else {}
    fields = {"attention_window": window if _WINDOW in kinds else None, **said}
    note = ""
    if family.kind == "gpt" and fields.pop("layer_kinds", ()):  # which only llama has
        fields["full_attention_every"] = every = layers // kinds.count(_FULL)
        if layers // every != kinds.count(_FULL):
            raise ModelShapeInvalidError(f"no field of the family gpt says {WINDOWS}")
        note = WINDOWS
    chunk = window if is_chunked and window else 0
    return ConfigLayers(kinds=tuple(whole), fields=fields, window=chunk, note=note)


def _kinds_of_layers(words: ConfigWords, family: ConfigFamily, layers: int) -> list[str]:
    pattern = words.get(
        "sliding_window_pattern", "global_attn_every_n_layers", "full_attention_interval", "every"
    )
    use = words.get("use_sliding_window")
    stated = words.names("layer_types", layers) or words.names("attention_layers", layers)
    if 0 in (words.whole_numbers("attn_type_list") or ()):
        stated = ["lightning_attention"]
    if stated is None and isinstance(pattern, str) and re.fullmatch("[LG]+", pattern):
        stated = [pattern[layer % len(pattern)] for layer in range(layers)]
    if not stated and family.windows in ("stated", "alone"):
        raise ModelShapeInvalidError("the config.json does not state layer_types")
    if stated is not None:
        kinds = [kind_named(each) for each in stated]
        known = {_FULL, _WINDOW, _CHUNK} | ({_LINEAR} if family.linear else set())
        known |= {"dense", "experts"} if family.windows == "alone" else set()
        if others := sorted({*kinds} - known):
            raise ModelShapeInvalidError(
                f"layer_types has {shown(others[0])}: no field of a model says {OTHER_LAYERS}"
            )
        return [_FULL if kind == _WINDOW and use is False else kind for kind in kinds]
    is_linear = bool(family.linear)
    if not is_linear and (
        use is False or (words.get("sliding_window") is None and family.windows == "full_last")
    ):
        return [_FULL] * layers
    if use and not family.windows:
        raise ModelShapeInvalidError(f"use_sliding_window=true: no field of a model says {WINDOWS}")
    every = pattern if isinstance(pattern, int) and pattern > 0 else layers + 1
    rotated = _rotated(words, layers) if family.windows in ("rotated", "unrotated") else []
    full = words.whole_numbers("attn_layer_indices") or ()
    windows: Mapping[str, Callable[[int], bool]] = {
        "all": lambda _: True,
        "full_last": lambda layer: (layer + 1) % every != 0,
        "full_first": lambda layer: layer % every != 0,
        "from_layer": lambda layer: layer >= (words.whole("max_window_layers") or 0),
        "rotated": lambda layer: rotated[layer],
        "unrotated": lambda layer: not rotated[layer],
        "flint": lambda layer: layer > 1 and layer % 4 != 1 and layer != layers - 1,
        "indices": lambda layer: layer not in full,
        "": lambda _: False,
    }
    has_window = windows[family.windows]
    kind = _CHUNK if family.windows == "rotated" else _LINEAR if is_linear else _WINDOW
    return [kind if has_window(layer) else _FULL for layer in range(layers)]


def _rotated(words: ConfigWords, layers: int) -> list[bool]:
    """Whether each layer has rotary positions."""
    if stated := words.whole_numbers("no_rope_layers", layers):
        return [bool(each) for each in stated]
    interval = words.whole("no_rope_layer_interval") or layers + 1
    return [(layer + 1) % interval != 0 for layer in range(layers)]


def _layers_with_experts(words: ConfigWords, layers: int) -> list[bool]:
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
