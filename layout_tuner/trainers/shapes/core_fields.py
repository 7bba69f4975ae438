"""A model as fields of megatron-core, which Megatron-LM's flags and Megatron-Bridge's keys set.

The fields are those of `TransformerConfig` and `MLATransformerConfig` at d98e8a64, the pattern that
of `core/models/hybrid/hybrid_layer_allocation.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.layer_kinds import SYMBOLS
from layout_tuner.search_spaces.models.model_fields import LINEAR_FIELDS, MAMBA_FIELDS
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.trainers.adapter import TrainerJob, TrainerRule

_LETTERS: Final = {kind: letter for letter, kind in SYMBOLS.items()} | {"window": "*"}


def is_hybrid(model: ModelShape) -> bool:
    """Whether Megatron's GPT lacks such layers: Mamba-2, and sublayers that are a layer alone."""
    return any("+" not in kind or "mamba2" in kind for kind in model.kind_of_layers)


def letters_of(kinds: Iterable[str]) -> str:
    """Layers in a hybrid pattern, in which each sublayer is a layer."""
    return "".join(_LETTERS[word] for kind in kinds for word in kind.split("+"))


def hybrid_pattern(layout: Layout, model: ModelShape) -> str:
    """The layers of each stage between `|`, then those of each depth of prediction after `/`."""
    kinds, stages = model.kind_of_layers, range(layout.pp * layout.vpp)
    layers = (layout.layers_of_stage(stage, model.num_layers) for stage in stages)
    main = "|".join(letters_of(kinds[layer] for layer in each) for each in layers)
    return "/".join((main, *[letters_of(model.mtp_kinds)] * model.num_mtp_layers))


def stages_text(layout: Layout, model: ModelShape) -> str:
    """The pipeline that is written out, with the depths of prediction before the last loss."""
    return f"{layout.pipeline_layout[:-1]}{'m' * model.num_mtp_layers}L"


def _frequency(marks: Sequence[bool]) -> int | list[int]:
    """The layers that have something: n, where all but each n-th have it, or a list."""
    n = marks.index(False) + 1 if False in marks else 1
    is_number = n > 1 and all(mark == ((i + 1) % n > 0) for i, mark in enumerate(marks))
    return n if is_number else list(map(int, marks))


def attention_values(model: ModelShape) -> dict[str, Any]:
    """What layers mix tokens with; None is a field that Megatron-Bridge has to be told."""
    values: dict[str, Any] = {} if model.head_dim is None else {"kv_channels": model.head_dim}
    kinds = model.kind_of_layers
    every: int | list[int] | None = model.full_attention_every
    if model.qk_norm:
        values["qk_layernorm"] = True
    if model.attention_window is not None:
        if model.layer_kinds and any(kind.startswith("full") for kind in kinds):
            times = [len(letters_of((kind,))) if is_hybrid(model) else 1 for kind in kinds]
            pairs = zip(kinds, times, strict=True)
            every = _frequency([kind.startswith("window") for kind, n in pairs for _ in range(n)])
        # Megatron counts the positions before a token's own.
        values["window_size"] = [model.attention_window - 1, 0]
        values["window_attn_skip_freq"] = every
    said = {
        "multi_latent_attention": model.kv_lora_rank > 0,
        "kv_lora_rank": model.kv_lora_rank,
        "qk_head_dim": model.qk_nope_head_dim,
        "qk_pos_emb_head_dim": model.qk_rope_head_dim,
        "v_head_dim": model.v_head_dim,
        "add_qkv_bias": model.biases_of == "qkv",
        "attention_output_gate": model.attention_output_gate,
        "softmax_type": "learnable" if model.attention_sinks else None,
        "rotary_percent": model.rotary_fraction if model.rotary_fraction < 1 else None,
        "mtp_num_layers": model.num_mtp_layers,
        **{name: getattr(model, name) for name in (*LINEAR_FIELDS, *MAMBA_FIELDS)},
    }
    values |= {name: value for name, value in said.items() if value}
    if model.kv_lora_rank:
        values |= {"q_lora_rank": model.q_lora_rank or None, "kv_channels": model.v_head_dim}
        # The norms of latents; plain rotation, as the default is YaRN by 40; it is never fused.
        values |= {"qk_layernorm": True, "rope_type": "rope", "apply_rope_fusion": False}
    if model.linear_num_key_heads and not is_hybrid(model):
        values["experimental_attention_variant"] = "gated_delta_net"  # since core 0.20 gdn, too
        marks = [kind.startswith("gated_delta_net") for kind in kinds]
        values["linear_attention_freq"] = _frequency(marks)
    return values


def expert_values(job: TrainerJob) -> dict[str, Any]:
    """The mixture of experts; empty: the model is dense.

    The router's choice is the probe's: the largest logits in fp32, and no loss that balances. etp
    is always stated: where nothing is, it is tp. A number of `moe_layer_freq` would mean other
    layers than here: 0, n, 2 n and so on.
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
    marks = [int(model.has_experts(layer)) for layer in range(model.num_layers)]
    is_softmax, scaling = model.router_score == "softmax", model.router_scaling_factor
    more = {
        # TransformerConfig refuses to do without.
        "moe_router_pre_softmax": model.experts_per_token == 1 and is_softmax,
        "moe_shared_expert_intermediate_size": model.shared_expert_ffn_hidden_size,
        "moe_layer_freq": None if all(marks) or is_hybrid(model) else marks,
        "moe_router_score_function": None if is_softmax else "sigmoid",
        "moe_router_num_groups": model.router_groups,
        "moe_router_group_topk": model.router_topk_groups,
        "moe_router_enable_expert_bias": model.router_bias,
        "moe_router_topk_scaling_factor": None if scaling == 1 else scaling,
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
    is_uneven = share > 0 and share % cp != 0 and cp % share != 0
    yield is_uneven, f"of mamba_num_groups/tp={share} and cp={cp} neither divides the other"


def _said_lacking(layout: Layout, model: ModelShape) -> str:
    """What megatron-core cannot say of a model, with what to do; empty: nothing."""
    kinds, hybrid = model.kind_of_layers, is_hybrid(model)
    windows = [kind.startswith("window") for kind in kinds]
    counts = layout.recompute_layers.isdigit() and any("+" in kind for kind in kinds)
    found = {
        "kda in layer_kinds": "kda" in " ".join(kinds),
        "window_num_heads and window_num_kv_heads": model.window_num_heads
        or model.window_num_kv_heads,
        "parallel_block=true": model.parallel_block,
        "qk_norm=width (state true, for norms of single heads)": model.qk_norm == "width",
        "biases=attention (state qkv or all)": model.biases_of == "attention",
        "router_bias=true without router_score=sigmoid": model.router_bias
        and model.router_score == "softmax",
        "kv_lora_rank or qk_norm in a hybrid pattern, whose attention has no norms inside": hybrid
        and (model.kv_lora_rank or model.qk_norm),
        "recompute_layers as a number, where a hybrid pattern counts sublayers": hybrid and counts,
        "num_mtp_layers with other windows in the first layers than in the last one, as it gives "
        "the depths those of the first": {*windows[: model.num_mtp_layers]} - {windows[-1]},
    }
    return "; ".join(name for name, is_there in found.items() if is_there)


LACKING_FIELDS: Final = TrainerRule(
    name="lacking_fields",
    source="core/transformer/transformer_config.py, core/models/hybrid/hybrid_layer_specs.py, "
    "core/transformer/multi_token_prediction.py",
    broken=lambda layout, model: bool(_said_lacking(layout, model)),
    sentence=lambda layout, model: f"megatron-core does not have {_said_lacking(layout, model)}",
)
