"""A model as fields of megatron-core, which Megatron-LM's flags and Megatron-Bridge's keys set.

The fields are those of `TransformerConfig` and `MLATransformerConfig` at d98e8a64, the pattern that
of `core/models/hybrid/hybrid_layer_allocation.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_fields import LINEAR_FIELDS, MAMBA_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob, TrainerRule

_SYMBOLS: Final[Mapping[str, str]] = {
    "full": "*",
    "window": "*",
    "gated_delta_net": "G",
    "mamba2": "M",
    "dense": "-",
    "experts": "E",
}
"""The letter of each sublayer in a hybrid pattern, in which it is a layer of its own."""


def is_hybrid(model: ModelShape) -> bool:
    """Whether Megatron's GPT lacks such layers: Mamba-2, and sublayers that are a layer alone."""
    return any("+" not in kind or "mamba2" in kind for kind in model.kind_of_layers)


def symbols_of(kind: str) -> str:
    """A layer in the letters of a hybrid pattern."""
    return "".join(_SYMBOLS[word] for word in kind.split("+"))


def hybrid_pattern(layout: Layout, model: ModelShape) -> str:
    """The layers of each stage between `|`, then those of each depth of prediction after `/`."""
    letters = [symbols_of(kind) for kind in model.kind_of_layers]
    stages = (
        "".join(letters[layer] for layer in layout.layers_of_stage(stage, model.num_layers))
        for stage in range(layout.pp * layout.vpp)
    )
    depth = "".join(map(symbols_of, model.mtp_kinds))
    return "/".join(("|".join(stages), *[depth] * model.num_mtp_layers))


def stages_text(layout: Layout, model: ModelShape) -> str:
    """The pipeline that is written out, with the depths of prediction before the last loss."""
    return f"{layout.pipeline_layout[:-1]}{'m' * model.num_mtp_layers}L"


def _frequency(marks: Sequence[bool]) -> int | list[int]:
    """The layers that have something: n, where all but each n-th have it, or a list."""
    n = marks.index(False) + 1 if False in marks else 1
    is_number = n > 1 and all(mark == ((i + 1) % n > 0) for i, mark in enumerate(marks))
    return n if is_number else list(map(int, marks))


def _skipped_windows(model: ModelShape) -> int | list[int] | None:
    """`window_attn_skip_freq`, in a hybrid pattern with an entry for each letter."""
    kinds = model.kind_of_layers
    if model.full_attention_every or not any(kind.startswith("full") for kind in kinds):
        return model.full_attention_every
    times = [len(symbols_of(kind)) if is_hybrid(model) else 1 for kind in kinds]
    pairs = zip(kinds, times, strict=True)
    return _frequency([kind.startswith("window") for kind, n in pairs for _ in range(n)])


def attention_values(model: ModelShape) -> dict[str, Any]:
    """What layers mix tokens with; None is a field that Megatron-Bridge has to be told."""
    values: dict[str, Any] = {} if model.head_dim is None else {"kv_channels": model.head_dim}
    if model.qk_norm:
        values["qk_layernorm"] = True
    if model.attention_window is not None:
        # Megatron counts the positions before a token's own.
        values["window_size"] = [model.attention_window - 1, 0]
        values["window_attn_skip_freq"] = _skipped_windows(model)
    if model.kv_lora_rank:
        values |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.q_lora_rank or None,
            "kv_lora_rank": model.kv_lora_rank,
            "qk_head_dim": model.qk_nope_head_dim,
            "qk_pos_emb_head_dim": model.qk_rope_head_dim,
            "v_head_dim": model.v_head_dim,
            "kv_channels": model.v_head_dim,  # else it divides the hidden size
            "qk_layernorm": True,  # the norms of both latents
            "rope_type": "rope",  # and not YaRN with a factor of 40
            "apply_rope_fusion": False,  # refused but for YaRN
        }
    said = {
        "add_qkv_bias": model.biases_of == "qkv",
        "attention_output_gate": model.attention_output_gate,
        "softmax_type": "learnable" if model.attention_sinks else None,
        "rotary_percent": model.rotary_fraction if 0 < model.rotary_fraction < 1 else None,
        "mtp_num_layers": model.num_mtp_layers,
        **{name: getattr(model, name) for name in (*LINEAR_FIELDS, *MAMBA_FIELDS)},
    }
    values |= {name: value for name, value in said.items() if value}
    if model.linear_num_key_heads and not is_hybrid(model):
        marks = [kind.startswith("gated_delta_net") for kind in model.kind_of_layers]
        # Since core 0.20 it is called gdn, and this name is read, too.
        values["experimental_attention_variant"] = "gated_delta_net"
        values["linear_attention_freq"] = _frequency(marks)
    return values


def expert_values(job: TrainerJob) -> dict[str, Any]:
    """The mixture of experts; empty: the model is dense.

    The router's choice is the probe's: the largest logits in fp32, and no loss that balances. etp
    is always stated: where nothing is, it is tp. Layers with experts are a list, as a number n
    means the layers 0, n, 2 n and so on.
    """
    model = job.model
    if not model.num_experts:
        return {}
    values: dict[str, Any] = {
        "num_moe_experts": model.num_experts,
        "moe_router_topk": model.experts_per_token,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "expert_model_parallel_size": job.layout.ep,
        "expert_tensor_parallel_size": job.layout.etp,
        "moe_grouped_gemm": True,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_token_dispatcher_type": "alltoall",
    }
    has_dense = model.num_expert_layers < model.num_layers and not is_hybrid(model)
    scaling = model.router_scaling_factor
    more = {
        # TransformerConfig refuses to do without.
        "moe_router_pre_softmax": model.experts_per_token == 1 and model.router_score == "softmax",
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
        "moe_layer_freq": has_dense
        and [int(model.has_experts(i)) for i in range(model.num_layers)],
        "moe_router_score_function": model.router_score == "sigmoid" and "sigmoid",
        "moe_router_num_groups": model.router_groups,
        "moe_router_group_topk": model.router_topk_groups,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_router_topk_scaling_factor": scaling != 1 and scaling,
        "moe_latent_size": model.expert_latent_size,
        "moe_shared_expert_gate": model.shared_expert_gate,
        "moe_router_force_load_balancing": job.balanced_routing,
    }
    return values | {name: value for name, value in more.items() if value}


def mixer_checks(layout: Layout, model: ModelShape) -> Iterator[tuple[bool, str]]:
    """Of states, whose heads cp divides as tp does (core/ssm/mamba_context_parallel.py)."""
    tp, cp, groups = layout.tp, layout.cp, model.mamba_num_groups
    for name in ("linear_num_key_heads", "linear_num_value_heads", "mamba_num_heads"):
        heads = getattr(model, name)
        yield heads % (tp * cp) != 0, f"{name}={heads} is not divisible by tp*cp={tp * cp}"
    yield groups % tp != 0, f"mamba_num_groups={groups} is not divisible by tp={tp}"
    share = groups // tp
    yield (
        share > 0 and share % cp != 0 and cp % share != 0,
        f"of mamba_num_groups/tp={share} and cp={cp} neither divides the other",
    )
    yield (
        layout.recompute_layers.isdigit()
        and is_hybrid(model)
        and any(len(symbols_of(kind)) > 1 for kind in model.kind_of_layers),
        f"recompute_layers={layout.recompute_layers}: Megatron counts attention and feed-forward of "
        "such a model as layers of their own; leave recompute_layers out",
    )


def _lacking_fields(model: ModelShape) -> Iterator[tuple[bool, str]]:
    """What no field of megatron-core says."""
    windows = [kind.startswith("window") for kind in model.kind_of_layers]
    own_heads = model.window_num_heads or model.window_num_kv_heads
    yield "kda" in str(model.layer_kinds), "layer_kinds has kda, which it lacks"
    yield (
        own_heads > 0,
        f"window_num_heads={model.window_num_heads} and window_num_kv_heads={model.window_num_kv_heads}: all its layers have the same heads",
    )
    yield (
        model.qk_norm == "width",
        "qk_norm=width: it has norms of single heads alone; state qk_norm: true, whose time is nearly the same",
    )
    yield model.parallel_block, "parallel_block=true: its layers have one sublayer after the other"
    yield (
        model.biases_of == "attention",
        "biases=attention: it has biases of queries, keys and values (qkv), or all",
    )
    yield (
        model.router_bias and model.router_score == "softmax",
        "router_bias=true needs router_score=sigmoid",
    )
    yield (
        is_hybrid(model) and (model.kv_lora_rank > 0 or bool(model.qk_norm)),
        "layer_kinds is a hybrid pattern, in which attention has norms neither of latents nor of "
        "query and key; leave out kv_lora_rank and qk_norm, or have attention and feed-forward in each layer",
    )
    yield (
        any(windows[i] != windows[-1] for i in range(min(model.num_mtp_layers, len(windows)))),
        f"num_mtp_layers={model.num_mtp_layers}: its depths have the windows of the first layers, "
        "and not of the last one",
    )


def _said_lacking(model: ModelShape) -> str:
    return "; ".join(sentence for is_lacking, sentence in _lacking_fields(model) if is_lacking)


LACKING_FIELDS: Final = TrainerRule(
    name="lacking_fields",
    source="core/transformer/transformer_config.py; core/models/hybrid/hybrid_layer_specs.py; "
    "core/transformer/multi_token_prediction.py",
    broken=lambda _, model: bool(_said_lacking(model)),
    sentence=lambda _, model: f"megatron-core cannot have the model: {_said_lacking(model)}",
)
