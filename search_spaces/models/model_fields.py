"""The fields of a model, their ranges, and what is wrong with a single one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, get_args

from layout_tuner.documents.not_covered import known_word
from layout_tuner.documents.reading import (
    MAX_NAME_LENGTH,
    is_line,
    is_name,
    shown,
    switch_problem,
)
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.layer_kinds import read_layer_kinds
from layout_tuner.search_spaces.physical_ranges import Range

Family = Literal["gpt", "llama"]
"""gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, SwiGLU, RoPE, no biases."""

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)

Attention = Literal["fused", "unfused"]
"""fused: scores are never stored (arXiv:2205.14135). unfused: their matrix is written to memory."""

ATTENTIONS: Final[tuple[Attention, ...]] = get_args(Attention)

Activation = Literal["swiglu", "geglu", "gelu", "relu2"]
"""swiglu, geglu: gated, of three matrices (arXiv:2002.05202). gelu, relu2: of two; relu2 squares
what ReLU leaves (arXiv:2109.08668)."""

Norm = Literal["rms", "layer"]
"""rms: arXiv:1910.07467. layer: LayerNorm with weight and bias."""

Biases = Literal["none", "qkv", "attention", "all"]
"""qkv: of query, key and value. attention: of attention's output too. all: of feed-forwards,
experts and routers too."""

RouterScore = Literal["softmax", "sigmoid"]

OF_FAMILY: Final[Mapping[Family, Mapping[str, Any]]] = {
    "gpt": {"activation": "gelu", "norm": "layer", "biases": "all"},
    "llama": {"activation": "swiglu", "norm": "rms", "biases": "none"},
}
"""What the layers of a family have where a model does not state it; stated, it becomes None."""

_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {
    "family": FAMILIES,
    "attention": ATTENTIONS,
    "activation": get_args(Activation),
    "norm": get_args(Norm),
    "biases": get_args(Biases),
    "router_score": get_args(RouterScore),
}
"""The words of each field that takes some."""

MODEL_RANGES: Final[Mapping[str, Range]] = {
    "num_layers": Range(1, 1 << 14),
    "hidden_size": Range(1, 1 << 20),
    "ffn_hidden_size": Range(1, 1 << 22),
    "num_heads": Range(1, 1 << 16),
    "num_kv_heads": Range(1, 1 << 16),
    "seq_length": Range(1, 1 << 26, "tokens"),
    "vocab_size": Range(1, 1 << 24, "tokens"),
    "rotary_base": Range(2.0, 1e12),
    "head_dim": Range(1, 1 << 16),
    "attention_window": Range(1, 1 << 26, "tokens"),
    "full_attention_every": Range(2, 1 << 14, "layers"),
    "num_experts": Range(1, 1 << 12),
    "experts_per_token": Range(1, 1 << 12),
    "moe_ffn_hidden_size": Range(1, 1 << 20),
    "shared_expert_ffn_hidden_size": Range(1, 1 << 20),
    "num_dense_layers": Range(1, 1 << 14),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), Range(1, 1 << 20)),
    **dict.fromkeys(
        (
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
            *("window_num_heads", "window_num_kv_heads"),
            *("linear_num_key_heads", "linear_num_value_heads"),
            *("linear_key_head_dim", "linear_value_head_dim"),
            *("mamba_num_heads", "mamba_head_dim", "mamba_state_dim", "mamba_num_groups"),
        ),
        Range(1, 1 << 16),
    ),
    "num_mtp_layers": Range(1, 16),
    "rotary_fraction": Range(1e-3, 1.0),
    "router_groups": Range(2, 1 << 12),
    "router_topk_groups": Range(1, 1 << 12),
    "router_scaling_factor": Range(1e-3, 1e3),
    "expert_latent_size": Range(1, 1 << 20),
    "experts_every": Range(2, 1 << 14, "layers"),
    "mean_document_length": Range(1, 1 << 26, "tokens"),
    "attention_dropout": Range(1e-6, 0.999),
    "hidden_dropout": Range(1e-6, 0.999),
}
"""The range of each number; `_MOST` bounds the products that ranges do not."""

ATTENTION_FIELDS: Final = ("attention", "attention_dropout", "hidden_dropout")
"""The fields of how a model is trained, which leave its parameters and FLOPs as they are."""

ROTARY_BASE: Final = 10000.0
"""The base of rotary positions in arXiv:2104.09864, and the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFields:
    """The fields of a model, as documents state them."""

    name: str
    """Its name on the leaderboard."""
    family: Family
    """The kind of its blocks."""
    num_layers: int
    """Transformer blocks."""
    hidden_size: int
    """Width of the residual stream."""
    ffn_hidden_size: int
    """Inner width of the feed-forward block (of each of gate and up, for llama)."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads; fewer than num_heads is grouped-query attention."""
    seq_length: int
    """Tokens per sequence."""
    vocab_size: int
    """Rows of the embedding."""
    tied_embeddings: bool
    """Whether the output projection is the embedding's transpose."""
    rotary_base: float = ROTARY_BASE
    """Base of the rotary positions (theta): pair i of D / 2 turns by base^(-2i/D) per token; llama
    only."""
    head_dim: int | None = None
    """Width of one head, where it is not hidden_size over num_heads; that value becomes None."""
    qk_norm: bool | Literal["width"] = False
    """Whether query and key pass an RMSNorm before their rotation: true: each head, with weights
    that the heads share (Qwen3, arXiv:2505.09388); width: all heads together (OLMo 2,
    arXiv:2501.00656); llama only."""
    attention_window: int | None = None
    """Positions that a token attends to, itself included; None: all up to itself."""
    full_attention_every: int | None = None
    """Of so many layers the last one ignores the window; None: none does."""
    num_experts: int = 0
    """Routed experts of a layer, each a gated feed-forward; 0: the feed-forward is dense. llama
    only, as are the other fields of experts."""
    experts_per_token: int = 0
    """Experts that each token takes."""
    moe_ffn_hidden_size: int = 0
    """Inner width of one expert."""
    shared_expert_ffn_hidden_size: int = 0
    """Inner width of the expert that every token takes besides; 0: there is none."""
    num_dense_layers: int = 0
    """First layers, whose feed-forward is dense."""
    attention: Attention | None = None
    """How attention is computed; None: as the trainer does by default."""
    attention_dropout: float | None = None
    """Probability that an attention score is dropped; None: as the trainer does by default."""
    hidden_dropout: float = 0.0
    """Probability that a feature is dropped before each residual sum."""
    layer_kinds: tuple[str, ...] = ()
    """The kinds of the layers (`layer_kinds.LAYER_KINDS`), the shortest pattern that is repeated to
    `num_layers`; empty: attention and a feed-forward in each, as the fields of windows and of
    experts say. llama only, as are all fields that follow."""
    window_num_heads: int = 0
    """Query heads of layers with a window; 0: as of others."""
    window_num_kv_heads: int = 0
    """Key and value heads of layers with a window; 0: as of others."""
    q_lora_rank: int = 0
    """Width of the latent that queries are projected from; 0: from the residual stream."""
    kv_lora_rank: int = 0
    """Width of the latent that keys and values are projected from (multi-head latent attention,
    arXiv:2405.04434); 0: attention is not latent."""
    qk_nope_head_dim: int = 0
    """Width of the part of a latent query or key head that is not rotated."""
    qk_rope_head_dim: int = 0
    """Width of the part that is rotated, which all key heads share."""
    v_head_dim: int = 0
    """Width of a value head of latent attention."""
    attention_output_gate: bool = False
    """Whether a sigmoid of a further projection scales the output of full and windowed attention
    (Qwen3-Next)."""
    attention_sinks: bool = False
    """Whether each query head learns a logit that belongs to no position (gpt-oss)."""
    linear_num_key_heads: int = 0
    """Key heads of a gated delta net; KDA has as many as value heads."""
    linear_num_value_heads: int = 0
    """Value heads of a gated delta net or of KDA."""
    linear_key_head_dim: int = 0
    """Width of such a key head."""
    linear_value_head_dim: int = 0
    """Width of such a value head."""
    mamba_num_heads: int = 0
    """Heads of Mamba-2."""
    mamba_head_dim: int = 0
    """Width of such a head."""
    mamba_state_dim: int = 0
    """Numbers of state for each feature of a head."""
    mamba_num_groups: int = 0
    """Groups of heads that share B and C."""
    activation: Activation | None = None
    """Of all feed-forwards; None: of the family."""
    norm: Norm | None = None
    """Norms of layers and of the output; None: of the family."""
    biases: Biases | None = None
    """Matrices that have biases; None: of the family."""
    parallel_block: bool = False
    """Whether attention and feed-forward take the same normed input, and both are added to it
    (GPT-J, Cohere): a layer has one norm."""
    rotary_fraction: float = 1.0
    """Share of a head's features that is rotated; 0: there are no positions (Nemotron-H)."""
    router_score: RouterScore = "softmax"
    """What makes weights of the router's logits."""
    router_groups: int = 0
    """Groups of experts of which a token takes some (DeepSeek-V3, arXiv:2412.19437); 0: none."""
    router_topk_groups: int = 0
    """Groups that a token takes experts of."""
    router_bias: bool = False
    """Whether a bias, moved by the load, is added to the scores that experts are chosen by."""
    router_scaling_factor: float = 1.0
    """Factor on the weights of the chosen experts."""
    expert_latent_size: int = 0
    """Width of the latent that routed experts work on (Nemotron-3 Super); 0: the residual
    stream."""
    shared_expert_gate: bool = False
    """Whether a sigmoid scales the shared expert's output (Qwen2-MoE)."""
    experts_every: int = 0
    """Of so many layers the last one has experts (Llama 4 Maverick: 2); 0: all after the dense
    ones."""
    num_mtp_layers: int = 0
    """Depths of multi-token prediction (arXiv:2412.19437, section 2.2), each with a layer like the
    last one; its embedding and output are the model's."""
    mean_document_length: int | None = None
    """Mean length of the documents that are packed into a sequence, weighted by tokens, where
    attention stays inside a document; None: a sequence is one document."""
    lacks: str = ""
    """What the published model of this name has and this shape lacks, for people to read."""


_UNSTATED: Final[Mapping[str, tuple[int | None, ...]]] = {
    **dict.fromkeys(
        ("head_dim", "attention_window", "full_attention_every", "mean_document_length"), (None,)
    ),
    **dict.fromkeys(("hidden_dropout", "rotary_fraction", "ffn_hidden_size"), (0,)),
    "attention_dropout": (None, 0),
}
"""Numbers that a model may lack, each with the values outside of its range that it may have."""

SWITCHES: Final = tuple(field.name for field in fields(ModelFields) if field.type == "bool")


def wrong_fields(values: Mapping[str, Any]) -> Iterator[ModelShapeInvalidError]:
    """What is wrong with single fields, each for itself."""
    for name, value in values.items():
        if problem := _problem(name, value):
            yield ModelShapeInvalidError.of_field(name, f"{name}={problem}")


def _problem(name: str, value: object) -> str | None:
    if name == "name" and not is_name(value):
        return f"{shown(value)} is not a string of 1 to {MAX_NAME_LENGTH} characters"
    if name in _CHOICES and value not in _CHOICES[name]:
        if value is None and name not in ("family", "router_score"):
            return None
        hint = known_word(value) if name == "family" else ""
        return f"{shown(value)} is not one of {', '.join(_CHOICES[name])}{hint}"
    if name == "lacks" and not is_line(value):
        return f"{shown(value)} is not a line of text"
    if name == "qk_norm" and value != "width":
        problem = switch_problem(value)
        return problem and problem.replace("true or false", "true, false or width")
    if name in SWITCHES:
        return switch_problem(value)
    if name == "layer_kinds":
        read = read_layer_kinds(value) if value not in ((), []) else ()
        return read if isinstance(read, str) else None
    unstated = _UNSTATED.get(name, (0,) if name in _ZERO_UNSTATED else ())
    is_unstated = value in unstated and not isinstance(value, bool)
    return None if name not in MODEL_RANGES or is_unstated else MODEL_RANGES[name].problem(value)


_ZERO_UNSTATED: Final = frozenset(
    field.name for field in fields(ModelFields) if field.default == 0 and type(field.default) is int
)
"""Numbers that are 0 where a model does not state them."""

NAMES: Final = tuple(field.name for field in fields(ModelFields))
"""The names of all fields."""

EXPERT_FIELDS: Final = NAMES[NAMES.index("num_experts") : NAMES.index("attention")]
"""The first fields of a mixture of experts; all are 0 in a dense model."""

ROUTING_FIELDS: Final = NAMES[NAMES.index("router_score") : NAMES.index("num_mtp_layers")]
"""The later ones, which have their defaults in a dense model."""

LINEAR_FIELDS: Final = tuple(name for name in NAMES if name.startswith("linear_"))
"""The fields of a gated delta net and of KDA."""

MAMBA_FIELDS: Final = tuple(name for name in NAMES if name.startswith("mamba_"))
"""The fields of Mamba-2."""

DEFAULTS: Final = {field.name: field.default for field in fields(ModelFields)}
"""By name; fields that a model states have none."""
