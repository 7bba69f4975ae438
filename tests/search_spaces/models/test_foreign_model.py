"""Models in the words of a config.json of Hugging Face and of Megatron-LM's options."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import pytest

from layout_tuner.errors import ModelShapeInvalidError, SearchSpaceError
from layout_tuner.search_spaces.models.foreign_model import WORDS, read_foreign
from layout_tuner.search_spaces.models.foreign_words import HUGGING_FACE, MEGATRON_LM, SAME_VALUE
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from tests.kit.campaigns import spec_of

KNOWN: Final = tuple(field.name for field in fields(ModelShape))

CONFIG: Final[dict[str, Any]] = {
    "architectures": ["OurMoeForCausalLM"],
    "bos_token_id": 1,
    "first_k_dense_replace": 2,
    "hidden_act": "silu",
    "hidden_size": 512,
    "intermediate_size": 1536,
    "max_position_embeddings": 65536,
    "model_type": "our_moe",
    "moe_intermediate_size": 256,
    "n_routed_experts": 32,
    "n_shared_experts": 2,
    "num_attention_heads": 8,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 10,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_qk_norm": True,
    "vocab_size": 40000,
}
"""A mixture of experts with two dense layers and two shared experts."""


def refusal(document: dict[str, Any]) -> SearchSpaceError:
    with pytest.raises(ModelShapeInvalidError) as caught:
        resolve_model(document)
    return caught.value


def test_words_that_state_two_values_of_a_field_are_named_and_neither_is_taken() -> None:
    rope = {"rope_type": "default", "rope_theta": 1e6}
    again = {"num_local_experts": 24, "rope_parameters": rope}  # transformers 5's, read by 4
    said = str(refusal(CONFIG | again))
    assert "n_routed_experts=32 and num_local_experts=24 state two values of num_experts" in said
    assert "rope_theta=500000 and rope_parameters.rope_theta=1000000.0 state two values" in said
    nested = {"text_config": {"rope_theta": 10000, "rope_parameters": rope}}
    said = str(refusal({"model_type": "ours_vl", **nested}))
    assert "text_config.rope_theta=10000 and text_config.rope_parameters.rope_theta=1" in said
    known = read_foreign(CONFIG | again, KNOWN).fields
    assert not {"num_experts", "rotary_base"} & set(known)
    for agreeing in ({"num_local_experts": 32}, {"rope_parameters": rope | {"rope_theta": 5e5}}):
        assert "two values" not in str(refusal(CONFIG | agreeing))
        assert read_foreign(CONFIG | agreeing, KNOWN).fields["num_experts"] == 32
    beside = str(refusal({"preset": "tiny-moe", "--num-experts": 3}))
    assert "unknown model field '--num-experts' (here it is num_experts)" in beside


def test_a_config_json_is_answered_with_one_sentence_and_at_most_five_fields() -> None:
    refused = refusal(CONFIG)
    assert len(refused.parts) == 1
    said = str(refused)
    assert said.startswith("these are words of a config.json of Hugging Face; write ")
    named = [name for name in KNOWN if re.search(rf"\b{name}\b(?!')", said)]
    assert named == ["family", "num_layers", "ffn_hidden_size", "num_heads", "seq_length"]
    assert "num_layers=10 for 'num_hidden_layers'" in said
    assert " and 9 more; state seq_length, which no word says" in said
    assert "without effect here: 'architectures', 'bos_token_id'" in said
    assert said.endswith("--model FILE, or model: {config: FILE, seq_length: N}")
    assert len(said) < 500


def test_all_fields_of_a_config_json_are_known_with_their_values() -> None:
    read = read_foreign(CONFIG, KNOWN)
    assert (read.source, read.not_covered, read.unknown) == (HUGGING_FACE, {}, ())
    told = {name: value for name, value in CONFIG.items() if name in KNOWN}
    model = resolve_model({**told, **read.fields, "seq_length": 4096})
    assert (model.family, model.num_layers, model.num_dense_layers) == ("llama", 10, 2)
    assert (model.num_experts, model.experts_per_token, model.moe_ffn_hidden_size) == (32, 4, 256)
    assert model.shared_expert_ffn_hidden_size == 2 * 256
    assert (model.num_kv_heads, model.qk_norm, model.tied_embeddings) == (2, True, False)


def test_the_options_of_megatron_lm_are_known_with_and_without_hyphens() -> None:
    options = {
        "--num-layers": 12,
        "hidden-size": 512,
        "num_attention_heads": 8,
        "group_query_attention": True,
        "num_query_groups": 4,
        "--swiglu": True,
        "normalization": "RMSNorm",
        "untie_embeddings_and_output_weights": True,
        "window_size": "127,0",
        "window_attn_skip_freq": 3,
        "moe_layer_freq": "([0]*2+[1]*10)",
        "num_experts": 8,
        "moe_router_topk": 2,
    }
    read = read_foreign(options, KNOWN)
    assert read.source == MEGATRON_LM
    assert read.fields == {
        "family": "llama",
        "num_layers": 12,
        "hidden_size": 512,
        "num_heads": 8,
        "num_kv_heads": 4,
        "tied_embeddings": False,
        "attention_window": 128,
        "full_attention_every": 3,
        "experts_per_token": 2,
        "num_dense_layers": 2,
    }
    assert "not covered" not in str(refusal(options))


@pytest.mark.parametrize(
    ("word", "value", "says"),
    [
        ("num_attention_heads", 8, "'num_attention_heads' (here it is called 'num_heads')"),
        ("num_key_value_heads", 2, "(here it is called 'num_kv_heads')"),
        ("n_shared_experts", 2, "(here it is shared_expert_ffn_hidden_size=256)"),
        ("tie_word_embeddings", True, "(here it is called 'tied_embeddings')"),
        ("untie_embeddings_and_output_weights", True, "(here it is tied_embeddings=false)"),
        ("max_position_embeddings", 8, "(it has no effect on layouts: leave it out)"),
        ("attention_bias", True, "(here it is biases=attention)"),
        ("num_nextn_predict_layers", 2, "(here it is called 'num_mtp_layers')"),
        ("torch_dtype", "bfloat16", "unknown model field 'torch_dtype'"),
        ("mlp_only_layers", [0, 1], "(here it is num_dense_layers=2)"),
        ("full_attention_interval", 4, "(here it is layer_kinds)"),
        ("attention_chunk_size", 4, "(attention in chunks: not covered, see"),
    ],
)
def test_one_foreign_word_is_answered_with_ours_and_without_a_list(
    word: str, value: Any, says: str
) -> None:
    said = str(refusal({"preset": "tiny-moe", word: value}))
    assert says in said
    assert "choose from" not in said or word == "torch_dtype"
    assert "did you mean" not in said


@pytest.mark.parametrize("word", sorted(WORDS))
def test_no_word_of_other_software_is_answered_with_a_guess(word: str) -> None:
    for value in (None, 3, True):
        assert "did you mean" not in str(refusal({"preset": "tiny-moe", word: value})), value


NOT_COVERED: Final[list[tuple[dict[str, Any], dict[str, Any], str]]] = [
    (
        {"layer_types": ["conv", "full_attention"]},
        {"layer_types": ["full_attention"] * 2},
        "layers of other kinds than attention",
    ),
    ({"model_type": "bloom"}, {"model_type": "our_own"}, "ALiBi positions"),
    ({"model_type": "falcon_h1"}, {"model_type": "nemotron_h"}, "layers of other kinds"),
    ({"capacity_factor": 1.5}, {"capacity_factor": None}, "experts that drop tokens"),
    ({"attention_chunk_size": 8}, {"attention_chunk_size": None}, "attention in chunks"),
    ({"attn_type_list": [0, 1]}, {"attn_type_list": [1, 1]}, "layers of other kinds"),
    ({"intermediate_size": [64, 64, 32, 32]}, {"intermediate_size": [64] * 4}, "different widths"),
    ({"block_configs": [{"ffn": 1}]}, {"block_configs": None}, "different widths"),
    ({"word_embed_proj_dim": 32}, {"word_embed_proj_dim": None}, "different widths"),
    ({"vision_config": {"depth": 2}}, {"vision_config": {}}, "encoders beside the decoder"),
]


@pytest.mark.parametrize(("refused", "taken", "says"), NOT_COVERED)
def test_a_shape_that_can_be_said_only_nearly_is_refused_by_name_and_only_that(
    refused: dict[str, Any], taken: dict[str, Any], says: str
) -> None:
    model = {"num_layers": 4, "family": "llama", "num_experts": 8}
    (what,) = read_foreign({**model, **refused}, KNOWN).not_covered.values()
    assert says in what
    said = str(refusal({"preset": "tiny-moe", **refused}))
    assert "not covered" in said
    assert says in said
    assert not read_foreign({**model, **taken}, KNOWN).not_covered


KINDS: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    ({"moe_layer_freq": 2}, {"moe_layer_freq": 1}),
    ({"moe_layer_freq": [0, 1, 0, 1]}, {"moe_layer_freq": [0, 0, 1, 1]}),
    ({"moe_layer_freq": "([0,1]*2)"}, {"moe_layer_freq": "[0]*2+[1]*2"}),
    ({"moe_layer_freq": "([0]*4)"}, {"moe_layer_freq": "([1]*4)"}),
    ({"mlp_only_layers": [3]}, {"mlp_only_layers": []}),
    ({"moe_layers": [1, 3]}, {"moe_layers": [2, 3]}),
    ({"moe_layers_enum": "1,3"}, {"moe_layers_enum": "1,2,3"}),
    ({"mlp_layer_types": ["sparse", "dense"]}, {"mlp_layer_types": ["dense"]}),
    ({"moe_layer_end_index": 2}, {"moe_layer_end_index": 3}),
    (
        {"layer_types": ["linear_attention", "full_attention"]},
        {"layer_types": ["full_attention"] * 2},
    ),
    (
        {"layer_types": ["full_attention", "sliding_attention"] * 2},
        {"layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    (
        {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
        {"sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2},
    ),
    (
        {"attention_types": [[["global", "local"], 2]]},
        {"attention_types": [[["local", "global"], 2]]},
    ),
    ({"expert_layer_period": 2}, {"expert_layer_period": 1}),
    ({"moe_layer_frequency": 2}, {"moe_layer_frequency": 1}),
    ({"hybrid_override_pattern": "ME"}, {"hybrid_override_pattern": None}),
    ({"mamba_chunk_size": 256}, {"mamba_chunk_size": None}),
]


@pytest.mark.parametrize(("said", "short"), KINDS)
def test_layers_without_a_short_form_are_kinds(said: dict[str, Any], short: dict[str, Any]) -> None:
    model = {"num_layers": 4, "family": "llama", "num_experts": 8}
    read = read_foreign({**model, **said}, KNOWN)
    assert (read.fields["layer_kinds"], read.not_covered) == ("", {})
    assert "layer_kinds" not in read_foreign({**model, **short}, KNOWN).fields
    assert re.search(r"\blayer_kinds( for|\))", str(refusal({"preset": "tiny-moe", **said})))


def test_two_matrices_beside_rms_norms_are_of_llama() -> None:
    words = {"hidden_act": "gelu", "rms_norm_eps": 1e-5}
    assert read_foreign(words, KNOWN).fields == {"activation": "gelu"}


def test_layer_norms_of_a_class_are_told_beside_its_rms_word() -> None:
    words = {"model_type": "phimoe", "hidden_act": "silu", "rms_norm_eps": 1e-5}
    assert read_foreign(words, KNOWN).fields == {"family": "llama", "norm": "layer"}
    assert "norm=layer for 'model_type'" in str(refusal({"preset": "tiny-moe", **words}))


def test_two_matrices_beside_rotary_positions_are_fields_of_llama() -> None:
    neox = {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "rotary_pct": 0.25}
    told = {"activation": "gelu", "norm": "layer", "rotary_fraction": 0.25}
    assert read_foreign(neox, KNOWN).fields == told
    assert "state family, " in str(refusal(neox))
    gpt = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "n_layer": 12}
    assert read_foreign(gpt, KNOWN).fields == {"family": "gpt", "num_layers": 12}


def test_parts_of_a_config_json_count_as_its_own_fields() -> None:
    nested = {
        "text_config": {"num_hidden_layers": 4, "rope_parameters": {"rope_theta": 1e6}},
        "tie_word_embeddings": True,
    }
    told = {"num_layers": 4, "tied_embeddings": True, "rotary_base": 1e6}
    assert read_foreign(nested, KNOWN).fields == told


def test_a_nested_word_that_is_ours_too_is_not_missing() -> None:
    nested = {"text_config": {"hidden_size": 512, "vocab_size": 40000, "num_hidden_layers": 4}}
    told = {"num_layers": 4, "hidden_size": 512, "vocab_size": 40000}
    assert read_foreign(nested, KNOWN).fields == told
    assert "state family, ffn_hidden_size, num_heads, seq_length, which" in str(refusal(nested))


IMPLIED: Final[list[tuple[dict[str, Any], dict[str, Any]]]] = [
    (
        {"model_type": "gemma2", "sliding_window": 2048},
        {
            "family": "llama",
            "tied_embeddings": True,
            "head_dim": 256,
            "attention_window": 2048,
            "full_attention_every": 2,
        },
    ),
    (
        {"model_type": "gemma", "head_dim": 64, "tie_word_embeddings": False},
        {"family": "llama", "tied_embeddings": False},
    ),
    ({"model_type": "qwen3"}, {"head_dim": 128, "qk_norm": True}),
    ({"model_type": "qwen3", "head_dim": None}, {"qk_norm": True}),
    ({"model_type": "mistral"}, {"attention_window": 4096}),
    ({"model_type": "mistral", "sliding_window": None}, {}),
    ({"model_type": "smollm3", "hidden_act": "silu"}, {"family": "llama", "tied_embeddings": True}),
    (
        {"model_type": "exaone", "activation_function": "silu", "layer_norm_epsilon": 1e-5},
        {"family": "llama"},
    ),
    (
        {"model_type": "qwen", "intermediate_size": 22016},
        {"family": "llama", "ffn_hidden_size": 11008},
    ),
]


@pytest.mark.parametrize(("document", "told"), IMPLIED)
def test_what_a_class_of_models_implies_is_said_unless_the_file_says_otherwise(
    document: dict[str, Any], told: dict[str, Any]
) -> None:
    read = read_foreign(document, KNOWN)
    assert not read.not_covered
    assert read.fields == told


def test_a_dense_model_has_no_experts_and_their_widths_have_no_effect() -> None:
    dense = {"num_local_experts": 1, "num_experts_per_tok": 1, "num_hidden_layers": 4}
    assert read_foreign(dense, KNOWN).fields == {"num_layers": 4}
    qwen = {"num_experts": 8, "moe_intermediate_size": 64, "intermediate_size": 512}
    assert read_foreign(qwen, KNOWN).fields == {"moe_ffn_hidden_size": 64}


@pytest.mark.parametrize(
    ("word", "value", "told"),
    [
        ("window_size", [127, 0], {"attention_window": 128}),
        ("window_size", "(-1, -1)", {}),
        ("sliding_window", None, {}),
        ("window_attn_skip_freq", [1, 1, 0, 1, 1, 0], {"full_attention_every": 3}),
        ("first_k_dense_replace", 0, {}),
        ("tie_word_embeddings", False, {"tied_embeddings": False}),
        ("multi_query", True, {"num_kv_heads": 1}),
        ("n_inner", None, {}),
        ("moe_layers", [2, 3], {"num_dense_layers": 2}),
        ("mlp_layer_types", ["dense", "sparse"], {"num_dense_layers": 1}),
        ("sliding_window_pattern", "LLLG", {"full_attention_every": 4}),
        ("moe_topk", [6, 6, 6], {"experts_per_token": 6}),
        ("moe", {"num_experts_per_tok": 2}, {"experts_per_token": 2}),
        ("activation_func", "fast-swiglu", {"family": "llama"}),
        ("decoder_sparse_step", 2, {"experts_every": 2}),
        ("interleave_moe_layer_step", 1, {}),
        ("interleave_moe_layer_step", 2, {"experts_every": 2}),
        ("num_nextn_predict_layers", 0, {}),
        ("mtp_num_layers", 2, {"num_mtp_layers": 2}),
        ("qk_pos_emb_head_dim", 64, {"qk_rope_head_dim": 64}),
        ("mamba_d_state", 16, {"mamba_state_dim": 16}),
        ("n_group", 8, {"router_groups": 8}),
        ("n_group", 1, {}),
        ("moe_router_score_function", "sigmoid", {"router_score": "sigmoid"}),
        ("add_qkv_bias", True, {"biases": "qkv"}),
        ("add_bias_linear", True, {"biases": "all"}),
        ("share_embeddings_and_output_weights", True, {"tied_embeddings": True}),
        ("num_query_groups", 2, {"num_kv_heads": 2, "tied_embeddings": True}),
    ],
)
def test_a_value_means_what_it_means_there(word: str, value: Any, told: dict[str, Any]) -> None:
    document = {"num_layers": 4, "num_experts": 8, "family": "llama", word: value}
    assert read_foreign(document, KNOWN).fields == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ({"hidden_act": "relu2"}, {"activation": "relu2"}),
        ({"squared_relu": True}, {"activation": "relu2"}),
        ({"gated_linear_unit": False}, {"activation": "gelu"}),
        ({"swiglu": False}, {"activation": "gelu", "tied_embeddings": True}),
        ({"normalization": "LayerNorm"}, {"norm": "layer"}),
        ({"hidden_act": "silu", "rms_norm_eps": 1e-5}, {"family": "llama"}),
        ({"hidden_act": "silu", "layer_norm_eps": 1e-5}, {"family": "llama", "norm": "layer"}),
        ({"attention_bias": True, "mlp_bias": True}, {"biases": "all"}),
        ({"attention_bias": True, "family": "gpt"}, {}),
        ({"num_experts": 1, "scoring_func": "sigmoid"}, {}),
    ],
)
def test_activation_norm_and_biases_are_fields(words: dict[str, Any], told: dict[str, Any]) -> None:
    document = {"num_layers": 4, "num_experts": 8, "family": "llama", **words}
    assert read_foreign(document, KNOWN).fields == told


@pytest.mark.parametrize("widths", [{"moe_intermediate_size": [64, 64]}, {"intermediate_size": 64}])
def test_shared_experts_have_the_width_of_the_others(widths: dict[str, Any]) -> None:
    document = {"num_experts": 8, "num_shared_expert": [2, 2], **widths}
    assert read_foreign(document, KNOWN).fields["shared_expert_ffn_hidden_size"] == 128


def test_a_width_that_is_rounded_up_to_a_multiple_is_computed() -> None:
    llama = {"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}
    assert read_foreign(llama, KNOWN).fields == {"hidden_size": 4096, "ffn_hidden_size": 14336}
    assert read_foreign({"dim": 4096, "multiple_of": 256}, KNOWN).fields["ffn_hidden_size"] == 11008


@pytest.mark.parametrize("grouped", [{}, {"group_query_attention": False}])
def test_megatron_lm_ignores_groups_of_queries_without_their_option(
    grouped: dict[str, Any],
) -> None:
    options = {"swiglu": True, "num_query_groups": 2, **grouped}
    assert read_foreign(options, KNOWN).fields == {"family": "llama", "tied_embeddings": True}


def test_megatron_lm_ties_the_embeddings_unless_an_option_unties_them() -> None:
    sizes = dict.fromkeys(("hidden_size", "ffn_hidden_size", "seq_length", "vocab_size"), 512)
    options = {"swiglu": True, "num-layers": 4, "num_heads": 8, **sizes}
    assert read_foreign(options, KNOWN).fields["tied_embeddings"] is True
    said = str(refusal(options))
    assert "tied_embeddings=true for 'no untie_embeddings_and_output_weights'" in said
    untied = {"untie_embeddings_and_output_weights": True}
    assert read_foreign({**options, **untied}, KNOWN).fields["tied_embeddings"] is False
    assert (
        "tied_embeddings" not in read_foreign({**options, "tied_embeddings": False}, KNOWN).fields
    )


def test_any_value_of_a_word_is_answered() -> None:
    odd = (10**30, -1, "x" * 200, [10**30], ["a", None], {"a": 1}, [[0]], 0.5, "", "-1", "1,", [])
    for word in sorted(WORDS):
        for value in odd:
            said = str(refusal({"preset": "tiny-moe", word: value, "num_hidden_layers": 10**30}))
            assert len(said) < 900, (word, value)


def test_several_unknown_fields_are_refused_with_one_list_of_all() -> None:
    said = str(refusal({"preset": "tiny", "colour": 1, "shape": 2, "taste": 3}))
    assert said.count("choose from name, family, num_layers") == 1
    assert [word in said for word in ("'colour'", "'shape'", "'taste'")] == [True] * 3


def test_a_guess_is_made_only_for_names_of_like_words() -> None:
    assert "did you mean 'num_heads'" in str(refusal({"preset": "tiny", "num_headz": 4}))
    for word in ("num_shared_layers", "full_attention_heads"):
        assert "did you mean" not in str(refusal({"preset": "tiny", word: 4}))


def test_a_model_in_place_of_a_campaign_is_one_error() -> None:
    with pytest.raises(SearchSpaceError) as caught:
        spec_of(**CONFIG)
    said = str(caught.value)
    assert "model: 'architectures', 'bos_token_id'" in said
    assert " and 16 more describe the model: write them below `model`" in said
    assert "unknown campaign field" not in said


def test_the_reference_has_every_word_that_has_the_value_of_a_field() -> None:
    page = Path("docs/reference/campaign-file.md").read_text(encoding="utf-8")
    for ours, words in SAME_VALUE.items():
        (row,) = (
            line
            for line in page.splitlines()
            if line.startswith(f"| `{ours}` | `{words.split()[0]}`")
        )
        assert [word for word in words.split() if f"`{word}`" not in row] == []
