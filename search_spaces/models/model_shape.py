"""The model: a transformer's shape, its parameters and its floating-point work."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from typing import Any, Final, Literal, Self, get_args

from layout_tuner.documents.not_covered import known_word
from layout_tuner.documents.reading import (
    MAX_NAME_LENGTH,
    Problems,
    is_line,
    is_name,
    read_mapping,
    refuse_all,
    shown,
    switch_problem,
    unknown_names,
)
from layout_tuner.errors import ModelShapeInvalidError
from layout_tuner.search_spaces.models.foreign_model import read_foreign
from layout_tuner.search_spaces.physical_ranges import Range

Family = Literal["gpt", "llama"]
"""gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, SwiGLU, RoPE, no biases."""

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)

Attention = Literal["fused", "unfused"]
"""fused: scores are never stored (arXiv:2205.14135). unfused: their matrix is written to memory."""

ATTENTIONS: Final[tuple[Attention, ...]] = get_args(Attention)

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
    "attention_dropout": Range(1e-6, 0.999),
    "hidden_dropout": Range(1e-6, 0.999),
}
"""The range of each number; `_MOST` bounds the products that ranges do not."""

_MOST: Final = 1 << 63
"""Parameters and FLOPs per token fit into 64 bits."""

EXPERT_FIELDS: Final = (
    "num_experts",
    "experts_per_token",
    "moe_ffn_hidden_size",
    "shared_expert_ffn_hidden_size",
    "num_dense_layers",
)
"""The fields of a mixture of experts; all are 0 in a dense model."""

ATTENTION_FIELDS: Final = ("attention", "attention_dropout", "hidden_dropout")
"""The fields of how a model is trained, which leave its parameters and FLOPs as they are."""

_LLAMA_ONLY: Final[Mapping[str, str]] = {
    "rotary_base": "learned positions",
    "qk_norm": "no norms of queries and keys",
    "num_experts": "dense feed-forwards alone",
}
"""Fields that other families lack, each with what these have instead."""

ROTARY_BASE: Final = 10000.0
"""The base of rotary positions in arXiv:2104.09864, and the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """The shape of a model: all that determines its speed and memory, and its rotary base.

    Raises:
        ModelShapeInvalidError: at construction, when the numbers contradict each other.
    """

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
    qk_norm: bool = False
    """Whether each head of query and key passes an RMSNorm before its rotation; its weights are
    shared by the heads (Qwen3, arXiv:2505.09388); llama only."""
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
    lacks: str = ""
    """What the published model of this name has and this shape lacks, for people to read."""

    def __post_init__(self) -> None:
        refuse_all(_wrong_fields(asdict(self)))
        refuse_all(self._contradictions())
        if self.head_size * self.num_heads == self.hidden_size:
            object.__setattr__(self, "head_dim", None)  # equal shapes are equal

    def _contradictions(self) -> Iterator[ModelShapeInvalidError]:
        if self.head_dim is None and self.hidden_size % self.num_heads:
            yield ModelShapeInvalidError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}; "
                "state head_dim if heads have a width of their own"
            )
        if self.num_heads % self.num_kv_heads:
            yield ModelShapeInvalidError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}"
            )
        if self.family == "llama" and self.head_size % 2:
            stated = "" if self.head_dim else f"(hidden_size={self.hidden_size} over "
            stated += f"num_heads={self.num_heads}) " if stated else ""
            yield ModelShapeInvalidError(
                f"head size {self.head_size} {stated}is odd; rotary positions need an even one"
            )
        defaults = {field.name: field.default for field in fields(self)}
        for name, instead in _LLAMA_ONLY.items():
            value = getattr(self, name)
            if self.family != "llama" and value != defaults[name]:
                text = f"{value:g}" if isinstance(value, float) else str(value).lower()
                yield ModelShapeInvalidError.of_field(
                    name,
                    f"{name}={text} has no meaning for family={self.family}, which has "
                    f"{instead}; leave it out",
                )
        if self.full_attention_every and not self.attention_window:
            yield ModelShapeInvalidError.of_field(
                "full_attention_every",
                f"full_attention_every={self.full_attention_every} needs attention_window: without "
                "a window every layer attends to all positions",
            )
        if max(self.num_parameters, self.model_flops_per_token) >= _MOST:
            yield ModelShapeInvalidError(
                f"the model has {self.num_parameters:.3g} parameters and takes "
                f"{self.model_flops_per_token:.3g} FLOPs per token; at most {_MOST:.3g} of each are "
                "accepted"
            )
        yield from self._contradictions_of_experts()

    def _contradictions_of_experts(self) -> Iterator[ModelShapeInvalidError]:
        experts, chosen = self.num_experts, self.experts_per_token
        refused = ModelShapeInvalidError.of_field
        if not experts:
            for name in EXPERT_FIELDS[1:]:
                if value := getattr(self, name):
                    yield refused(name, f"{name}={value} needs experts: state num_experts")
            return
        if not 1 <= chosen <= experts:
            yield refused(
                "experts_per_token",
                f"experts_per_token={chosen} is not from 1 to num_experts={experts}",
            )
        if not self.moe_ffn_hidden_size:
            yield refused("moe_ffn_hidden_size", "the model's moe_ffn_hidden_size is missing")
        if self.num_dense_layers >= self.num_layers:
            yield refused(
                "num_dense_layers",
                f"num_dense_layers={self.num_dense_layers} leaves none of "
                f"num_layers={self.num_layers} with experts",
            )
        if not self.num_dense_layers and self.ffn_hidden_size != self.moe_ffn_hidden_size:
            yield refused(
                "ffn_hidden_size",
                f"ffn_hidden_size={self.ffn_hidden_size} is the width of dense layers and there are "
                "none; leave it out",
            )

    @property
    def title(self) -> str:
        return model_title(self.to_mapping())

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def query_size(self) -> int:
        """Width of all query heads together, and of what attention hands to its projection."""
        return self.num_heads * self.head_size

    @property
    def kv_hidden_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_size

    def fuses_attention(self, by_default: bool) -> bool:
        """Whether attention never stores its scores, under a trainer that does so by default."""
        return by_default if self.attention is None else self.attention == "fused"

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of a layer, counted from 0, is a mixture of experts."""
        return self.num_experts > 0 and layer >= self.num_dense_layers

    def window_of(self, layer: int) -> int | None:
        """Positions that a token attends to in a layer, counted from 0; None: all up to itself."""
        every = self.full_attention_every
        ignores = every is not None and (layer + 1) % every == 0
        too_long = self.attention_window is None or self.attention_window >= self.seq_length
        return None if ignores or too_long else self.attention_window

    @property
    def dense(self) -> Self:
        """The shape with the dense layers' feed-forward in every layer."""
        none: dict[str, Any] = dict.fromkeys(EXPERT_FIELDS, 0)
        return replace(self, **none) if self.num_experts else self

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def num_attention_matrix_parameters(self) -> int:
        q = self.query_size
        return self.hidden_size * (q + 2 * self.kv_hidden_size) + q * self.hidden_size

    @property
    def num_expert_parameters(self) -> int:
        """Parameters of all routed experts of one layer."""
        return self.num_experts * 3 * self.hidden_size * self.moe_ffn_hidden_size

    @property
    def num_layer_matrix_parameters(self) -> int:
        """Parameters in the matrices of one block: attention and feed-forward.

        With experts: of a block that has them, all of them and their router.
        """
        h, attention = self.hidden_size, self.num_attention_matrix_parameters
        if self.num_experts:
            shared = 3 * h * self.shared_expert_ffn_hidden_size
            return attention + self.num_expert_parameters + shared + h * self.num_experts
        matrices = 3 if self.family == "llama" else 2
        return attention + matrices * h * self.ffn_hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one block, norms and biases included, as the embedded trainer builds it.

        With experts: of a block that has them.
        """
        h, q = self.hidden_size, self.query_size
        if self.family == "llama":
            norms = 2 * h + (2 * self.head_size if self.qk_norm else 0)
            return self.num_layer_matrix_parameters + norms
        biases = (q + 2 * self.kv_hidden_size) + h + self.ffn_hidden_size + h
        return self.num_layer_matrix_parameters + biases + 4 * h

    @property
    def num_embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the learned positions where there are any."""
        positions = self.seq_length * self.hidden_size if self.family == "gpt" else 0
        return self.vocab_size * self.hidden_size + positions

    @property
    def num_head_parameters(self) -> int:
        """Parameters after the last block: final norm, and the output matrix if not tied."""
        norm = self.hidden_size * (2 if self.family == "gpt" else 1)
        return norm + (0 if self.tied_embeddings else self.vocab_size * self.hidden_size)

    @property
    def num_parameters(self) -> int:
        """Parameters of the whole model, each counted once."""
        dense = self.num_layers - self.num_expert_layers
        return (
            self.num_expert_layers * self.num_layer_parameters
            + dense * self.dense.num_layer_parameters
            + self.num_embedding_parameters
            + self.num_head_parameters
        )

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token uses: all but the experts that it does not take.

        The embedding counts as a whole, as in the totals of Mixtral (arXiv:2401.04088) and Qwen3.
        """
        return self.num_parameters - self.num_expert_layers * self._idle_parameters

    @property
    def _idle_parameters(self) -> int:
        """Parameters of a layer's experts that a token does not take."""
        if not self.num_experts:
            return 0
        idle = self.num_experts - self.experts_per_token
        return self.num_expert_parameters // self.num_experts * idle

    @property
    def model_flops_per_token(self) -> int:
        """FLOPs per token of a forward and a backward pass, without recomputation.

        Three times the forward pass: 2 operations per matrix parameter (with the output projection,
        without the embedding look-up, and of the experts only those that a token takes), and 4 s q
        for the two attention products, q being the width of the query heads. For the GPT shape
        with ffn = 4h this is 72 L h^2 (1 + s/(6h) + V/(12 L h)), arXiv:2104.04473 equation 3 less
        its recomputation (and arXiv:2205.05198, appendix A).
        """
        return 3 * (self.layers_forward_flops_per_token + self.logit_forward_flops_per_token)

    @property
    def layers_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of all blocks' forward pass."""
        active = self.num_layer_matrix_parameters - self._idle_parameters
        dense = self.dense.num_layer_matrix_parameters
        matrices = self.num_expert_layers * active
        matrices += (self.num_layers - self.num_expert_layers) * dense
        return 2 * matrices + self.attention_forward_flops_per_token

    @property
    def attention_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of the two attention products of all blocks."""
        return 4 * self.query_size * self.attention_positions

    @property
    def attention_positions(self) -> int:
        """Positions that a token's products are counted over, summed over the layers.

        The sequence s without a window w: the half that the causal mask hides counts too, as in
        arXiv:2104.04473. Likewise with a window twice the pairs inside it: (s^2 - (s - w)^2) / s.
        """
        every = self.full_attention_every or self.num_layers + 1
        whole = self.num_layers // every
        return whole * self._positions_of(every - 1) + (
            self.num_layers - whole
        ) * self._positions_of(0)

    def _positions_of(self, layer: int) -> int:
        """Positions that a token's products are counted over in a layer, counted from 0."""
        s, window = self.seq_length, self.window_of(layer)
        return s if window is None else window * (2 * s - window) // s

    @property
    def logit_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of the output projection's forward pass."""
        return 2 * self.hidden_size * self.vocab_size

    def routing_problem(self, balanced_routing: object) -> str | None:
        """Why a probe of this model can't route so, or None."""
        if (problem := switch_problem(balanced_routing)) or balanced_routing or self.num_experts:
            return problem
        return (
            f"false measures how unevenly tokens reach experts, and the model {self.name} has none; "
            "leave it out"
        )

    def hardware_flops_per_token(
        self, recompute: str, layers: Collection[int] | None = None
    ) -> int:
        """Floating-point operations per token with recomputation in some layers; None: in all.

        Full recomputation runs a block's forward pass twice (and the output projection once),
        selective recomputation the two attention products (arXiv:2205.05198), that of `mlp` those
        of a dense feed-forward, as Megatron-LM repeats them; the embedded trainer leaves out the
        last of them, whose output no gradient needs. What is not a product does not count.
        """
        again = range(self.num_layers) if layers is None else layers
        dense = sum(not self.has_experts(layer) for layer in again)
        matrices = extra = 0
        if recompute in ("full", "selective") or "core_attention" in recompute:
            positions = sum(self._positions_of(layer) for layer in again)
            extra = 4 * self.query_size * positions
        if recompute == "full":
            matrices = dense * self.dense.num_layer_matrix_parameters
            active = self.num_layer_matrix_parameters - self._idle_parameters
            matrices += (len(again) - dense) * active
        elif "mlp" in recompute:
            products = 3 if self.family == "llama" else 2
            matrices = dense * products * self.hidden_size * self.ffn_hidden_size
        return self.model_flops_per_token + extra + 2 * matrices

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values, without later fields at their defaults."""
        later = {field.name: field.default for field in fields(self)[_NUM_FIRST_FIELDS:]}
        return {n: v for n, v in asdict(self).items() if n not in later or v != later[n]}

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a shape from its fields by name.

        `num_kv_heads` defaults to `num_heads`; `ffn_hidden_size` to four times the hidden size for
        gpt; `name` to "custom"; `tied_embeddings` to true for gpt and false for llama;
        `rotary_base` to 10000; `moe_ffn_hidden_size` to `ffn_hidden_size`, and the other way round
        where no layer is dense; what later versions added to "not there".

        Raises:
            ModelShapeInvalidError: a field is unknown, missing, or out of range.
        """
        known = tuple(field.name for field in fields(cls))
        given = read_mapping(mapping, ModelShapeInvalidError, "the model")
        foreign = read_foreign(given, known)
        values = dict(foreign.fields)  # what they state is not missing
        values |= {name: value for name, value in given.items() if name in known}
        values.setdefault("name", "custom")
        values.setdefault("num_kv_heads", values.get("num_heads"))
        values.setdefault("tied_embeddings", values.get("family") == "gpt")
        if values.get("num_experts") and "ffn_hidden_size" in values:
            values.setdefault("moe_ffn_hidden_size", values["ffn_hidden_size"])
        elif values.get("num_experts") and not values.get("num_dense_layers"):
            values["ffn_hidden_size"] = values.get("moe_ffn_hidden_size")
        optional = {
            field.name: field.default for field in fields(cls) if field.default is not MISSING
        }
        values = optional | values
        if values.get("family") == "gpt" and isinstance(values.get("hidden_size"), int):
            values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
        problems = Problems()
        missing = [
            name
            for name in known
            if values.get(name) is None
            and optional.get(name, "") is not None
            and (name != "num_kv_heads" or name in given)
        ]
        if foreign.is_whole_model:
            problems.add(ModelShapeInvalidError(foreign.sentence(missing, given)))
        else:
            problems.add(
                *unknown_names(
                    given,
                    known,
                    ModelShapeInvalidError,
                    "model field",
                    known_as=lambda name: foreign.hint(name) or known_word(name),
                )
            )
            for name in missing:
                said = f"the model's {name} is missing"
                problems.add(ModelShapeInvalidError.of_field(name, said))
        stated = {name: value for name, value in values.items() if given.get(name) is not None}
        problems.add(*_wrong_fields(stated))
        problems.refuse()
        return cls(**values)


def model_title(stated: Mapping[str, Any]) -> str:
    """The name in a model's document, and in brackets what it states of `ATTENTION_FIELDS`."""
    words = ", ".join(f"{name}={stated[name]}" for name in ATTENTION_FIELDS if name in stated)
    return f"{stated['name']} ({words})" if words else str(stated["name"])


_NUM_FIRST_FIELDS: Final = 11
"""Fields that every document states; those after them are left out at their defaults."""

_UNSTATED: Final[Mapping[str, tuple[int | None, ...]]] = {
    **dict.fromkeys(("head_dim", "attention_window", "full_attention_every"), (None,)),
    **dict.fromkeys((*EXPERT_FIELDS, "hidden_dropout"), (0,)),
    "attention_dropout": (None, 0),
}
"""Numbers that a model may lack, each with the values outside of its range that it may have."""


def _wrong_fields(values: Mapping[str, Any]) -> Iterator[ModelShapeInvalidError]:
    for name, value in values.items():
        if problem := _problem(name, value):
            yield ModelShapeInvalidError.of_field(name, f"{name}={problem}")


def _problem(name: str, value: object) -> str | None:
    if name == "name" and not is_name(value):
        return f"{shown(value)} is not a string of 1 to {MAX_NAME_LENGTH} characters"
    if name == "family" and value not in FAMILIES:
        return f"{shown(value)} is not one of {', '.join(FAMILIES)}{known_word(value)}"
    if name == "attention" and value is not None and value not in ATTENTIONS:
        return f"{shown(value)} is not one of {', '.join(ATTENTIONS)}"
    if name == "lacks" and not is_line(value):
        return f"{shown(value)} is not a line of text"
    if name in ("tied_embeddings", "qk_norm"):
        return switch_problem(value)
    is_unstated = value in _UNSTATED.get(name, ()) and not isinstance(value, bool)
    return None if name not in MODEL_RANGES or is_unstated else MODEL_RANGES[name].problem(value)
