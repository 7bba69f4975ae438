"""Levers of memory: what they save, what they cost, and many layouts as each one."""

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from layout_tuner.predictions.estimates.peak_memory import (
    memory_terms,
    peak_memory_bytes,
    stage_memory,
)
from layout_tuner.predictions.estimates.step_shape import offloaded_s
from layout_tuner.predictions.estimates.step_time import step_time_parts, step_time_s
from layout_tuner.predictions.estimates.time_terms import EACH_MICROBATCH_S
from layout_tuner.predictions.estimates.trainer_storage import EMBEDDED_TRAINER, MEGATRON_LIKE
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_presets import model_preset

LLAMA, MIXTURE = model_preset("llama-7b"), model_preset("mixtral-8x7b")
H100 = CLUSTER_PRESETS["h100-sxm"]
PIPELINE = Layout(pp=4, num_microbatches=8, precision="bf16")
HALF = 2.0


def kept(layout: Layout, model: Any = LLAMA, storage: Any = MEGATRON_LIKE) -> float:
    return stage_memory(layout, model, storage)[0].activations_bytes


def seconds(layout: Layout, model: Any = LLAMA) -> float:
    return float(step_time_s(layout, model, H100)[0])


def test_mlp_drops_the_inside() -> None:
    layout = replace(PIPELINE, pp=1, num_microbatches=1)
    saved = kept(layout) - kept(replace(layout, recompute="mlp"))
    inside = 3.0 * LLAMA.ffn_hidden_size * LLAMA.seq_length * LLAMA.num_layers
    assert saved == pytest.approx(HALF * inside)


def test_layernorm_drops_two_outputs() -> None:
    layout = replace(PIPELINE, pp=1, num_microbatches=1)
    saved = kept(layout) - kept(replace(layout, recompute="layernorm"))
    outputs = 2.0 * LLAMA.hidden_size * LLAMA.seq_length * LLAMA.num_layers
    assert saved == pytest.approx(HALF * outputs)


@pytest.mark.parametrize(("storage", "widths"), [(MEGATRON_LIKE, 1.0), (EMBEDDED_TRAINER, 0.0)])
def test_moe_act_drops_the_activation(storage: Any, widths: float) -> None:
    layout = Layout(precision="bf16")
    again = replace(layout, recompute="moe_act")
    saved = kept(layout, MIXTURE, storage) - kept(again, MIXTURE, storage)
    rows = MIXTURE.experts_per_token * MIXTURE.seq_length * MIXTURE.num_layers
    assert saved == pytest.approx(HALF * widths * rows * MIXTURE.moe_ffn_hidden_size)


def test_core_attention_is_nothing_when_fused() -> None:
    others = replace(PIPELINE, recompute="layernorm")
    more = replace(PIPELINE, recompute="core_attention+layernorm")
    assert kept(others) == kept(more)
    assert seconds(others) < seconds(more)


def test_layers_that_recompute_are_a_share() -> None:
    none, full = kept(PIPELINE), kept(replace(PIPELINE, recompute="full"))
    part = replace(PIPELINE, recompute="full", recompute_layers=2)  # of 8
    assert kept(part) == pytest.approx(0.75 * none + 0.25 * full)
    times = [seconds(PIPELINE), seconds(part), seconds(replace(PIPELINE, recompute="full"))]
    assert times[1] - times[0] == pytest.approx(0.25 * (times[2] - times[0]), rel=0.02)


def test_the_fullest_rank_may_be_any() -> None:
    layout = replace(PIPELINE, recompute="full", recompute_layers="8/8/0/0")
    totals = [stage.total_bytes for stage in stage_memory(layout, LLAMA, MEGATRON_LIKE)]
    assert np.argmax(totals) == 2
    assert float(peak_memory_bytes(layout, LLAMA, MEGATRON_LIKE)) == pytest.approx(totals[2])


def test_a_rank_that_recomputes_more_waits() -> None:
    even = seconds(replace(PIPELINE, recompute="full", recompute_layers="4"))
    uneven = seconds(replace(PIPELINE, recompute="full", recompute_layers="8/4/4/0"))
    whole = seconds(replace(PIPELINE, recompute="full"))
    assert even < uneven < whole


def test_unequal_stages_recompute_so_many_of_theirs() -> None:
    layout = replace(PIPELINE, pp=2, pipeline_layout="Et*4|t*28L", recompute="full")
    times = [seconds(replace(layout, recompute_layers=each)) for each in (4, 16, 28)]
    assert times[0] < times[1] < times[2] == pytest.approx(seconds(layout))
    # The other 12 layers of the slowest stage, which takes 7 of the 8 + 1 stage times.
    alone = seconds(replace(layout, recompute="none"))
    assert (times[2] - times[1]) / (times[2] - alone) == pytest.approx(12 / 28, rel=0.03)


def test_offload_takes_states_to_the_host() -> None:
    layout = Layout(dp=8, zero_stage=1, precision="bf16")
    away = replace(layout, offload="optimizer")
    assert stage_memory(layout, LLAMA)[0].optimizer_bytes > 0
    assert stage_memory(away, LLAMA)[0].optimizer_bytes == 0
    params = LLAMA.num_parameters / 8
    # Megatron-Bridge measured 2.5 ns a parameter of a rank (Qwen3 30B, 16 H100).
    assert seconds(away) - seconds(layout) == pytest.approx(2.5e-9 * params, rel=0.15)


def test_offloaded_activations_stay_three_layers() -> None:
    layout = Layout(precision="bf16", micro_batch_size=4)
    away = replace(layout, offload="activations")
    assert kept(away) == pytest.approx(kept(layout) * 3 / LLAMA.num_layers)
    assert seconds(away) > seconds(layout)


def test_offloaded_activations_are_a_part_of_their_own() -> None:
    layout = Layout(precision="bf16", micro_batch_size=4)
    before, after = (
        {part.name: part for part in step_time_parts(each, LLAMA, H100)}
        for each in (layout, replace(layout, offload="activations"))
    )
    assert after.keys() - before.keys() == {"offload"}
    assert after["offload"].meaning == "activations to the host and back"
    total = sum(part.seconds for part in after.values())
    assert total == pytest.approx(seconds(replace(layout, offload="activations")))
    ratio = after["each_microbatch"].seconds / after["offload"].seconds
    columns = LayoutColumns.of(replace(layout, offload="activations"))
    assert ratio == pytest.approx(EACH_MICROBATCH_S / offloaded_s(columns, LLAMA, H100))


def test_hosts_of_hgx_have_one_link_and_of_nvl72_a_faster_one() -> None:
    columns = LayoutColumns.of(Layout(precision="bf16", offload="activations"))
    names = ("h100-sxm", "b200", "b300", "gb300")
    h100, b200, b300, gb300 = (
        float(offloaded_s(columns, LLAMA, CLUSTER_PRESETS[name])) for name in names
    )
    assert h100 == b200 == b300 == pytest.approx(7.0 * gb300)


def test_moments_of_16_bits_are_half() -> None:
    layout = Layout(precision="bf16")
    (before,), (after,) = (
        stage_memory(each, LLAMA) for each in (layout, replace(layout, optimizer_states="bf16"))
    )
    saved = before.optimizer_bytes - after.optimizer_bytes
    assert saved == pytest.approx(4.0 * LLAMA.num_parameters)
    assert after.optimizer_bytes == pytest.approx(8.0 * LLAMA.num_parameters)


LAYERS = ("all", "0", "2", "5", "8/6/4/0", "1/0/0/3")


def layouts(model: Any) -> list[Layout]:
    modules = ("none", "full", "core_attention+layernorm")
    modules += ("moe_act",) if model.num_experts else ("mlp", "mlp+layernorm")
    return [
        replace(PIPELINE, recompute=recompute, recompute_layers=layers, vpp=vpp, tp=tp,
                sequence_parallel=tp > 1, optimizer_states=states, offload=offload)
        for recompute, layers, vpp, tp, (states, offload) in product(
            modules, LAYERS, (1, 2), (1, 2), (("fp32", "none"), ("bf16", "optimizer"))
        )
    ] + [
        replace(PIPELINE, pp=pp, recompute="full", recompute_layers=layers, pipeline_layout=stages)
        for pp, stages in ((2, "Et*4|t*28L"), (4, "Et*7|(t*8|)*2t*9L"))
        for layers in ("all", "6", "6/0" if pp == 2 else "8/6/4/0")
    ]  # fmt: skip


@pytest.mark.parametrize("model", [LLAMA, MIXTURE], ids=lambda each: each.name)
def test_many_layouts_are_as_each_one(model: Any) -> None:
    each = layouts(model)
    columns = LayoutColumns.of_each(each)
    alone = [float(peak_memory_bytes(layout, model)) for layout in each]
    assert peak_memory_bytes(columns, model) == pytest.approx(alone, rel=1e-12)
    terms = memory_terms(columns, model).num_bytes.sum(axis=1).max(axis=0)
    assert terms == pytest.approx(alone, rel=1e-12)
    times = [seconds(layout, model) for layout in each]
    assert step_time_s(columns, model, H100) == pytest.approx(times, rel=1e-12)


def test_other_layers_have_freed_theirs() -> None:
    layout = Layout(tp=2, sequence_parallel=True, precision="bf16")
    whole = replace(layout, recompute="full")
    plain, full, part = (
        stage_memory(each, LLAMA)[0]
        for each in (layout, whole, replace(whole, recompute_layers="31"))
    )
    # The layer that recomputes none has its backward pass first, and frees all that it kept.
    assert plain.backward_bytes == part.backward_bytes < full.backward_bytes
