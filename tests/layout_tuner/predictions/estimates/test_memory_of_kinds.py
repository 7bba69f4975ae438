"""The memory of layers of several kinds: what autograd keeps, what each stage has, and MTP."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from layout_tuner.predictions.estimates.activations import (
    backward_elements,
    gathered_elements,
    kept_elements,
    late_elements,
    mtp_elements,
)
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes, stage_memory
from layout_tuner.predictions.estimates.rank_stages import RankStages, StageLayers, layer_shapes
from layout_tuner.predictions.estimates.stage_parameters import stage_parameters
from layout_tuner.predictions.estimates.trainer_storage import (
    EMBEDDED_TRAINER,
    MEGATRON_LIKE,
    TORCHTITAN,
    layers_of_stage,
)
from layout_tuner.search_spaces.layouts.layout import PIPELINE_SPLITS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.layer_kinds import repeated, sublayers_of
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape

LLAMA = ModelShape(
    name="llama",
    family="llama",
    num_layers=12,
    hidden_size=32,
    ffn_hidden_size=80,
    num_heads=4,
    num_kv_heads=2,
    seq_length=8,
    vocab_size=96,
    tied_embeddings=False,
)
LATENT = replace(
    LLAMA,
    num_kv_heads=4,
    q_lora_rank=12,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=7,
)
MIXTURE: dict[str, Any] = {
    "num_experts": 8,
    "experts_per_token": 2,
    "moe_ffn_hidden_size": 24,
    "shared_expert_ffn_hidden_size": 40,
}
MAMBA: dict[str, Any] = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_state_dim": 8,
    "mamba_num_groups": 2,
}
HYBRID = replace(
    LLAMA,
    **MIXTURE,
    **MAMBA,
    layer_kinds=(
        *("mamba2", "experts", "full", "experts", "mamba2+dense") * 2,
        "mamba2",
        "experts",
    ),
    num_mtp_layers=1,
)


class Fused(torch.autograd.Function):
    """An operator of one kernel, which keeps some of its inputs, and its output where asked."""

    @staticmethod
    def forward(
        ctx: Any, compute: Callable[..., Tensor], keeps: int, keeps_output: bool, *of: Tensor
    ) -> Tensor:
        out = compute(*of)
        ctx.save_for_backward(*of[:keeps], *([out] if keeps_output else []))
        return out


def fused(
    compute: Callable[..., Tensor], *of: Tensor, keeps: int, keeps_output: bool = False
) -> Tensor:
    return Fused.apply(compute, keeps, keeps_output, *of)  # type: ignore[no-any-return, no-untyped-call]


def norm(x: Tensor) -> Tensor:
    return fused(lambda x: F.rms_norm(x, x.shape[-1:]), x, keeps=1)


def rotated(x: Tensor) -> Tensor:
    return fused(torch.neg, x, keeps=0)


class Layer:
    """A plain layer of one kind: products of torch; norms, gates and attention of one kernel."""

    def __init__(self, shape: ModelShape) -> None:
        self.shape = shape
        self.weights: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        if self.shape.parallel_block:
            y = norm(x)
            return x + self.attention(y) + self.feed_forward(y)
        x = x + self.attention(norm(x)) if self.shape.mixer else x
        return x + self.feed_forward(norm(x)) if self.shape.feed_forward else x

    def linear(self, x: Tensor, outputs: int) -> Tensor:
        self.weights.append(torch.randn(outputs, x.shape[-1], requires_grad=True))
        return F.linear(x, self.weights[-1])

    def attention(self, x: Tensor) -> Tensor:
        of, heads, gate = self.shape, self.shape.num_query_heads, None
        if of.kv_lora_rank:
            q, k, v = self.from_latents(x)
        else:
            q, k, v = (self.linear(x, n) for n in (of.query_size, *[of.kv_hidden_size] * 2))
            gate = self.linear(x, of.query_size) if of.attention_output_gate else None
            q, k = (rotated(norm(each) if of.qk_norm else each) for each in (q, k))
        o = fused(
            lambda q, k, v: torch.ones(len(q), heads * of.value_head_size),
            *(q, k, v),
            keeps=3,
            keeps_output=True,
        )
        o = o if gate is None else fused(lambda o, gate: o * gate.sigmoid(), o, gate, keeps=2)
        return self.linear(o, of.hidden_size)

    def from_latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of, heads = self.shape, self.shape.num_heads
        queries = norm(self.linear(x, of.q_lora_rank)) if of.q_lora_rank else x
        q = rotated(self.linear(queries, heads * of.head_size))
        down = self.linear(x, of.kv_lora_rank + of.qk_rope_head_dim)
        latent, shared = down.split([of.kv_lora_rank, of.qk_rope_head_dim], -1)
        up = self.linear(norm(latent), heads * (of.qk_nope_head_dim + of.v_head_dim))
        key, v = up.view(len(x), heads, -1).split([of.qk_nope_head_dim, of.v_head_dim], -1)
        k = torch.cat([key, rotated(shared)[:, None].expand(-1, heads, -1)], -1)
        return q, k, v.contiguous()

    def feed_forward(self, x: Tensor) -> Tensor:
        of = self.shape
        up = self.linear(x, of.ffn_hidden_size)
        if of.is_gated:
            gate = self.linear(x, of.ffn_hidden_size)
            inside = fused(lambda gate, up: F.silu(gate) * up, gate, up, keeps=2)
        else:
            inside = F.gelu(up) if of.activation_of == "gelu" else F.relu(up).square()
        return self.linear(inside, of.hidden_size)


def elements_kept(layer: Layer, num_tokens: int) -> int:
    """Elements of the storages that autograd keeps of a layer's forward pass, without weights."""
    kept: dict[int, Tensor] = {}

    def pack(each: Tensor) -> Tensor:
        kept[each.untyped_storage()._cdata] = each
        return each

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
        layer(torch.randn(num_tokens, layer.shape.hidden_size, requires_grad=True))
    own = {weight.untyped_storage()._cdata for weight in layer.weights}
    return sum(
        each.untyped_storage().nbytes() // each.element_size()
        for key, each in kept.items()
        if key not in own
    )


SHAPES = {
    "latent": LATENT,
    "latent without a latent of queries": replace(LATENT, q_lora_rank=0),
    "grouped heads": LLAMA,
    "norms of heads": replace(LLAMA, qk_norm=True),
    "norms over the width": replace(LLAMA, qk_norm="width"),
    "output gate": replace(LLAMA, attention_output_gate=True),
    "gelu": replace(LLAMA, activation="gelu"),
    "relu2": replace(LLAMA, activation="relu2"),
    "geglu": replace(LLAMA, activation="geglu"),
    "parallel": replace(LLAMA, parallel_block=True),
    "attention alone": replace(LLAMA, layer_kinds=("full",), ffn_hidden_size=0),
    "latent attention alone": replace(LATENT, layer_kinds=("full",), ffn_hidden_size=0),
    "feed-forward alone": replace(LLAMA, layer_kinds=("dense",)),
    "relu2 alone": replace(LLAMA, layer_kinds=("dense",), activation="relu2"),
}


def columns_of(**knobs: Any) -> LayoutColumns:
    return LayoutColumns.of(Layout(**{"precision": "fp32", **knobs}))


@pytest.mark.parametrize("name", SHAPES)
def test_a_layer_keeps_what_autograd_keeps(name: str) -> None:
    shape, tokens = SHAPES[name], 8
    assert elements_kept(Layer(shape), tokens) == tokens * float(
        kept_elements(columns_of(), shape, MEGATRON_LIKE)
    )


def test_tp_leaves_latents_whole_and_sp_divides_their_tokens() -> None:
    def kept(**knobs: Any) -> float:
        return float(kept_elements(columns_of(**knobs), LATENT, MEGATRON_LIKE))

    of_heads = 2 * 4 * (10 + 7) + 3 * LATENT.ffn_hidden_size  # q, k, v, o; gate, up, product
    whole = 4 * LATENT.hidden_size + 2 * 12 + (10 + 4) + 10  # norms; latents
    assert kept() == whole + of_heads
    assert kept(tp=2) == whole + of_heads / 2
    assert kept(tp=2, sequence_parallel=True) == whole / 2 + of_heads / 2


def test_sp_gathers_latents_and_not_the_residual_stream() -> None:
    columns = columns_of(tp=2, sequence_parallel=True)
    half = LATENT.hidden_size / 2
    assert gathered_elements(columns, LATENT) == (12 + 10) / 2 + half
    # Without a latent of queries the trainer keeps the whole input, and its part for the others.
    assert gathered_elements(columns, replace(LATENT, q_lora_rank=0)) == 2 * half + 10 / 2 + half
    assert gathered_elements(columns, LLAMA) == 2 * half
    assert gathered_elements(columns, SHAPES["feed-forward alone"]) == half


def test_up_projections_are_made_again_from_latents() -> None:
    knobs = {"tp": 2, "recompute": "mla_up_proj"}
    columns, plain = columns_of(**knobs), columns_of(tp=2)
    dropped = 4 * (10 + 10 + 7) / 2  # query, key, value
    for storage in (MEGATRON_LIKE, EMBEDDED_TRAINER):
        kept = [float(kept_elements(each, LATENT, storage)) for each in (plain, columns)]
        assert kept[0] - kept[1] == dropped
        alone = SHAPES["latent attention alone"]
        made = [float(backward_elements(each, alone, storage)) for each in (plain, columns)]
        assert made[1] - made[0] == dropped
        assert kept_elements(columns, LLAMA, storage) == kept_elements(plain, LLAMA, storage)


@pytest.mark.parametrize(("kind", "norms"), [("full+dense", 2), ("dense", 1), ("mamba2", 1)])
def test_a_sublayer_has_one_norm_to_make_again(kind: str, norms: int) -> None:
    shape = HYBRID.of_kind(kind) if kind != "full+dense" else LLAMA
    kept = [
        float(kept_elements(columns_of(recompute=each), shape, MEGATRON_LIKE))
        for each in ("none", "layernorm")
    ]
    assert kept[0] - kept[1] == norms * shape.hidden_size


def test_latent_experts_have_rows_of_the_latent() -> None:
    wide = replace(LLAMA, **MIXTURE, ffn_hidden_size=24, activation="relu2")
    narrow = replace(wide, expert_latent_size=8)
    for storage, rows in ((MEGATRON_LIKE, 1), (EMBEDDED_TRAINER, 0)):
        kept = [float(kept_elements(columns_of(), each, storage)) for each in (wide, narrow)]
        assert kept[0] - kept[1] == rows * 2 * (32 - 8) - 2 * 8
    assert kept_elements(columns_of(), replace(wide, shared_expert_gate=True), MEGATRON_LIKE) == (
        kept_elements(columns_of(), wide, MEGATRON_LIKE) + 32
    )


def test_experts_without_gate_keep_three_widths_of_their_inside() -> None:
    """Megatron-LM: the activation's input, its output, and that times the token's weight."""
    wide = replace(LLAMA, **MIXTURE, ffn_hidden_size=24, activation="gelu")
    wider = replace(wide, moe_ffn_hidden_size=25, ffn_hidden_size=25)
    for module, widths in (("none", 3), ("moe_act", 1)):
        columns = columns_of(recompute=module)
        more, less = (kept_elements(columns, each, MEGATRON_LIKE) for each in (wider, wide))
        assert more - less == 2 * widths


def test_a_mixer_alone_has_its_own_backward_pass() -> None:
    """The gradients of q, k, v and o, and that of the layer's output."""
    shape = SHAPES["latent attention alone"]
    assert backward_elements(columns_of(), shape, MEGATRON_LIKE) == 32 + 2 * 4 * (10 + 7)
    mamba = HYBRID.of_kind("mamba2")
    assert backward_elements(columns_of(), mamba, MEGATRON_LIKE) == (
        32 + mamba.mixer_parts.kept_divided + mamba.mixer_parts.remade
    )


def test_late_gradients_keep_the_factors_of_each_product() -> None:
    inputs = 2 * 32 + (12 + 10) + 4 * 7 + 80
    outputs = 12 + 4 * 10 + (10 + 4) + 4 * (6 + 7) + 32 + 2 * 80 + 32
    assert late_elements(columns_of(), LATENT) == inputs + outputs
    alone = SHAPES["feed-forward alone"]
    assert late_elements(columns_of(), alone) == 32 + 80 + 2 * 80 + 32


@pytest.mark.parametrize("shape", [HYBRID, LATENT, model_preset("deepseek-v3")], ids=str)
@pytest.mark.parametrize("pp", [1, 2, 3, 4])
@pytest.mark.parametrize("split", PIPELINE_SPLITS)
def test_stages_have_all_parameters_together(shape: ModelShape, pp: int, split: Any) -> None:
    columns = columns_of(pp=pp, pipeline_split=split)
    total = 0.0
    for stage in map(np.asarray, range(pp)):
        number = layers_of_stage(columns.pp, stage, shape, MEGATRON_LIKE, columns.counted_ends)
        layers = StageLayers.of(columns, stage, number, shape, None)
        total += sum(stage_parameters(columns, shape, stage, layers)[:2])
    copies = shape.vocab_size * shape.hidden_size if pp > 1 and shape.num_mtp_layers else 0
    assert total == shape.num_parameters + copies


def test_tp_divides_heads_and_leaves_down_projections() -> None:
    def parameters(tp: int) -> float:
        columns = columns_of(tp=tp)
        layers = StageLayers(np.asarray(1.0), (LATENT,), ())
        return float(stage_parameters(columns, LATENT, np.asarray(0), layers)[2])

    whole = 32 * 12 + 12 + 32 * (10 + 4) + 10 + 2 * 32
    divided = LATENT.num_layer_parameters - whole
    assert [parameters(tp) for tp in (1, 2, 4)] == [whole + divided / tp for tp in (1, 2, 4)]


KINDS = ("full+dense", "mamba2+experts", "mamba2", "experts", "window", "dense")


@given(
    st.lists(st.sampled_from(KINDS), min_size=1, max_size=5),
    st.integers(2, 4),
    st.sampled_from(
        [(1, 1, "1f1b"), (2, 1, "1f1b"), (3, 2, "1f1b"), (5, 1, "1f1b"), (3, 2, "zbv")]
    ),
    st.sampled_from([*PIPELINE_SPLITS, "written"]),
)
def test_stages_count_the_layers_of_each_kind(
    kinds: list[str], each: int, pipeline: tuple[int, int, Any], split: Any
) -> None:
    pp, vpp, schedule = pipeline
    num_layers, layout = each * pp * vpp, Layout(pp=pp, vpp=vpp, schedule=schedule)
    if split == "written" and pp > 1:
        rest = num_layers - (pp * vpp - 1)
        text = "E" + "t|" * (pp * vpp - 1) + "t" * rest + "L"
        layout = replace(layout, pipeline_layout=text)
    elif split != "written" and schedule == "1f1b":
        layout = replace(layout, pipeline_split=split)
        num_layers -= sum(layout.counted_ends)
    shape = hybrid_of(kinds, num_layers)
    columns, stages = LayoutColumns.of(layout), np.arange(pp)
    number = layers_of_stage(columns.pp, stages, shape, MEGATRON_LIKE, columns.counted_ends)
    layers = StageLayers.of(columns, stages, number, shape, RankStages.of(columns, shape))
    shapes, codes, _ = layer_shapes(shape)
    held = np.array([*layers.of_shape, layers.of_last])
    for rank in range(pp):
        own = [
            codes[i]
            for stage in layout.stages_of_rank(rank)
            for i in layout.layers_of_stage(stage, num_layers)
        ]
        found = np.broadcast_to(held, (len(shapes), pp))[:, rank].tolist()
        assert found == [own.count(place) for place in range(len(shapes))]


def hybrid_of(kinds: list[str], num_layers: int, **fields: Any) -> ModelShape:
    """A model with these kinds of layers, repeated, and with what they need."""
    kinds = list(repeated(kinds, num_layers))
    mixers = {sublayers_of(kind)[0] for kind in kinds}
    inner = {sublayers_of(kind)[1] for kind in kinds}
    needed = dict(MAMBA) if "mamba2" in mixers else {}
    needed |= {"attention_window": 4} if "window" in mixers else {}
    needed |= MIXTURE if "experts" in inner else {}
    if "dense" not in inner:
        needed["ffn_hidden_size"] = MIXTURE["moe_ffn_hidden_size"] if "experts" in inner else 0
    return replace(LLAMA, num_layers=num_layers, layer_kinds=tuple(kinds), **{**needed, **fields})


@given(
    st.lists(st.sampled_from(KINDS), min_size=2, max_size=6),
    st.sampled_from([(2, 1), (4, 1), (2, 2)]),
    st.sampled_from([0, 1, 3]),
    st.integers(0, 2),
)
def test_the_peak_is_that_of_the_fullest_stage(
    kinds: list[str], pipeline: tuple[int, int], zero: int, depths: int
) -> None:
    shape = hybrid_of(kinds, 12, num_mtp_layers=depths)
    layout = Layout(pp=pipeline[0], vpp=pipeline[1], num_microbatches=8, zero_stage=zero, dp=2)
    for storage in (MEGATRON_LIKE, EMBEDDED_TRAINER):
        stages = [stage.total_bytes for stage in stage_memory(layout, shape, storage)]
        assert peak_memory_bytes(layout, shape, storage) == pytest.approx(max(stages), rel=1e-12)


def test_kinds_say_what_dense_first_layers_say() -> None:
    short = replace(LLAMA, **MIXTURE, num_dense_layers=3)
    said = replace(
        short, num_dense_layers=0, layer_kinds=("full+dense",) * 3 + ("full+experts",) * 9
    )
    for layout in (Layout(pp=4, dp=2, zero_stage=3), Layout(tp=2, pp=2, vpp=3, ep=2, dp=2)):
        for storage in (MEGATRON_LIKE, EMBEDDED_TRAINER, TORCHTITAN):
            assert stage_memory(layout, said, storage) == stage_memory(layout, short, storage)


def test_windows_change_no_memory_but_by_their_heads() -> None:
    mixed = hybrid_of(["full+dense", "window+dense"], 12)
    assert layer_shapes(mixed).shapes == (mixed.of_kind("full+dense"),)
    fewer = replace(mixed, window_num_heads=2, window_num_kv_heads=1)
    assert len(layer_shapes(fewer).shapes) == 2
    layout = Layout(num_microbatches=4)
    assert peak_memory_bytes(layout, fewer) < peak_memory_bytes(layout, mixed)


def test_experts_in_every_second_layer_count_as_kinds() -> None:
    every = replace(LLAMA, **MIXTURE, experts_every=2)
    kinds = replace(every, experts_every=0, layer_kinds=("full+dense", "full+experts"))
    layout = Layout(pp=3, num_microbatches=6)
    assert stage_memory(layout, every) == stage_memory(layout, kinds)


def test_mtp_is_memory_of_the_last_stage_alone() -> None:
    plain = replace(HYBRID, num_mtp_layers=0)
    layout = Layout(pp=4, num_microbatches=8)
    first, *others = stage_memory(layout, HYBRID)
    assert [first, *others[:-1]] == stage_memory(layout, plain)[:-1]
    last, before = others[-1], stage_memory(layout, plain)[-1]
    assert last.mtp_bytes == last.total_bytes - before.total_bytes > 0
    parameters = HYBRID.num_mtp_parameters + HYBRID.vocab_size * HYBRID.hidden_size
    assert last.gradients_bytes - before.gradients_bytes == 4 * parameters
    assert last.head_bytes > 1.5 * before.head_bytes, "each depth has logits"


def test_a_depth_keeps_its_layers_and_three_rows_of_features() -> None:
    shape = replace(LATENT, num_mtp_layers=2)
    for schedule, held in (("1f1b", 2), ("gpipe", 2 * 6)):
        columns = columns_of(pp=2, num_microbatches=6, schedule=schedule)
        kept, gathered, _ = mtp_elements(columns, shape, MEGATRON_LIKE)
        assert kept == held * (3 * 32 + kept_elements(columns, LATENT, MEGATRON_LIKE))
        assert gathered == 0
    columns = columns_of(tp=2, sequence_parallel=True)
    _, gathered, _ = mtp_elements(columns, shape, MEGATRON_LIKE)
    assert gathered == 2 * (32 + gathered_elements(columns, LATENT))


def test_a_stage_between_the_ends_may_be_the_fullest() -> None:
    shape = hybrid_of(["dense"] * 3 + ["full+experts"] * 9, 12)
    layout = Layout(pp=4, num_microbatches=8)
    first, second, *_ = (stage.total_bytes for stage in stage_memory(layout, shape))
    assert first < second == peak_memory_bytes(layout, shape)
