"""The kinds of a model's layers: what documents say, short forms, and shapes of one kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.layer_kinds import (
    LAYER_KINDS,
    SHORT_FORMS,
    read_layer_kinds,
    repeated,
    shortest_pattern,
    write_layer_kinds,
)
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

SHAPE: Final = {
    "family": "llama",
    "num_layers": 8,
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_heads": 8,
    "seq_length": 128,
    "vocab_size": 1000,
}
EXPERTS: Final = {"num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 64}
WINDOWS: Final = {"attention_window": 32}
LATENT: Final = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
MAMBA: Final = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "mamba_state_dim": 16,
    "mamba_num_groups": 2,
}


def shape(**fields: Any) -> ModelShape:
    return ModelShape.from_mapping(SHAPE | fields)


def refusal(**fields: Any) -> str:
    with pytest.raises(ModelShapeInvalidError) as caught:
        shape(**fields)
    return str(caught.value)


@given(st.lists(st.sampled_from(LAYER_KINDS), min_size=1, max_size=24))
def test_written_kinds_are_read_back_and_patterns_repeat(kinds: list[str]) -> None:
    assert read_layer_kinds(write_layer_kinds(kinds)) == tuple(kinds)
    pattern = shortest_pattern(tuple(kinds))
    assert repeated(pattern, len(kinds)) == tuple(kinds)
    assert len(kinds) % len(pattern) == 0
    assert shortest_pattern(pattern) == pattern


def test_an_option_states_kinds_with_commas() -> None:
    assert shape(layer_kinds="full,dense") == shape(layer_kinds=["full", "dense"])
    assert shape(layer_kinds="full+dense") == shape(layer_kinds=[]) == shape()


@pytest.mark.parametrize(
    ("kinds", "short"),
    [
        (["full+dense"], {}),
        ([{"window+dense": 3}, "full+dense"], WINDOWS | {"full_attention_every": 4}),
        (["window+dense"], WINDOWS),
        (
            ["window+experts", "full+experts"],
            WINDOWS | EXPERTS | {"ffn_hidden_size": 64, "full_attention_every": 2},
        ),
        (
            ["window+dense", "full+dense"],
            WINDOWS | {"window_num_kv_heads": 4, "full_attention_every": 2},
        ),
    ],
)
def test_a_list_becomes_the_short_form_that_says_it(
    kinds: list[Any], short: dict[str, Any]
) -> None:
    stated = shape(layer_kinds=kinds, **{k: v for k, v in short.items() if k not in SHORT_FORMS})
    assert stated == shape(**short)
    assert stated.to_mapping() == shape(**short).to_mapping()
    assert shape(layer_kinds=kinds, **short) == stated


@pytest.mark.parametrize(
    ("kinds", "short"),
    [
        ([{"full+dense": 2}, {"full+experts": 6}], {"num_dense_layers": 2}),
        (["full+dense", "full+experts"], {"experts_every": 2}),
    ],
)
def test_a_list_of_layers_with_and_without_experts_is_kept(
    kinds: list[Any], short: dict[str, int]
) -> None:
    """Estimates of a list wait for stages with more experts: see decision 0070."""
    stated, shortly = shape(layer_kinds=kinds, **EXPERTS), shape(**EXPERTS, **short)
    assert stated.to_mapping()["layer_kinds"] == kinds
    assert stated.kind_of_layers == shortly.kind_of_layers
    for name in ("num_parameters", "num_active_parameters", "model_flops_per_token"):
        assert getattr(stated, name) == getattr(shortly, name)
    assert ModelShape.from_mapping(stated.to_mapping()) == stated
    assert shape(layer_kinds=kinds, **EXPERTS, **short) == shortly


@pytest.mark.parametrize(
    ("kinds", "fields"),
    [
        (["full+experts", "full+dense"], EXPERTS),
        (["full+dense", "window+dense"], WINDOWS),
        (["full+dense", "dense"], {}),
        ([{"window+dense": 5}, "full+dense", "window+dense", "full+dense"], WINDOWS),
    ],
)
def test_a_list_that_no_short_form_says_is_kept(kinds: list[Any], fields: dict[str, Any]) -> None:
    assert shape(layer_kinds=kinds, **fields).to_mapping()["layer_kinds"] == kinds


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"layer_kinds": ""}, "is not a list of kinds of layers"),
        ({"layer_kinds": "full+dense,"}, "layer_kinds='' is not a kind of layer"),
        ({"layer_kinds": {"full+dense": 8}}, "is not a list of kinds of layers"),
        ({"layer_kinds": ["full+dens"]}, "did you mean 'full+dense'?"),
        ({"layer_kinds": [None]}, "layer_kinds=None is not a kind of layer"),
        ({"layer_kinds": [{"full+dense": True}]}, "True of full+dense is not a whole number"),
        ({"layer_kinds": [{"full+dense": 10**9}]}, "is not a whole number from 1 to 16384"),
        ({"layer_kinds": [{"full+dense": 16384}] * 2}, "names more than 16384 layers"),
        ({"layer_kinds": ["full+dense", "dense", "full"]}, "3 layers, which do not divide num_lay"),
        ({"layer_kinds": ["full"]}, "no layer of layer_kinds has a feed-forward"),
        ({"layer_kinds": ["full+experts"]}, "layer_kinds has experts: state num_experts"),
        (EXPERTS | {"layer_kinds": ["full+dense", "dense"]}, "no layer of layer_kinds has experts"),
        ({"layer_kinds": ["window+dense", "full+dense"]}, "need attention_window"),
        ({"layer_kinds": ["dense", "full"], "attention_window": 9}, "no layer of layer_kinds is a"),
        (
            EXPERTS | {"layer_kinds": ["full+dense", "full+experts"], "num_dense_layers": 1},
            "num_dense_layers=1 and layer_kinds both say the kinds; leave num_dense_layers out",
        ),
        (
            WINDOWS
            | {"layer_kinds": [{"window+dense": 3}, "full+dense"], "full_attention_every": 2},
            "full_attention_every=2 and layer_kinds both say the kinds",
        ),
        ({"layer_kinds": ["mamba2+dense"]}, "mamba_state_dim is missing, which mamba2 needs"),
        (MAMBA, "mamba_num_heads=8, and no layer of layer_kinds is mamba2; leave it out"),
        (
            MAMBA | {"layer_kinds": ["mamba2+dense"], "mamba_num_groups": 3},
            "mamba_num_heads=8 is not divisible by mamba_num_groups=3",
        ),
        (
            {
                "layer_kinds": ["kda+dense"],
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 8,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "key and value heads of kda are alike in number and width",
        ),
        (
            {
                "layer_kinds": ["gated_delta_net+dense"],
                "linear_num_key_heads": 3,
                "linear_num_value_heads": 8,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "linear_num_value_heads=8 is not divisible by linear_num_key_heads=3",
        ),
        ({"layer_kinds": ["dense", "full"], "parallel_block": True}, "layers with both sublayers"),
        ({"kv_lora_rank": 64}, "v_head_dim is missing, which latent attention needs"),
        ({"v_head_dim": 64}, "v_head_dim=64 is of latent attention: state kv_lora_rank too"),
        (LATENT | {"num_kv_heads": 2}, "latent attention has as many key heads as num_heads=8"),
        (LATENT | {"qk_norm": True}, "qk_norm=true has no meaning with latent attention"),
        (LATENT | {"qk_rope_head_dim": 7}, "qk_rope_head_dim=7 is odd"),
        ({"rotary_fraction": 0.1}, "rotates 3 of 32 features of a head"),
        ({"qk_norm": "all"}, "qk_norm='all' is not true, false or width"),
        ({"window_num_heads": 4}, "window_num_heads=4, and no layer has a window"),
        (
            {"attention_window": 9, "window_num_kv_heads": 3},
            "are not divisible by their 3 key heads",
        ),
        ({"mean_document_length": 129}, "is more than seq_length=128"),
        ({"router_score": "sigmoid"}, "router_score=sigmoid needs experts: state num_experts"),
        ({"ffn_hidden_size": 0}, "ffn_hidden_size=0 is not a whole number"),
        (
            EXPERTS | {"experts_every": 9},
            "experts_every=9 leaves none of num_layers=8 with experts",
        ),
        (
            EXPERTS | {"num_dense_layers": 1, "router_groups": 3, "router_topk_groups": 1},
            "router_groups=3 must divide num_experts=8",
        ),
        (
            EXPERTS | {"num_dense_layers": 1, "shared_expert_gate": True},
            "shared_expert_gate=true needs shared_expert_ffn_hidden_size",
        ),
        (
            {"family": "gpt", "activation": "relu2"},
            "activation=relu2 has no meaning for family=gpt",
        ),
    ],
)
def test_what_can_not_be_is_refused_in_a_sentence(fields: dict[str, Any], said: str) -> None:
    assert said in refusal(**fields)


def test_a_kind_is_a_model_of_its_own() -> None:
    hybrid = shape(
        layer_kinds=["mamba2", "experts", "full", "experts"], **MAMBA, **EXPERTS, ffn_hidden_size=64
    )
    by_kind = {each.kind: each for each in hybrid.kinds}
    assert by_kind["experts"].layers == (1, 3, 5, 7)
    assert (by_kind["experts"].shape.mixer, by_kind["mamba2"].shape.feed_forward) == (None, None)
    assert by_kind["experts"].shape.query_size == 0
    assert by_kind["mamba2"].shape.ffn_hidden_size == 0
    assert by_kind["full"].shape.num_experts == 0
    total = sum(len(each.layers) * each.shape.num_layer_parameters for each in hybrid.kinds)
    ends = hybrid.num_embedding_parameters + hybrid.num_head_parameters
    assert hybrid.num_parameters == total + ends
    with pytest.raises(ValueError, match="ask each of `kinds`"):
        _ = hybrid.mixer


@pytest.mark.parametrize(
    ("kinds", "depth"),
    [
        (["full+dense", "full+experts"], ("full+experts",)),
        (["mamba2", "experts", "full", "experts"], ("full", "experts")),
    ],
)
def test_a_depth_of_prediction_is_like_the_last_layer(
    kinds: list[str], depth: tuple[str, ...]
) -> None:
    more = MAMBA | {"ffn_hidden_size": 64} if "mamba2" in kinds else {}
    model = shape(layer_kinds=kinds, num_mtp_layers=2, **more, **EXPERTS)
    assert model.mtp_kinds == depth
    layers = sum(model.of_kind(kind).num_layer_parameters for kind in depth)
    assert model.num_mtp_parameters == layers + 2 * 256**2 + 3 * 256
    assert model.num_parameters - model.num_main_parameters == 2 * model.num_mtp_parameters


def test_documents_shorten_attention_and_windows_cap_it() -> None:
    long = replace(model_preset("llama-8b"), seq_length=32768)
    packed = replace(long, mean_document_length=2048)
    assert packed.attention_positions == replace(long, seq_length=2048).attention_positions
    assert packed.num_parameters == long.num_parameters
    windows = replace(packed, attention_window=4096)
    assert windows.attention_positions == packed.attention_positions


def test_later_fields_are_left_out_of_documents_at_their_defaults() -> None:
    first = set(SHAPE) | {"name", "num_kv_heads", "tied_embeddings", "rotary_base"}
    assert set(shape().to_mapping()) == first
    assert set(shape(**LATENT).to_mapping()) == first | set(LATENT)
