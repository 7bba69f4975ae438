from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from search_spaces.estimates.memory import (
    layers_of_stage,
    memory_terms,
    peak_memory_bytes,
    stage_memory,
    stage_terms,
)
from search_spaces.estimates.storage import (
    EMBEDDED_ON_GPU,
    EMBEDDED_TRAINER,
    MEGATRON_LIKE,
    NANOTRON,
    LayerSplit,
    TrainerStorage,
    storage_of,
)
from search_spaces.schedules import Backward, Forward, pipeline_schedule
from search_spaces.spec.cluster import detect_local_cpu
from search_spaces.spec.layout import PIPELINE_SPLITS, Layout
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape
from search_spaces.spec.presets.clusters import CLUSTER_PRESETS
from search_spaces.spec.presets.models import model_preset
from search_spaces.spec.rules import ALL_SCOPES
from search_spaces.spec.space import SearchSpace, enumerate_legal

MIB = 1 << 20
GPT = model_preset("gpt-175b")
LLAMA = model_preset("llama-8b")

# As 175B ran on Frontier with Megatron-DeepSpeed: fp16 gradients, sharded after their reduction.
SHARDED_GRADIENTS = TrainerStorage(
    gradient_bytes=2, zero_shards_gradients=True, gathered_share=0.0, fp32_logits=2
)
RAN_ON_FRONTIER = Layout(
    num_nodes=16,
    tp=4,
    pp=16,
    dp=2,
    num_microbatches=40,
    zero_stage=1,
    recompute="full",
    precision="fp16",
)


def states_bytes(layout: Layout) -> float:
    return sum(
        stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
        for stage in stage_memory(layout, LLAMA)
    )


@pytest.mark.parametrize(
    ("layout", "bytes_a_parameter"),
    [
        (Layout(precision="fp32"), 4 + 4 + 8),
        (Layout(precision="bf16"), 2 + 4 + 12),
        (Layout(precision="bf16", dp=4), 2 + 4 + 12),
        (Layout(precision="bf16", dp=4, zero_stage=1), 2 + 4 + 12 / 4),
        (Layout(precision="fp32", dp=8, zero_stage=1), 4 + 4 + 8 / 8),
        (Layout(precision="fp32", dp=8, zero_stage=1, zero_replicas=2), 4 + 4 + 8 / 4),
        (Layout(precision="fp32", dp=8, zero_replicas=2), 4 + 4 + 8),
    ],
    ids=lambda value: value.key if isinstance(value, Layout) else "",
)
def test_states_take_so_many_bytes_a_parameter(layout: Layout, bytes_a_parameter: float) -> None:
    assert states_bytes(layout) == pytest.approx(LLAMA.num_parameters * bytes_a_parameter)


def test_stages_and_ranks_share_the_parameters_without_loss() -> None:
    layout = Layout(pp=8, tp=1, precision="fp32")
    assert states_bytes(layout) == pytest.approx(LLAMA.num_parameters * 16)
    shared = states_bytes(Layout(pp=8, tp=8, precision="fp32")) * 8
    norms = LLAMA.hidden_size * (2 * LLAMA.num_layers + 1)
    assert shared == pytest.approx((LLAMA.num_parameters + 7 * norms) * 16)


def test_a_tied_embedding_is_held_twice_in_a_pipeline() -> None:
    model = model_preset("llama-1b")
    embedding_bytes = model.vocab_size * model.hidden_size * 4
    weights = [
        sum(stage.weights_bytes for stage in stage_memory(Layout(pp=pp), model)) for pp in (1, 2)
    ]
    assert weights[1] - weights[0] == pytest.approx(embedding_bytes)


def test_the_state_of_the_frontier_run_is_nine_bytes_a_parameter() -> None:
    # Measured there: 23,361 MiB on the stages between the first and the last.
    stage = stage_memory(RAN_ON_FRONTIER, GPT, SHARDED_GRADIENTS)[8]
    states = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
    assert states / (GPT.num_layers * GPT.num_layer_parameters / 64) == pytest.approx(
        9.0, rel=0.001
    )
    assert states / MIB == pytest.approx(23361, rel=0.002)


def test_sharded_gradients_and_weights_have_two_whole_layers_beside_the_share() -> None:
    model, shards = model_preset("small-llama"), 4
    plain, second, third, one = (
        stage_memory(Layout(dp=dp, zero_stage=zero, precision="bf16"), model)[0]
        for dp, zero in ((4, 0), (4, 2), (4, 3), (1, 3))
    )
    output = model.vocab_size * model.hidden_size + model.hidden_size
    two_layers = model.num_layer_parameters + output
    share = model.num_parameters / shards
    assert second.weights_bytes == plain.weights_bytes == 2 * model.num_parameters
    assert second.gradients_bytes == third.gradients_bytes == 4 * (share + two_layers)
    assert third.weights_bytes == 2 * (share + two_layers)
    assert third.optimizer_bytes == 12 * share
    assert one.weights_bytes == plain.weights_bytes, "one replica has nobody to share with"


def test_a_micro_batch_in_flight_costs_what_it_did_on_frontier() -> None:
    # Measured there: 300 MiB from one stage to the next under full recomputation.
    stages = stage_memory(RAN_ON_FRONTIER, GPT, SHARDED_GRADIENTS)
    step = stages[7].total_bytes - stages[8].total_bytes
    assert step / MIB == pytest.approx(300, rel=0.05)


def test_the_first_stage_keeps_as_many_micro_batches_as_there_are_stages() -> None:
    model = model_preset("tiny")
    a_layer = [stage.activations_bytes for stage in stage_memory(Layout(num_microbatches=1), model)]
    many = stage_memory(Layout(pp=4, num_microbatches=64), model)
    few = stage_memory(Layout(pp=4, num_microbatches=2), model)
    kept = many[3].activations_bytes
    assert [stage.activations_bytes / kept for stage in many[:3]] == pytest.approx([4, 3, 2])
    assert [stage.activations_bytes / kept for stage in few[:3]] == pytest.approx([2, 2, 2])
    assert kept < a_layer[0]


def test_interleaving_keeps_more() -> None:
    model = model_preset("tiny")
    plain = stage_memory(Layout(pp=2, num_microbatches=8), model)[0]
    interleaved = stage_memory(Layout(pp=2, vpp=2, num_microbatches=8), model)[0]
    assert interleaved.activations_bytes / plain.activations_bytes == pytest.approx(1 + 1 / 4)


def test_a_layer_keeps_what_korthikanti_counts_less_the_dropout_masks() -> None:
    # arXiv:2205.05198, equation 2 at 16 bits: s b h (10 + 24/t + 5 a s / (h t)); the masks are
    # 2 s b h of the ten and one of the five.
    model, t, b = GPT, 8, 2
    layers, h, s = model.num_layers, model.hidden_size, model.seq_length
    layout = Layout(tp=t, micro_batch_size=b, precision="bf16")
    storage = TrainerStorage(fused_attention=False)
    kept = stage_memory(layout, model, storage)[0].activations_bytes
    unmasked = s * b * h * (8 + 24 / t + 2 * model.num_heads * s / (h * t))
    assert kept / layers == pytest.approx(unmasked)
    fused = stage_memory(layout, model)[0].activations_bytes
    assert fused / layers == pytest.approx(s * b * h * (8 + 24 / t))


def test_cut_tokens_are_shared_by_norms_and_by_matrices_only_if_gathered_again() -> None:
    # arXiv:2205.05198, equation 4: sequence parallelism divides the ten of equation 2 by t as well.
    h, s, t, layers = GPT.hidden_size, GPT.seq_length, 8, GPT.num_layers
    layout = Layout(tp=t, precision="bf16", sequence_parallel=True)
    kept = stage_memory(layout, GPT)[0].activations_bytes
    assert kept == pytest.approx(layers * s * h * (4 / t + 4 + 24 / t))
    again = stage_memory(layout, GPT, TrainerStorage(gathered_share=0.0))[0]
    assert again.activations_bytes == pytest.approx(layers * (8 + 24) * s * h / t)


def test_selective_recomputation_saves_the_attention_matrix_alone() -> None:
    eager = TrainerStorage(fused_attention=False)
    layout = Layout(precision="bf16", tp=8)
    selective = stage_memory(replace(layout, recompute="selective"), GPT, eager)
    assert selective == stage_memory(layout, GPT)
    assert stage_memory(layout, GPT, eager)[0].total_bytes > selective[0].total_bytes


@pytest.mark.parametrize("name", ["gpt-175b", "llama-70b", "tiny"])
def test_each_saving_saves(name: str) -> None:
    model = model_preset(name)
    base = Layout(tp=2, pp=2, dp=2, micro_batch_size=4, num_microbatches=8)
    savings: list[dict[str, Any]] = [
        {"tp": 4},
        {"pp": 4},
        {"zero_stage": 1},
        {"recompute": "full"},
        {"sequence_parallel": True},
        {"micro_batch_size": 2},
        {"num_microbatches": 1},
    ]
    for saving in savings:
        changed = peak_memory_bytes(replace(base, **saving), model)
        assert changed < peak_memory_bytes(base, model), saving


def test_logits_weigh_on_the_last_stage_alone() -> None:
    layout = Layout(pp=4, tp=2, micro_batch_size=3, precision="bf16")
    stages = stage_memory(layout, LLAMA)
    tokens = 3 * LLAMA.seq_length
    assert [stage.head_bytes for stage in stages[:3]] == [0, 0, 0]
    logits, an_input = tokens * LLAMA.vocab_size / 2, tokens * LLAMA.hidden_size
    # In bf16 and, once, in fp32, where they turn into their gradient in place; the inputs of the
    # final norm and of the projection.
    assert stages[3].head_bytes == logits * (2 + 4) + 2 * an_input * 2
    # Megatron's: bf16 logits, fp32 softmax, fp32 gradient.
    assert (
        stage_memory(layout, LLAMA, SHARDED_GRADIENTS)[3].head_bytes
        == logits * 10 + 2 * an_input * 2
    )
    single = stage_memory(replace(layout, precision="fp32"), LLAMA)
    assert single[3].head_bytes == logits * 4 + 3 * an_input * 4


def test_the_peak_over_columns_is_the_fullest_stage_of_each_layout() -> None:
    space = SearchSpace(
        global_batch_size=256,
        num_nodes=[1, 2, 4],
        tp=[1, 2, 8],
        pp=[1, 2, 4, 8],
        vpp=[1, 2],
        micro_batch_size=[1, 4],
        zero_stage=[0, 1],
        recompute=["none", "selective", "full"],
        sequence_parallel=[False, True],
        precision=["fp32", "bf16"],
    )
    legal = enumerate_legal(
        space, LLAMA, CLUSTER_PRESETS["h100-sxm"], scopes=ALL_SCOPES - {"trainer"}
    )
    peaks = peak_memory_bytes(legal.columns(), LLAMA)
    assert len(peaks) == len(legal) > 500
    fullest = [
        max(stage.total_bytes for stage in stage_memory(legal.layout(position), LLAMA))
        for position in range(len(legal))
    ]
    np.testing.assert_allclose(peaks, fullest, rtol=1e-12)


def test_a_trillion_parameters_must_recompute_on_frontier() -> None:
    # Dash et al. ran 1T with TP 8, PP 64 and activation checkpointing on devices of 64 GiB.
    model = model_preset("gpt-1t")
    layout = Layout(
        num_nodes=384, tp=8, pp=64, dp=6, num_microbatches=1600, zero_stage=1, precision="fp16"
    )
    memory = CLUSTER_PRESETS["frontier"].device_memory_bytes
    assert peak_memory_bytes(layout, model, SHARDED_GRADIENTS) > memory
    assert peak_memory_bytes(replace(layout, recompute="full"), model, SHARDED_GRADIENTS) < memory


def test_a_llama_layer_keeps_its_swiglu_and_the_narrow_keys_and_values() -> None:
    # Elements a token: two norm inputs and two matrix inputs of h; query and attention output of h;
    # key and value of a quarter of it; gate, up and their product, and, unless the trainer makes it
    # again, the gate's activation.
    h, f = 4096, 14336
    for fused, parts in ((True, 3), (False, 4)):
        layer = 4 * h + 2 * h + 2 * (h // 4) + parts * f
        storage = TrainerStorage(fused_swiglu=fused)
        kept = stage_memory(Layout(precision="bf16"), LLAMA, storage)[0].activations_bytes
        assert kept == 2 * LLAMA.seq_length * 32 * layer


def test_full_recomputation_keeps_each_layers_input_and_revives_one_layer_at_a_time() -> None:
    whole = stage_memory(Layout(precision="bf16"), GPT)[0]
    full = stage_memory(Layout(precision="bf16", recompute="full"), GPT)[0]
    an_input = 2 * GPT.seq_length * GPT.hidden_size
    assert full.activations_bytes == GPT.num_layers * an_input
    revived = whole.activations_bytes / GPT.num_layers - an_input
    assert full.backward_bytes - whole.backward_bytes == revived


def test_the_logits_and_the_revived_layer_are_never_there_at_once() -> None:
    stage = stage_memory(Layout(recompute="full"), model_preset("small"))[0]
    states = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
    larger = max(stage.backward_bytes, stage.head_bytes)
    assert min(stage.backward_bytes, stage.head_bytes) > 0
    assert stage.total_bytes == states + stage.activations_bytes + larger


@pytest.mark.parametrize(
    ("model", "layout", "measured_mib"),
    [
        # Peaks of the embedded trainer on the CPU (`layout-tuner probe`), the fullest rank.
        ("small", Layout(micro_batch_size=2), 203.1),
        ("small", Layout(micro_batch_size=8), 424.3),
        ("small", Layout(micro_batch_size=8, recompute="full"), 185.6),
        ("small", Layout(micro_batch_size=8, precision="bf16"), 324.4),
        ("small", Layout(pp=2, micro_batch_size=2), 131.9),
        ("small", Layout(pp=2, vpp=2, micro_batch_size=8), 400.3),
        ("small", Layout(pp=2, micro_batch_size=8, recompute="full"), 121.4),
        ("small", Layout(pp=4, micro_batch_size=8, recompute="full"), 97.3),
        ("small", Layout(tp=2, micro_batch_size=8), 248.0),
        ("small", Layout(tp=2, sequence_parallel=True, micro_batch_size=8), 233.8),
        ("small", Layout(dp=2, micro_batch_size=8, zero_stage=1), 392.0),
        ("small-llama", Layout(micro_batch_size=8), 422.9),
        ("small-llama", Layout(pp=2, micro_batch_size=8), 340.8),
        ("small-llama", Layout(pp=2, vpp=2, micro_batch_size=8, recompute="full"), 138.3),
    ],
    ids=str,
)
def test_the_estimate_is_near_and_under_what_the_embedded_trainer_was_measured_to_hold(
    model: str, layout: Layout, measured_mib: float
) -> None:
    """What is left out, statistics and gloo's copies under sequence parallelism, is under 2 %."""
    layout = replace(layout, num_microbatches=4)
    estimate_mib = float(peak_memory_bytes(layout, model_preset(model))) / MIB
    assert 0.98 * measured_mib < estimate_mib < 1.002 * measured_mib


@pytest.mark.parametrize("layer_split", ["even", "compute"])
@pytest.mark.parametrize("pp", [1, 2, 3, 5, 8, 12, 16, 31, 32, 33, 64])
def test_every_parameter_has_a_stage_whichever_way_layers_are_split(
    layer_split: LayerSplit, pp: int
) -> None:
    storage = TrainerStorage(layer_split=layer_split)
    weights = [stage.weights_bytes for stage in stage_memory(Layout(pp=pp), LLAMA, storage)]
    assert sum(weights) == pytest.approx(4 * LLAMA.num_parameters)


def test_split_by_work_the_last_stage_has_fewer_layers_because_of_its_logits() -> None:
    stages = np.arange(8)
    split = layers_of_stage(np.asarray(8), stages, LLAMA, TrainerStorage(layer_split="compute"))
    # 32 blocks, and an output projection worth 2.4 of them: 4.3 a stage.
    assert split.tolist() == [5, 4, 4, 5, 4, 4, 5, 1]
    even = layers_of_stage(np.asarray(5), np.arange(5), LLAMA, TrainerStorage())
    assert even.tolist() == [7, 7, 6, 6, 6]


def uneven_layouts() -> Iterator[tuple[ModelShape, Layout]]:
    """Legal layouts of every split, with few layers a stage, so that one of them weighs much."""
    grid = product(PIPELINE_SPLITS, (2, 3, 4, 8), (1, 2, 3), (1, 2, 3), (1, 2, 4))
    for split, pp, vpp, layers, groups in grid:
        layout = Layout(
            pp=pp,
            vpp=vpp,
            pipeline_split=split,
            num_microbatches=groups * pp,
            recompute="full" if groups == 2 else "none",
            precision="bf16",
        )
        num_layers = layers * pp * vpp - sum(layout.counted_ends)
        if num_layers > 0:
            yield replace(LLAMA, num_layers=num_layers, vocab_size=2048), layout


@pytest.mark.parametrize("storage", [EMBEDDED_TRAINER, MEGATRON_LIKE], ids=["own", "megatron"])
def test_the_peak_is_that_of_the_fullest_of_all_stages_of_any_split(
    storage: TrainerStorage,
) -> None:
    fullest = set()
    for model, layout in uneven_layouts():
        totals = [stage.total_bytes for stage in stage_memory(layout, model, storage)]
        assert peak_memory_bytes(layout, model, storage).item() == pytest.approx(max(totals))
        of_ends = memory_terms(layout, model, storage).num_bytes.sum(axis=1)
        assert of_ends.max() == pytest.approx(max(totals))
        fullest.add((layout.pp > 2) * totals.index(max(totals)))
    assert {0, 1} <= fullest, "the second stage of some layout is the fullest"


def test_layers_of_all_stages_are_those_of_the_schedule_and_of_the_layout() -> None:
    for model, layout in uneven_layouts():
        num_stages = layout.pp * layout.vpp
        ranges = [layout.layers_of_stage(s, model.num_layers) for s in range(num_stages)]
        assert [layer for each in ranges for layer in each] == list(range(model.num_layers))
        of_ranks = [sum(map(len, ranges[rank :: layout.pp])) for rank in range(layout.pp)]
        columns, stages = LayoutColumns.of(layout), np.arange(layout.pp)
        split = layers_of_stage(columns.pp, stages, model, EMBEDDED_TRAINER, columns.counted_ends)
        assert split.tolist() == of_ranks
        if layout.recompute == "full":
            continue
        storage = replace(EMBEDDED_TRAINER, gathered_share=0.0)
        kept = [stage.activations_bytes for stage in stage_memory(layout, model, storage)]
        in_flight = [most_in_flight(rank, layout, ranges[rank :: layout.pp]) for rank in stages]
        # In bytes of one layer. The last rank's peak is that with the logits.
        one = model.seq_length * 2.0 * kept_of_a_layer(model)
        *before, last = (number / one for number in kept)
        assert before == pytest.approx(in_flight[:-1])
        assert in_flight[-1] - 1 <= last <= in_flight[-1] + 1e-9


def kept_of_a_layer(model: ModelShape) -> float:
    """Elements a token that one layer of one micro-batch keeps for the backward pass."""
    alone = stage_memory(Layout(precision="bf16"), model)[0].activations_bytes
    return alone / (model.seq_length * 2.0 * model.num_layers)


def most_in_flight(rank: int, layout: Layout, chunks: Sequence[range]) -> int:
    """The most layers times micro-batches that a rank holds, by its schedule."""
    held = most = 0
    schedule = pipeline_schedule(
        rank, pp=layout.pp, vpp=layout.vpp, num_microbatches=layout.num_microbatches
    )
    for action in schedule:
        if isinstance(action, Forward):
            held += len(chunks[action.of.chunk])
        elif isinstance(action, Backward):
            held -= len(chunks[action.of.chunk])
        most = max(most, held)
    return most


def test_terms_add_up_to_the_peak() -> None:
    layout = Layout(tp=2, pp=4, dp=2, num_microbatches=8, precision="bf16")
    for storage in (EMBEDDED_TRAINER, MEGATRON_LIKE, NANOTRON):
        of_ends = memory_terms(layout, LLAMA, storage).num_bytes.sum(axis=1)
        stages = stage_memory(layout, LLAMA, storage)
        assert of_ends[0] == pytest.approx(stages[0].total_bytes)
        assert of_ends[1] == pytest.approx(stages[-1].total_bytes)
        assert of_ends.max() == pytest.approx(peak_memory_bytes(layout, LLAMA, storage).item())
        of_stages = stage_terms(layout, LLAMA, storage).num_bytes[0].sum(axis=0)
        assert of_stages == pytest.approx([stage.total_bytes for stage in stages])


def test_fp8_takes_the_memory_of_bf16() -> None:
    layout, model = Layout(tp=2, dp=4, zero_stage=1, precision="bf16"), model_preset("small-llama")
    assert stage_memory(replace(layout, precision="fp8"), model) == stage_memory(layout, model)


def test_megatron_keeps_18_bytes_a_parameter_with_bf16_and_16_with_fp16() -> None:
    for precision, expected in (("bf16", 18), ("fp16", 16)):
        stage = stage_memory(Layout(precision=precision), LLAMA, MEGATRON_LIKE)[0]  # type: ignore[arg-type]
        states = stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes
        assert states == pytest.approx(expected * LLAMA.num_parameters)


def test_a_source_or_a_software_says_whose_storage_it_is() -> None:
    gpu, cpu = CLUSTER_PRESETS["frontier"], detect_local_cpu()
    for own in ("", "torch 2.6", "layout-tuner campaign first"):
        assert storage_of(own, cpu) is EMBEDDED_TRAINER
        assert storage_of(own, gpu) is EMBEDDED_ON_GPU
    assert storage_of("a benchmark plot (nanotron)", gpu) is NANOTRON
    for other in ("vTrain", "Megatron-DeepSpeed", "unknown", "simulated stress-22b, seed 1"):
        assert storage_of(other, gpu) is MEGATRON_LIKE


def test_terms_over_a_grid_of_knobs_are_those_of_its_layouts_one_by_one() -> None:
    grid = replace(
        LayoutColumns.of(Layout(dp=4, precision="bf16")),
        tp=np.array([[1, 2, 4]]),
        zero_stage=np.array([[0], [1]]),
    )
    one_by_one = [
        memory_terms(Layout(tp=tp, dp=4, zero_stage=zero, precision="bf16"), LLAMA).num_bytes
        for zero in (0, 1)
        for tp in (1, 2, 4)
    ]
    assert memory_terms(grid, LLAMA).num_bytes == pytest.approx(np.concatenate(one_by_one, axis=2))
