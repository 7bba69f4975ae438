"""What the fields of a shape say of a config.json: biases, norms, routing, kinds of layers."""

from __future__ import annotations

from typing import Any, Final

import pytest

from layout_tuner.search_spaces.models.model_shape import ModelShape
from tests.search_spaces.models.test_config_json import DENSE, SPARSE, read, refusal

WIDE: Final = {"num_experts": 16, "num_experts_per_tok": 4}
EXPERTS: Final = WIDE | {"moe_intermediate_size": 256}
SAID: Final[list[tuple[str, dict[str, Any], dict[str, Any]]]] = [
    ("llama", {"attention_bias": True}, {"biases": "attention"}),
    ("llama", {"attention_bias": True, "mlp_bias": True}, {"biases": "all"}),
    ("starcoder2", {}, {"biases": "all", "norm": "layer", "activation": "gelu"}),
    ("glm", {}, {"biases": "qkv", "rotary_fraction": 0.5}),
    ("gpt_oss", WIDE, {"biases": "all", "attention_sinks": True, "router_score": "softmax"}),
    ("olmo2", {}, {"qk_norm": "width"}),
    ("gemma", {}, {"activation": "geglu"}),
    ("arcee", {}, {"activation": "relu2", "norm": None}),
    ("nemotron", {}, {"activation": "relu2", "norm": "layer", "rotary_fraction": 0.5}),
    ("stablelm", {}, {"norm": "layer", "parallel_block": False, "rotary_fraction": 0.25}),
    ("stablelm", {"use_parallel_residual": True}, {"parallel_block": True}),
    ("cohere2", {}, {"parallel_block": True, "tied_embeddings": True}),
    ("phi", {}, {"parallel_block": True, "biases": "all", "norm": "layer"}),
    ("minimax_m2", WIDE | {"rotary_dim": 32}, {"rotary_fraction": 0.25, "qk_norm": "width"}),
    ("glm4_moe", {**EXPERTS, "head_dim": 42}, {"rotary_fraction": 20 / 42}),
    ("glm4_moe", EXPERTS, {"router_score": "sigmoid", "router_bias": True, "num_mtp_layers": 1}),
    ("glm4_moe", EXPERTS | {"num_nextn_predict_layers": 0}, {"num_mtp_layers": 0}),
    ("minimax_m2", WIDE | {"num_mtp_modules": 3, "use_mtp": False}, {"num_mtp_layers": 0}),
    ("minimax_m2", WIDE | {"num_mtp_modules": 3}, {"num_mtp_layers": 3, "biases": None}),
    ("qwen2_moe", EXPERTS | {"shared_expert_intermediate_size": 64}, {"shared_expert_gate": True}),
    ("afmoe", EXPERTS, {"attention_output_gate": True, "router_bias": True}),
    (
        "deepseek_v3",
        EXPERTS | {"head_dim": 192, "v_head_dim": 32},
        {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
        | {"v_head_dim": 32, "num_kv_heads": 8, "head_dim": None, "rotary_fraction": 1.0}
        | {"router_groups": 8, "router_topk_groups": 4, "router_scaling_factor": 2.5},
    ),
    ("deepseek_v3", EXPERTS | {"q_lora_rank": None, "n_group": 1}, {"q_lora_rank": 0}),
    ("deepseek_v2", EXPERTS | {"n_group": 8, "topk_group": 3}, {"router_groups": 0}),
    (
        "deepseek_v2",
        EXPERTS | {"n_group": 8, "topk_group": 3, "topk_method": "group_limited_greedy"},
        {"router_groups": 8, "router_topk_groups": 3, "router_score": "softmax"},
    ),
    ("minicpm3", {}, {"v_head_dim": 64, "kv_lora_rank": 256}),
]


@pytest.mark.parametrize(("kind", "words", "fields"), SAID)
def test_what_a_file_has_is_said_by_fields(
    kind: str, words: dict[str, Any], fields: dict[str, Any]
) -> None:
    model = read(kind, DENSE | words)
    assert {name: getattr(model, name) for name in fields} == fields
    again = ModelShape.from_mapping(model.to_mapping())
    assert again == model


LINEAR: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 32,
}


def test_gated_delta_nets_are_kinds_of_layers() -> None:
    model = read("qwen3_next", SPARSE | LINEAR, full_attention_interval=3)
    assert model.layer_kinds == (*["gated_delta_net+experts"] * 2, "full+experts")
    assert {name: getattr(model, name) for name in LINEAR} == LINEAR
    assert model.attention_output_gate
    types = ["linear_attention", "sliding_attention", "full_attention"] * 4
    mixed = read("lara_mini", SPARSE | LINEAR, layer_types=types, sliding_window=64)
    kinds = ("gated_delta_net+experts", "window+experts", "full+experts")
    assert (mixed.layer_kinds, mixed.attention_window) == (kinds, 64)
    said = refusal({"model_type": "lara_mini", **SPARSE, **LINEAR})
    assert said == "the config.json does not state layer_types"
    said = refusal({"model_type": "qwen3_next", **SPARSE, **LINEAR, "linear_conv_kernel_dim": 3})
    assert "linear_conv_kernel_dim=3' has not 4 taps" in said


def test_kimi_linear_counts_its_layers_from_one() -> None:
    kda: dict[str, Any] = {"head_dim": 64, "num_heads": 4, "full_attn_layers": [4, 8, 12]}
    kda["kda_layers"] = [1, 2, 3, 5, 6, 7, 9, 10, 11]
    model = read("kimi_linear", SPARSE, linear_attn_config=kda, qk_nope_head_dim=64)
    assert model.kind_of_layers[:4] == ("kda+dense", *["kda+experts"] * 2, "full+experts")
    assert (model.linear_num_value_heads, model.linear_key_head_dim) == (4, 64)
    assert model.kv_lora_rank == 512
    assert model.lacks == "no rotary positions"
    words = {"mla_use_nope": True, "moe_renormalize": True, "use_grouped_topk": True}
    stated = {"linear_attn_config": kda, "qk_nope_head_dim": 64, **words}
    assert read("kimi_linear", SPARSE, **stated) == model
    assert read("kimi_linear", SPARSE, **stated | {"mla_use_nope": False}).lacks == ""


NEMOTRON: Final = {
    "num_hidden_layers": 7,
    "hybrid_override_pattern": "MEM*-ME",
    "moe_latent_size": 128,
    "moe_shared_expert_intermediate_size": 300,
}


def test_the_letters_of_nemotron_are_layers() -> None:
    model = read("nemotron_h", SPARSE | NEMOTRON, num_nextn_predict_layers=1)
    kinds = ("mamba2", "experts", "mamba2", "full", "dense", "mamba2", "experts")
    assert model.kind_of_layers == kinds
    assert (model.mamba_num_heads, model.mamba_num_groups, model.rotary_fraction) == (128, 8, 0.0)
    assert (model.expert_latent_size, model.shared_expert_ffn_hidden_size) == (128, 300)
    assert (model.num_mtp_layers, model.activation, model.lacks) == (1, "relu2", "")
    types = ["mamba", "moe", "mamba", "attention", "mlp", "mamba", "moe"]
    newer = {**SPARSE, **NEMOTRON, "layers_block_type": types, "num_nextn_predict_layers": 1}
    del newer["hybrid_override_pattern"], newer["num_hidden_layers"]
    assert read("nemotron_h", newer, mtp_layers_block_type=["attention", "moe"]) == model
    config = {"model_type": "nemotron_h", **SPARSE, **NEMOTRON, "num_nextn_predict_layers": 1}
    said = refusal({**config, "mtp_hybrid_override_pattern": "*-"})
    assert "other layers of multi-token prediction than its last ones" in said
    assert "use_conv_bias=false' has other biases of Mamba-2" in refusal(
        {**config, "use_conv_bias": False}
    )


def test_layers_that_contradict_a_pattern_of_letters_are_refused() -> None:
    config = {"model_type": "nemotron_h", **SPARSE, **NEMOTRON}
    said = refusal({**config, "num_hidden_layers": 12})
    assert said.startswith("num_hidden_layers=12 and a pattern of 7 layers contradict each other")
    assert "Mamba-2" in refusal({**config, "hybrid_override_pattern": "MEM*XME"})
    published = {"expand": 2, "chunk_size": 128, "n_shared_experts": 1}
    assert read("nemotron_h", config, **published) == read("nemotron_h", config)


def test_bamba_names_its_layers_with_attention() -> None:
    model = read("bamba", attn_layer_indices=[2, 5, 8, 11], mamba_n_heads=16)
    assert model.layer_kinds == (*["mamba2+dense"] * 2, "full+dense")
    assert (model.mamba_num_heads, model.mamba_head_dim, model.mamba_state_dim) == (16, 64, 256)


def test_layers_with_windows_may_have_other_heads() -> None:
    types, heads = ["full_attention", "sliding_attention"] * 6, [16, 8] * 6
    config = {**SPARSE, "gating": False, "layer_types": types, "head_dim": 64}
    model = read("laguna", config, num_attention_heads_per_layer=heads)
    assert (model.num_heads, model.window_num_heads) == (16, 8)
    odd = {"model_type": "laguna", **config, "num_attention_heads_per_layer": [16] * 11 + [8]}
    assert "layers or embeddings of different widths" in refusal(odd)


def test_a_hybrid_may_have_attention_alone() -> None:
    config = {**DENSE, "num_local_experts": 0, "shared_intermediate_size": 900, "mamba_n_heads": 8}
    model = read("granitemoehybrid", config, layer_types=["attention"] * 12)
    assert (model.ffn_hidden_size, model.num_experts, model.lacks) == (900, 0, "")
    assert (model.mamba_num_heads, model.rotary_fraction) == (0, 0.0)
    rotary = {"layer_types": ["attention"] * 12, "position_embedding_type": "rope"}
    assert read("granitemoehybrid", config | rotary).rotary_fraction == 1.0
    kinds = {"layers_block_type": ["mamba", "attention"] * 6}
    hybrid = read("granitemoehybrid", config | kinds)
    assert hybrid.layer_kinds == ("mamba2+dense", "full+dense")
    assert set(read("granitemoehybrid", config).kind_of_layers) == {"mamba2+dense"}


ODD: Final[list[Any]] = ["8", [1, 2], [[1]], {"a": 1}, 10**30, -1, 0.5, True]


@pytest.mark.parametrize("value", ODD, ids=repr)
@pytest.mark.parametrize(
    ("kind", "word"),
    [
        ("nemotron_h", "hybrid_override_pattern"),
        ("nemotron_h", "layers_block_type"),
        ("nemotron_h", "mamba_num_heads"),
        ("kimi_linear", "num_hidden_layers"),
        ("kimi_linear", "linear_attn_config"),
        ("deepseek_v3", "kv_lora_rank"),
        ("bamba", "mamba_d_head"),
        ("glm", "partial_rotary_factor"),
        ("laguna", "num_attention_heads_per_layer"),
    ],
)
def test_odd_values_of_newer_words_get_one_sentence(kind: str, word: str, value: Any) -> None:
    kda = {"full_attn_layers": [4, 8, 12], "kda_layers": [1, 2, 3, 5, 6, 7, 9, 10, 11]}
    config = {"model_type": kind, **SPARSE, "linear_attn_config": kda, word: value}
    if (word, value) in (("partial_rotary_factor", 0.5), ("kv_lora_rank", 10**30)):
        return
    assert "\n" not in refusal(config)
    inside = {**config, "linear_attn_config": {**kda, "full_attn_layers": value}}
    assert kind != "kimi_linear" or "\n" not in refusal(inside)


def test_odd_layers_of_predicted_tokens_get_one_sentence() -> None:
    config = {"model_type": "nemotron_h", **SPARSE, **NEMOTRON, "num_nextn_predict_layers": 1}
    for value in ODD:
        assert "other layers of multi-token" in refusal({**config, "mtp_layers_block_type": value})
