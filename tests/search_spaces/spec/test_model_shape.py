"""Mixtures of experts, heads of their own width and attention windows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.errors import ModelShapeInvalidError
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.models import MODEL_PRESETS, model_preset, resolve_model

TINY = model_preset("tiny-moe")


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),  # arXiv:2401.04088
        ("mixtral-8x22b", 141, 39),  # mistral.ai/news/mixtral-8x22b
        ("qwen3-30b-a3b", 30.5, 3.3),  # arXiv:2505.09388 and the models' cards
        ("qwen3-235b-a22b", 235, 22),
        ("gpt-oss-120b", 116.8, 5.1),  # arXiv:2508.10925; active without the embedding
    ],
)
def test_presets_have_the_published_numbers_of_parameters(
    name: str, billions: float, active: float
) -> None:
    model = model_preset(name)
    left_out = model.num_embedding_parameters if "attention sinks" in model.lacks else 0
    assert model.num_parameters / 1e9 == pytest.approx(billions, rel=0.003)
    assert (model.num_active_parameters - left_out) / 1e9 == pytest.approx(active, rel=0.017)


def test_work_counts_the_experts_that_a_token_takes_and_the_width_of_dense_layers() -> None:
    """Six operations for each active matrix parameter but the embedding, and attention's."""
    shape = replace(TINY, shared_expert_ffn_hidden_size=64)
    norms = shape.num_layers * (2 * shape.hidden_size + 2 * shape.head_size) + shape.hidden_size
    matrices = shape.num_active_parameters - shape.num_embedding_parameters - norms
    attention = 3 * 4 * shape.num_layers * shape.seq_length * shape.query_size
    assert shape.model_flops_per_token == 6 * matrices + attention
    more = replace(shape, num_experts=16)
    router = shape.num_layers * 8 * shape.hidden_size
    assert more.model_flops_per_token == shape.model_flops_per_token + 6 * router
    mixed = replace(TINY, ffn_hidden_size=512, num_dense_layers=1)
    assert [mixed.has_experts(i) for i in range(4)] == [False, True, True, True]
    dense = 4 * 128 * 128 - 2 * 128 * 64 + 3 * 128 * 512 + 2 * 128 + 2 * 32
    assert mixed.dense.num_layer_parameters == dense
    assert mixed.num_parameters - TINY.num_parameters == dense - TINY.num_layer_parameters
    flops = mixed.model_flops_per_token - TINY.model_flops_per_token
    assert flops == 6 * (3 * 128 * 512 - 2 * 3 * 128 * 128 - 8 * 128)


@pytest.mark.parametrize("window", [1, 5, 31, 32, 40])
def test_a_window_counts_twice_the_pairs_inside_it(window: int) -> None:
    shape = replace(TINY, seq_length=32, attention_window=window, full_attention_every=4)
    pairs = sum(1 for i in range(32) for j in range(32) if 0 <= i - j < window)
    inside = 2 * pairs - min(window, 32)  # of the causal square likewise, 2 n (n + 1) / 2 - n = n^2
    assert shape.attention_positions == 32 + 3 * (inside // 32)
    assert [shape.window_of(i) is None for i in range(4)] == [window >= 32] * 3 + [True]


def test_documents_state_new_fields_only_where_they_say_something() -> None:
    dense = model_preset("llama-8b")
    assert not {"head_dim", "num_experts", "lacks"} & dense.to_mapping().keys()
    assert ModelShape.from_mapping({**dense.to_mapping(), "head_dim": 128}) == dense
    assert model_preset("qwen3-30b-a3b").to_mapping()["head_dim"] == 128
    for name, model in MODEL_PRESETS.items():
        assert model.name == name
        assert ModelShape.from_mapping(model.to_mapping()) == model
    # The width of experts is that of the feed-forward unless both are stated.
    mapping = TINY.to_mapping()
    del mapping["moe_ffn_hidden_size"]
    assert ModelShape.from_mapping(mapping) == TINY
    narrow = resolve_model({"preset": "tiny-moe", "moe_ffn_hidden_size": 64})
    assert narrow.ffn_hidden_size == narrow.moe_ffn_hidden_size == 64


DENSE = {"preset": "tiny"}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"experts_per_token": 9}, "experts_per_token=9 is not from 1 to num_experts=8"),
        ({"experts_per_token": 0}, "experts_per_token=0 is not from 1 to num_experts=8"),
        ({"num_experts": 4097}, "num_experts=4097 is not a whole number from 1 to 4096"),
        ({"ffn_hidden_size": 64}, "ffn_hidden_size=64 is the width of dense layers and there are"),
        (
            {"num_dense_layers": 4, "ffn_hidden_size": 64},
            "num_dense_layers=4 leaves none of num_layers=4 with experts",
        ),
        ({"head_dim": 31}, "head size 31 is odd"),
        ({"num_heads": 6, "num_kv_heads": 6}, "state head_dim if heads have a width of their own"),
        ({"full_attention_every": 2}, "full_attention_every=2 needs attention_window"),
        ({"qk_norm": 1}, "qk_norm=1 is not true or false"),
        ({"lacks": "a\nb"}, "is not a line of text"),
        (
            {"num_layers": 1 << 14, "num_experts": 4096}
            | {"moe_ffn_hidden_size": 1 << 20, "hidden_size": 1 << 20},
            "FLOPs per token; at most",
        ),
        (
            {**DENSE, "num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 64},
            "num_experts=8 has no meaning for family=gpt, which has dense feed-forwards alone",
        ),
        ({**DENSE, "qk_norm": True}, "qk_norm=true has no meaning for family=gpt"),
        ({**DENSE, "experts_per_token": 2}, "experts_per_token=2 needs experts: state num_experts"),
    ],
    ids=str,
)
def test_an_impossible_mixture_of_experts_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelShapeInvalidError, match=re.escape(says)):
        resolve_model({"preset": "tiny-moe", **changes})
