"""What Hugging Face's config.json and Megatron-LM's options call the parts of a model's shape.

The words were read in transformers 5.24.0 (`models/*/configuration_*.py`) and in Megatron-LM of
August 2026 (`megatron/training/arguments.py`). A word with a value has one of three meanings: a
field of ours, something that is not covered, or nothing that affects a layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final


def words_of(text: str) -> frozenset[str]:
    return frozenset(text.split())


def alike(value: Any) -> Any:
    """The value that a list has for every layer, or the value."""
    is_alike = isinstance(value, list) and value and all(each == value[0] for each in value)
    return value[0] if is_alike else value


HUGGING_FACE: Final = "a config.json of Hugging Face"
MEGATRON_LM: Final = "the options of Megatron-LM"

SAME_VALUE: Final[Mapping[str, str]] = {
    "num_layers": "num_hidden_layers n_layer n_layers",
    "hidden_size": "n_embd n_embed d_model dim",
    "ffn_hidden_size": "intermediate_size n_inner ffn_dim inner_dim inter_dim hidden_dim "
    "intermediate_size_mlp",
    "num_heads": "num_attention_heads n_head n_heads",
    "num_kv_heads": "num_key_value_heads n_head_kv n_kv_heads kv_n_heads num_query_groups "
    "multi_query_group_num",
    "head_dim": "kv_channels attention_head_dim",
    "seq_length": "encoder_seq_length",
    "vocab_size": "padded_vocab_size",
    "tied_embeddings": "tie_word_embeddings tie_embeddings share_embeddings_and_output_weights",
    "rotary_base": "rope_theta rotary_emb_base",
    "qk_norm": "use_qk_norm qk_layernorm",
    "attention_window": "sliding_window window attention_window_size",
    "full_attention_every": "sliding_window_pattern",
    "num_experts": "num_local_experts n_routed_experts moe_num_experts num_moe_experts experts",
    "experts_per_token": "num_experts_per_tok moe_k moe_topk moe_top_k top_k moe_router_topk "
    "n_activated_experts",
    "moe_ffn_hidden_size": "moe_intermediate_size expert_ffn_dim moe_inter_dim",
    "shared_expert_ffn_hidden_size": "shared_expert_intermediate_size shared_intermediate_size "
    "moe_shared_expert_intermediate_size",
    "num_dense_layers": "first_k_dense_replace moe_layer_start_index n_dense_layers",
    "attention_dropout": "attn_pdrop attn_dropout attention_probs_dropout_prob",
    "hidden_dropout": "resid_pdrop resid_dropout residual_dropout hidden_dropout_prob",
    "qk_nope_head_dim": "qk_head_dim",
    "qk_rope_head_dim": "qk_pos_emb_head_dim",
    "attention_output_gate": "attn_output_gate",
    "mamba_num_heads": "mamba_n_heads",
    "mamba_head_dim": "mamba_d_head",
    "mamba_state_dim": "ssm_state_size mamba_d_state",
    "mamba_num_groups": "n_groups mamba_n_groups",
    "attention_sinks": "attention_sink",
    "parallel_block": "use_parallel_residual parallel_attn",
    "rotary_fraction": "partial_rotary_factor rotary_pct rotary_percent",
    "router_score": "scoring_func moe_router_score_function",
    "router_groups": "n_group moe_router_num_groups",
    "router_topk_groups": "topk_group moe_router_group_topk",
    "router_bias": "use_routing_bias moe_router_enable_expert_bias",
    "router_scaling_factor": "routed_scaling_factor moe_router_topk_scaling_factor",
    "expert_latent_size": "moe_latent_size",
    "shared_expert_gate": "moe_shared_expert_gate",
    "experts_every": "decoder_sparse_step interleave_moe_layer_step moe_layer_interval",
    "num_mtp_layers": "num_nextn_predict_layers mtp_num_hidden_layers mtp_num_layers num_mtp_modules",
}
"""Words by the field of ours whose value they have."""

OUR_FIELDS: Final = {word: ours for ours, words in SAME_VALUE.items() for word in words.split()}

ATTENTION_KINDS: Final = {
    "auto": "",
    **dict.fromkeys(words_of("unfused local eager torch false"), "unfused"),
    **dict.fromkeys(
        words_of("flash fused sdpa flash_attention_2 flash_attention_3 flex_attention triton true"),
        "fused",
    ),
}
"""Our `attention` by the words of Megatron-LM (`--attention-backend`), of transformers
(attn_implementation), of llm-foundry (attn_impl) and of switches. Megatron-LM's auto takes a fused
kernel where one supports the job, which is the trainer's default."""
MEGATRON_COLUMNS: Final[Mapping[str, Mapping[str, str]]] = {
    "attention_backend": ATTENTION_KINDS,
    "transformer_impl": {"transformer_engine": "", "local": "unfused"},
}
"""Our `attention` by option and word of Megatron-LM, a later option over an earlier one.
`--transformer-impl local` has no fused kernel, whatever the backend."""
ATTENTION_WORDS: Final = words_of(
    "attention_backend transformer_impl attn_implementation attn_impl use_flash_attn"
)

NESTED: Final = (
    "text_config",
    "attn_config",
    "ffn_config",
    "moe",
    "moe_args",
    "rope_parameters",
    "rope_scaling",
    "full_attention",
    "sliding_attention",
)
"""Parts of a config.json whose fields count as its own."""

WINDOWS: Final = "attention windows in other layers than all, or all but every n-th"
OTHER_LAYERS: Final = "layers of other kinds than attention, gated delta nets, KDA and Mamba-2"
MLA: Final = "multi-head latent attention"
WIDTHS: Final = "layers or embeddings of different widths, or that share weights"

NOT_COVERED: Final[Mapping[str, str]] = (
    {"attention_chunk_size": "attention in chunks"}
    | dict.fromkeys(("alibi", "use_alibi"), "ALiBi positions")
    | dict.fromkeys(
        ("moe_expert_capacity_factor", "capacity_factor"),
        "experts that drop tokens over a capacity",
    )
    | dict.fromkeys(
        words_of(
            """
            block_configs ffn_multipliers global_head_dim hidden_size_per_layer_input
            num_global_key_value_heads num_kv_shared_layers
            """
        ),
        WIDTHS,
    )
    | dict.fromkeys(("parallel_attn_mlp_res",), "a dense feed-forward beside the experts")
    | dict.fromkeys(("vision_config", "audio_config"), "encoders beside the decoder")
    | dict.fromkeys(("cross_attention", "is_encoder_decoder"), "models other than decoders")
)
"""What a word means that is neither 0, false nor null."""

OF_OTHER_LAYERS: Final = re.compile(r"(mamba|ssm|linear|rwkv|rglru|lru|conv)_\w+")
"""Words of state-space, linear-attention and convolution layers."""
KINDS_OF_LAYERS: Final = words_of(
    """
    full_attention_interval attn_layer_indices attn_layer_period hybrid_override_pattern
    hybrid_layer_pattern linear_attn_config
    """
)
"""Words that say which layers are of which kind, as our layer_kinds does."""

MODEL_TYPES: Final[Mapping[str, str]] = (
    dict.fromkeys(("bloom", "mpt"), "ALiBi positions")
    | dict.fromkeys(
        words_of("t5 mt5 bart bert modernbert albert electra roberta xlm-roberta vit whisper"),
        "models other than decoders",
    )
    | dict.fromkeys(
        words_of("mamba mamba2 rwkv jamba zamba zamba2 falcon_h1 minimax lfm2 recurrent_gemma"),
        OTHER_LAYERS,
    )
)
"""What models of a `model_type` have that no field of ours says, where no other word says it."""

_LLAMA: Final = {"family": "llama"}
_TIED: Final = {"tied_embeddings": True}
_GEMMA: Final = _LLAMA | _TIED | {"head_dim": 256}
_WINDOW: Final = {"attention_window": 4096}

CLASS_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "chatglm": _LLAMA,
    "exaone": _LLAMA,
    "qwen": _LLAMA,
    "smollm3": _TIED,
    "ernie4_5": _TIED,
    "ernie4_5_moe": _TIED,
    "minicpm": _TIED,
    "gemma": _GEMMA,
    "gemma2": _GEMMA | _WINDOW | {"full_attention_every": 2},
    "gemma3": _GEMMA | _WINDOW | {"full_attention_every": 6, "qk_norm": True},
    "mistral": _WINDOW,
    "phimoe": {"norm": "layer"},
    "qwen3": {"qk_norm": True, "head_dim": 128},
    "qwen3_moe": {"qk_norm": True},
}
"""What a `model_type`, without the ending `_text`, implies where the file does not say it."""

STEPS: Final = ("expert_interval", "expert_layer_period", "moe_layer_frequency")
"""Experts in every layer whose number this divides; 1 is all layers."""

ACTIVATIONS: Final = words_of(
    "hidden_act hidden_activation activation_function mlp_hidden_act activation_func"
)
GATED: Final = words_of("silu swish swiglu geglu reglu fast-swiglu fast-geglu fast-reglu")
NORMS: Final = {
    "RMSNorm": ("rms_norm_eps", "rms_norm_epsilon"),
    "LayerNorm": ("layer_norm_eps", "layer_norm_epsilon", "layernorm_epsilon"),
}
ROTARY: Final = words_of(
    """
    rope_theta rotary_emb_base rotary_base rotary_pct rotary_dim partial_rotary_factor
    rope_type use_rotary_position_embeddings
    """
)

OF_HUGGING_FACE: Final = words_of(
    """
    architectures model_type transformers_version num_hidden_layers num_key_value_heads
    n_embd n_layer tie_word_embeddings num_experts_per_tok first_k_dense_replace
    """
)
OF_MEGATRON_LM: Final = words_of(
    """
    num_query_groups swiglu kv_channels moe_router_topk group_query_attention
    untie_embeddings_and_output_weights moe_shared_expert_intermediate_size qk_layernorm
    """
)
OPTIONS: Final = words_of("swiglu untie_embeddings_and_output_weights")
"""Words of Megatron-LM's command line that no configuration of its library has."""

WITHOUT_EFFECT: Final = words_of(
    """
    architectures model_type transformers_version auto_map dtype torch_dtype use_cache
    name_or_path max_position_embeddings n_positions n_ctx max_seq_len max_sequence_length
    pretraining_tp ep_size quantization_config norm_topk_prob
    topk_method rope_type type output_router_logits multi_latent_attention
    aux_loss_alpha seq_aux use_sliding_window factor max_window_layers
    mlp_bias disable_bias_linear bias rotary_dim low_freq_factor
    high_freq_factor original_max_position_embeddings beta_fast beta_slow mscale
    mscale_all_dim attention_factor
    group_query_attention multi_query_attention position_embedding_type new_decoder_architecture init_method_std clip_qkv
    attn_logit_softcapping final_logit_softcapping query_pre_attn_scalar tokenizer_class
    head_type scale_attn_weights reorder_and_upcast_attn task_specific_params rope_scaling
    rope_parameters moe_router_load_balancing_type make_vocab_size_divisible_by
    use_rotary_position_embeddings rotary swiglu_limit expert_layer_offset initial_context_length
    """
)
WITHOUT_EFFECT_ALIKE: Final = re.compile(
    r"(\w+_)?(token_id|dropout|pdrop|p_drop|eps|epsilon|initializer_range|coef|coeff|activation)"
    r"|summary_\w+|initializer_\w+|output_\w+|id2label|label2id"
)
