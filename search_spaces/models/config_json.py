"""Reads the config.json of a decoder, as transformers 4 and 5 write it, into a shape.

What a shape cannot say is listed in its `lacks`, or the file is refused: see `config_features`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from layout_tuner.documents.reading import MAX_TEXT_LENGTH, shown
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.config_families import (
    ALIBI,
    ENCODER,
    FAMILIES,
    MAMBA,
    NESTED_SIZES,
    PARALLEL,
    REFUSED,
    SAME_FAMILY,
    TEXT_TYPES,
    ConfigFamily,
)
from layout_tuner.search_spaces.models.config_features import (
    MOST_SHARE,
    Feature,
    feature,
    multi_token_prediction,
    refused_features,
)
from layout_tuner.search_spaces.models.config_layers import attention_layers, layers_with_experts
from layout_tuner.search_spaces.models.config_words import (
    ACTIVATION,
    ATTENTION_DROPOUT,
    COSTLESS,
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    HIDDEN_DROPOUT,
    KV_HEADS,
    LAYERS,
    MTP_MODULES,
    POSITIONS,
    ROTARY_BASE,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    WIDTH,
    ConfigWords,
)
from layout_tuner.search_spaces.models.foreign_words import EXPERTS as SPARSE_LAYERS
from layout_tuner.search_spaces.models.foreign_words import WIDTHS, words_of
from layout_tuner.search_spaces.models.model_fields import MODEL_RANGES
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import listed

_NESTED: Final = ("text_config", "llm_config", "language_config")
_TOWERS: Final = {
    "a tower for pictures": words_of(
        "vision_config visual vision_tower mm_vision_tower vit_config img_processor embd_layer"
    ),
    "a tower for sound": words_of("audio_config audio_processor speech_config"),
}
_HEADLESS: Final = re.compile(
    r"(?<!LMHead)(?<!ChatGLM)Model$|\w+For(Sequence|Token)Classification$"
)


def is_config_json(document: object) -> bool:
    """Whether a document is Hugging Face's description of a model."""
    return isinstance(document, Mapping) and bool({"model_type", "architectures"} & set(document))


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigDecoder:
    """The decoder of a config.json: a shape, and what it has beside it."""

    shape: ModelShape
    features: tuple[Feature, ...]
    """What has parameters or matrix products."""
    others: tuple[str, ...]
    """What has neither, by name, and towers for pictures or sound."""


def shape_of_config(
    document: Mapping[str, Any], *, seq_length: int | None, name: str = "custom"
) -> ModelShape:
    """The shape of the decoder that a config.json describes.

    What changes neither parameters nor FLOPs by more than `MOST_SHARE` is named in `lacks`, and so
    is a tower for pictures or sound.

    Args:
        document: the file's fields.
        seq_length: tokens per sequence, which the file does not say: its longest ones are those
            that the model can take. None: the error asks for it.
        name: the name of the shape.

    Raises:
        ModelShapeInvalidError: the family is not known, the shape cannot say what it has, or a
            field is missing, wrong or contradicts another.
    """
    decoder = decoder_of_config(document, seq_length=seq_length)
    if refused := list(refused_features(decoder.shape, decoder.features)):
        said = listed([f"{each.name} ({each.share(decoder.shape):.1%})" for each in refused], 5)
        raise ModelShapeInvalidError(
            f"no field of a model says {said}: more than {MOST_SHARE:.1%} of its parameters or FLOPs"
            f"{''.join(each.without for each in refused)}"
        )
    lacks = ", ".join(dict.fromkeys((*(each.name for each in decoder.features), *decoder.others)))
    if len(lacks) > MAX_TEXT_LENGTH:
        lacks = lacks[: MAX_TEXT_LENGTH - 5] + ", ..."
    return replace(decoder.shape, name=name, lacks=lacks)


def decoder_of_config(document: Mapping[str, Any], *, seq_length: int | None) -> ConfigDecoder:
    """The decoder that a config.json describes, whatever its shape lacks; see `shape_of_config`."""
    kind, values, towers = _decoder(document)
    family = FAMILIES[kind]
    _refuse_not_finite(document)
    if seq_length is None:
        raise ModelShapeInvalidError.of_field(
            "seq_length",
            "a config.json does not say the length of training sequences; state it with "
            "--seq-length, or as seq_length beside config",
        )
    words = ConfigWords(values, family.defaults)
    fields, of_attention = _fields(words, kind, family, seq_length)
    shape = ModelShape(name="custom", **fields)
    features = (*of_attention(shape), *_features(words, family, shape))
    others = (*towers, *_costless(words, family), *words.unknown(kind))
    return ConfigDecoder(shape=shape, features=features, others=others)


def _decoder(document: Mapping[str, Any]) -> tuple[str, dict[str, Any], list[str]]:
    """The family of the decoder of a file, its words, and the towers beside it."""
    outer = document.get("thinker_config") or document
    if not isinstance(outer, Mapping):
        raise ModelShapeInvalidError(f"thinker_config={shown(outer)} is not a mapping")
    if outer.get("is_encoder_decoder") or outer.get("add_cross_attention"):
        raise _refusal("the model", ENCODER)
    towers = [what for what, words in _TOWERS.items() if any(outer.get(each) for each in words)]
    inner = next((each for each in _NESTED if outer.get(each)), None)
    if inner is None:
        kind = _family(outer)
        left_out = {word for words in _TOWERS.values() for word in words}
        values = {word: value for word, value in outer.items() if word not in left_out}
        return kind, _renamed(kind, values), towers
    stated = outer[inner]
    if not isinstance(stated, Mapping):
        raise ModelShapeInvalidError(f"{inner}={shown(stated)} is not a mapping")
    values = {"model_type": TEXT_TYPES.get(str(outer.get("model_type"))), **stated}
    kind = _family(values)
    word = "tie_word_embeddings"
    if ties := [each[word] for each in (outer, values) if each.get(word) is not None]:
        values[word] = True in ties or ties[0]
    return kind, _renamed(kind, {**NESTED_SIZES.get(kind, {}), **values}), towers


def _family(values: Mapping[str, Any]) -> str:
    """The family by `model_type`, or by `architectures`; refuses all others."""
    stated, built = values.get("model_type"), values.get("architectures")
    classes = [str(each) for each in built] if isinstance(built, list) else []
    named = re.sub(r"_text(_model)?$", "", str(stated or ""))
    if draft := next((each for each in classes if re.search("Eagle|Medusa", each)), ""):
        raise _refusal(draft, "layers of a draft model")
    for each in (named, *(_type_of(each) for each in classes)):
        kind = SAME_FAMILY.get(each, each)
        if what := REFUSED.get(kind):
            raise _refusal(each, what)
        if kind in FAMILIES:
            if classes and all(map(_HEADLESS.search, classes)):
                raise _refusal(classes[0], "no output projection to the vocabulary")
            return kind
    said = f"model_type={shown(stated)}" if stated else "the file, without a model_type,"
    raise ModelShapeInvalidError(
        f"{said} is of no family of decoders whose config.json is read; write the shape itself, with "
        "its num_layers, hidden_size and so on"
    )


def _type_of(architecture: str) -> str:
    """The model_type whose class this is: Qwen3MoeForCausalLM is that of qwen3_moe."""
    plain = re.sub(r"(For(CausalLM|ConditionalGeneration)|LMHeadModel|Model)$", "", architecture)
    plain = plain.lower().replace("_", "")
    known = (*FAMILIES, *SAME_FAMILY, *REFUSED)
    return next((each for each in known if re.sub("[_-]", "", each.lower()) == plain), "")


def _refusal(who: str, what: str) -> ModelShapeInvalidError:
    return ModelShapeInvalidError(f"{shown(who)} has {what}, which no field of a model says")


def _refuse_not_finite(value: Any, word: str = "") -> None:
    """Refuses NaN and infinity, as the reader of such files marks them; not below 100 levels."""
    if isinstance(value, Mapping):
        if "__float__" in value:
            raise ModelShapeInvalidError(f"{word}={value['__float__']} is not a finite number")
        for each, inside in value.items():
            if each != "time_step_limit":  # of Mamba layers, whose files say infinity
                _refuse_not_finite(inside, each)
    elif isinstance(value, list):
        for inside in value:
            _refuse_not_finite(inside, word)


def _renamed(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    """The words of families in which the same words mean something else."""
    if kind == "llama4":  # intermediate_size is that of experts and of the shared one
        values["moe_intermediate_size"] = values.pop("intermediate_size", 8192)
        values["intermediate_size"] = values.pop("intermediate_size_mlp", None) or 16384
        values["num_shared_experts"] = 1
    if kind == "chatglm":
        ratio = values.get("rope_ratio", 1)
        values["rope_theta"] = 1e4 * ratio if isinstance(ratio, (int, float)) else ratio
    if kind == "baichuan" and "max_position_embeddings" not in values:
        raise _refusal(kind, ALIBI)
    if kind == "qwen" and isinstance(values.get("intermediate_size"), int):
        values["intermediate_size"] //= 2  # of gate and up together
    if kind == "dbrx":
        for part in ("attn_config", "ffn_config"):
            if isinstance(values.get(part), Mapping):
                values |= {each: value for each, value in values.pop(part).items() if value}
    if kind == "granitemoehybrid":
        values["layer_types"] = values.get("layer_types") or values.pop("layers_block_type", None)
        if values["layer_types"] is None:  # Mamba in all layers, by default
            raise _refusal(kind, MAMBA)
        values = {word: value for word, value in values.items() if not word.startswith("mamba_")}
        if values.get("num_local_experts") == 0:
            values["intermediate_size"] = values.pop("shared_intermediate_size", None)
    return values


def _fields(
    words: ConfigWords, kind: str, family: ConfigFamily, seq_length: int
) -> tuple[dict[str, Any], Callable[[ModelShape], Iterator[Feature]]]:
    """Fields of the shape, and what makes the features that its attention lacks."""
    layers = words.needed(LAYERS)
    if problem := MODEL_RANGES["num_layers"].problem(layers):
        raise ModelShapeInvalidError(f"num_hidden_layers={problem}")
    hidden, heads = words.needed(HIDDEN), words.needed(HEADS)
    is_gpt = family.kind == "gpt"
    heads_by_layer = words.get("num_attention_heads_per_layer")
    if heads_by_layer not in (None, heads):
        raise _refusal(kind, WIDTHS)
    windows = attention_layers(words, family, layers, seq_length)
    fields: dict[str, Any] = {
        "family": "gpt" if is_gpt else "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _kv_heads(words, heads),
        "seq_length": seq_length,
        "vocab_size": words.whole("padded_vocab_size") or words.needed(("vocab_size",)),
        "tied_embeddings": words.switch("tie_word_embeddings"),
        "attention_window": windows.window,
        "full_attention_every": windows.every,
        "attention_dropout": words.number(*ATTENTION_DROPOUT) or None,
        "hidden_dropout": words.number(*HIDDEN_DROPOUT) or 0.0,
    }
    if is_gpt:
        fields["ffn_hidden_size"] = words.whole(*WIDTH) or 4 * hidden
        if words.whole("word_embed_proj_dim") not in (None, hidden):
            raise _refusal(kind, WIDTHS)
    else:
        width = None if kind == "stablelm" else words.whole(*HEAD_DIM)
        # Classes with `moe_intermediate_size` round down; those of llama refuse such a width.
        rounds = width is None and family.kind == "experts" and heads > 0
        fields["head_dim"] = hidden // heads if rounds else width
        fields["qk_norm"] = "head_norm" in words.switched(family.features)
        if base := words.number(*ROTARY_BASE):
            fields["rotary_base"] = float(base)
        fields |= _feed_forwards(words, kind, family, layers)
    return fields, windows.features


def _kv_heads(words: ConfigWords, heads: int) -> int:
    if words.get("multi_query") is True:
        return 1
    stated = words.whole(*KV_HEADS)
    return heads if stated is None or words.get("multi_query_attention") is False else stated


def _feed_forwards(
    words: ConfigWords, kind: str, family: ConfigFamily, layers: int
) -> dict[str, Any]:
    """Widths of feed-forwards and experts, and how many of the first layers are dense."""
    has_experts = family.kind in ("experts", "wide")
    words.get("intermediate_size")  # without effect where all layers have experts
    if not (has_experts and words.needed(EXPERTS)):
        return {"ffn_hidden_size": words.needed(WIDTH)}
    with_experts = layers_with_experts(words, layers)
    dense = with_experts.index(True) if True in with_experts else layers
    if not all(with_experts[dense:]):
        raise _refusal(kind, SPARSE_LAYERS)
    if dense == layers:
        return {"ffn_hidden_size": words.needed(WIDTH)}
    of_expert = ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size")
    width = words.needed(of_expert if family.kind == "wide" else ("moe_intermediate_size",))
    shared = words.whole(*SHARED_WIDTH) or (words.whole(*SHARED_EXPERTS) or 0) * width
    return {
        "ffn_hidden_size": words.needed(WIDTH) if dense else width,
        "num_experts": words.needed(EXPERTS),
        "experts_per_token": words.needed(EXPERTS_PER_TOKEN),
        "moe_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": shared,
        "num_dense_layers": dense,
    }


def _features(words: ConfigWords, family: ConfigFamily, shape: ModelShape) -> Iterator[Feature]:
    for name in words.switched(family.features):
        if name == "parallel":
            raise _refusal("use_parallel_residual", PARALLEL)
        if name == "head_gate" and words.get("gating") not in (True, "per-head"):
            name = "output_gate"
        if name != "head_norm":
            yield feature(name, shape)
    modules = words.whole(*MTP_MODULES) or 0
    if modules and words.get("use_mtp") is not False:
        modules *= words.whole("mtp_transformer_layers") or 1
        yield multi_token_prediction(shape, modules, words.stated(*MTP_MODULES))
    if family.kind == "gpt":
        longest = words.needed(POSITIONS)
        if longest < shape.seq_length:
            raise ModelShapeInvalidError(
                f"seq_length={shape.seq_length} is more than the {longest} learned positions of the "
                "model"
            )
        rows = longest + (words.whole("extra_positions") or 0)
        if rows != shape.seq_length:
            more = (rows - shape.seq_length) * shape.hidden_size
            yield Feature(name=f"{rows} learned positions", parameters=more)


def _costless(words: ConfigWords, family: ConfigFamily) -> Iterator[str]:
    """What changes neither parameters nor products of matrices."""
    plain = "gelu" if family.kind == "gpt" else "silu"
    activation = str(next(filter(None, map(words.get, ACTIVATION)), plain))
    activation = "gelu" if activation == "geglu" else activation
    if plain not in activation and activation not in ("swish", "swiglu"):
        yield f"the activation {activation[:40]} in place of {plain}"
    for text, (names, usual) in COSTLESS.items():
        if [name for name in names.split() if words.get(name) not in usual]:  # asks for all
            yield text
    yield from words.rotary()
