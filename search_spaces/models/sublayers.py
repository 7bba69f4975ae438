"""What the sublayers of a layer are made of: matrices, other parameters, products of tokens.

Each is of a shape whose layers are all of one kind (`ModelShape.kinds`). Parameters equal those of
transformers' models to the last one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from layout_tuner.search_spaces.models.layer_kinds import Mixer

if TYPE_CHECKING:
    from layout_tuner.search_spaces.models.model_shape import ModelShape

CONVOLUTION: Final = 4
"""Taps of the convolution before a gated delta net, KDA and Mamba-2, in all published models."""

Split = Literal["columns", "rows", "whole"]
"""How tp divides a matrix: by the features of its output or of its input; or each rank has it."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix of a sublayer: out[tokens, columns] = in[tokens, rows] w."""

    rows: int
    columns: int
    split: Split

    @property
    def num_parameters(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True, kw_only=True, slots=True)
class MixerParts:
    """What a layer mixes tokens with; a layer without one has none of all this."""

    matrices: tuple[Matrix, ...] = ()
    divided_parameters: int = 0
    """Parameters beside matrices that tp divides with the heads."""
    whole_parameters: int = 0
    """Parameters beside matrices that each rank of tp has."""
    flops_of_position: int = 0
    """Forward operations of a token for each position that it attends to."""
    flops_of_token: int = 0
    """Forward operations of a token beside matrices that do not grow with the sequence."""
    kept_divided: int = 0
    """Elements of a token that are kept for the backward pass, divided by tp: those between the
    matrices, without scores and without the two of the norm (its input and its output)."""
    kept_whole: int = 0
    """Elements of a token that are kept and that each rank of tp has."""
    gathered: int = 0
    """Elements of a token that sequence parallelism gathers before the matrices divided by
    columns."""
    gathered_not_kept: int = 0
    """Of these the ones that no matrix takes: the rotated part of a latent key."""
    latents: int = 0
    """Features of a token, of latents, that go into matrices divided by columns."""
    remade: int = 0
    """Elements of a token, divided by tp, that the backward pass has beside `kept_divided` and the
    gradients of those."""

    @property
    def num_matrix_parameters(self) -> int:
        return sum(each.num_parameters for each in self.matrices)

    @property
    def num_whole_matrix_parameters(self) -> int:
        return sum(each.num_parameters for each in self.matrices if each.split == "whole")

    @property
    def num_parameters(self) -> int:
        return self.num_matrix_parameters + self.divided_parameters + self.whole_parameters


def mixer_of(shape: ModelShape) -> MixerParts:
    """The mixer of a shape whose layers are all of one kind."""
    if shape.mixer is None:
        return MixerParts()
    if shape.mixer in ("full", "window"):
        return _latent_attention(shape) if shape.kv_lora_rank else _attention(shape)
    if shape.mixer == "mamba2":
        return _mamba2(shape)
    return _delta_net(shape) if shape.mixer == "gated_delta_net" else _kda(shape)


def _attention(shape: ModelShape) -> MixerParts:
    """Softmax attention with grouped heads (arXiv:2305.13245)."""
    h, d, q, kv = shape.hidden_size, shape.head_size, shape.query_size, shape.kv_hidden_size
    gate = q if shape.attention_output_gate else 0
    divided = whole = 0
    kept = 2 * q + 2 * kv + 2 * gate
    if shape.qk_norm:
        kept += q + kv
        divided, whole = (q + kv, 0) if shape.qk_norm == "width" else (0, 2 * d)
    if shape.biases_of != "none":
        divided += q + 2 * kv + gate
        whole += 0 if shape.biases_of == "qkv" else h
    divided += shape.num_query_heads if shape.attention_sinks else 0
    return MixerParts(
        matrices=(Matrix(h, q + 2 * kv + gate, "columns"), Matrix(q, h, "rows")),
        divided_parameters=divided,
        whole_parameters=whole,
        flops_of_position=4 * q,
        kept_divided=kept,
        gathered=h,
    )


def _latent_attention(shape: ModelShape) -> MixerParts:
    """Multi-head latent attention, trained un-absorbed (arXiv:2405.04434, section 2.1).

    The down-projections and the norms of both latents are whole on each rank of tp, as in
    Megatron-LM, and what is gathered are the latents.
    """
    h, heads = shape.hidden_size, shape.num_query_heads
    a, r, p, v = shape.q_lora_rank, shape.kv_lora_rank, shape.qk_rope_head_dim, shape.v_head_dim
    n = shape.qk_nope_head_dim
    q, value = heads * (n + p), heads * v
    queries = (Matrix(h, a, "whole"), Matrix(a, q, "columns")) if a else (Matrix(h, q, "columns"),)
    return MixerParts(
        matrices=(
            *queries,
            Matrix(h, r + p, "whole"),
            Matrix(r, heads * (n + v), "columns"),
            Matrix(value, h, "rows"),
        ),
        whole_parameters=a + r,
        flops_of_position=2 * (q + value),
        kept_divided=2 * q + 2 * value,
        kept_whole=2 * a + (r + p) + r,
        gathered=(a or h) + r + p,
        gathered_not_kept=p,
        latents=a + r,
    )


def _delta_net(shape: ModelShape) -> MixerParts:
    """A gated delta net with its output gate (arXiv:2412.06464), as in Qwen3-Next.

    The recurrence takes 8 operations for each number of its state, as Megatron-LM counts. Kept are
    the projection, what leaves the convolution, the inputs of the chunked kernel (normed query and
    key, value, and a row of 64 positions a head), its output and the gated one. The backward pass
    makes w and u of the chunks and their states again (flash-linear-attention 0315a70,
    ops/gated_delta_rule/chunk.py).
    """
    h, heads = shape.hidden_size, shape.linear_num_value_heads
    k, v = shape.linear_num_key_heads * shape.linear_key_head_dim, shape.linear_value_size
    inside = 2 * k + v
    projected = inside + v + 2 * heads
    return MixerParts(
        matrices=(Matrix(h, projected, "columns"), Matrix(v, h, "rows")),
        divided_parameters=CONVOLUTION * inside + 2 * heads,
        whole_parameters=shape.linear_value_head_dim,
        flops_of_token=8 * heads * shape.linear_key_head_dim * shape.linear_value_head_dim,
        kept_divided=projected + inside + (inside + 3 * heads + _CHUNK * heads) + 2 * v,
        gathered=h,
        remade=_remade(heads, shape.linear_key_head_dim, shape.linear_value_head_dim),
    )


def _kda(shape: ModelShape) -> MixerParts:
    """Kimi Delta Attention with gates of low rank (arXiv:2510.26692); decay is by channel."""
    h, heads, width = shape.hidden_size, shape.linear_num_value_heads, shape.linear_value_head_dim
    d = heads * width
    projected = 3 * d + 2 * d + heads
    return MixerParts(
        matrices=(
            Matrix(h, 3 * d + heads, "columns"),
            *(Matrix(h, width, "whole"), Matrix(width, d, "columns")) * 2,
            Matrix(d, h, "rows"),
        ),
        divided_parameters=CONVOLUTION * 3 * d + heads + d,
        whole_parameters=width,
        flops_of_token=8 * heads * width * width,
        kept_divided=projected + 3 * d + (3 * d + 2 * d + heads + _CHUNK * heads) + 2 * d,
        kept_whole=2 * width,
        gathered=h,
        remade=_remade(heads, width, width),
    )


def _mamba2(shape: ModelShape) -> MixerParts:
    """Mamba-2 (arXiv:2405.21060) as Megatron-LM and Nemotron-H have it.

    The state takes 7 operations a number, as Megatron-LM counts. Kept are the projection, and the
    output of the scan before and after its gate and normed: the kernel has neither the norm nor the
    last matrix (megatron/core/ssm/mamba_mixer.py at d98e8a6, `_ssm_training`). The backward pass
    makes the convolution again, with its gradient, and the states of chunks of 128 positions: two
    in fp32 and two in 16 bits (mamba_ssm, ops/triton/ssd_combined.py).
    """
    h, heads, d = shape.hidden_size, shape.mamba_num_heads, shape.mamba_size
    groups = 2 * shape.mamba_num_groups * shape.mamba_state_dim
    return MixerParts(
        matrices=(Matrix(h, 2 * d + groups + heads, "columns"), Matrix(d, h, "rows")),
        divided_parameters=(CONVOLUTION + 1) * (d + groups) + 3 * heads + d,
        flops_of_token=7 * d * shape.mamba_state_dim,
        kept_divided=2 * d + groups + heads + 3 * d,
        gathered=h,
        remade=2 * (d + groups) + 6 * d * shape.mamba_state_dim // 128,
    )


def _remade(heads: int, key: int, value: int) -> int:
    return heads * (key + value) + heads * key * value // _CHUNK


_CHUNK: Final = 64
"""Positions of a chunk of the delta net's kernels in flash-linear-attention."""


_HEADS: Final[Mapping[Mixer, tuple[str, str]]] = {
    "full": ("num_heads", "num_kv_heads"),
    "window": ("window_num_heads", "window_num_kv_heads"),
    "gated_delta_net": ("linear_num_key_heads", "linear_num_value_heads"),
    "kda": ("linear_num_key_heads", "linear_num_value_heads"),
    "mamba2": ("mamba_num_heads", "mamba_num_groups"),
}


def has_kinds(model: ModelShape) -> bool:
    """Whether layers differ in more than a window and dense first feed-forwards."""
    own_heads = model.window_num_heads or model.window_num_kv_heads
    return bool(model.layer_kinds or model.experts_every or own_heads)


def heads_of(model: ModelShape, *mixers: Mixer) -> dict[str, int]:
    """Heads and groups of heads by field, of the layers with these mixers; without any: of all."""
    own = {each.shape.mixer for each in model.kinds}
    names = [
        name
        for mixer, each in _HEADS.items()
        if mixer in own
        for name in each
        if mixer in mixers or not mixers
    ]
    usual = [name if getattr(model, name) else name.removeprefix("window_") for name in names]
    return {name: getattr(model, name) for name in usual}


def width_of_dense_layers(model: ModelShape) -> int:
    """Inner width of the dense feed-forwards; 0: a model of stated kinds has none."""
    is_dense = any(each.shape.feed_forward == "dense" for each in model.kinds)
    return model.ffn_hidden_size if is_dense or not model.layer_kinds else 0


def dense_width(shape: ModelShape) -> int:
    """Inner width of the feed-forward that each token takes whole; 0: there is none."""
    return shape.shared_expert_ffn_hidden_size if shape.num_experts else shape.ffn_hidden_size


def num_dense_parameters(shape: ModelShape, width: int) -> int:
    """Parameters of a feed-forward of this inner width, with its biases."""
    h, ups = shape.hidden_size, shape.num_ups
    biases = ups * width + h if shape.biases_of == "all" else 0
    return (ups + 1) * h * width + biases if width else 0


def num_routed_parameters(shape: ModelShape) -> int:
    """Parameters of all routed experts of a layer."""
    h, width, ups = shape.routed_width, shape.moe_ffn_hidden_size, shape.num_ups
    biases = ups * width + h if shape.biases_of == "all" else 0
    return shape.num_experts * ((ups + 1) * h * width + biases)


def num_beside_routed_parameters(shape: ModelShape) -> int:
    """Parameters of the router, latents and the shared expert's gate, which each rank of tp has."""
    h, experts = shape.hidden_size, shape.num_experts
    router = h * experts + (experts if shape.biases_of == "all" else 0)
    gate = h if shape.shared_expert_gate else 0
    return router + 2 * h * shape.expert_latent_size + gate if experts else 0
