"""The model: a transformer's shape, its parameters and its floating-point work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, Self, get_args

from search_spaces.errors import ModelShapeInvalidError
from search_spaces.reading import (
    MAX_NAME_LENGTH,
    MAX_WIDTH,
    is_name,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)

Family = Literal["gpt", "llama"]
"""gpt: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, SwiGLU, RoPE, no biases."""

FAMILIES: Final[tuple[Family, ...]] = get_args(Family)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """What is trained: everything about the model that moves speed or memory.

    Raises:
        ModelShapeInvalidError: at construction, when the numbers contradict each other.
    """

    name: str
    """What the leaderboard calls it."""
    family: Family
    """Which block it is built of."""
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
    """Tokens a sequence."""
    vocab_size: int
    """Rows of the embedding."""
    tied_embeddings: bool
    """Whether the output projection is the embedding's transpose."""

    def __post_init__(self) -> None:
        if not is_name(self.name):
            raise ModelShapeInvalidError(
                f"name={shown(self.name)} is not a string of 1 to {MAX_NAME_LENGTH} characters"
            )
        if self.family not in FAMILIES:
            raise ModelShapeInvalidError(
                f"family={shown(self.family)} is not one of {', '.join(FAMILIES)}"
            )
        for name in _COUNTS:
            problem = whole_number_problem(getattr(self, name), high=MAX_WIDTH)
            if problem:
                raise ModelShapeInvalidError(f"{name}={problem}")
        if not isinstance(self.tied_embeddings, bool):
            raise ModelShapeInvalidError(
                f"tied_embeddings={shown(self.tied_embeddings)} is not true or false"
            )
        if self.hidden_size % self.num_heads:
            raise ModelShapeInvalidError(
                f"hidden_size={self.hidden_size} is not divisible by num_heads={self.num_heads}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ModelShapeInvalidError(
                f"num_heads={self.num_heads} is not divisible by num_kv_heads={self.num_kv_heads}"
            )
        if self.family == "llama" and self.head_size % 2:
            raise ModelShapeInvalidError(
                f"head size {self.head_size} (hidden_size={self.hidden_size} over "
                f"num_heads={self.num_heads}) is odd; rotary positions need an even one"
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
        """Parameters in the matrices of one block: attention and feed-forward, no norms, no biases."""
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
        """Parameters after the last block: the final norm, and the output matrix if it is not tied."""
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
        """Floating-point operations of a forward and a backward pass, a token, without recomputation.

        Three times the forward pass: 2 operations a matrix parameter (output projection included,
        embedding look-up not), and 4 s h for the two attention products. For the GPT shape with
        ffn = 4h this is 72 L h^2 (1 + s/(6h) + V/(12 L h)), arXiv:2104.04473 equation 3 less its
        recomputation (and arXiv:2205.05198, appendix A).
        """
        return 3 * (
            self.num_layers * self.layer_forward_flops_per_token
            + self.logit_forward_flops_per_token
        )

    @property
    def layer_forward_flops_per_token(self) -> int:
        """Floating-point operations of one block's forward pass, a token."""
        return 2 * self.num_layer_matrix_parameters + 4 * self.seq_length * self.hidden_size

    @property
    def logit_forward_flops_per_token(self) -> int:
        """Floating-point operations of the output projection's forward pass, a token."""
        return 2 * self.hidden_size * self.vocab_size

    def hardware_flops_per_token(self, recompute: str) -> int:
        """Floating-point operations that are really executed, a token, recomputation included.

        Full recomputation runs every block's forward pass a second time (the output projection is
        not recomputed), selective recomputation the two attention products (arXiv:2205.05198).
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
        gpt; `name` to "custom"; `tied_embeddings` to true for gpt and false for llama.

        Raises:
            ModelShapeInvalidError: a field is unknown, missing, or out of range.
        """
        known = tuple(field.name for field in fields(cls))
        given = read_mapping(mapping, ModelShapeInvalidError, "the model")
        refuse_unknown(given, known, ModelShapeInvalidError, "model field")
        values = {"name": "custom", **given}
        values.setdefault("num_kv_heads", values.get("num_heads"))
        values.setdefault("tied_embeddings", values.get("family") == "gpt")
        if values.get("family") == "gpt" and isinstance(values.get("hidden_size"), int):
            values.setdefault("ffn_hidden_size", 4 * values["hidden_size"])
        missing = [name for name in known if values.get(name) is None]
        if missing:
            raise ModelShapeInvalidError(f"the model's {missing[0]} is missing")
        return cls(**values)


_COUNTS: Final = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "seq_length",
    "vocab_size",
)
