"""Memory: counted exactly, and limited for real."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from search_spaces.errors import LayoutInvalidError
from search_spaces.estimates.memory import stage_memory
from search_spaces.mesh import Coordinates
from search_spaces.protocol.contradictions import least_memory_bytes
from search_spaces.protocol.outcome import ProbeRequest
from search_spaces.schedules import Schedule
from search_spaces.spec.layout import PIPELINE_SPLITS, Layout, PipelineSplit
from search_spaces.units import memory
from tests.workers.trainer.cases import (
    COLUMNS,
    CPU,
    CUT,
    TP,
    ZERO,
    ZERO_3,
    lone_mesh,
    make_layout,
    make_shape,
    make_training,
    on_layout,
    over_axes,
)
from tests.workers.trainer.ranks import RanksFailedError, run_ranks
from workers.trainer.comm.collectives import gather_rows
from workers.trainer.comm.mesh import Copies, Mesh, build_mesh
from workers.trainer.errors import MemoryLimitExceededError
from workers.trainer.memory import LogicalPeak, enforce_limit
from workers.trainer.model import matrix_products
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.probe.failure import classify
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
    kineto = profiler.profiler.kineto_results  # type: ignore[union-attr]
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


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
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


def test_full_recomputation_and_smaller_microbatches_lower_the_peak() -> None:
    def peak(**changes: Any) -> int:
        layout = Layout(**{"micro_batch_size": 8, "num_microbatches": 1, **changes})
        return rehearse(make_training(WIDE, layout), limit_bytes=None)

    assert peak(recompute="full") < peak()
    assert peak(micro_batch_size=2, num_microbatches=4) < peak()


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_selective_recomputation_keeps_nothing_of_attention_but_its_inputs(family: str) -> None:
    """Fused attention keeps a number a head and token beside them; unfused, the probabilities."""
    shape = make_shape(
        family, num_layers=4, hidden_size=128, ffn_hidden_size=256, seq_length=128, vocab_size=512
    )
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
@pytest.mark.parametrize("shares_memory", [True, False])
@over_axes(TP, CUT, ZERO, ZERO_3, {"cp": 2})
def test_the_peak_does_not_depend_on_gloo(axes: dict[str, Any], shares_memory: bool) -> None:
    """gloo's thread keeps a tensor for a moment after its work; a third of the peaks was wrong."""
    layout = Layout(micro_batch_size=2, num_microbatches=1, **axes)

    def work(training: Training) -> set[int]:
        return {rehearse(training, limit_bytes=None) for _ in range(20)}

    for peaks in on_layout(layout, work, WIDE, shares_memory=shares_memory):
        assert len(peaks) == 1


def test_sharding_the_optimizer_halves_its_part_of_the_peak() -> None:
    def peaks(zero_stage: int) -> list[int]:
        layout = make_layout(dp=2, zero_stage=zero_stage)
        return on_layout(layout, functools.partial(rehearse, limit_bytes=None), WIDE)

    states = 8 * WIDE.num_parameters
    whole, sharded = peaks(0), peaks(1)
    # Activations peak in the passes, the optimizer's scratch in the update: never more than half.
    assert whole[0] - sharded[0] == pytest.approx(states / 2, rel=0.05)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("pp", [1, 2])
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_a_sharded_rank_holds_what_was_said_before(
    zero_stage: int, pp: int, precision: Any, tied: bool
) -> None:
    """Its own share, and whole gradients (2, 3) and weights (3) of two layers."""
    shape = make_shape(num_layers=8, hidden_size=64, ffn_hidden_size=128, tied_embeddings=tied)
    layout = make_layout(dp=2, pp=pp, zero_stage=zero_stage, precision=precision)

    def work(training: Training) -> tuple[int, int]:
        aside = {id(t) for t in (*training.model.tables, *training.optimizer.steps)}
        tensors = [t for t in training.persistent_tensors() if id(t) not in aside]
        told = persistent_bytes(shape, training.mesh, OptimizerSettings())
        return told, sum(t.untyped_storage().nbytes() for t in tensors[: 2 + zero_stage - 1]) + sum(
            t.nbytes for t in tensors[2 + zero_stage - 1 :]
        )

    for told, held in on_layout(layout, work, shape):
        assert told == held


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
@pytest.mark.parametrize(("pp", "vpp"), [(1, 1), (2, 1), (2, 2)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_sharded_rank_peaks_at_what_is_estimated(
    family: str, pp: int, vpp: int, zero_stage: int
) -> None:
    shape = make_shape(family, ffn_hidden_size=512, **SIZES)
    layout = Layout(
        dp=2, pp=pp, vpp=vpp, micro_batch_size=8, num_microbatches=4, zero_stage=zero_stage
    )
    measured = on_layout(layout, functools.partial(rehearse, limit_bytes=None), shape)
    estimated = [stage.total_bytes for stage in stage_memory(layout, shape)]
    for rank, found in enumerate(measured):
        expected = estimated[rank // 2]
        assert 0.96 * found < expected < 1.01 * found


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
        assert group is not None
        own = torch.ones(64, 8)
        with LogicalPeak([own]) as tracker:
            before = tracker.live_bytes
            whole = gather_rows(own, group)
        return tracker.peak_bytes - before, whole.nbytes

    for peak_bytes, whole_bytes in run_ranks(2, work):
        assert peak_bytes == (1 + copies) * whole_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_persistent_bytes_are_known_before_anything_is_built(family: str, precision: str) -> None:
    shape, mesh = make_shape(family), lone_mesh(make_layout(precision=precision))
    training = make_training(shape, mesh=mesh)
    rotary = {id(table) for table in training.model.tables}
    steps = {id(step) for step in training.optimizer.steps}
    built = sum(t.nbytes for t in training.persistent_tensors() if id(t) not in rotary | steps)
    assert persistent_bytes(shape, mesh, OptimizerSettings()) == built


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


EVERY_LAYOUT = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "vpp": st.sampled_from([1, 2]),
        "dp": st.sampled_from([1, 2, 4, 8]),
        "cp": st.sampled_from([1, 2]),
        "ep": st.sampled_from([1, 2]),
        "zero_stage": st.sampled_from([0, 1, 2, 3]),
        "zero_replicas": st.sampled_from([1, 2]),
        "precision": st.sampled_from(["fp32", "bf16", "fp16"]),
    }
)
EVERY_MODEL = st.fixed_dictionaries(
    {
        "family": st.sampled_from(["gpt", "llama", "moe"]),
        "num_layers": st.sampled_from([8, 16]),
        "num_dense_layers": st.integers(0, 5),
        "tied_embeddings": st.booleans(),
    }
)


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


@settings(max_examples=150)
@given(axes=EVERY_LAYOUT, shape=EVERY_MODEL)
@example(
    axes={"dp": 4, "zero_stage": 3}, shape={"family": "gpt", "num_layers": 8, "num_dense_layers": 0}
)
@example(
    axes={"dp": 4, "zero_stage": 3}, shape={"family": "moe", "num_layers": 8, "num_dense_layers": 7}
)
def test_the_least_memory_of_a_probe_is_what_its_fullest_rank_holds(
    axes: dict[str, Any], shape: dict[str, Any]
) -> None:
    """More would refuse true figures; less accepts those that were halved."""
    shape = shape | {"hidden_size": 128, "vocab_size": 256}
    assume(axes.get("pp", 1) > 1 or axes.get("vpp", 1) == 1)
    if shape["family"] != "moe":
        shape |= {"num_dense_layers": 0}
        axes = axes | {"ep": 1}
    try:
        layout = make_layout(**axes | {"num_microbatches": 4})
    except LayoutInvalidError:
        assume(False)
    model = make_shape(**shape)
    request = ProbeRequest(model=model, layout=layout)
    least = least_memory_bytes(request)
    held = max(
        persistent_bytes(model, unconnected_mesh(layout, stage), OptimizerSettings())
        for stage in range(layout.pp)
    )
    assert 0.9 * held < least <= held  # a rank pads what it shares


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


def test_a_dead_rank_is_reported_by_the_harness() -> None:
    """The harness itself can fail: a rank that raises ends its test."""

    def work(rank: int) -> None:
        raise ValueError("told to fail")

    with pytest.raises(RanksFailedError, match="ValueError: told to fail"):
        run_ranks(2, work)


SIZES = {"num_layers": 8, "hidden_size": 128, "seq_length": 64, "vocab_size": 512}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize(("pp", "vpp"), [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)])
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_stage_holds_what_is_estimated(family: str, pp: int, vpp: int, recompute: Any) -> None:
    """Left out are one number a head and up to four a layer for every token: under 2.5 % here."""
    shape = make_shape(family, ffn_hidden_size=512, **SIZES)
    layout = Layout(pp=pp, vpp=vpp, micro_batch_size=8, num_microbatches=8, recompute=recompute)
    measured = on_layout(layout, functools.partial(rehearse, limit_bytes=None), shape)
    estimated = [stage.total_bytes for stage in stage_memory(layout, shape)]
    for found, expected in zip(measured, estimated, strict=True):
        assert 0.975 * found < expected < found


@pytest.mark.sampled(5)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(("pp", "num_microbatches"), [(2, 8), (4, 8), (4, 2)])
@pytest.mark.parametrize(
    ("schedule", "low", "high"), [("gpipe", 0.99, 1.0), ("zero_bubble", 0.91, 1.03)]
)
@pytest.mark.parametrize("family", ["gpt", "llama", "moe"])
def test_a_stage_holds_what_is_estimated_under_every_schedule(
    family: str,
    schedule: Schedule,
    low: float,
    high: float,
    pp: int,
    num_microbatches: int,
    recompute: Any,
) -> None:
    """What late weight gradients free, and when, is counted by the layer."""
    widths = {"ffn_hidden_size": 256, "moe_ffn_hidden_size": 256} if family == "moe" else {}
    shape = make_shape(family, **{"ffn_hidden_size": 512} | SIZES | widths)
    layout = Layout(
        pp=pp,
        micro_batch_size=8,
        num_microbatches=num_microbatches,
        recompute=recompute,
        schedule=schedule,
    )

    def work(training: Training) -> int:
        for mixture in training.model.mixtures:
            mixture.balanced = True
        return rehearse(training, limit_bytes=None)

    for found, stage in zip(
        on_layout(layout, work, shape), stage_memory(layout, shape), strict=True
    ):
        assert low * found < stage.total_bytes < high * found


@pytest.mark.sampled(6)
@over_axes(
    *({}, {"tp_columns": 4}, {"tp": 2}, CUT, {"pp": 2}, {"cp": 2}, {"dp": 2, "zero_stage": 3}),
    *({"recompute": "full"}, {"recompute": "selective"}, {"precision": "bf16"}),
)
@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_ranks_of_tensor_columns_hold_what_is_estimated(family: str, axes: dict[str, Any]) -> None:
    """Left out are a few numbers a token of each layer, among them statistics of norms."""
    shape = make_shape(family, ffn_hidden_size=512, **SIZES)
    layout = Layout(micro_batch_size=8, num_microbatches=4 if "pp" in axes else 2, **COLUMNS | axes)
    measured = on_layout(layout, functools.partial(rehearse, limit_bytes=None), shape)
    estimated = [stage.total_bytes for stage in stage_memory(layout, shape)]
    for rank, found in enumerate(measured):
        expected = estimated[rank * layout.pp // layout.num_devices]
        assert 0.98 * found < expected < found


@pytest.mark.parametrize("axes", [{}, {"recompute": "full"}, {"tp": 2}])
def test_products_in_fp32_hold_the_copies_of_one_product_more(
    axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole factor of 512 features and the 512 features of the other, of 512 tokens."""
    shape = make_shape("gpt", ffn_hidden_size=512, **SIZES)
    layout = Layout(micro_batch_size=8, num_microbatches=2, precision="bf16", **axes)
    work = functools.partial(rehearse, limit_bytes=None)
    fast = on_layout(layout, work, shape)
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: False)
    copies = 2 * torch.float32.itemsize * 512 * 512
    for found, without in zip(on_layout(layout, work, shape), fast, strict=True):
        assert without < found <= without + copies


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "axes",
    [
        {"pp": 2},
        {"pp": 2, "recompute": "full"},
        CUT | {"recompute": "selective"},
        CUT | {"etp": 2},
        {"precision": "bf16"},
        {"dp": 2, "ep": 2},
        {"dp": 2, "etp": 2, "recompute": "full"},
        {"dp": 2, "ep": 2, "recompute": "full"},
        {"dp": 2, "ep": 2, "precision": "bf16"},
        CUT | {"ep": 2},
        {"dp": 4, "ep": 2, "zero_stage": 1},
        {"dp": 4, "ep": 2, "zero_stage": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "changes",
    [
        {"shared_expert_ffn_hidden_size": 0, "qk_norm": False, "moe_ffn_hidden_size": 256},
        {"moe_ffn_hidden_size": 256},
        {"num_dense_layers": 3, "ffn_hidden_size": 512},
        {"num_experts": 16, "experts_per_token": 4, "head_dim": 32},
    ],
    ids=str,
)
def test_a_stage_with_experts_holds_what_is_estimated(
    changes: dict[str, Any], axes: dict[str, Any]
) -> None:
    """With a shared expert, cut tokens are gathered twice at once, which is left out."""
    width = {"ffn_hidden_size": changes.get("moe_ffn_hidden_size", 32)}
    shape = make_shape("moe", **SIZES | width | changes)
    # Without a pipeline only one is in flight; the second adds to the gradients of the first.
    layout = Layout(micro_batch_size=8, num_microbatches=8 if "pp" in axes else 2, **axes)

    def work(training: Training) -> int:
        for mixture in training.model.mixtures:
            mixture.balanced = True
        return rehearse(training, limit_bytes=None)

    measured = on_layout(layout, work, shape)
    stages = stage_memory(layout, shape)
    estimated = [stage.total_bytes for stage in stages for _ in range(layout.tp * layout.dp)]
    # Wide dense layers come first: by their backward pass, later layers' inputs are gone.
    most = 1.05 if "num_dense_layers" in changes and layout.recompute == "full" else 1.03
    for found, expected in zip(measured, estimated, strict=True):
        assert 0.94 * found < expected < most * found
