"""Reads the config.json of a decoder, as transformers 4 and 5 write it, into a shape.

What a shape cannot say is listed in its `lacks`, or the file is refused: see `config_features`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from layout_tuner.documents.reading import MAX_TEXT_LENGTH, shown, word_of
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.config_families import (
    ALIBI,
    ENCODER,
    FAMILIES,
    NESTED_SIZES,
    REFUSED,
    SAME_FAMILY,
    TEXT_TYPES,
    ConfigFamily,
)
from layout_tuner.search_spaces.models.config_features import (
    FEATURES,
    MOST_SHARE,
    OF_EXPERTS,
    SAID,
    Feature,
    feature,
    refused_features,
)
from layout_tuner.search_spaces.models.config_layers import (
    ConfigLayers,
    config_layers,
    kind_named,
)
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
    OF_LATENTS,
    OF_LINEAR_LAYERS,
    OF_MAMBA,
    OF_SCORES,
    POSITIONS,
    ROTARY_BASE,
    SCALING,
    SHARED_EXPERTS,
    SHARED_WIDTH,
    TAPS,
    WIDTH,
    ConfigWords,
)
from layout_tuner.search_spaces.models.foreign_words import WIDTHS, words_of
from layout_tuner.search_spaces.models.layer_kinds import sublayers_of
from layout_tuner.search_spaces.models.model_fields import MODEL_RANGES, Activation
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.models.sublayers import CONVOLUTION
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
            f"no field of a model says {said}: more than {MOST_SHARE:.1%} of its parameters or "
            "FLOPs"
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
    fields, layers, left = _fields(words, kind, family, seq_length)
    shape = ModelShape(name="custom", **fields)
    depth = words.get("mtp_hybrid_override_pattern") or words.get("mtp_layers_block_type")
    kinds = tuple(kind_named(str(each)) for each in depth) if isinstance(depth, (str, list)) else ()
    if shape.mtp_kinds and depth and kinds != shape.mtp_kinds:
        raise _refusal(kind, "other layers of multi-token prediction than its last ones")
    features = (*layers.features(shape), *_features(words, family, shape, left))
    others = (*towers, *_costless(words, family), *words.unknown(kind, bool(family.linear)))
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
    if kind in ("codegen", "gptj") and isinstance(values.get("n_embd"), int):
        values["n_inner"] = values.get("n_inner") or 4 * values["n_embd"]
    if kind == "qwen" and isinstance(values.get("intermediate_size"), int):
        values["intermediate_size"] //= 2  # of gate and up together
    if kind == "dbrx":
        for part in ("attn_config", "ffn_config"):
            if isinstance(values.get(part), Mapping):
                values |= {each: value for each, value in values.pop(part).items() if value}
    return _renamed_of_hybrids(kind, values)


def _renamed_of_hybrids(kind: str, values: dict[str, Any]) -> dict[str, Any]:
    if kind == "granitemoehybrid":
        values["is_rotary"] = values.pop("position_embedding_type", None) == "rope"
        if values.get("num_local_experts") == 0:
            values["intermediate_size"] = values.pop("shared_intermediate_size", None)
    if kind == "nemotron_h":  # its layers are single sublayers, and their list is their number
        stated = values.pop("hybrid_override_pattern", None) or values.get("layers_block_type")
        values["layer_types"] = stated = stated or values.get("layer_types")
        if isinstance(stated, (str, list)):
            number = len(stated)
            if (also := values.get("num_hidden_layers")) not in (number, None):
                raise ModelShapeInvalidError(
                    f"num_hidden_layers={shown(also)} and a pattern of {number} layers contradict "
                    "each other: look up which one is right, and take num_hidden_layers out"
                )
            values |= {"layer_types": list(stated), "num_hidden_layers": number}
        values.pop("n_shared_experts", None)  # the width is that of all of them
    part, layers = values.get("linear_attn_config"), values.get("num_hidden_layers")
    if kind == "kimi_linear" and isinstance(part, Mapping):  # it counts layers from 1
        del values["linear_attn_config"]
        full, kda = part.get("full_attn_layers"), part.get("kda_layers")
        if not isinstance(full, list) or not isinstance(kda, list) or len(full + kda) != layers:
            raise _refusal("linear_attn_config", f"not one kind for each of {shown(layers)} layers")
        numbers = range(1, layers + 1)
        values["layer_types"] = ["*" if each in full else "M" for each in numbers]
        names = ("head_dim", "num_heads", "short_conv_kernel_size")
        values |= {f"linear_{each}": part[each] for each in names if each in part}
    if stated := values.pop("layers_block_type", None):
        values["layer_types"] = stated
    return values


def _fields(
    words: ConfigWords, kind: str, family: ConfigFamily, seq_length: int
) -> tuple[dict[str, Any], ConfigLayers, list[str]]:
    """Fields of the shape, its layers, and the names of the features that no field says."""
    layers = words.needed(LAYERS)
    if problem := MODEL_RANGES["num_layers"].problem(layers):
        raise ModelShapeInvalidError(f"num_hidden_layers={problem}")
    hidden, heads = words.needed(HIDDEN), words.needed(HEADS)
    said = config_layers(words, family, layers, seq_length)
    fields: dict[str, Any] = {
        "family": "gpt" if family.kind == "gpt" else "llama",
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _kv_heads(words, heads),
        "seq_length": seq_length,
        "vocab_size": words.whole("padded_vocab_size") or words.needed(("vocab_size",)),
        "tied_embeddings": words.switch("tie_word_embeddings"),
        "attention_dropout": words.number(*ATTENTION_DROPOUT) or None,
        "hidden_dropout": words.number(*HIDDEN_DROPOUT) or 0.0,
        **said.fields,
    }
    left = words.switched(family.features)
    if family.kind == "gpt":
        fields["ffn_hidden_size"] = words.whole(*WIDTH) or 4 * hidden
        if words.whole("word_embed_proj_dim") not in (None, hidden):
            raise _refusal(kind, WIDTHS)
        return fields, said, left
    if words.get("num_attention_heads_per_layer") not in (None, heads):
        fields |= _heads_by_kind(words, kind, said.kinds)
    width = None if kind in ("stablelm", "persimmon") else words.whole(*HEAD_DIM)
    # Classes with `moe_intermediate_size` round down; those of llama refuse such a width.
    rounds = width is None and family.kind == "experts" and heads > 0
    fields["head_dim"] = hidden // heads if rounds else width
    if base := words.number(*ROTARY_BASE):
        fields["rotary_base"] = float(base)
    fields["activation"] = _activation(words, family)
    depths = (words.whole(*MTP_MODULES) or 0) * (words.whole("mtp_transformer_layers") or 1)
    fields["num_mtp_layers"] = 0 if words.get("use_mtp") is False else depths
    fields |= _feed_forwards(words, family, said.kinds) | _states(words, hidden, said.kinds)
    if "head_gate" in left and words.get("gating") not in (True, "per-head"):
        left[left.index("head_gate")] = "output_gate"
    has_experts = "num_experts" in fields
    for name in left:
        of_experts = name in OF_EXPERTS
        fields |= SAID.get(name, {}) if has_experts or not of_experts else {}
    if "kv_lora_rank" in family.defaults:
        fields |= {name: words.whole(name) or 0 for name in OF_LATENTS}
        fields |= {"num_kv_heads": heads, "head_dim": None}
        fields["v_head_dim"] = fields["v_head_dim"] or hidden // max(heads, 1)
    else:
        share = words.rotary_share(fields["head_dim"] or hidden // max(heads, 1))
        fields = {"rotary_fraction": share} | fields | _biases(left, said.kinds, fields)
    kept = ("routing_bias",) * has_experts + ("unrotated",)
    left = [each for each in left if each in FEATURES and (each not in SAID or each in kept)]
    return fields, said, left


def _heads_by_kind(words: ConfigWords, kind: str, kinds: Sequence[str]) -> dict[str, int]:
    """Heads of layers with a window and of others, from those of each layer."""
    heads = words.whole_numbers("num_attention_heads_per_layer", len(kinds)) or []
    pairs = {(sublayers_of(each)[0], own) for each, own in zip(kinds, heads, strict=True)}
    by_mixer = dict(pairs)
    if len(pairs) != 2 or {*by_mixer} != {"full", "window"}:
        raise _refusal(kind, WIDTHS)
    return {"num_heads": by_mixer["full"], "window_num_heads": by_mixer["window"]}


def _biases(left: list[str], kinds: Sequence[str], fields: Mapping[str, Any]) -> dict[str, str]:
    """The field that says the biases; their features are taken out of `left`."""
    inner = {sublayers_of(each)[1] for each in kinds}
    attention = all_of = {"qkv_biases", "o_bias"}
    all_of = all_of | ({"expert_biases"} if "experts" in inner else set())
    if "dense" in inner or fields.get("shared_expert_ffn_hidden_size"):
        all_of |= {"mlp_biases"}
    steps = {"all": all_of, "attention": attention, "qkv": {"qkv_biases"}, "none": set()}
    found = next(word for word, covered in steps.items() if covered <= {*left})
    left[:] = [each for each in left if each not in steps[found]]
    if "expert_biases" in left:
        raise _refusal("the model", "biases of experts without all others")
    return {"biases": found} if found != "none" else {}


def _states(words: ConfigWords, hidden: int, kinds: Sequence[str]) -> dict[str, int]:
    """Heads of gated delta nets, of KDA and of Mamba-2."""
    mixers = {sublayers_of(each)[0] for each in kinds}
    fields: dict[str, int] = {}
    if {"gated_delta_net", "kda"} & mixers:
        fields |= {ours: words.needed(theirs) for ours, theirs in OF_LINEAR_LAYERS.items()}
    if "mamba2" in mixers:
        heads, width = words.needed(OF_MAMBA["mamba_num_heads"]), OF_MAMBA["mamba_head_dim"]
        if words.get(*width) in (None, "auto"):
            fields["mamba_head_dim"] = hidden * (words.whole("mamba_expand") or 2) // max(heads, 1)
        said = {ours: theirs for ours, theirs in OF_MAMBA.items() if ours not in fields}
        fields |= {ours: words.needed(theirs) for ours, theirs in said.items()}
    taps = words.whole(*TAPS)
    if fields and taps not in (None, CONVOLUTION):
        raise _refusal(f"{words.stated(*TAPS)}={taps}", f"not {CONVOLUTION} taps of convolutions")
    for word in ("use_conv_bias", "mamba_conv_bias", "mamba_proj_bias", "use_bias"):
        if "mamba2" in mixers and words.get(word) not in (None, "conv" in word):
            raise _refusal(f"{word}={word_of(words.get(word))}", "other biases of Mamba-2")
    return fields


def _activation(words: ConfigWords, family: ConfigFamily) -> Activation | None:
    """The feed-forward, by the family and by the function that the file names."""
    named = str(next(filter(None, map(words.get, ACTIVATION)), ""))
    if "two_matrices" in family.features:
        return "relu2" if named == "relu2" else "gelu"
    return "geglu" if "gelu" in named or named == "geglu" else None


def _kv_heads(words: ConfigWords, heads: int) -> int:
    if words.get("multi_query") is True:
        return 1
    stated = words.whole(*KV_HEADS)
    return heads if stated is None or words.get("multi_query_attention") is False else stated


def _feed_forwards(
    words: ConfigWords, family: ConfigFamily, kinds: Sequence[str]
) -> dict[str, Any]:
    """Widths of feed-forwards and experts, and how tokens choose experts."""
    inner = {sublayers_of(each)[1] for each in kinds}
    words.get("intermediate_size")  # without effect where all layers have experts
    fields = {"ffn_hidden_size": words.needed(WIDTH)} if "dense" in inner else {}
    if "experts" not in inner:
        return fields
    of_expert = ("intermediate_size", "moe_intermediate_size", "ffn_hidden_size")
    width = words.needed(of_expert if family.kind == "wide" else ("moe_intermediate_size",))
    shared = words.whole(*SHARED_WIDTH) or (words.whole(*SHARED_EXPERTS) or 0) * width
    score, taken = words.get(*OF_SCORES), words.whole("topk_group")
    groups = words.whole("n_group", "num_expert_group") or 0
    grouped = groups > 1 and words.get("topk_method") != "greedy"
    return {
        "ffn_hidden_size": width,
        **fields,
        "num_experts": words.needed(EXPERTS),
        "experts_per_token": words.needed(EXPERTS_PER_TOKEN),
        "moe_ffn_hidden_size": width,
        "shared_expert_ffn_hidden_size": shared,
        "expert_latent_size": words.whole("moe_latent_size") or 0,
        **({"router_score": "sigmoid"} if score == "sigmoid" else {}),
        **({"router_groups": groups, "router_topk_groups": taken or 1} if grouped else {}),
        "router_scaling_factor": float(words.number(*SCALING) or 1.0),
    }


def _features(
    words: ConfigWords, family: ConfigFamily, shape: ModelShape, left: Sequence[str]
) -> Iterator[Feature]:
    yield from (feature(name, shape) for name in left)
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
    is_plain = family.kind == "gpt" or "two_matrices" in family.features
    plain, *others = ("gelu", "relu2") if is_plain else ("silu", "gelu", "geglu", "swish", "swiglu")
    others = [] if family.kind == "gpt" else others
    activation = str(next(filter(None, map(words.get, ACTIVATION)), plain))
    if not any(each in activation for each in (plain, *others)):
        yield f"the activation {activation[:40]} in place of {plain}"
    for text, (names, usual) in COSTLESS.items():
        if [name for name in names.split() if words.get(name) not in usual]:  # asks for all
            yield text
    yield from words.rotary()
