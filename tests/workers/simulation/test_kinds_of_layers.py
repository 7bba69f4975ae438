"""Simulated models with layers of several kinds, latent attention and multi-token prediction."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Final

import pytest

from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.blocks import AXES, BlockTimes
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_peaks import rank_memory
from layout_tuner.workers.simulation.steps import steps

MACHINE: Final = Machine.of(CLUSTER_PRESETS["h100-sxm"])
QWEN: Final = model_preset("qwen3-30b-a3b")
LATENT: Final = {
    "num_kv_heads": 32,
    "head_dim": None,
    "qk_norm": False,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
MAMBA: Final = {
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
}
DELTA: Final = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}


def make_layout(**knobs: Any) -> Layout:
    return Layout(**({"precision": "bf16", "num_microbatches": 8} | knobs))


def step_s(layout: Layout, model: ModelShape) -> float:
    return steps([layout], model, MACHINE)[0].step_s


def peaks(layout: Layout, model: ModelShape) -> list[float]:
    return [rank.allocated_bytes for rank in rank_memory(layout, model, MACHINE, seed=0)]


def passes_s(model: ModelShape, **knobs: Any) -> float:
    block = BlockTimes(make_layout(**knobs), model, MACHINE)
    return float(block.forward.sum() + block.backward(weights_later=False).sum())


LAYOUTS: Final = [
    {"dp": 8, "ep": 8},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 4, "sequence_parallel": True, "recompute": "full"},
    {"pp": 4, "dp": 2, "vpp": 2, "zero_stage": 2, "recompute": "layernorm+mlp"},
]


@pytest.mark.parametrize("knobs", LAYOUTS)
def test_stated_kinds_are_simulated_as_short_forms(knobs: dict[str, Any]) -> None:
    short = replace(QWEN, num_layers=8, num_dense_layers=2, ffn_hidden_size=6144)
    kinds = ("full+dense",) * 2 + ("full+experts",) * 6
    stated = replace(short, num_dense_layers=0, layer_kinds=kinds)
    layout = make_layout(**knobs)
    assert step_s(layout, stated) == pytest.approx(step_s(layout, short), rel=1e-12)
    assert peaks(layout, stated) == pytest.approx(peaks(layout, short), rel=1e-12)


def test_sums_over_tensor_columns_lengthen_both_passes() -> None:
    def tp_s(**parts_s: float) -> list[float]:
        block = BlockTimes(make_layout(tp=2, tp_columns=2), QWEN, MACHINE)
        vars(block).update(parts_s)
        passes = block.forward, block.backward(weights_later=False)
        return [float(each[AXES.index("tp")]) for each in passes]

    without = tp_s(_norm_sums_s=0.0, _column_sums_s=0.0)
    forward_s, backward_s = tp_s(_norm_sums_s=1.0, _column_sums_s=2.0)
    assert forward_s - without[0] == pytest.approx(3.0)
    assert backward_s - without[1] == pytest.approx(1.0)


def test_halves_of_a_layer_cost_as_much_as_the_layer() -> None:
    halves = replace(QWEN, num_layers=96, layer_kinds=("full", "experts"))
    layout = make_layout(dp=8, ep=8)
    assert halves.num_parameters == QWEN.num_parameters
    assert step_s(layout, halves) == pytest.approx(step_s(layout, QWEN), rel=0.02)
    assert peaks(layout, halves) == pytest.approx(peaks(layout, QWEN), rel=0.02)


def test_a_stage_of_dearer_layers_takes_longer_and_holds_more() -> None:
    mixed = replace(
        QWEN, num_layers=8, ffn_hidden_size=98304, layer_kinds=("full+dense", *["full+experts"] * 3)
    )
    front = replace(mixed, layer_kinds=("full+dense",) * 2 + ("full+experts",) * 6)
    layout = make_layout(pp=2, dp=4, ep=4)
    assert step_s(layout, front) > step_s(layout, mixed)
    first, last = peaks(layout, front)
    even = peaks(layout, mixed)
    assert first > even[0]
    assert last < even[1]


def test_multi_token_prediction_is_on_the_last_stage() -> None:
    depth = replace(QWEN, num_mtp_layers=1)
    layout = make_layout(pp=4, dp=2, ep=2)
    before, after = peaks(layout, QWEN), peaks(layout, depth)
    assert after[:3] == before[:3]
    weights = depth.num_mtp_parameters - depth.num_expert_parameters // 2
    assert after[3] - before[3] > 18 * weights / 2
    assert step_s(layout, depth) > 1.05 * step_s(layout, QWEN)


def test_latent_attention_gathers_latents_and_recomputes_from_them() -> None:
    latent = replace(QWEN, **LATENT)
    cut = {"tp": 4, "dp": 2, "sequence_parallel": True}
    wide = replace(latent, q_lora_rank=4096, kv_lora_rank=4096)
    block, wider = (BlockTimes(make_layout(**cut), m, MACHINE) for m in (latent, wide))
    assert wider.forward[1] > block.forward[1]
    none, up = (make_layout(**cut, recompute=r) for r in ("none", "mla_up_proj"))
    assert peaks(up, latent)[0] < peaks(none, latent)[0]
    assert step_s(up, latent) > step_s(none, latent)
    assert step_s(up, QWEN) == step_s(none, QWEN)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [("mamba2", MAMBA), ("gated_delta_net", DELTA), ("kda", DELTA | {"linear_num_key_heads": 32})],
)
def test_mixers_without_scores_take_no_longer_per_token(kind: str, fields: dict[str, int]) -> None:
    def of_length(name: str, seq_length: int, **more: int) -> ModelShape:
        kinds = (f"{name}+experts",)
        return replace(QWEN, seq_length=seq_length, layer_kinds=kinds, qk_norm=False, **more)

    growth = {
        name: passes_s(of_length(name, 65536, **more)) / passes_s(of_length(name, 8192, **more))
        for name, more in ((kind, fields), ("full", {}))
    }
    assert 4 < growth[kind] < 8.2
    assert growth["full"] > 16
    halved = passes_s(of_length(kind, 8192, **fields), tp=2)
    assert halved < passes_s(of_length(kind, 8192, **fields))


def test_packed_documents_shorten_attention_alone() -> None:
    long = replace(model_preset("llama-8b"), seq_length=32768)
    packed = replace(long, mean_document_length=2048)
    short = replace(long, seq_length=2048)
    # 16 short sequences have the tokens of a long one.
    assert passes_s(packed) == pytest.approx(passes_s(short, micro_batch_size=16), rel=0.1)
    assert passes_s(packed) < 0.7 * passes_s(long)


def test_experts_on_latents_exchange_and_multiply_less() -> None:
    narrow = replace(QWEN, expert_latent_size=512)
    blocks = [BlockTimes(make_layout(dp=8, ep=8), m, MACHINE) for m in (QWEN, narrow)]
    exchanged = [block.forward[3] for block in blocks]
    assert exchanged[1] < 0.5 * exchanged[0]
    assert blocks[1].forward[0] < blocks[0].forward[0]
