"""Fields of a model that contradict each other, each as one sentence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.layer_kinds import (
    SHORT_FORMS,
    FeedForward,
    Mixer,
    sublayers_of,
)
from layout_tuner.search_spaces.models.model_fields import (
    DEFAULTS,
    EXPERT_FIELDS,
    LINEAR_FIELDS,
    MAMBA_FIELDS,
    MODEL_RANGES,
    NAMES,
    ROUTING_FIELDS,
)

if TYPE_CHECKING:
    from layout_tuner.search_spaces.models.model_shape import ModelShape

_LLAMA_ONLY: Final = {
    "rotary_base": "learned positions",
    "qk_norm": "no norms of queries and keys",
    "num_experts": "dense feed-forwards alone",
} | dict.fromkeys(
    NAMES[NAMES.index("layer_kinds") : NAMES.index("lacks")],
    "layers of GPT-2 alone",
)
"""Fields that other families lack, each with what these have instead."""

_LATENT: Final = ("q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

_refused = ModelShapeInvalidError.of_field


def _wrong(model: ModelShape, name: str, why: str) -> ModelShapeInvalidError:
    """A refusal of the value of a field; `why` follows it."""
    value = getattr(model, name)
    said = f"{value:g}" if isinstance(value, float) else word_of(value)
    return _refused(name, f"{name}={'[...]' if isinstance(value, tuple) else said}{why}")


def contradictions(model: ModelShape) -> Iterator[ModelShapeInvalidError]:
    """What is wrong with fields that are each in their range."""
    yield from _of_heads(model)
    for name, instead in _LLAMA_ONLY.items():
        if model.family != "llama" and getattr(model, name) != DEFAULTS[name]:
            why = f" has no meaning for family={model.family}, which has {instead}; leave it out"
            yield _wrong(model, name, why)
    if model.full_attention_every and not model.attention_window:
        why = " needs attention_window: without a window every layer attends to all positions"
        yield _wrong(model, "full_attention_every", why)
    yield from _of_latents(model)
    yield from _of_kinds(model)
    yield from _of_experts(model)
    if (model.mean_document_length or 0) > model.seq_length:
        why = f" is more than seq_length={model.seq_length}"
        yield _wrong(model, "mean_document_length", why)


def _of_heads(model: ModelShape) -> Iterator[ModelShapeInvalidError]:
    size, heads = model.hidden_size, model.num_heads
    if not model.kv_lora_rank and model.head_dim is None and size % heads:
        yield ModelShapeInvalidError(
            f"hidden_size={size} is not divisible by num_heads={heads}; "
            "state head_dim if heads have a width of their own"
        )
    if heads % model.num_kv_heads:
        yield ModelShapeInvalidError(
            f"num_heads={heads} is not divisible by num_kv_heads={model.num_kv_heads}"
        )
    own, keys = model.window_num_heads or heads, model.window_num_kv_heads or model.num_kv_heads
    if (own, keys) != (heads, model.num_kv_heads) and own % keys:
        yield _refused(
            "window_num_kv_heads",
            f"the {own} query heads of layers with a window are not divisible by their {keys} key "
            "heads",
        )
    if model.family == "llama" and model.rotary_size % 2:
        if model.kv_lora_rank:
            yield _wrong(model, "qk_rope_head_dim", " is odd; rotary positions need an even one")
            return
        if model.rotary_fraction not in (0.0, 1.0):
            why = f" rotates {model.rotary_size} of {model.head_size} features of a head; rotary"
            yield _wrong(model, "rotary_fraction", f"{why} positions need an even number")
            return
        stated = "" if model.head_dim else f"(hidden_size={size} over "
        stated += f"num_heads={heads}) " if stated else ""
        yield ModelShapeInvalidError(
            f"head size {model.head_size} {stated}is odd; rotary positions need an even one"
        )


def _of_latents(model: ModelShape) -> Iterator[ModelShapeInvalidError]:
    if not model.kv_lora_rank:
        for name in _LATENT:
            if getattr(model, name):
                yield _wrong(model, name, " is of latent attention: state kv_lora_rank too")
        return
    for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        if not getattr(model, name):
            yield _refused(name, f"the model's {name} is missing, which latent attention needs")
    if model.num_kv_heads != model.num_heads:
        why = (
            f": latent attention has as many key heads as num_heads={model.num_heads}; leave it out"
        )
        yield _wrong(model, "num_kv_heads", why)
    for name in (
        *("head_dim", "qk_norm", "attention_output_gate", "rotary_fraction", "biases"),
        *("window_num_heads", "window_num_kv_heads", "attention_sinks"),
    ):
        value = getattr(model, name)
        if value != DEFAULTS[name] and not (name == "biases" and value == "none"):
            yield _wrong(model, name, " has no meaning with latent attention; leave it out")


def _of_kinds(model: ModelShape) -> Iterator[ModelShapeInvalidError]:
    kinds = dict.fromkeys(model.kind_of_layers)
    sublayers = [sublayers_of(kind) for kind in kinds]
    mixers, inner = {mixer for mixer, _ in sublayers}, {each for _, each in sublayers}
    yield from _of_widths(model, kinds)
    if model.layer_kinds:
        yield from _of_stated_kinds(model, mixers, inner)
    if "window" not in mixers:
        for name in ("window_num_heads", "window_num_kv_heads"):
            if getattr(model, name):
                yield _wrong(model, name, ", and no layer has a window; leave it out")
    yield from _of_states(model, mixers)
    if model.parallel_block and any(None in each for each in sublayers):
        yield _refused("parallel_block", "parallel_block needs layers with both sublayers")


def _of_widths(model: ModelShape, kinds: Iterable[str]) -> Iterator[ModelShapeInvalidError]:
    has_dense = any(sublayers_of(kind)[1] == "dense" for kind in kinds)
    if has_dense and not model.ffn_hidden_size:
        problem = MODEL_RANGES["ffn_hidden_size"].problem(model.ffn_hidden_size)
        yield _refused("ffn_hidden_size", f"ffn_hidden_size={problem}")


def _of_stated_kinds(
    model: ModelShape, mixers: set[Mixer | None], inner: set[FeedForward | None]
) -> Iterator[ModelShapeInvalidError]:
    if model.num_layers % (number := len(model.layer_kinds)):
        yield _refused(
            "layer_kinds",
            f"layer_kinds names {number} layers, which do not divide num_layers={model.num_layers}: "
            "name each layer, or a pattern that is repeated whole",
        )
    for name in SHORT_FORMS:
        if getattr(model, name) != DEFAULTS[name]:
            yield _wrong(model, name, f" and layer_kinds both say the kinds; leave {name} out")
    if "window" in mixers and model.attention_window is None:
        yield _refused("attention_window", "layers with a window need attention_window")
    if model.attention_window is not None and "window" not in mixers:
        yield _wrong(model, "attention_window", ", and no layer of layer_kinds is a window")
    if "experts" in inner and not model.num_experts:
        yield _refused("layer_kinds", "layer_kinds has experts: state num_experts")
    if model.num_experts and "experts" not in inner:
        yield _refused(
            "layer_kinds",
            f"num_experts={model.num_experts}, and no layer of layer_kinds has experts: write "
            "for example full+experts",
        )


def _of_states(model: ModelShape, mixers: set[Mixer | None]) -> Iterator[ModelShapeInvalidError]:
    of_delta_nets = mixers & {"gated_delta_net", "kda"}
    yield from _belong_together(model, LINEAR_FIELDS, " and ".join(sorted(map(str, of_delta_nets))))
    yield from _belong_together(model, MAMBA_FIELDS, "mamba2" if "mamba2" in mixers else "")
    if of_delta_nets and all(getattr(model, name) for name in LINEAR_FIELDS):
        keys, values = model.linear_num_key_heads, model.linear_num_value_heads
        if values % keys:
            why = f" is not divisible by linear_num_key_heads={keys}"
            yield _wrong(model, "linear_num_value_heads", why)
        widths = model.linear_key_head_dim, model.linear_value_head_dim
        if "kda" in mixers and (keys != values or widths[0] != widths[1]):
            yield _refused(
                "linear_num_key_heads", "key and value heads of kda are alike in number and width"
            )
    if "mamba2" in mixers and model.mamba_num_heads % (model.mamba_num_groups or 1):
        why = f" is not divisible by mamba_num_groups={model.mamba_num_groups}"
        yield _wrong(model, "mamba_num_heads", why)


def _belong_together(
    model: ModelShape, names: tuple[str, ...], needed_by: str
) -> Iterator[ModelShapeInvalidError]:
    for name in names:
        value = getattr(model, name)
        if needed_by and not value:
            yield _refused(name, f"the model's {name} is missing, which {needed_by} needs")
        if value and not needed_by:
            kind = "mamba2" if name in MAMBA_FIELDS else "gated_delta_net or kda"
            yield _wrong(model, name, f", and no layer of layer_kinds is {kind}; leave it out")


def _of_experts(model: ModelShape) -> Iterator[ModelShapeInvalidError]:
    experts, chosen = model.num_experts, model.experts_per_token
    if not experts:
        for name in (*EXPERT_FIELDS[1:], *ROUTING_FIELDS):
            if getattr(model, name) != DEFAULTS[name]:
                yield _wrong(model, name, " needs experts: state num_experts")
        return
    if not 1 <= chosen <= experts:
        yield _wrong(model, "experts_per_token", f" is not from 1 to num_experts={experts}")
    if not model.moe_ffn_hidden_size:
        yield _refused("moe_ffn_hidden_size", "the model's moe_ffn_hidden_size is missing")
    too_many = model.num_dense_layers >= model.num_layers
    if too_many or not model.num_expert_layers:
        name = "num_dense_layers" if too_many else "experts_every"
        yield _wrong(model, name, f" leaves none of num_layers={model.num_layers} with experts")
    has_dense = any(sublayers_of(kind)[1] == "dense" for kind in model.kind_of_layers)
    if not has_dense and model.ffn_hidden_size != model.moe_ffn_hidden_size:
        why = " is the width of dense layers and there are none; leave it out"
        yield _wrong(model, "ffn_hidden_size", why)
    groups, taken = model.router_groups, model.router_topk_groups
    divides = bool(groups) and experts % groups == 0 and 1 <= taken <= groups
    if (groups or taken) and not (divides and experts // groups * taken >= chosen):
        why = f" must divide num_experts={experts}, and router_topk_groups={taken} be from 1 to"
        why += f" router_groups and have experts_per_token={chosen} of them"
        yield _wrong(model, "router_groups", why)
    if model.shared_expert_gate and not model.shared_expert_ffn_hidden_size:
        yield _refused(
            "shared_expert_gate", "shared_expert_gate=true needs shared_expert_ffn_hidden_size"
        )
