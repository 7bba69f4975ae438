"""Levers of memory in the simulator: recomputation by part and layer, states, narrow formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_presets import model_preset
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.simulation.machine import Machine
from layout_tuner.workers.simulation.simulated_peaks import rank_memory
from layout_tuner.workers.simulation.steps import SimulatedStep, steps

# Few words: logits shall not be the peak of the last stage.
LLAMA = replace(model_preset("llama-8b"), vocab_size=128)
MIXTURE = replace(model_preset("mixtral-8x7b"), vocab_size=128)
MACHINE = Machine.of(CLUSTER_PRESETS["h100-sxm"])
TOKENS = 2 * LLAMA.seq_length


def make_layout(**knobs: Any) -> Layout:
    # So long a pass that the device is slower than the host.
    fixed = {"precision": "bf16", "num_microbatches": 8, "micro_batch_size": 2}
    return Layout(**(fixed | knobs))


def step(layout: Layout, model: ModelShape = LLAMA) -> SimulatedStep:
    return steps([layout], model, MACHINE)[0]


def peaks(layout: Layout, model: ModelShape = LLAMA) -> list[float]:
    """Bytes in use of each stage at its peak."""
    return [rank.allocated_bytes for rank in rank_memory(layout, model, MACHINE, seed=0)]


def kept_bytes(layout: Layout, model: ModelShape = LLAMA) -> float:
    """Bytes a layer that one more micro-batch in flight takes on the first of two stages."""
    one, two = (peaks(replace(layout, pp=2, num_microbatches=m), model)[0] for m in (1, 2))
    return (two - one) / (model.num_layers / 2)


def compute_s(**knobs: Any) -> float:
    return step(make_layout(**knobs)).parts_s["compute_s"]


def test_time_and_memory_go_with_layers() -> None:
    by_layers = [
        make_layout(tp=8, recompute="full", recompute_layers=str(n)) for n in (0, 8, 16, 24)
    ]
    seconds = [step(layout).step_s for layout in by_layers]
    assert seconds[0] == step(make_layout(tp=8)).step_s
    assert seconds[2] - seconds[1] == pytest.approx(seconds[1] - seconds[0])
    assert seconds[3] - seconds[2] == pytest.approx(seconds[1] - seconds[0])
    whole = make_layout(tp=8, recompute="full")
    assert step(replace(whole, recompute_layers="32")).step_s == step(whole).step_s
    # Of layers that recompute, only the input stays.
    used = [peaks(layout)[0] for layout in by_layers]
    saved = (used[0] - used[1]) / 8
    assert saved == pytest.approx(
        kept_bytes(make_layout(tp=8)) - kept_bytes(make_layout(tp=8, recompute="full"))
    )
    assert used[1] - used[2] == pytest.approx(used[0] - used[1])


def test_the_first_layers_recompute_when_others_are_freed() -> None:
    every = make_layout(recompute="full")
    kept, little = kept_bytes(make_layout()), kept_bytes(every)
    used = {n: peaks(replace(every, recompute_layers=n))[0] for n in ("16", "17", "31", "all")}
    # What one layer makes again takes the place of what the last layer has freed by then.
    assert used["all"] - used["31"] == pytest.approx(little)
    assert used["16"] - used["17"] == pytest.approx(kept - little)


def test_numbers_by_rank_relieve_the_first_stage() -> None:
    plain = make_layout(pp=4, tp=2)
    first = replace(plain, recompute="full", recompute_layers="6/0/0/0")
    before, after = peaks(plain), peaks(first)
    assert after[0] < 0.8 * before[0]
    assert after[1:] == before[1:]
    assert step(plain).step_s < step(first).step_s < step(replace(plain, recompute="full")).step_s


def test_numbers_are_of_each_virtual_stage() -> None:
    layout = make_layout(pp=2, vpp=2, recompute="full")
    assert step(replace(layout, recompute_layers="8")) == step(layout)
    assert peaks(replace(layout, recompute_layers="8")) == peaks(layout)
    assert step(replace(layout, recompute_layers="7")).step_s < step(layout).step_s
    by_rank = replace(layout, recompute_layers="8/0")
    assert peaks(by_rank)[0] == peaks(layout)[0]
    assert peaks(by_rank)[1] > peaks(layout)[1]


def test_modules_repeat_their_own_work() -> None:
    by_module = {
        module: compute_s(tp=2, recompute=module) - compute_s(tp=2)
        for module in ("selective", "mlp", "layernorm")
    }
    assert all(seconds > 0 for seconds in by_module.values())
    together = compute_s(tp=2, recompute="core_attention+mlp+layernorm") - compute_s(tp=2)
    assert together == pytest.approx(sum(by_module.values()))
    # The first product of a feed-forward is two thirds of it; a norm only moves data.
    assert by_module["layernorm"] < 0.2 * by_module["mlp"]
    assert together < compute_s(tp=2, recompute="full") - compute_s(tp=2)


def test_modules_free_what_they_make_again() -> None:
    layout, h, f = make_layout(), LLAMA.hidden_size, LLAMA.ffn_hidden_size
    kept = kept_bytes(layout)
    assert kept - kept_bytes(replace(layout, recompute="layernorm")) == pytest.approx(
        2 * 2 * TOKENS * h
    )
    assert kept - kept_bytes(replace(layout, recompute="mlp")) == pytest.approx(2 * 3 * TOKENS * f)
    attention = kept - kept_bytes(replace(layout, recompute="selective"))
    both = kept - kept_bytes(replace(layout, recompute="core_attention+layernorm"))
    assert both - attention == pytest.approx(2 * 2 * TOKENS * h)


def test_a_pass_holds_what_a_module_makes_again() -> None:
    plain, again = make_layout(), make_layout(recompute="mlp")
    saved = kept_bytes(plain) - kept_bytes(again)
    # One layer's inside, and its input, which is not kept where tokens are gathered again.
    made = 2 * TOKENS * (3 * LLAMA.ffn_hidden_size + LLAMA.hidden_size)
    assert peaks(plain)[0] - peaks(again)[0] == pytest.approx(32 * saved - made)


def test_experts_make_activations_again_anyhow() -> None:
    layout = make_layout(dp=8, ep=8, zero_stage=1)
    again = replace(layout, recompute="moe_act")
    assert step(again, MIXTURE) == step(layout, MIXTURE)
    assert peaks(again, MIXTURE) == peaks(layout, MIXTURE)
    norms = replace(layout, recompute="moe_act+layernorm")
    assert step(norms, MIXTURE).step_s > step(layout, MIXTURE).step_s
    assert peaks(norms, MIXTURE)[0] < peaks(layout, MIXTURE)[0]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moments_of_16_bits_take_half(precision: str) -> None:
    layout = make_layout(precision=precision, dp=8, zero_stage=1)
    short = replace(layout, optimizer_states="bf16")
    assert peaks(layout)[0] - peaks(short)[0] == pytest.approx(4 * LLAMA.num_parameters / 8)
    parts, shorter = step(layout).parts_s, step(short).parts_s
    assert shorter["optimizer_s"] == pytest.approx(30 / 38 * parts["optimizer_s"])


@pytest.mark.parametrize(
    ("precision", "zero", "more"),
    # Of a weight in a layer: 16 bits beside two copies, of a byte and a 32nd or half a byte and a
    # 16th, and without them where ZeRO has masters.
    [("fp8", 0, 0.0), ("mxfp8", 0, 2.0625), ("mxfp8", 1, 0.0625), ("nvfp4", 1, 2 * 0.5625 - 2)],
)
def test_narrow_weights_have_their_bytes(precision: str, zero: int, more: float) -> None:
    # Next to no activations: tokens of one sequence of 128.
    model = replace(LLAMA, seq_length=128, vocab_size=128256)
    wide = make_layout(dp=8, zero_stage=zero, micro_batch_size=1, recompute="full")
    narrow = replace(wide, precision=precision)
    in_layers = model.num_layers * model.num_layer_parameters
    assert peaks(narrow, model)[0] - peaks(wide, model)[0] == pytest.approx(
        more * in_layers, rel=0.01, abs=0.01 * in_layers
    )


def test_kept_inputs_of_narrow_products_are_narrow() -> None:
    h, f, q = LLAMA.hidden_size, LLAMA.ffn_hidden_size, LLAMA.query_size
    saved = kept_bytes(make_layout()) - kept_bytes(make_layout(precision="fp8"))
    # Attention keeps its output too, so that the projection's input is one more byte.
    assert saved == pytest.approx(TOKENS * (2 * h + f - q))


def test_casts_take_time_where_formats_have_blocks() -> None:
    machine = replace(MACHINE, device=replace(MACHINE.device, peak_flops_per_s={"bf16": 1e15}))
    by_precision = {
        name: steps([make_layout(precision=name)], LLAMA, machine)[0].parts_s["compute_s"]
        for name in ("bf16", "fp8", "mxfp8", "nvfp4")
    }
    assert by_precision["fp8"] == by_precision["bf16"]
    assert by_precision["bf16"] < by_precision["mxfp8"] < by_precision["nvfp4"]


def test_narrow_weights_are_gathered_narrow() -> None:
    layout = make_layout(num_nodes=2, dp=16, zero_stage=1)
    dp_s = {
        name: step(replace(layout, precision=name)).parts_s["dp_s"]
        for name in ("bf16", "mxfp8", "nvfp4")
    }
    assert dp_s["mxfp8"] == pytest.approx(dp_s["bf16"], rel=0.01)
    assert dp_s["nvfp4"] < 0.9 * dp_s["bf16"]
