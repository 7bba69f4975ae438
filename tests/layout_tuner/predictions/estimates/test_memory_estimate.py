from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from layout_tuner.predictions.estimates.distinct_layouts import distinct_peaks
from layout_tuner.predictions.estimates.fitting import count_fitting
from layout_tuner.predictions.estimates.peak_memory import (
    StageMemory,
    memory_terms,
    peak_memory_bytes,
    stage_memory,
    stage_terms,
)
from layout_tuner.predictions.estimates.trainer_storage import (
    EMBEDDED_ON_GPU,
    EMBEDDED_TRAINER,
    MEGATRON_2022,
    MEGATRON_LIKE,
    NANOTRON,
    LayerSplit,
    TrainerStorage,
    layers_of_stage,
    storage_of,
)
from layout_tuner.search_spaces.clusters.cluster import detect_local_cpu
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS, resolve_cluster
from layout_tuner.search_spaces.layouts.layout import (
    LAYOUT_FIELDS,
    PIPELINE_SPLITS,
    Layout,
    Precision,
)
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.layouts.recomputation import Recompute
from layout_tuner.search_spaces.layouts.schedules import Backward, Forward, pipeline_schedule
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES
from layout_tuner.search_spaces.models.model_presets import model_preset, resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import SearchSpace, enumerate_legal

MIB = 1 << 20
GPT = model_preset("gpt-175b")
LLAMA = model_preset("llama-8b")

# As 175B ran on Frontier with Megatron-DeepSpeed: fp16 gradients, sharded after their reduction.
SHARDED_GRADIENTS = TrainerStorage(
    gradient_bytes=2, zero_shards_gradients=True, gathered_share=0.0, fp32_logits=2
)
RAN_ON_FRONTIER = Layout(
    tp=4, pp=16, dp=2, num_microbatches=40, zero_stage=1, recompute="full", precision="fp16"
)


def states_of(stage: StageMemory) -> float:
    return stage.weights_bytes + stage.gradients_bytes + stage.optimizer_bytes


def states_bytes(layout: Layout, storage: TrainerStorage = EMBEDDED_TRAINER) -> float:
    return sum(map(states_of, stage_memory(layout, LLAMA, storage)))


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
        (Layout(precision="fp32", pp=8), 4 + 4 + 8),
        (Layout(precision="bf16", zero_stage=3), 2 + 4 + 12),
    ],
    ids=lambda value: value.key if isinstance(value, Layout) else "",
)
def test_states_take_so_many_bytes_a_parameter(layout: Layout, bytes_a_parameter: float) -> None:
    assert states_bytes(layout) == pytest.approx(LLAMA.num_parameters * bytes_a_parameter)
    if layout.precision == "bf16":  # fp8 takes the memory of bf16
        assert stage_memory(replace(layout, precision="fp8"), LLAMA) == stage_memory(layout, LLAMA)


@pytest.mark.parametrize(
    ("precision", "of_weight", "of_input"),
    [("fp8_block", 4.0625, 1.03125), ("mxfp8", 2.0625, 1.03125), ("nvfp4", 1.125, 0.5625)],
)
def test_narrow_weights_and_inputs_are_stored_as_such(
    precision: Precision, of_weight: float, of_input: float
) -> None:
    """With Megatron-LM: those of the layers' matrices; other trainers have them in bf16."""
    wide = Layout(precision="bf16", dp=2, zero_stage=1)
    narrow = replace(wide, precision=precision)
    assert stage_memory(narrow, LLAMA) == stage_memory(wide, LLAMA)
    (before,), (after,) = (stage_memory(each, LLAMA, MEGATRON_LIKE) for each in (wide, narrow))
    layers = LLAMA.num_layers * LLAMA.num_layer_parameters
    more = layers * (of_weight - 2)
    assert after.weights_bytes - before.weights_bytes == pytest.approx(more, rel=1e-6)
    h, f, q = LLAMA.hidden_size, LLAMA.ffn_hidden_size, LLAMA.query_size
    inputs = LLAMA.num_layers * LLAMA.seq_length * (h + q + h + f)
    less = before.activations_bytes - after.activations_bytes
    assert less == pytest.approx(inputs * (2 - of_input))
    assert after.optimizer_bytes == before.optimizer_bytes


def test_without_zero_bf16_weights_lie_beside_narrow_ones() -> None:
    alone, beside = (
        stage_memory(Layout(precision="mxfp8", dp=2, zero_stage=zero), LLAMA, MEGATRON_LIKE)[0]
        for zero in (1, 0)
    )
    layers = LLAMA.num_layers * LLAMA.num_layer_parameters
    assert beside.weights_bytes - alone.weights_bytes == pytest.approx(2 * layers, rel=1e-6)


def test_parameters_are_shared_but_norms_and_tied_embeddings_are_held_twice() -> None:
    shared = states_bytes(Layout(pp=8, tp=8, precision="fp32")) * 8
    norms = LLAMA.hidden_size * (2 * LLAMA.num_layers + 1)
    assert shared == pytest.approx((LLAMA.num_parameters + 7 * norms) * 16)
    bf16, fp16 = Layout(precision="bf16"), Layout(precision="fp16")
    assert states_bytes(bf16, MEGATRON_LIKE) == pytest.approx(18 * LLAMA.num_parameters)
    assert states_bytes(fp16, MEGATRON_LIKE) == pytest.approx(16 * LLAMA.num_parameters)
    model = model_preset("llama-1b")
    one, two = (
        sum(stage.weights_bytes for stage in stage_memory(Layout(pp=pp), model)) for pp in (1, 2)
    )
    assert two - one == pytest.approx(model.vocab_size * model.hidden_size * 4)


def test_the_run_on_frontier_has_its_measured_state_and_micro_batch_in_flight() -> None:
    # Measured there: 23,361 MiB on the stages between the first and the last, and 300 MiB from one
    # stage to the next under full recomputation.
    stages = stage_memory(RAN_ON_FRONTIER, GPT, SHARDED_GRADIENTS)
    states = states_of(stages[8])
    parameters = GPT.num_layers * GPT.num_layer_parameters / 64
    assert states / parameters == pytest.approx(9.0, rel=0.001)
    assert states / MIB == pytest.approx(23361, rel=0.002)
    step = stages[7].total_bytes - stages[8].total_bytes
    assert step / MIB == pytest.approx(300, rel=0.05)


def test_the_first_stage_keeps_as_many_micro_batches_as_stages_and_more_interleaved() -> None:
    def kept(**knobs: Any) -> list[float]:
        stages = stage_memory(Layout(**knobs), model_preset("tiny"))
        return [stage.activations_bytes for stage in stages]

    many, few = kept(pp=4, num_microbatches=64), kept(pp=4, num_microbatches=2)
    assert [each / many[3] for each in many[:3]] == pytest.approx([4, 3, 2])
    assert [each / many[3] for each in few[:3]] == pytest.approx([2, 2, 2])
    assert many[3] < kept(num_microbatches=1)[0]
    interleaved = kept(pp=2, vpp=2, num_microbatches=8)[0]
    assert interleaved / kept(pp=2, num_microbatches=8)[0] == pytest.approx(1 + 1 / 4)


def test_a_layer_keeps_what_korthikanti_counts_less_the_dropout_masks() -> None:
    # arXiv:2205.05198, equation 2 at 16 bits: s b h (10 + 24/t + 5 a s / (h t)); the masks are
    # 2 s b h of the ten and one of the five.
    t, b = 8, 2
    h, s = GPT.hidden_size, GPT.seq_length
    layout = Layout(tp=t, micro_batch_size=b, precision="bf16")
    eager = TrainerStorage(fused_attention=False)

    def a_layer(layout: Layout, storage: TrainerStorage = EMBEDDED_TRAINER) -> float:
        return stage_memory(layout, GPT, storage)[0].activations_bytes / GPT.num_layers

    unmasked = s * b * h * (8 + 24 / t + 2 * GPT.num_heads * s / (h * t))
    assert a_layer(layout, eager) == pytest.approx(unmasked)
    assert a_layer(layout) == pytest.approx(s * b * h * (8 + 24 / t))
    # Selective recomputation saves the attention matrix alone.
    selective = replace(layout, recompute="selective")
    assert a_layer(selective, eager) == a_layer(layout)
    # Equation 4: sequence parallelism divides the ten of equation 2 by t as well; matrices have
    # whole sequences unless they are gathered again.
    cut = replace(layout, micro_batch_size=1, sequence_parallel=True)
    assert a_layer(cut) == pytest.approx(s * h * (4 / t + 4 + 24 / t))
    again = a_layer(cut, TrainerStorage(gathered_share=0.0))
    assert again == pytest.approx((8 + 24) * s * h / t)


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
    megatrons = stage_memory(layout, LLAMA, SHARDED_GRADIENTS)[3]
    assert megatrons.head_bytes == logits * 10 + 2 * an_input * 2
    single = stage_memory(replace(layout, precision="fp32"), LLAMA)
    assert single[3].head_bytes == logits * 4 + 3 * an_input * 4


def test_the_peak_over_columns_is_the_fullest_stage_of_each_layout() -> None:
    space = SearchSpace(
        global_batch_size=256,
        num_nodes=[1, 4],
        tp=[1, 8],
        pp=[1, 2, 8],
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
    places = np.arange(0, len(legal), 5)
    assert len(places) > 50
    stages = [stage_memory(legal.layout(int(place)), LLAMA) for place in places]
    fullest = [max(stage.total_bytes for stage in each) for each in stages]
    np.testing.assert_allclose(
        peak_memory_bytes(legal.columns(), LLAMA)[places], fullest, rtol=1e-12
    )
    grid = replace(
        LayoutColumns.of(Layout(dp=4, precision="bf16")),
        tp=np.array([[1, 2, 4]]),
        zero_stage=np.array([[0], [1]]),
    )
    one_by_one = [
        memory_terms(Layout(tp=tp, dp=4, zero_stage=zero, precision="bf16"), LLAMA).num_bytes
        for zero, tp in product((0, 1), (1, 2, 4))
    ]
    assert memory_terms(grid, LLAMA).num_bytes == pytest.approx(np.concatenate(one_by_one, axis=2))


@pytest.mark.parametrize("storage", [EMBEDDED_ON_GPU, MEGATRON_2022, NANOTRON])
def test_the_peak_of_a_layout_does_not_depend_on_its_neighbours(storage: TrainerStorage) -> None:
    one = Layout(pp=2, dp=2, schedule="zero_bubble", recompute="full", precision="bf16")
    both = [one, replace(one, pipeline_split="embedding_and_head")]
    together = memory_terms(LayoutColumns.of_each(both), LLAMA, storage)
    for place, layout in enumerate(both):
        alone = memory_terms(layout, LLAMA, storage)
        np.testing.assert_allclose(together.num_bytes[..., [place]], alone.num_bytes, rtol=1e-12)


@pytest.mark.parametrize("storage", [EMBEDDED_ON_GPU, MEGATRON_2022, NANOTRON])
@pytest.mark.parametrize("is_sharding", [False, True])
def test_layouts_of_which_one_stands_for_several_have_the_same_peak(
    storage: TrainerStorage, is_sharding: bool
) -> None:
    storage = replace(storage, shards_bf16_states=is_sharding)
    varied = [
        Layout(
            pp=4,
            dp=dp,
            vpp=vpp,
            schedule=schedule,
            zero_stage=zero_stage,
            num_nodes=dp,
            recompute=recompute,
            precision="bf16",
        )
        for schedule, vpp in (("1f1b", 1), ("1f1b", 2), ("gpipe", 1), ("zero_bubble", 1))
        for dp, zero_stage, recompute in product((2, 8), (0, 1, 3), ("none", "full"))
    ]
    numbers, each = np.array([[9, 1, 4, 16, 6, 7, 8]]), LayoutColumns.of_each(varied)
    tile = LayoutColumns(**{name: getattr(each, name)[:, None] for name in LAYOUT_FIELDS})
    tile = replace(tile, num_microbatches=numbers)
    few, places = distinct_peaks(tile, always_shards=is_sharding)
    assert places.shape == (len(varied), numbers.size)
    all_bytes = memory_terms(tile, LLAMA, storage).num_bytes
    np.testing.assert_array_equal(
        memory_terms(few, LLAMA, storage).num_bytes[..., places.reshape(-1)], all_bytes
    )
    # 1F1B and zero bubbles hold up to 4 micro-batches (1, 4), interleaved stages 7 (1, 4, 6, 7),
    # GPipe all 7; without ZeRO both numbers of replicas are alike.
    shapes = (2 if is_sharding else 1) + 2 + 2
    assert len(few.tp) == 2 * shapes * (2 + 4 + 7 + 2)


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
    # The logits and the revived layer are never there at once.
    assert min(full.backward_bytes, full.head_bytes) > 0
    larger = max(full.backward_bytes, full.head_bytes)
    assert full.total_bytes == states_of(full) + full.activations_bytes + larger


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


def test_every_parameter_has_a_stage_and_by_work_the_last_one_has_fewer_layers() -> None:
    splits: tuple[LayerSplit, ...] = ("even", "compute")
    for split, pp in product(splits, (1, 2, 3, 5, 8, 16, 31, 32, 33, 64)):
        stages = stage_memory(Layout(pp=pp), LLAMA, TrainerStorage(layer_split=split))
        weights = sum(stage.weights_bytes for stage in stages)
        assert weights == pytest.approx(4 * LLAMA.num_parameters), (split, pp)
    stages = np.arange(8)
    split = layers_of_stage(np.asarray(8), stages, LLAMA, TrainerStorage(layer_split="compute"))
    # 32 blocks, and an output projection worth 2.4 of them: 4.3 a stage.
    assert split.tolist() == [5, 4, 4, 5, 4, 4, 5, 1]
    even = layers_of_stage(np.asarray(5), np.arange(5), LLAMA, TrainerStorage())
    assert even.tolist() == [7, 7, 6, 6, 6]


def uneven_layouts() -> Iterator[tuple[ModelShape, Layout]]:
    """Legal layouts of every split, with few layers a stage, so that one of them weighs much."""
    grid = product(PIPELINE_SPLITS, (2, 3, 8), (1, 3), (1, 2), (1, 2, 4))
    for split, pp, vpp, layers, groups in grid:
        layout = Layout(pp=pp, vpp=vpp, pipeline_split=split, num_microbatches=groups * pp)
        recompute: Recompute = "full" if groups == 2 else "none"
        layout = replace(layout, recompute=recompute, precision="bf16")
        num_layers = layers * pp * vpp - sum(layout.counted_ends)
        if num_layers > 0:
            yield replace(LLAMA, num_layers=num_layers, vocab_size=2048), layout


@pytest.mark.parametrize("storage", [EMBEDDED_TRAINER, MEGATRON_LIKE, NANOTRON])
def test_the_peak_is_that_of_the_fullest_of_all_stages_of_any_split(
    storage: TrainerStorage,
) -> None:
    fullest = set()
    uneven = [each for at, each in enumerate(uneven_layouts()) if at % 2 == 0]
    for model, layout in [*uneven, (LLAMA, RAN_ON_FRONTIER)]:
        totals = [stage.total_bytes for stage in stage_memory(layout, model, storage)]
        assert peak_memory_bytes(layout, model, storage).item() == pytest.approx(max(totals))
        of_ends = memory_terms(layout, model, storage).num_bytes.sum(axis=1)
        assert of_ends.max() == pytest.approx(max(totals))
        if layout == RAN_ON_FRONTIER:  # elsewhere, the first may stand for the second
            assert of_ends[:, 0] == pytest.approx([totals[0], totals[-1]])
        of_stages = stage_terms(layout, model, storage).num_bytes[0].sum(axis=0)
        assert of_stages == pytest.approx(totals)
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
        # In bytes of one layer of one micro-batch. The last rank's peak is that with the logits.
        alone = stage_memory(Layout(precision="bf16"), model)[0].activations_bytes
        *before, last = (number / (alone / model.num_layers) for number in kept)
        assert before == pytest.approx(in_flight[:-1])
        assert in_flight[-1] - 1 <= last <= in_flight[-1] + 1e-9


def most_in_flight(rank: int, layout: Layout, chunks: Sequence[range]) -> int:
    """The most layers times micro-batches that a rank holds, by its schedule."""
    held = most = 0
    sizes = {"pp": layout.pp, "vpp": layout.vpp, "num_microbatches": layout.num_microbatches}
    for action in pipeline_schedule(rank, **sizes):
        if isinstance(action, (Forward, Backward)):
            layers = len(chunks[action.of.chunk])
            held += layers if isinstance(action, Forward) else -layers
        most = max(most, held)
    return most


def test_a_source_or_a_software_says_whose_storage_it_is() -> None:
    gpu, cpu = CLUSTER_PRESETS["frontier"], detect_local_cpu()
    for own in ("", "torch 2.6", "layout-tuner campaign first"):
        assert storage_of(own, cpu) is EMBEDDED_TRAINER
        assert storage_of(own, gpu) is EMBEDDED_ON_GPU
    assert storage_of("a benchmark plot (nanotron)", gpu) is NANOTRON
    assert storage_of("Primus Megatron-LM", gpu) is MEGATRON_LIKE
    for other in ("unknown", "simulated stress-22b, seed 1"):
        assert storage_of(other, gpu) is MEGATRON_2022


MODEL = resolve_model("gpt-22b")
CLUSTER, _ = resolve_cluster("frontier")


def test_a_sample_is_within_its_stated_error_and_sees_every_value_of_each_knob() -> None:
    """With a step of 2, the half of the set would have one of two values of the last knob."""
    space = SearchSpace(
        global_batch_size={"min": 1, "max": 1 << 16},
        num_nodes={"from": 1, "to": 16},
        tp=[1, 2, 4, 8],
        pp=[1, 2, 4, 8],
        micro_batch_size={"from": 1, "to": 8},
        num_microbatches={"from": 1, "to": 16},
        recompute=["none", "full"],
    )
    legal = enumerate_legal(space, MODEL, CLUSTER)
    memory = CLUSTER.device_memory_bytes
    whole = count_fitting(legal, MODEL, memory)
    assert whole.num_fitting == (peak_memory_bytes(legal.columns(), MODEL) <= memory).sum()
    assert (whole.num_estimated, whole.half_interval) == (len(legal), 0)
    assert 0 < whole.num_fitting < len(legal)
    for most in (500, 1000, 2800, len(legal) // 2 + 1):
        sample = count_fitting(legal, MODEL, memory, most=most)
        assert sample.num_estimated <= most < whole.num_estimated
        assert sample.half_interval > 0
        # Twice the 95 % interval: the sample is fixed, so that this either always holds or never.
        assert abs(sample.num_fitting - whole.num_fitting) <= 2 * sample.half_interval
    none = enumerate_legal(SearchSpace(global_batch_size=7, tp=3), MODEL, CLUSTER)
    found = count_fitting(none, MODEL, 1e12)
    assert (found.num_fitting, found.num_estimated, found.half_interval) == (0, 0, 0)
