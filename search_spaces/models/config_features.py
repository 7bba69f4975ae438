"""What decoders have beside the fields of a shape, each with its parameters and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from layout_tuner.search_spaces.models.model_shape import ModelShape

MOST_SHARE: Final = 0.005
"""Largest part of the parameters, or of the floating-point operations, that a shape may lack: an
error of half a per cent is below what separates layouts in measurements."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """Something that a model has and its shape does not say."""

    name: str
    parameters: int = 0
    """By which the model has more than the shape; below 0: fewer."""
    products: int = 0
    """Those parameters of them that are matrices which each token passes."""
    forward_flops: int = 0
    """Other floating-point operations of a token's forward pass, as of attention."""

    def share(self, shape: ModelShape) -> float:
        """The larger of its parts of the shape's parameters and FLOPs."""
        flops = 3 * (2 * self.products + self.forward_flops)
        return max(
            abs(self.parameters) / shape.num_parameters, abs(flops) / shape.model_flops_per_token
        )


_Count = Callable[[ModelShape], int]


def _of_feed_forwards(shape: ModelShape) -> int:
    """Biases of all dense feed-forwards and shared experts."""
    h, shared, ups = shape.hidden_size, shape.shared_expert_ffn_hidden_size, shape.num_ups
    of_shared = ups * shared + h if shared else 0
    dense = _layers(shape, lambda kind: kind.feed_forward == "dense")
    return dense * (ups * shape.ffn_hidden_size + h) + shape.num_expert_layers * of_shared


def _layers(shape: ModelShape, has: Callable[[ModelShape], bool]) -> int:
    return sum(len(each.layers) for each in shape.kinds if has(each.shape))


def _norm_weights(shape: ModelShape) -> int:
    """Weights of the norms of all blocks, and of the last one."""
    norms = sum(len(each.layers) * each.shape.num_layer_norms for each in shape.kinds)
    return (norms + 1) * shape.hidden_size


def _head_sum(count: Callable[[ModelShape], int]) -> _Count:
    """Summed over the layers with attention, each in the shape of its kind."""
    return lambda shape: sum(
        len(each.layers) * count(each.shape)
        for each in shape.kinds
        if each.shape.has_softmax_attention
    )


SAID: Final[Mapping[str, Mapping[str, Any]]] = {
    "head_norm": {"qk_norm": True},
    "width_norm": {"qk_norm": "width"},
    "layernorm": {"norm": "layer"},
    "sinks": {"attention_sinks": True},
    "output_gate": {"attention_output_gate": True},
    "shared_gate": {"shared_expert_gate": True},
    "routing_bias": {"router_bias": True},
    "balanced": {"router_bias": True},
    "sigmoid": {"router_score": "sigmoid"},
    "parallel": {"parallel_block": True},
    "no_positions": {"rotary_fraction": 0.0},
}
"""Features that are fields of a shape."""

OF_EXPERTS: Final = ("shared_gate", "routing_bias", "balanced", "sigmoid")
"""Those of them that a model without experts does not have."""

FEATURES: Final[Mapping[str, tuple[str, _Count]]] = {
    "no_qkv_biases": (
        "queries, keys and values without biases",
        lambda m: -m.num_layers * (m.query_size + 2 * m.kv_hidden_size),
    ),
    "no_biases": (
        "linear layers without biases",
        lambda m: (
            -m.num_layers * (m.query_size + 2 * m.kv_hidden_size + 2 * m.hidden_size)
            - m.num_layers * m.ffn_hidden_size
        ),
    ),
    "no_layernorm_weights": (
        "norms without weights",
        lambda m: -(4 * m.num_layers + 2) * m.hidden_size,
    ),
    "o_bias": ("biases of attention's output", _head_sum(lambda m: m.hidden_size)),
    "mlp_biases": ("biases of feed-forwards", _of_feed_forwards),
    "latent_biases": (
        "biases of latent projections",
        _head_sum(lambda m: m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim + m.hidden_size),
    ),
    "head_bias": ("a bias of the output projection", lambda m: m.vocab_size),
    "routing_bias": (
        "a bias of routing among the parameters",
        lambda m: m.num_expert_layers * m.num_experts,
    ),
    "post_norms": (
        "norms behind attention and feed-forward too",
        lambda m: 2 * m.num_layers * m.hidden_size,
    ),
    "norm_of_feed_forward": (
        "a norm of the feed-forward's own",
        lambda m: m.num_layers * m.norm_parameters,
    ),
    "norm_of_experts": (
        "norms behind the experts",
        lambda m: m.num_expert_layers * m.hidden_size,
    ),
    "norms_after": ("norms behind attention and feed-forward in place of before", lambda _: 0),
    "no_norm_weights": ("norms without weights", lambda m: -_norm_weights(m)),
    "layernorm_weights": ("LayerNorm in place of RMSNorm", lambda _: 0),
    "each_norm": (
        "norms of queries and keys with weights of each head",
        _head_sum(lambda m: m.query_size + m.kv_hidden_size),
    ),
    "head_layernorm": ("LayerNorm of queries and keys", _head_sum(lambda m: 4 * m.head_size)),
    "l2_norm": ("norms of queries and keys without weights", lambda _: 0),
    "unrotated": ("no rotary positions", lambda _: 0),
    "head_gate": (
        "a gate of each head's output",
        _head_sum(lambda m: m.hidden_size * m.num_query_heads),
    ),
    "xielu": ("two learned numbers of each activation", lambda m: 2 * m.num_layers),
}
"""What no field says: names and numbers of parameters, from those of the model's shape."""

_OF_MATRICES: Final = ("head_gate",)


def feature(name: str, shape: ModelShape) -> Feature:
    """A feature of `FEATURES` in a model of this shape."""
    text, count = FEATURES[name]
    parameters = count(shape)
    return Feature(
        name=text, parameters=parameters, products=parameters if name in _OF_MATRICES else 0
    )


def refused_features(shape: ModelShape, features: Sequence[Feature]) -> Iterator[Feature]:
    """Those that make the shape wrong by more than `MOST_SHARE`, together or each for itself."""
    total = Feature(
        name="",
        parameters=sum(each.parameters for each in features),
        products=sum(each.products for each in features),
        forward_flops=sum(each.forward_flops for each in features),
    )
    alone = [each for each in features if each.share(shape) > MOST_SHARE]
    if alone or total.share(shape) > MOST_SHARE:
        yield from alone or [each for each in features if each.share(shape)]
