"""Memory: counted exactly, and limited for real."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from search_spaces.estimates.memory import stage_memory
from search_spaces.mesh import Coordinates
from search_spaces.protocol.measurement_checks import least_memory_bytes
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.spec.layout import PIPELINE_SPLITS, RECOMPUTE_MODES, Layout, PipelineSplit
from search_spaces.units import memory
from tests.workers.trainer.cases import (
    CPU,
    CUT,
    TP,
    VPP,
    ZERO,
    ZERO_3,
    in_turn,
    lone_mesh,
    make_layout,
    make_shape,
    make_training,
    on_layout,
)
from tests.workers.trainer.knob_pairs import (
    NUM_FAST,
    RUNS,
    layout_of,
    settings_of,
    shape_of,
    values_of,
)
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.comm.collectives import gather_rows
from workers.trainer.comm.mesh import Copies, Mesh, build_mesh
from workers.trainer.errors import MemoryLimitExceededError
from workers.trainer.memory import LogicalPeak, enforce_limit
from workers.trainer.model import matrix_products
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.probe.exception_reasons import classify
from workers.trainer.probe.measurement import rehearse
from workers.trainer.training import Training, persistent_bytes

pytestmark = pytest.mark.ranks

WIDE = make_shape(hidden_size=128, ffn_hidden_size=256, seq_length=64, vocab_size=512)


@pytest.fixture(autouse=True)
def _fast_16_bit_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has them: elsewhere fp32 copies of a product's factors are added."""
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: True)


def test_live_storages_are_counted_once_and_given_back() -> None:
    existing = torch.zeros(100)
    with LogicalPeak([existing, existing.view(10, 10)]) as tracker:
        assert tracker.live_bytes == 400
        grown = existing + 1
        views = grown.view(10, 10).t()
        assert tracker.live_bytes == 800
        del grown
        assert tracker.live_bytes == 800, "a view keeps the storage"
        del views
        assert tracker.live_bytes == 400
    assert tracker.peak_bytes == 800


def profiled_peaks(training: Training) -> tuple[int, int]:
    """The peak of the allocator's running total in one step, from the profiler's events.

    Returns that between operators, and that at any time: inside an operator, it may have memory for
    itself, and how much depends on the kernel.
    """
    batch = training.batch(0)
    training.step(batch)
    persistent = [*training.persistent_tensors(), batch.ids_MT, batch.targets_MT]
    start = sum(
        {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in persistent}.values()
    )
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        training.step(batch)
    kineto = profiler.profiler.kineto_results
    changes, busy_until, live = [], 0, start
    between = at_any_time = start
    for event in kineto.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), 1, event.nbytes()))
        elif event.name().startswith("aten::"):
            changes.append((event.start_ns(), 0, event.start_ns() + event.duration_ns()))
    for time_ns, is_memory, value in sorted(changes):
        if time_ns >= busy_until:
            between = max(between, live)
        if is_memory:
            live += value
            at_any_time = max(at_any_time, live)
        else:
            busy_until = max(busy_until, value)
    return between, at_any_time


@in_turn(("recompute", "precision"), RECOMPUTE_MODES, ["fp32", "bf16"])
def test_the_counted_peak_is_the_profilers(recompute: str, precision: str) -> None:
    """Between what is there when no operator runs, and what there is with their own memory, too."""
    layout = make_layout(recompute=recompute, precision=precision, micro_batch_size=4)

    def work(rank: int) -> tuple[int, tuple[int, int]]:
        training = make_training(WIDE, layout)
        return rehearse(training, limit_bytes=None), profiled_peaks(training)

    counted, (between, at_any_time) = run_ranks(1, work)[0]
    scalars_bytes = 4096  # autograd holds some that no operator has returned
    assert between - scalars_bytes <= counted <= at_any_time


def test_a_rehearsal_changes_nothing() -> None:
    rehearsed, fresh = make_training(WIDE), make_training(WIDE)
    rehearse(rehearsed, limit_bytes=None)
    for step in range(3):
        batch = fresh.batch(step)
        assert rehearsed.step(batch) == fresh.step(batch)
    assert torch.equal(rehearsed.flat.weights, fresh.flat.weights)


def test_the_budget_is_exact_to_the_byte() -> None:
    peak = rehearse(make_training(WIDE), limit_bytes=None)
    assert rehearse(make_training(WIDE), limit_bytes=peak) == peak
    over = f"rank 0 needs at least {memory(peak)} for a step, {memory(1)} over the limit of {memory(peak - 1)};"
    with pytest.raises(MemoryLimitExceededError, match=over):
        rehearse(make_training(WIDE), limit_bytes=peak - 1)


def test_selective_recomputation_keeps_nothing_of_attention_but_its_inputs() -> None:
    """Fused attention keeps a number a head and token beside them; unfused, the probabilities."""
    shape = replace(WIDE, num_layers=4, seq_length=128)
    tokens_and_heads = 8 * shape.seq_length * shape.num_heads * shape.num_layers

    def saving(backend: SDPBackend) -> float:
        layout = Layout(micro_batch_size=8, num_microbatches=1)
        with sdpa_kernel(backend):
            none, selective = (
                rehearse(make_training(shape, replace(layout, recompute=mode)), limit_bytes=None)
                for mode in ("none", "selective")
            )
        return (none - selective) / (4 * tokens_and_heads)

    assert saving(SDPBackend.FLASH_ATTENTION) == 1
    # Not all of them: while a layer is made again, its own are there.
    assert saving(SDPBackend.MATH) > shape.seq_length / 2


@pytest.mark.sampled(3)
@in_turn(("axes", "shares_memory"), [CUT, VPP, ZERO, TP, {"cp": 2}, ZERO_3], [False, True])
def test_the_peak_does_not_depend_on_gloo(axes: dict[str, Any], shares_memory: bool) -> None:
    """gloo's thread keeps a tensor for a moment after its work; a third of the peaks was wrong."""
    layout = Layout(micro_batch_size=2, num_microbatches=axes.get("pp", 1), **axes)
    shape = replace(WIDE, num_layers=4)

    def work(training: Training) -> set[int]:
        return {rehearse(training, limit_bytes=None) for _ in range(20)}

    for peaks in on_layout(layout, work, shape, shares_memory=shares_memory):
        assert len(peaks) == 1


def held_bytes(training: Training) -> int:
    """What a rank holds between steps, without rotary tables and counts of steps."""
    aside = {id(t) for t in (*training.model.tables, *training.optimizer.steps)}
    tensors = [t for t in training.persistent_tensors() if id(t) not in aside]
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", RUNS[:NUM_FAST])
def test_persistent_bytes_are_known_before_anything_is_built(words: str) -> None:
    """Of a sharded rank its share, and whole gradients (2, 3) and weights (3) of two layers."""
    values = values_of(words)
    shape, optimizer = shape_of(values), settings_of(values)

    def work(training: Training) -> tuple[int, int]:
        return persistent_bytes(shape, training.mesh, optimizer), held_bytes(training)

    for told, held in on_layout(layout_of(values), work, shape, settings=optimizer):
        assert told == held


def test_gathered_weights_arrive_without_a_second_copy() -> None:
    def work(training: Training) -> int:
        with LogicalPeak(training.persistent_tensors()) as tracker:
            before = tracker.live_bytes
            training.optimizer.start_step(0.0, range(len(training.optimizer.weights)))
            training.optimizer.finish_step()
        return tracker.peak_bytes - before

    assert on_layout(make_layout(dp=2, zero_stage=1), work, WIDE) == [0, 0]


@pytest.mark.parametrize(("shares_memory", "copies"), [(False, 1), (True, 0)])
def test_the_copy_that_gloo_makes_of_tokens_is_counted(shares_memory: bool, copies: int) -> None:
    """Shared memory needs none; its slots are the transport's, as a socket's buffers are."""
    layout = make_layout(tp=2, sequence_parallel=True)

    def work(rank: int) -> tuple[int, int]:
        mesh = build_mesh(rank, layout, tied_embeddings=False, shares_memory=shares_memory)
        group = mesh.tp_group
        own = torch.ones(64, 8)
        with LogicalPeak([own]) as tracker:
            before = tracker.live_bytes
            whole = gather_rows(own, group)
        return tracker.peak_bytes - before, whole.nbytes

    for peak_bytes, whole_bytes in run_ranks(2, work):
        assert peak_bytes == (1 + copies) * whole_bytes


@pytest.mark.parametrize("split", PIPELINE_SPLITS)
@pytest.mark.parametrize("vpp", [1, 2])
def test_every_stage_of_an_uneven_pipeline_holds_what_is_estimated(
    split: PipelineSplit, vpp: int
) -> None:
    embedding, head = Layout(pp=4, pipeline_split=split).counted_ends
    shape = make_shape(num_layers=16 - embedding - head, hidden_size=64, ffn_hidden_size=128)
    layout = make_layout(pp=4, vpp=vpp, pipeline_split=split)
    for stage, estimate in enumerate(stage_memory(layout, shape)):
        place = Coordinates(tp_rank=0, dp_rank=0, pp_rank=stage)
        mesh = replace(lone_mesh(layout), rank=stage, place=place)
        states = estimate.weights_bytes + estimate.gradients_bytes + estimate.optimizer_bytes
        assert states == pytest.approx(persistent_bytes(shape, mesh, OptimizerSettings()), rel=1e-3)


def unconnected_mesh(layout: Layout, stage: int) -> Mesh:
    """The mesh of a rank of a stage, which can be planned for but not run."""

    def copies(num_shards: int) -> Copies:
        return Copies(size=num_shards, num_shards=num_shards, zero_stage=layout.zero_stage)

    others = copies(layout.zero_group_size)
    are_apart = layout.ep > 1 or layout.etp != layout.tp
    return replace(
        lone_mesh(layout),
        place=Coordinates(tp_rank=0, dp_rank=0, pp_rank=stage),
        copies=others,
        expert_copies=copies(layout.expert_zero_group_size) if are_apart else others,
    )


@pytest.mark.parametrize("num_layers", [4, 16])
def test_the_least_memory_of_a_probe_is_what_its_fullest_rank_holds(num_layers: int) -> None:
    """More would refuse true figures; less accepts those that were halved."""
    for words in (*RUNS, "dp4 zero3", "moe dp4 zero3"):
        values = values_of(words)
        layout, shape = layout_of(values), shape_of(values)
        if layout.pipeline_split == "layers":
            dense = {"num_dense_layers": num_layers - 1} if shape.num_dense_layers else {}
            shape = replace(shape, num_layers=max(num_layers, shape.num_layers), **dense)
        model = replace(shape, hidden_size=128, vocab_size=256)
        least = least_memory_bytes(ProbeRequest(model=model, layout=layout))
        held = max(
            persistent_bytes(model, unconnected_mesh(layout, stage), OptimizerSettings())
            for stage in range(layout.pp)
        )
        assert 0.9 * held < least <= held, words  # a rank pads what it shares


def test_the_limit_is_real_and_reads_as_out_of_memory_and_a_group_still_talks_after_it() -> None:
    def work(rank: int) -> tuple[str, float]:
        enforce_limit(32 << 20, CPU)
        torch.zeros(24 << 20, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="DefaultCPUAllocator") as refused:
            torch.zeros(1 << 30, dtype=torch.uint8)
        value = torch.ones(1 << 18)
        dist.all_reduce(value)
        return classify(refused.value), float(value[0])

    assert run_ranks(2, work) == [("out_of_memory", 2.0)] * 2
