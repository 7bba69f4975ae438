"""The model: a transformer's shape, its parameters and its floating-point work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from types import MappingProxyType
from typing import Any, Final, Literal, Self, get_args

from search_spaces.documents.not_covered import known_word
from search_spaces.documents.reading import (
    MAX_NAME_LENGTH,
    Problems,
    is_name,
    read_mapping,
    refuse_all,
    shown,
    switch_problem,
    unknown_names,
)
from search_spaces.errors import ModelShapeInvalidError
from search_spaces.spec.ranges import Range

Family = Literal["gpt", "llama"]
"""gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, SwiGLU, RoPE, no biases."""

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)


MODEL_RANGES: Final[Mapping[str, Range]] = MappingProxyType(
    {
        "num_layers": Range(1, 1 << 14),
        "hidden_size": Range(1, 1 << 20),
        "ffn_hidden_size": Range(1, 1 << 22),
        "num_heads": Range(1, 1 << 16),
        "num_kv_heads": Range(1, 1 << 16),
        "seq_length": Range(1, 1 << 26, "tokens"),
        "vocab_size": Range(1, 1 << 24, "tokens"),
        "rotary_base": Range(2.0, 1e12),
    }
)
"""The range of each number: the number of parameters and the FLOPs per token then fit into 64
bits."""

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

    def __post_init__(self) -> None:
        refuse_all(_wrong_fields(asdict(self)))
        refuse_all(self._contradictions())

    def _contradictions(self) -> Iterator[ModelShapeInvalidError]:
        if self.hidden_size % self.num_heads:
            yield ModelShapeInvalidError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            yield ModelShapeInvalidError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}"
            )
        if self.family == "llama" and self.head_size % 2:
            yield ModelShapeInvalidError(
                f"head size {self.head_size} (hidden_size={self.hidden_size} over "
                f"num_heads={self.num_heads}) is odd; rotary positions need an even one"
            )
        if self.family != "llama" and self.rotary_base != ROTARY_BASE:
            yield ModelShapeInvalidError.of_field(
                "rotary_base",
                f"rotary_base={self.rotary_base:g} has no meaning for family={self.family}, which has "
                "learned positions; leave it out",
            )

    @property
    def head_size(self) -> int:
        """Width of one head."""
        return self.hidden_size // self.num_heads

    @property
    def kv_hidden_size(self) -> int:
        """Width of all key heads together (and of all value heads)."""
        return self.num_kv_heads * self.head_size

    @property
    def num_layer_matrix_parameters(self) -> int:
        """Parameters in the matrices of one block: attention and feed-forward."""
        h = self.hidden_size
        attention = h * (h + 2 * self.kv_hidden_size) + h * h
        matrices = 3 if self.family == "llama" else 2
        return attention + matrices * h * self.ffn_hidden_size

    @property
    def num_layer_parameters(self) -> int:
        """Parameters of one block, norms and biases included, as the embedded trainer builds it."""
        h = self.hidden_size
        if self.family == "llama":
            return self.num_layer_matrix_parameters + 2 * h
        biases = (h + 2 * self.kv_hidden_size) + h + self.ffn_hidden_size + h
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
        return (
            self.num_layers * self.num_layer_parameters
            + self.num_embedding_parameters
            + self.num_head_parameters
        )

    @property
    def model_flops_per_token(self) -> int:
        """FLOPs per token of a forward and a backward pass, without recomputation.

        Three times the forward pass: 2 operations per matrix parameter (with the output projection,
        without the embedding look-up), and 4 s h for the two attention products. For the GPT shape
        with ffn = 4h this is 72 L h^2 (1 + s/(6h) + V/(12 L h)), arXiv:2104.04473 equation 3 less
        its recomputation (and arXiv:2205.05198, appendix A).
        """
        return 3 * (
            self.num_layers * self.layer_forward_flops_per_token
            + self.logit_forward_flops_per_token
        )

    @property
    def layer_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of one block's forward pass."""
        return 2 * self.num_layer_matrix_parameters + 4 * self.seq_length * self.hidden_size

    @property
    def logit_forward_flops_per_token(self) -> int:
        """Floating-point operations per token of the output projection's forward pass."""
        return 2 * self.hidden_size * self.vocab_size

    def hardware_flops_per_token(self, recompute: str) -> int:
        """Floating-point operations per token with recomputation.

        Full recomputation runs every block's forward pass twice (and the output projection once),
        selective recomputation the two attention products (arXiv:2205.05198).
        """
        extra = 0
        if recompute == "full":
            extra = self.num_layers * self.layer_forward_flops_per_token
        elif recompute == "selective":
            extra = self.num_layers * 4 * self.seq_length * self.hidden_size
        return self.model_flops_per_token + extra

    def to_mapping(self) -> dict[str, Any]:
        """The fields by name, as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Builds a shape from its fields by name.

        `num_kv_heads` defaults to `num_heads`; `ffn_hidden_size` to four times the hidden size for
        gpt; `name` to "custom"; `tied_embeddings` to true for gpt and false for llama;
        `rotary_base` to 10000.

        Raises:
            ModelShapeInvalidError: a field is unknown, missing, or out of range.
        """
        known = tuple(field.name for field in fields(cls))
        given = read_mapping(mapping, ModelShapeInvalidError, "the model")
        values = {name: value for name, value in given.items() if name in known}
        values.setdefault("name", "custom")
        values.setdefault("num_kv_heads", values.get("num_heads"))
        values.setdefault("tied_embeddings", values.get("family") == "gpt")
        values.setdefault("rotary_base", ROTARY_BASE)
        if values.get("family") == "gpt" and isinstance(values.get("hidden_size"), int):
            values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
        problems = Problems()
        problems.add(*unknown_names(given, known, ModelShapeInvalidError, "model field"))
        for name in known:
            if values.get(name) is None and (name != "num_kv_heads" or name in given):
                problems.add(
                    ModelShapeInvalidError.of_field(name, f"the model's {name} is missing")
                )
        stated = {name: value for name, value in values.items() if given.get(name) is not None}
        problems.add(*_wrong_fields(stated))
        problems.refuse()
        return cls(**values)


def _wrong_fields(values: Mapping[str, Any]) -> Iterator[ModelShapeInvalidError]:
    """An error for each field with an impossible value."""
    for name, value in values.items():
        if name == "name" and not is_name(value):
            yield ModelShapeInvalidError.of_field(
                name, f"name={shown(value)} is not a string of 1 to {MAX_NAME_LENGTH} characters"
            )
        elif name == "family" and value not in FAMILIES:
            yield ModelShapeInvalidError.of_field(
                name,
                f"family={shown(value)} is not one of {', '.join(FAMILIES)}{known_word(value)}",
            )
        elif name in MODEL_RANGES and (problem := MODEL_RANGES[name].problem(value)):
            yield ModelShapeInvalidError.of_field(name, f"{name}={problem}")
        elif name == "tied_embeddings" and (problem := switch_problem(value)):
            yield ModelShapeInvalidError.of_field(name, f"tied_embeddings={problem}")
