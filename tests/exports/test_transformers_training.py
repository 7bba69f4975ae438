"""The embedded trainer has the losses and gradients of transformers' modules of the same weights.

A configuration of the library is read as `layout-tuner` reads it, and the model is built by both.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.model.parameters import local_parts
from tests.exports.trainer_environments import Ask, reading
from tests.workers.trainer.cases import initial_weights, make_layout, make_training

pytestmark = pytest.mark.exports

Weights = dict[str, Tensor]

SIZES = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
    "max_position_embeddings": 16,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHAPE: dict[str, Any] = {
    "family": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "seq_length": 16,
    "vocab_size": 64,
}
MOST_LAYERS = 4
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
HALF = ROPE | {"partial_rotary_factor": 0.5}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
    "rope_parameters": ROPE,
    "rope_interleave": False,
    "rms_norm_eps": 1e-5,
    "num_nextn_predict_layers": 0,
}
TINY_MLA = model_preset("tiny-mla").to_mapping()
"""With as many experts of a token as the library's rule for groups has in common with
Megatron-LM's: two of each group."""
EXPERTS = {"num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 16}
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}


def plain(weights: Weights, layer: int) -> Weights:
    """Norms and attention, under the names of Llama."""
    own, theirs = f"layers.{layer}", f"model.layers.{layer}"
    found = {
        f"{theirs}.input_layernorm": f"{own}.attention_norm",
        f"{theirs}.post_attention_layernorm": f"{own}.feed_forward_norm",
        **{
            f"{theirs}.self_attn.{short}_{kind}": f"{own}.attention.{name}{suffix}"
            for short, name in (("q", "query"), ("k", "key"), ("v", "value"))
            for kind, suffix in (("proj", ""), ("norm", "_norm"))
        },
        f"{theirs}.self_attn.o_proj": f"{own}.attention.out",
        **{
            f"{theirs}.mlp.{name}_proj": f"{own}.feed_forward.{name}"
            for name in ("gate", "up", "down")
        },
    }
    return named(weights, found)


def named(weights: Weights, names: dict[str, str]) -> Weights:
    return {
        f"{theirs}.{kind}": weights[f"{own}.{kind}"]
        for theirs, own in names.items()
        for kind in ("weight", "bias")
        if f"{own}.{kind}" in weights
    }


def ends(weights: Weights, final_norm: str = "model.norm") -> Weights:
    names = {"model.embed_tokens": "embedding", "lm_head": "head", final_norm: "final_norm"}
    return named(weights, names)


def of_layers(weights: Weights, of_layer: Callable[[Weights, int], Weights]) -> Weights:
    return {
        name: value
        for layer in range(MOST_LAYERS)
        for name, value in of_layer(weights, layer).items()
    }


def cohere(weights: Weights) -> Weights:
    """Pairs of rotated features are neighbours, and norms have no bias."""

    def interleaved(name: str, value: Tensor) -> Tensor:
        if "q_proj" not in name and "k_proj" not in name:
            return value
        return value.view(-1, 2, 4, 32).transpose(1, 2).reshape(value.shape)

    found = of_layers(weights, plain) | ends(weights)
    return {n: interleaved(n, v) for n, v in found.items() if "bias" not in n}


def phi(weights: Weights) -> Weights:
    def of_layer(weights: Weights, layer: int) -> Weights:
        names = {"o_proj": "dense", "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"}
        found = plain(weights, layer)
        for theirs, name in names.items():
            found = {key.replace(theirs, name): value for key, value in found.items()}
        return found

    return of_layers(weights, of_layer) | ends(weights, "model.final_layernorm")


def nemotron(weights: Weights) -> Weights:
    return of_layers(weights, plain) | ends(weights)


def mixture(shared: str) -> Callable[[Weights], Weights]:
    """Stacked experts; `shared` is the name of the expert that every token takes."""

    def of_layer(weights: Weights, layer: int) -> Weights:
        own, theirs = f"layers.{layer}.feed_forward", f"model.layers.{layer}.mlp"
        names = {
            f"{theirs}.gate": f"{own}.router",
            f"{theirs}.{shared}_gate": f"{own}.shared_expert_gate",
        }
        for name in ("gate", "up", "down"):
            names[f"{theirs}.{shared}.{name}_proj"] = f"{own}.shared_expert.{name}"
        found = plain(weights, layer) | named(weights, names)
        if f"{own}.experts.0.up.weight" in weights:
            experts = {
                name: torch.stack([weights[f"{own}.experts.{i}.{name}.weight"] for i in range(8)])
                for name in ("gate", "up", "down")
            }
            found[f"{theirs}.experts.gate_up_proj"] = torch.cat((experts["gate"], experts["up"]), 1)
            found[f"{theirs}.experts.down_proj"] = experts["down"]
        return found

    return lambda weights: of_layers(weights, of_layer) | ends(weights)


def latent(weights: Weights) -> Weights:
    """The library calls the latents a, and what is projected from them b."""
    names = {
        "q_a_proj": "query_latent",
        "q_a_layernorm": "query_latent_norm",
        "kv_a_proj_with_mqa": "key_value_latent",
        "kv_a_layernorm": "key_value_latent_norm",
        "kv_b_proj": "key_value",
    }
    has_latent = "layers.0.attention.query_latent.weight" in weights

    def of_layer(weights: Weights, layer: int) -> Weights:
        own, theirs = f"layers.{layer}.attention", f"model.layers.{layer}.self_attn"
        every = {f"{theirs}.{name}": f"{own}.{latent}" for name, latent in names.items()}
        return named(weights, every)

    found = mixture("shared_experts")(weights) | of_layers(weights, of_layer)
    return {
        name.replace("q_proj", "q_b_proj") if has_latent else name: value
        for name, value in found.items()
    }


LESS = {"nemotron": 1.0}
"""What the library subtracts from the weights of norms before it stores them."""

Case = tuple[dict[str, Any], dict[str, Any], Callable[[Weights], Weights]]
CASES: dict[str, Case] = {
    "cohere": (
        {"intermediate_size": 64, "num_key_value_heads": 2, "logit_scale": 1.0}
        | {"rope_parameters": ROPE, "layer_norm_eps": 1e-5},
        {"ffn_hidden_size": 64, "num_kv_heads": 2, "tied_embeddings": True, "norm": "layer"}
        | {"parallel_block": True},
        cohere,
    ),
    "phi": (
        {"intermediate_size": 64, "rope_parameters": HALF, "layer_norm_eps": 1e-5}
        | {"resid_pdrop": 0.0, "embd_pdrop": 0.0},
        {"ffn_hidden_size": 64, "norm": "layer", "parallel_block": True, "biases": "all"}
        | {"activation": "gelu", "rotary_fraction": 0.5},
        phi,
    ),
    "nemotron": (
        {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "norm_eps": 1e-5}
        | {"rope_parameters": HALF, "hidden_act": "relu2"},
        {"ffn_hidden_size": 64, "num_kv_heads": 2, "norm": "layer", "activation": "relu2"}
        | {"rotary_fraction": 0.5},
        nemotron,
    ),
    "glm4_moe": (
        MIXTURE
        | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 1}
        | {"routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1}
        | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "use_qk_norm": True}
        | {"rope_parameters": HALF, "rms_norm_eps": 1e-5, "attention_bias": True},
        EXPERTS
        | {"ffn_hidden_size": 64, "num_dense_layers": 1, "num_kv_heads": 2, "qk_norm": True}
        | {"shared_expert_ffn_hidden_size": 16, "router_score": "sigmoid", "router_groups": 4}
        | {"router_topk_groups": 1, "router_scaling_factor": 2.5, "biases": "qkv"}
        | {"rotary_fraction": 0.5},
        mixture("shared_experts"),
    ),
    "qwen2_moe": (
        MIXTURE
        | {"num_experts": 8, "shared_expert_intermediate_size": 48, "norm_topk_prob": True}
        | {"num_key_value_heads": 2, "rope_parameters": ROPE, "rms_norm_eps": 1e-5}
        | {"qkv_bias": True, "decoder_sparse_step": 1},
        EXPERTS
        | {"num_kv_heads": 2, "shared_expert_ffn_hidden_size": 48, "shared_expert_gate": True}
        | {"biases": "qkv"},
        mixture("shared_expert"),
    ),
    "minimax_m2": (
        {"num_experts_per_tok": 2, "intermediate_size": 16, "num_local_experts": 8}
        | {"num_key_value_heads": 2, "head_dim": 8, "rope_parameters": HALF, "rms_norm_eps": 1e-5}
        | {"router_jitter_noise": 0.0},
        EXPERTS
        | {"num_kv_heads": 2, "qk_norm": "width", "rotary_fraction": 0.5}
        | {"router_score": "sigmoid"},
        mixture("none"),
    ),
    "tiny-mla": (
        DEEPSEEK
        | {"hidden_size": 128, "num_hidden_layers": 4, "vocab_size": 1024, "q_lora_rank": 48}
        | {"max_position_embeddings": 128, "first_k_dense_replace": 1, "intermediate_size": 256}
        | {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
        | {"num_experts_per_tok": 4, "moe_intermediate_size": 64, "routed_scaling_factor": 2.5},
        {name: value for name, value in TINY_MLA.items() if name not in ("name", "num_kv_heads")}
        | {"experts_per_token": 4},
        latent,
    ),
    "latent-of-keys": (
        DEEPSEEK | {"q_lora_rank": None, "first_k_dense_replace": 2, "intermediate_size": 64},
        {"kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
        | {"ffn_hidden_size": 64},
        latent,
    ),
    "every-second": (
        MIXTURE
        | {"model_type": "qwen3_moe", "num_experts": 8, "norm_topk_prob": True, "head_dim": 8}
        | {"num_key_value_heads": 2, "rope_parameters": ROPE, "rms_norm_eps": 1e-5}
        | {"decoder_sparse_step": 2, "intermediate_size": 64},
        EXPERTS | {"num_kv_heads": 2, "ffn_hidden_size": 64, "experts_every": 2, "qk_norm": True},
        mixture("none"),
    ),
    "windows": (
        {"model_type": "qwen3", "layer_types": ["sliding_attention", "full_attention"]}
        | {"use_sliding_window": True, "sliding_window": 6, "head_dim": 8, "rms_norm_eps": 1e-5}
        | {"num_key_value_heads": 2, "rope_parameters": ROPE, "intermediate_size": 64},
        {"num_kv_heads": 2, "ffn_hidden_size": 64, "qk_norm": True, "attention_window": 6}
        | {"layer_kinds": ["window+dense", "full+dense"]},
        mixture("none"),
    ),
}
"""The library's fields, the shape's, and how the library names and stores weights."""


def noisy(weights: Weights, *, with_biases: bool) -> Weights:
    """Weights of which no norm is one and no bias 0, but for the biases of norms on request."""
    generator = torch.Generator().manual_seed(0)
    return {
        name: value + 0.1 * torch.randn(value.shape, generator=generator)
        if with_biases or not name.endswith("norm.bias")
        else value
        for name, value in weights.items()
    }


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with reading("transformers", "train_transformers.py") as asked:
        yield asked


@pytest.mark.parametrize("kind", CASES)
def test_losses_and_gradients_are_the_library_s(kind: str, ask: Ask, tmp_path: Path) -> None:
    fields, changes, theirs = CASES[kind]
    shape = ModelShape.from_mapping({"name": kind, **SHAPE, **changes})
    training = make_training(shape, make_layout(micro_batch_size=4, num_microbatches=1))
    batch, drawn = training.batch(0), noisy(initial_weights(shape), with_biases=kind != "cohere")
    for slot in training.flat.slots:
        for part, value in local_parts(slot.parameter, slot.parameter.detach()):
            value.copy_(drawn[part.name])
    training.reduction.begin()
    loss, _ = training.pipeline.run(batch)
    own = {
        part.name: value.clone()
        for slot in training.flat.slots
        for part, value in local_parts(slot.parameter, slot.parameter.main_grad)
    }
    tokens = {
        "ids": batch.ids_MT.view(-1, shape.seq_length),
        "targets": batch.targets_MT.view(-1, shape.seq_length),
    }
    weights = theirs(drawn)
    for name in weights:
        weights[name] = weights[name] - LESS.get(kind, 0.0) * name.endswith("norm.weight")
    torch.save(tokens | {"weights": weights}, tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **SIZES, **fields}))
    answer = ask(tmp_path / "config.json", 1)
    assert answer.get("unknown") == [], answer
    assert float(loss) == pytest.approx(answer["loss"], rel=1e-5)
    gradients, expected = theirs(own), torch.load(tmp_path / "gradients.pt")
    left = {name for name in expected if name not in gradients} - {"lm_head.weight", "lm_head.bias"}
    assert not left, "the trainer has no such weights"
    size = max(float(each.abs().max()) for each in expected.values())
    for name, gradient in gradients.items():
        error, own_size = (gradient - expected[name]).abs().max(), expected[name].abs().max()
        assert float(error) <= 1e-5 * max(float(own_size), 1e-2 * size), name
