"""What decoders have beside the fields of a shape, each with its parameters and matrix products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import counted

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
    without: str = ""
    """The end of a sentence: how to leave it out; empty: the model is another one without it."""

    def share(self, shape: ModelShape) -> float:
        """The larger of its parts of the shape's parameters and FLOPs."""
        flops = 3 * (2 * self.products + self.forward_flops)
        return max(
            abs(self.parameters) / shape.num_parameters, abs(flops) / shape.model_flops_per_token
        )


_Count = Callable[[ModelShape], int]


def _gated_biases(shape: ModelShape) -> int:
    """Biases of gate, up and down of all dense feed-forwards and shared experts."""
    h, shared = shape.hidden_size, shape.shared_expert_ffn_hidden_size
    dense = shape.num_layers - shape.num_expert_layers
    of_shared = 2 * shared + h if shared else 0
    return dense * (2 * shape.ffn_hidden_size + h) + shape.num_expert_layers * of_shared


def _expert_biases(shape: ModelShape) -> int:
    """Biases of gate, up and down of all experts, and of the router."""
    of_one = 2 * shape.moe_ffn_hidden_size + shape.hidden_size
    return shape.num_expert_layers * shape.num_experts * (of_one + 1)


def _norm_weights(shape: ModelShape) -> int:
    """Weights of the norms of all blocks, and of the last one."""
    return (2 * shape.num_layers + 1) * shape.hidden_size


FEATURES: Final[Mapping[str, tuple[str, _Count]]] = {
    "qkv_biases": (
        "biases of queries, keys and values",
        lambda m: m.num_layers * (m.query_size + 2 * m.kv_hidden_size),
    ),
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
    "o_bias": ("biases of attention's output", lambda m: m.num_layers * m.hidden_size),
    "mlp_biases": ("biases of feed-forwards", _gated_biases),
    "expert_biases": ("biases of experts and router", _expert_biases),
    "head_bias": ("a bias of the output projection", lambda m: m.vocab_size),
    "routing_bias": (
        "a bias of routing",
        lambda m: m.num_expert_layers * m.num_experts,
    ),
    "post_norms": (
        "norms behind attention and feed-forward too",
        lambda m: 2 * m.num_layers * m.hidden_size,
    ),
    "norms_after": ("norms behind attention and feed-forward in place of before", lambda _: 0),
    "no_norm_weights": ("norms without weights", lambda m: -_norm_weights(m)),
    "layernorm": ("LayerNorm with biases in place of RMSNorm", _norm_weights),
    "layernorm_weights": ("LayerNorm in place of RMSNorm", lambda _: 0),
    "width_norm": (
        "norms over the width of all queries and of all keys",
        lambda m: m.num_layers * (m.query_size + m.kv_hidden_size),
    ),
    "each_norm": (
        "norms of queries and keys with weights of each head",
        lambda m: m.num_layers * (m.query_size + m.kv_hidden_size),
    ),
    "l2_norm": ("norms of queries and keys without weights", lambda _: 0),
    "sinks": ("attention sinks", lambda m: m.num_layers * m.num_heads),
    "head_gate": (
        "a gate of each head's output",
        lambda m: m.num_layers * m.hidden_size * m.num_heads,
    ),
    "output_gate": (
        "a gate of attention's output",
        lambda m: m.num_layers * m.hidden_size * m.query_size,
    ),
    "shared_gate": ("a gate of the shared expert", lambda m: m.num_expert_layers * m.hidden_size),
}
"""Names and numbers of parameters, from those of the model's shape."""

_OF_MATRICES: Final = ("head_gate", "output_gate", "shared_gate")


def feature(name: str, shape: ModelShape) -> Feature:
    """A feature of `FEATURES` in a model of this shape."""
    text, count = FEATURES[name]
    parameters = count(shape)
    return Feature(
        name=text, parameters=parameters, products=parameters if name in _OF_MATRICES else 0
    )


def multi_token_prediction(shape: ModelShape, modules: int, word: str) -> Feature:
    """Modules that predict further tokens, each like the last layer (arXiv:2412.19437, 2.2).

    `word` states their number.

    A module has two norms, a projection of 2 h to h, one layer and its norm; embedding and output
    projection are shared, and the latter is multiplied once more.
    """
    h, layers = shape.hidden_size, shape.num_layers
    idle = (shape.num_parameters - shape.num_active_parameters) // max(shape.num_expert_layers, 1)
    active = shape.num_layer_matrix_parameters - idle
    return Feature(
        name=f"{counted(modules, 'module')} of multi-token prediction",
        parameters=modules * (shape.num_layer_parameters + 2 * h * h + 3 * h),
        products=modules * (active + 2 * h * h + shape.vocab_size * h),
        forward_flops=modules * shape.attention_forward_flops_per_token // layers,
        without=f"; to leave it out, write {word}: 0 in the file",
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
