"""Reads descriptions of models in the words of other software, and says what they are here."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from layout_tuner.documents.not_covered import known_word
from layout_tuner.documents.reading import shown, word_of
from layout_tuner.search_spaces.models.foreign_words import (
    ACTIVATIONS,
    ATTENTION_KINDS,
    ATTENTION_WORDS,
    CLASS_DEFAULTS,
    GATED,
    HUGGING_FACE,
    KINDS_OF_LAYERS,
    MEGATRON_LM,
    MODEL_TYPES,
    NESTED,
    NORMS,
    NOT_COVERED,
    OF_HUGGING_FACE,
    OF_MEGATRON_LM,
    OF_OTHER_LAYERS,
    OPTIONS,
    OTHER_LAYERS,
    OUR_FIELDS,
    ROTARY,
    SAME_VALUE,
    STEPS,
    WIDTHS,
    WITHOUT_EFFECT,
    WITHOUT_EFFECT_ALIKE,
    alike,
    words_of,
)
from layout_tuner.search_spaces.models.model_fields import EXPERT_FIELDS, ROUTING_FIELDS
from layout_tuner.terminal.plurals import listed

_TIED_WITHOUT: Final = "no untie_embeddings_and_output_weights"
_MOST_FIELDS: Final = 5
"""Most fields of ours in one sentence."""
_WHOLE_FILE: Final = (
    "or give the file itself: `model put FILE --seq-length N`, --model FILE, or model: {config: FILE, "
    "seq_length: N}"
)
_FROM_TWO: Final = words_of(
    " ".join(SAME_VALUE[ours] for ours in ("router_groups", "router_topk_groups", "experts_every"))
)
_ONE_VALUE: Final = ("num_experts", "rotary_base")
"""Fields of which transformers 4, when it saves a file of transformers 5, adds a second value."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignModel:
    """A description of a model in the words of other software."""

    source: str = ""
    """Whose words they are; empty: not known."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Values by the names that `ModelShape` uses, of the words that are not the same there."""
    words: Mapping[str, str] = field(default_factory=dict)
    """The word of each of these fields."""
    not_covered: Mapping[str, str] = field(default_factory=dict)
    """By word, what it says that no field of ours can."""
    without_effect: tuple[str, ...] = ()
    """Words that say nothing that affects a layout."""
    unknown: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()
    """Words that state two values of a field, as sentences; neither value is in `fields`."""

    @property
    def is_whole_model(self) -> bool:
        """Whether several words are foreign, so that one sentence about all of them is due."""
        return len(self.words) + len(self.not_covered) + len(self.without_effect) > 1

    def hint(self, word: str) -> str:
        """The end of a message about one word; empty: it is not known."""
        if what := self.not_covered.get(word):
            return f' ({what}: not covered, see "What is covered" in README.md)'
        for ours, theirs in self.words.items():
            if theirs == word:
                is_same = OUR_FIELDS.get(_name_of(word)) == ours
                return f" (here it is {f'called {ours!r}' if is_same else self._said(ours)})"
        if word not in self.without_effect:
            known = OUR_FIELDS.get(_name_of(word))  # which another word states, too
            return f" (here it is called {known!r})" if known else ""
        return known_word(word) or " (it has no effect on layouts: leave it out)"

    def sentence(self, missing: Sequence[str], stated: Mapping[str, Any]) -> str:
        """What to write in place of all the words, with at most five fields of ours.

        `missing` are the needed fields that no word states, `stated` those in our own words.
        """
        parts = [f"these are words of {self.source or 'other software'}"]
        for what in list(dict.fromkeys(self.not_covered.values()))[:2]:
            word = next(word for word, each in self.not_covered.items() if each == what)
            parts.append(f"{shown(word)} is not covered: {what}")
        parts += self.contradictions
        if most := max(_MOST_FIELDS - len(missing), 0):
            said = [
                f"{self._said(ours)} for {shown(self.words[ours])}"
                for ours, value in self.fields.items()
                if stated.get(ours) != value
            ]
            parts += [f"write {listed(said, most)}"] if said else []
        if missing:
            parts.append(f"state {listed(missing, _MOST_FIELDS)}, which no word says")
        if self.without_effect:
            parts.append(f"without effect here: {listed(map(shown, self.without_effect), 3)}")
        if self.unknown:
            unknown = [f"{shown(word)}{known_word(word)}" for word in self.unknown]
            parts.append(f"no fields of a model here: {listed(unknown, 3)}")
        if self.source == HUGGING_FACE:
            parts.append(_WHOLE_FILE)
        return "; ".join(parts)

    def _said(self, ours: str) -> str:
        value = self.fields.get(ours)
        is_plain = isinstance(value, (bool, int, float)) or (isinstance(value, str) and value)
        return f"{ours}={word_of(value)[:80]}" if is_plain else ours


@dataclass(frozen=True, slots=True)
class _Said:
    """What a word and its value mean."""

    field: str = ""
    """The field of ours; empty: none."""
    value: Any = None
    not_covered: str = ""


_NOTHING: Final = _Said()
_KINDS: Final = _Said("layer_kinds", "")
"""What no short form says; the value is too long for a sentence."""
_Document = Mapping[str, Any]
"""Values by normalized name."""


def read_foreign(document: Mapping[str, Any], known: Sequence[str]) -> ForeignModel:
    """What the fields of a document say that are none of the `known` ones of `ModelShape`."""
    named = _flat(document)
    values = {name: value for name, (_, value) in named.items()}
    said: dict[str, _Said] = {}
    unknown = []
    for name, (word, value) in named.items():
        if word in known and word in document:
            continue
        meaning = _Said(name, value) if name in known else _meaning(name, value, values)
        if meaning is None:
            unknown.append(word)
        else:
            said[word] = meaning
    fields = {each.field: each.value for each in said.values() if each.field}
    stated = {OUR_FIELDS.get(name, name) for name in (*values, *fields)}
    stated |= {"full_attention_every"} if "layer_types" in values else set()
    implied = {key: each for key, each in _defaults(values).items() if key not in stated}
    fields = _without_contradictions(implied | fields, values)
    twice = _contradictions(document)
    fields = {ours: value for ours, value in fields.items() if ours not in twice}
    taken = {*fields, *twice}
    words = {each.field: word for word, each in said.items() if each.field in taken}
    words |= dict.fromkeys(implied, named.get("model_type", (_TIED_WITHOUT,))[0])
    return ForeignModel(
        source=_source(values),
        fields={name: fields[name] for name in known if name in fields},
        words=words,
        not_covered={word: each.not_covered for word, each in said.items() if each.not_covered},
        without_effect=tuple(
            word
            for word, each in said.items()
            if not each.not_covered and each.field not in taken and word not in words.values()
        ),
        unknown=tuple(unknown),
        contradictions=tuple(twice.values()),
    )


def _flat(document: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Words and values by name: in lower case, with underscores, without `--` in front."""
    found: dict[str, tuple[str, Any]] = {}
    for word, value in document.items():
        name = _name_of(word)
        if name in NESTED and isinstance(value, Mapping):
            found |= {key: each for key, each in _flat(value).items() if key not in found}
        else:
            found[name] = (word, value)
    return found


def _contradictions(document: Mapping[str, Any]) -> dict[str, str]:
    """By field of ours, that words state two values of it."""
    pairs, found = [*_pairs(document)], {}
    for ours in _ONE_VALUE:
        stated = {
            word: value
            for word, value in pairs
            if isinstance(value, (int, float))
            and value
            and OUR_FIELDS.get(name := _name_of(word.rpartition(".")[2]), name) == ours
        }
        if len(set(stated.values())) > 1:
            said = " and ".join(
                f"{word[:80]}={word_of(value)[:80]}" for word, value in stated.items()
            )
            found[ours] = f"{said} state two values of {ours}: look up which one is right"
    return found


def _pairs(document: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Words and values of a document and its parts, each word after those that lead to it."""
    for word, value in document.items():
        yield f"{path}{word}", value
        if _name_of(word) in NESTED and isinstance(value, Mapping):
            yield from _pairs(value, f"{path}{word}.")


def _name_of(word: str) -> str:
    return word[:80].lower().lstrip("-_").replace("-", "_")


def _defaults(values: _Document) -> Mapping[str, Any]:
    """What the class of a model, or Megatron-LM, takes for fields that are not stated."""
    if _source(values) == MEGATRON_LM and "untie_embeddings_and_output_weights" not in values:
        return {"tied_embeddings": True}
    return CLASS_DEFAULTS.get(str(values.get("model_type")).removesuffix("_text"), {})


def _source(values: _Document) -> str:
    if not OF_HUGGING_FACE.isdisjoint(values):
        return HUGGING_FACE
    return "" if OF_MEGATRON_LM.isdisjoint(values) else MEGATRON_LM


def _without_contradictions(fields: dict[str, Any], values: _Document) -> dict[str, Any]:
    """Without widths that a mixture of experts does not have, or the experts of a dense model."""
    stated = {**values, **fields}
    experts = stated.get("num_experts")
    if experts in (None, 0, 1):
        dense = {*EXPERT_FIELDS, *ROUTING_FIELDS}
        return {name: value for name, value in fields.items() if name not in dense}
    if stated.get("moe_ffn_hidden_size") and not stated.get("num_dense_layers"):
        return {name: value for name, value in fields.items() if name != "ffn_hidden_size"}
    return fields


def _meaning(name: str, value: Any, values: _Document) -> _Said | None:
    """What a word says; None: it is not known."""
    if name in _SPECIAL:
        return _SPECIAL[name](value, values)
    if name in STEPS:
        return _NOTHING if value in (None, 0, 1) else _KINDS
    if name in NOT_COVERED:
        return _Said(not_covered=NOT_COVERED[name]) if value else _NOTHING
    if name in _FROM_TWO and value in (0, 1):  # one group, or experts in every layer
        return _NOTHING
    if ours := OUR_FIELDS.get(name):
        value = alike(value)
        if isinstance(value, list) and value:
            return _Said(not_covered=WIDTHS)
        if name == "intermediate_size" and values.get("model_type") == "qwen":
            value = value // 2 if isinstance(value, int) else value  # of gate and up together
        is_unstated = value is None or (value == 0 and value is not False)
        return _NOTHING if is_unstated else _Said(ours, value)
    if name in KINDS_OF_LAYERS or OF_OTHER_LAYERS.fullmatch(name):
        return _KINDS if value else _NOTHING
    if name in WITHOUT_EFFECT or WITHOUT_EFFECT_ALIKE.fullmatch(name):
        return _NOTHING
    return None


def _dense_first(is_dense: Sequence[bool]) -> _Said:
    """Whether each layer is dense, as a number of dense layers at the beginning."""
    first = is_dense.index(False) if False in is_dense else len(is_dense)
    if any(is_dense[first:]):
        return _KINDS
    return _Said("num_dense_layers", first) if first else _NOTHING


def _frequency(value: Any, _: _Document) -> _Said:
    """Megatron-LM's --moe-layer-freq, an expression of a list, too; DeepSeek has the number 1."""
    found = re.fullmatch(r"\(?\[0\]\*(\d+) ?\+ ?\[1\]\*\d+\)?", str(value))
    if found:
        return _Said("num_dense_layers", int(found[1]))
    if isinstance(value, list):
        return _dense_first([not each for each in value])
    everywhere = value in (None, 1) or re.fullmatch(r"1|\(?\[1\]\*\d+\)?", str(value))
    return _NOTHING if everywhere else _KINDS


def _dense_layers(value: Any, _: _Document) -> _Said:
    """Positions of the dense layers, from 0."""
    if not value:
        return _NOTHING
    is_first = isinstance(value, list) and value == list(range(len(value)))
    return _Said("num_dense_layers", len(value)) if is_first else _KINDS


def _expert_layers(value: Any, values: _Document) -> _Said:
    """Positions of the layers with experts, from 0, in a list or a text such as "3,4,5"."""
    places = str(value).strip("[]").replace(" ", "").split(",") if value else []
    if not places:
        return _NOTHING
    num_layers = _whole(values, "num_layers")
    first = num_layers - len(places)
    if first < 0 or places != [str(place) for place in range(first, num_layers)]:
        return _KINDS
    return _Said("num_dense_layers", first) if first else _NOTHING


def _last_expert_layer(value: Any, values: _Document) -> _Said:
    """The position of the last layer with experts; -1 is the last layer."""
    last = (None, -1, _whole(values, "num_layers") - 1)
    return _NOTHING if value in last else _KINDS


def _whole(values: _Document, ours: str) -> int:
    """The value of a field of ours under any name; 0: it is not stated as a whole number."""
    names = (ours, *SAME_VALUE[ours].split())
    stated = (alike(values.get(name)) for name in names)
    found = [value for value in stated if isinstance(value, int)]
    return min(found[0], 1 << 20) if found else 0


_SAID_TYPES: Final = words_of(
    "full_attention sliding_attention attention mamba linear_attention mlp moe"
)


def _full_attention(is_full: Sequence[bool]) -> _Said:
    every = is_full.index(True) + 1 if True in is_full else 0
    if every < 2 and all(each == bool(every) for each in is_full):
        return _NOTHING
    pattern = [every > 1 and (place + 1) % every == 0 for place in range(len(is_full))]
    if list(is_full) != pattern:
        return _KINDS
    return _Said("full_attention_every", every)


def _layer_types(value: Any, _: _Document) -> _Said:
    if not isinstance(value, list) or not value:
        return _NOTHING
    if not {"full_attention", "sliding_attention"} >= set(map(str, value)):
        is_said = set(map(str, value)) <= {*_SAID_TYPES}
        return _KINDS if is_said else _Said(not_covered=OTHER_LAYERS)
    return _full_attention([each == "full_attention" for each in value])


def _window_skips(value: Any, _: _Document) -> _Said:
    """Every n-th layer is full; or, layer by layer, 1 or L for a window and 0 or G for none."""
    if isinstance(value, list) or (isinstance(value, str) and {*value} <= {"L", "G"}):
        return _full_attention([each in (0, "G") for each in value])
    return _Said("full_attention_every", value) if value else _NOTHING


def _window_size(value: Any, _: _Document) -> _Said:
    """Megatron-LM's --window-size, which does not count the token itself."""
    found = re.match(r"[\[(]?(\d+),", str(value))
    if found:
        return _Said("attention_window", int(found[1]) + 1)
    is_number = isinstance(value, int) and value > 0
    return _Said("attention_window", value) if is_number else _NOTHING


def _sliding_window(value: Any, values: _Document) -> _Said:
    """Qwen's has an effect if `use_sliding_window` is true, from layer `max_window_layers` on."""
    if value is None or values.get("use_sliding_window") is False:
        return _NOTHING
    first = values.get("max_window_layers")
    if values.get("use_sliding_window") and isinstance(first, int) and first > 0:
        return _KINDS if first < _whole(values, "num_layers") else _NOTHING
    return _Said("attention_window", value)


def _attention_types(value: Any, _: _Document) -> _Said:
    """GPT-Neo's layers, "global" or "local", also as pairs of a list and its repetitions."""
    kinds = re.findall(r"global|local", str(value)[: 1 << 14])
    return _full_attention([each == "global" for each in kinds])


def _attention(value: Any, values: _Document) -> _Said:
    """How attention is computed; Megatron-LM's local layers are unfused with any backend."""
    is_local = values.get("transformer_impl") == "local"
    kind = "unfused" if is_local else ATTENTION_KINDS.get(str(value)[:80].lower())
    return _Said("attention", kind) if kind else _NOTHING


def _rounded_width(_: Any, values: _Document) -> _Said:
    """Llama's width: two thirds of 4 h, times a factor, rounded up to a multiple."""
    multiple, factor = values.get("multiple_of") or 256, values.get("ffn_dim_multiplier") or 1
    hidden = _whole(values, "hidden_size")
    if not isinstance(multiple, int) or multiple < 1 or not hidden:
        return _NOTHING
    if not isinstance(factor, (int, float)) or not 0 < factor < 1 << 10:
        return _NOTHING
    return _Said("ffn_hidden_size", -(-int(factor * (8 * hidden // 3)) // multiple) * multiple)


def _query_groups(value: Any, values: _Document) -> _Said:
    """Megatron-LM's option is without effect unless --group-query-attention is given."""
    is_option = not OPTIONS.isdisjoint(values) or "group_query_attention" in values
    is_ignored = is_option and not values.get("group_query_attention")
    return _Said("num_kv_heads", value) if value and not is_ignored else _NOTHING


def _shared_experts(value: Any, values: _Document) -> _Said:
    """A number of shared experts; ours is the width of all of them together."""
    if not value:
        return _NOTHING
    value = alike(value)
    width = _whole(values, "moe_ffn_hidden_size") or _whole(values, "ffn_hidden_size")
    is_known = width and isinstance(value, int)
    return _Said(
        "shared_expert_ffn_hidden_size",
        value * width if is_known else f"{shown(value)} * moe_intermediate_size",
    )


def _has_norm(kind: str, values: _Document) -> bool:
    stated = str(values.get("normalization", "")).lower()
    return kind.lower() in stated or bool(set(NORMS[kind]) & set(values))


def _is_gated(values: _Document) -> bool:
    is_gated = values.get("swiglu") or values.get("gated_linear_unit")
    return bool(is_gated) or any(str(values.get(name)) in GATED for name in ACTIVATIONS)


def _is_llama(values: _Document) -> bool:
    """Whether feed-forward, norms or positions are not those of the family gpt."""
    positions = str(values.get("position_embedding_type", ""))
    is_rotary = not ROTARY.isdisjoint(values) or positions.startswith(("rope", "rotary"))
    is_stated = "llama" in (values.get("family"), _defaults(values).get("family"))
    return _is_gated(values) or _has_norm("RMSNorm", values) or is_rotary or is_stated


def _family(value: Any, values: _Document) -> _Said:
    """The family; of llama with two matrices, which the family does not say, the activation."""
    if not _is_llama(values):
        return _Said("family", "gpt")
    if _is_gated(values) or _defaults(values).get("family"):
        return _Said("family", "llama")
    is_squared = value == "relu2" or values.get("squared_relu")
    return _Said("activation", "relu2" if is_squared else "gelu")


def _norm(_: Any, values: _Document) -> _Said:
    """LayerNorm where the family alone would mean RMSNorm."""
    is_plain = _has_norm("RMSNorm", values) or _defaults(values).get("family")
    is_other = _is_llama(values) and _has_norm("LayerNorm", values) and not is_plain
    return _Said("norm", "layer") if is_other else _NOTHING


def _biases(_: Any, values: _Document) -> _Said:
    """Which matrices have biases; those of the family gpt have them without a word."""
    if values.get("family") == "gpt" or _family(None, values).value == "gpt":
        return _NOTHING
    of_attention, of_all = values.get("attention_bias"), values.get("mlp_bias")
    if values.get("add_bias_linear") or values.get("use_bias") or (of_attention and of_all):
        return _Said("biases", "all")
    is_qkv = values.get("add_qkv_bias") or values.get("qkv_bias")
    word = "attention" if of_attention else "qkv" if is_qkv else ""
    return _Said("biases", word) if word else _NOTHING


_SPECIAL: Final[Mapping[str, Callable[[Any, _Document], _Said]]] = {
    **dict.fromkeys((*ACTIVATIONS, "swiglu", "gated_linear_unit", "squared_relu"), _family),
    **dict.fromkeys(("normalization", *NORMS["LayerNorm"]), _norm),
    **dict.fromkeys(
        words_of("attention_bias qkv_bias add_qkv_bias add_bias_linear use_bias"), _biases
    ),
    **dict.fromkeys(
        words_of("n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts"),
        _shared_experts,
    ),
    "model_type": lambda value, _: _Said(not_covered=MODEL_TYPES.get(str(value), "")),
    "moe_layer_freq": _frequency,
    "mlp_only_layers": _dense_layers,
    "moe_layers": _expert_layers,
    "moe_layers_enum": _expert_layers,
    "moe_layer_end_index": _last_expert_layer,
    "mlp_layer_types": lambda value, _: _dense_first(
        [each == "dense" for each in value] if isinstance(value, list) else []
    ),
    "layer_types": _layer_types,
    "attn_type_list": lambda value, _: _Said(
        not_covered=OTHER_LAYERS if isinstance(value, list) and 0 in value else ""
    ),
    "attention_layers": _attention_types,
    "attention_types": _attention_types,
    "sliding_window_pattern": _window_skips,
    "word_embed_proj_dim": lambda value, values: _Said(
        not_covered=WIDTHS if value and value != _whole(values, "hidden_size") else ""
    ),
    "multiple_of": _rounded_width,
    "ffn_dim_multiplier": _rounded_width,
    "num_query_groups": _query_groups,
    "window_attn_skip_freq": _window_skips,
    "window_size": _window_size,
    "sliding_window": _sliding_window,
    **dict.fromkeys(ATTENTION_WORDS, _attention),
    "dropout": lambda value, _: _Said("hidden_dropout", value) if value else _NOTHING,
    "multi_query": lambda value, _: _Said("num_kv_heads", 1) if value else _NOTHING,
    "untie_embeddings_and_output_weights": lambda value, _: _Said("tied_embeddings", not value),
}
"""Words whose value is not that of a field of ours."""

WORDS: Final = frozenset((*OUR_FIELDS, *_SPECIAL, *STEPS, *NOT_COVERED))
"""All words with a meaning for the shape."""


def model_words(words: Iterable[str]) -> list[str]:
    """Those words that describe a model, here or elsewhere; nothing where fewer than two do."""
    names = {word: _name_of(word) for word in words}
    if sum(name in WORDS or name in SAME_VALUE for name in names.values()) < 2:
        return []
    known = (word for word, name in names.items() if name in SAME_VALUE or _meaning(name, None, {}))
    return list(known)
