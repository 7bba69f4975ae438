"""Memory: counted exactly, limited for real, and as estimated on each rank, with every knob."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes, stage_memory
from layout_tuner.protocol.measurement_checks import least_memory_bytes
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.layouts.layout import (
    CP_COMM_TYPES,
    PIPELINE_SPLITS,
    ZERO_STAGES,
    Layout,
    PipelineSplit,
    Precision,
)
from layout_tuner.search_spaces.layouts.rank_mesh import Coordinates
from layout_tuner.search_spaces.layouts.recomputation import RECOMPUTE_MODES, Recompute
from layout_tuner.search_spaces.layouts.schedules import Schedule
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.units import memory
from layout_tuner.workers.trainer.comm.collectives import gather_rows
from layout_tuner.workers.trainer.comm.mesh import Copies, Mesh, build_mesh
from layout_tuner.workers.trainer.errors import MemoryLimitExceededError
from layout_tuner.workers.trainer.model import matrix_products
from layout_tuner.workers.trainer.parallel.optimizer import OptimizerSettings
from layout_tuner.workers.trainer.probe.exception_reasons import classify
from layout_tuner.workers.trainer.probe.measured_memory import rehearse
from layout_tuner.workers.trainer.rank_memory import LogicalPeak, enforce_limit
from layout_tuner.workers.trainer.training import Training, persistent_bytes
from tests.kit.python_process import printed_by
from tests.workers.trainer.cases import (
    COLUMNS,
    CPU,
    CUT,
    PP,
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


def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """The bytes of their storages, each counted once."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


OPERATORS = ("aten::", "mkldnn::")
"""How the names of operators begin; fp32 products on AMD's processors are oneDNN's."""


def profiled_peaks(step: Callable[[], object], start: int) -> tuple[int, int]:
    """The peak of the allocator's running total in one step, from the profiler's events.

    Returns that between operators, and that at any time: inside an operator, it may have memory for
    itself, and how much depends on the kernel. `start` is the total before the step.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    kineto = profiler.profiler.kineto_results
    changes, busy_until, live = [], 0, start
    between = at_any_time = start
    for event in kineto.events():
        if event.name() == "[memory]":
            changes.append((event.start_ns(), 1, event.nbytes()))
        elif event.name().startswith(OPERATORS):
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
        counted, batch = rehearse(training, limit_bytes=None), training.batch(0)
        training.step(batch)
        start = storage_bytes([*training.persistent_tensors(), batch.ids_MT, batch.targets_MT])
        return counted, profiled_peaks(partial(training.step, batch), start)

    counted, (between, at_any_time) = run_ranks(1, work)[0]
    scalars_bytes = 4096  # autograd holds some that no operator has returned
    assert between - scalars_bytes <= counted <= at_any_time


PRODUCT = """
import torch
from tests.workers.trainer.test_memory import profiled_peaks
x, w = torch.ones(256, 512), torch.ones(128, 512)
multiply = lambda: torch.ops.mkldnn._linear_pointwise(x, w, None, "none", [], "")
multiply()
print(*profiled_peaks(multiply, 0))
"""


def test_the_scratch_of_a_product_by_onednn_is_the_operators_own() -> None:
    """Its AVX2 kernels copy a factor, and free the copy before the product returns."""
    between, at_any_time = map(int, printed_by(PRODUCT, ONEDNN_MAX_CPU_ISA="AVX2").split()[-2:])
    output_bytes = 256 * 128 * 4
    assert between == output_bytes <= at_any_time


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


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", RUNS[:NUM_FAST])
def test_persistent_bytes_are_known_before_anything_is_built(words: str) -> None:
    """Of a sharded rank its share, and whole gradients (2, 3) and weights (3) of two layers.

    Rotary tables and counts of steps are left out.
    """
    values = values_of(words)
    shape, optimizer = shape_of(values), settings_of(values)

    def work(training: Training) -> tuple[int, int]:
        aside = {id(t) for t in (*training.model.tables, *training.optimizer.steps)}
        held = [t for t in training.persistent_tensors() if id(t) not in aside]
        return persistent_bytes(shape, training.mesh, optimizer), storage_bytes(held)

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
        mesh = unconnected_mesh(layout, stage)
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


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_unequal_stages_hold_16_bit_states_as_estimated(precision: Precision) -> None:
    shape = make_shape(num_layers=16, hidden_size=64, ffn_hidden_size=128)
    written = {"pipeline_layout": "Et*7|t*5|t*3|tL", "optimizer_states": "bf16"}
    layout = make_layout(pp=4, precision=precision, **written)
    for stage, estimate in enumerate(stage_memory(layout, shape)):
        mesh = unconnected_mesh(layout, stage)
        states = estimate.weights_bytes + estimate.gradients_bytes + estimate.optimizer_bytes
        assert states == pytest.approx(persistent_bytes(shape, mesh, OptimizerSettings()), rel=1e-3)


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


SIZES = {"num_layers": 8, "hidden_size": 128, "seq_length": 64, "vocab_size": 512}
WIDTHS = SIZES | {"ffn_hidden_size": 512}
DENSE = ("gpt", "llama")
FULL, SELECTIVE, BF16 = {"recompute": "full"}, {"recompute": "selective"}, {"precision": "bf16"}
EP = {"dp": 2, "ep": 2}


def peaks_of(layout: Layout, shape: ModelShape) -> list[int]:
    """The counted peak of each rank, with balanced routing."""

    def work(training: Training) -> int:
        for mixture in training.model.mixtures:
            mixture.balanced = True
        return rehearse(training, limit_bytes=None)

    return on_layout(layout, work, shape)


def estimates_of(layout: Layout, shape: ModelShape) -> list[float]:
    """The estimate for each rank: that of its stage."""
    stages = stage_memory(layout, shape)
    ranks = range(layout.num_devices)
    return [stages[rank * layout.pp // layout.num_devices].total_bytes for rank in ranks]


def assert_estimated(layout: Layout, shape: ModelShape, low: float, high: float) -> None:
    """The estimate of each rank lies between these parts of what is counted."""
    counted, estimated = peaks_of(layout, shape), estimates_of(layout, shape)
    for of_rank, estimate in zip(counted, estimated, strict=True):
        assert low * of_rank < estimate < high * of_rank, (counted, estimated)


@pytest.mark.sampled(5)
@in_turn(
    ("stages", "family"),
    list(itertools.product([(2, 1), (2, 2), (2, 4), (4, 1), (4, 2)], RECOMPUTE_MODES)),
    DENSE,
)
def test_a_stage_holds_what_is_estimated(
    stages: tuple[tuple[int, int], Recompute], family: str
) -> None:
    """Left out are one number a head and up to four a layer for every token: under 2.5 % here."""
    (pp, vpp), recompute = stages
    layout = Layout(pp=pp, vpp=vpp, micro_batch_size=8, num_microbatches=8, recompute=recompute)
    assert_estimated(layout, make_shape(family, **WIDTHS), 0.975, 1.0)


@pytest.mark.sampled(5)
@in_turn(
    ("stages", "family"),
    list(itertools.product([(2, 8), (4, 8), (4, 2)], ["none", "full"], ["gpipe", "zero_bubble"])),
    (*DENSE, "moe"),
)
def test_a_stage_holds_what_is_estimated_under_every_schedule(
    stages: tuple[tuple[int, int], Recompute, Schedule], family: str
) -> None:
    """What late weight gradients free, and when, is counted by the layer."""
    (pp, num_microbatches), recompute, schedule = stages
    widths = {"ffn_hidden_size": 256, "moe_ffn_hidden_size": 256} if family == "moe" else {}
    layout = Layout(
        pp=pp,
        micro_batch_size=8,
        num_microbatches=num_microbatches,
        recompute=recompute,
        schedule=schedule,
    )
    low, high = (0.99, 1.0) if schedule == "gpipe" else (0.91, 1.03)
    assert_estimated(layout, make_shape(family, **WIDTHS | widths), low, high)


@pytest.mark.sampled(4)
@in_turn(
    ("stages", "family"), list(itertools.product([(1, 1), (2, 1), (2, 2)], ZERO_STAGES[1:])), DENSE
)
def test_a_sharded_rank_holds_what_is_estimated(
    stages: tuple[tuple[int, int], int], family: str
) -> None:
    (pp, vpp), zero_stage = stages
    layout = Layout(
        dp=2, pp=pp, vpp=vpp, micro_batch_size=8, num_microbatches=4, zero_stage=zero_stage
    )
    assert_estimated(layout, make_shape(family, **WIDTHS), 0.96, 1.01)


@pytest.mark.sampled(4)
@in_turn(
    ("axes", "family"),
    [{}, {"tp_columns": 4}, TP, CUT, PP, {"cp": 2}, ZERO_3, FULL, SELECTIVE, BF16],
    DENSE,
)
def test_ranks_of_tensor_columns_hold_what_is_estimated(axes: dict[str, Any], family: str) -> None:
    """Left out are a few numbers a token of each layer, among them statistics of norms."""
    layout = Layout(micro_batch_size=8, num_microbatches=4 if "pp" in axes else 2, **COLUMNS | axes)
    assert_estimated(layout, make_shape(family, **WIDTHS), 0.98, 1.0)


@pytest.mark.sampled(5)
@in_turn(
    ("axes", "changes"),
    [
        *(PP, PP | FULL, CUT | SELECTIVE, CUT | {"etp": 2}, BF16, EP, EP | FULL, EP | BF16),
        *({"dp": 2, "etp": 2} | FULL, CUT | {"ep": 2}),
        *({"dp": 4, "ep": 2, "zero_stage": stage} for stage in (1, 3)),
    ],
    [
        {"shared_expert_ffn_hidden_size": 0, "qk_norm": False, "moe_ffn_hidden_size": 256},
        {"moe_ffn_hidden_size": 256},
        {"num_dense_layers": 3, "ffn_hidden_size": 512},
        {"num_experts": 16, "experts_per_token": 4, "head_dim": 32},
    ],
)
def test_a_stage_with_experts_holds_what_is_estimated(
    axes: dict[str, Any], changes: dict[str, Any]
) -> None:
    """With a shared expert, cut tokens are gathered twice at once, which is left out."""
    width = {"ffn_hidden_size": changes.get("moe_ffn_hidden_size", 32)}
    # Without a pipeline only one is in flight; the second adds to the gradients of the first.
    layout = Layout(micro_batch_size=8, num_microbatches=8 if "pp" in axes else 2, **axes)
    # Wide dense layers come first: by their backward pass, later layers' inputs are gone.
    most = 1.05 if "num_dense_layers" in changes and layout.recompute == "full" else 1.03
    assert_estimated(layout, make_shape("moe", **SIZES | width | changes), 0.94, most)


LATENT = {
    "num_kv_heads": 4,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
UP: dict[str, Any] = {"recompute": "mla_up_proj"}
LATE: dict[str, Any] = PP | {"schedule": "zero_bubble"}


@pytest.mark.sampled(6)
@in_turn(
    ("axes", "changes"),
    [
        *({}, TP, CUT, PP, VPP, ZERO_3, FULL, BF16, UP, PP | UP, CUT | UP, PP | FULL),
        *({"cp": 2, "cp_comm_type": each} for each in CP_COMM_TYPES),
        {"recompute": "mlp+layernorm+mla_up_proj"},
        *(LATE, CUT | LATE, CUT | PP | UP, CUT | LATE | UP, LATE | UP),
    ],
    [
        {},
        {"q_lora_rank": 0},
        {"qk_nope_head_dim": 96, "v_head_dim": 96},
        {"layer_kinds": ("full", "dense")},
    ],
)
def test_a_rank_with_latents_holds_what_is_estimated(
    axes: dict[str, Any], changes: dict[str, Any]
) -> None:
    layout = Layout(micro_batch_size=8, num_microbatches=8 if "pp" in axes else 2, **axes)
    shape = make_shape(**SIZES | {"ffn_hidden_size": 256} | LATENT | changes)
    assert_estimated(layout, shape, 0.95, 1.05)


@pytest.mark.sampled(4)
@in_turn(("axes",), [PP, VPP, FULL, {"recompute": "mlp"}, ZERO_3])
def test_a_stage_of_kinds_holds_what_is_estimated(axes: dict[str, Any]) -> None:
    layout = Layout(micro_batch_size=8, num_microbatches=8 if "pp" in axes else 2, **axes)
    kinds = ("full+dense", "full", "full+experts", "dense")
    experts = {"num_experts": 8, "experts_per_token": 2, "moe_ffn_hidden_size": 64}
    shape = make_shape(**SIZES | {"ffn_hidden_size": 256, "layer_kinds": kinds} | experts)
    assert_estimated(layout, shape, 0.95, 1.05)


PARTS: list[dict[str, Any]] = [
    *(PP | {"recompute": "mlp"}, CUT | {"recompute": "layernorm"}, {"recompute": "mlp+layernorm"}),
    *(CUT | {"recompute": "mlp"}, PP | {"recompute": "core_attention+layernorm"}),
    PP | {"recompute": "full", "recompute_layers": "2/0"},
    PP | {"recompute": "mlp+layernorm", "recompute_layers": "2"},
    VPP | {"recompute": "full", "recompute_layers": "1"},
    PP | {"recompute": "full", "recompute_layers": "2", "schedule": "gpipe"},
    PP | {"recompute": "full", "recompute_layers": "1/0", "schedule": "zero_bubble"},
]
LEVERS = [
    *PARTS,
    *(axes | {"optimizer_states": "bf16"} for axes in ({}, PP, ZERO, ZERO_3, PARTS[2])),
    *({"pp": 2, "pipeline_layout": layout} for layout in ("Et*5|t*3L", "E|t*8L", "Et*3|t*5L")),
    {"pp": 4, "pipeline_layout": "Et*3|tt|tt|tL"},
    VPP | {"pipeline_layout": "Et*3|t|tt|ttL"},
    PP | {"pipeline_layout": "Et*6|ttL", "schedule": "gpipe"},
]


@pytest.mark.sampled(6)
@in_turn(("levers", "family", "precision"), LEVERS, DENSE, ["fp32", "bf16"])
def test_a_rank_holds_with_each_lever_what_is_estimated(
    levers: dict[str, Any], family: str, precision: Precision
) -> None:
    many = {"num_microbatches": 8 if "pp" in levers else 2, "precision": precision}
    layout = Layout(micro_batch_size=8, **many | levers)
    assert_estimated(layout, make_shape(family, **WIDTHS), 0.96, 1.02)


@pytest.mark.sampled(4)
@in_turn(
    ("levers", "precision"),
    [
        *(PP | {"recompute": "moe_act+layernorm"}, CUT | {"recompute": "layernorm"}),
        *(EP | {"recompute": "layernorm"}, PP | {"recompute": "full", "recompute_layers": "1/2"}),
        *(EP | {"optimizer_states": "bf16"}, PP | {"pipeline_layout": "Et*5|t*3L"}),
    ],
    ["fp32", "bf16"],
)
def test_experts_hold_with_each_lever_what_is_estimated(
    levers: dict[str, Any], precision: Precision
) -> None:
    many = {"num_microbatches": 8 if "pp" in levers else 2, "precision": precision}
    shape = make_shape("moe", **SIZES | {"ffn_hidden_size": 256, "moe_ffn_hidden_size": 256})
    assert_estimated(Layout(micro_batch_size=8, **many | levers), shape, 0.96, 1.04)


LONG = make_shape(
    **SIZES | {"ffn_hidden_size": 256, "num_heads": 8, "num_kv_heads": 4, "vocab_size": 64}
)


@pytest.mark.sampled(5)
@in_turn(("communication", "cp"), list(itertools.product(CP_COMM_TYPES, RECOMPUTE_MODES)), (2, 4))
def test_the_peak_of_shared_sequences_is_what_is_estimated(
    communication: tuple[Any, Recompute], cp: int
) -> None:
    comm_type, recompute = communication
    knobs = {"cp": cp, "cp_comm_type": comm_type, "recompute": recompute}
    layout = Layout(micro_batch_size=16, num_microbatches=2, **knobs)
    estimated = float(peak_memory_bytes(layout, LONG))
    assert peaks_of(layout, LONG) == pytest.approx([estimated] * cp, rel=0.06)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("pp", [1, 2])
def test_cutting_tokens_lowers_the_peak_of_every_rank_as_estimated(
    pp: int, recompute: Recompute
) -> None:
    shape = make_shape(**SIZES | {"ffn_hidden_size": 128, "vocab_size": 64})

    def peaks(sequence_parallel: bool) -> list[int]:
        layout = Layout(
            tp=2,
            pp=pp,
            micro_batch_size=16,
            num_microbatches=2,
            recompute=recompute,
            sequence_parallel=sequence_parallel,
        )
        found = peaks_of(layout, shape)
        assert found == pytest.approx(estimates_of(layout, shape), rel=0.12)
        return found

    whole, cut = peaks(False), peaks(True)
    assert all(less < more for less, more in zip(cut, whole, strict=True)), (cut, whole)


@pytest.mark.parametrize("axes", [{}, TP | FULL], ids=str)
def test_products_in_fp32_hold_the_copies_of_one_product_more(
    axes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole factor of 512 features and the 512 features of the other, of 512 tokens."""
    layout = Layout(micro_batch_size=8, num_microbatches=2, precision="bf16", **axes)
    shape = make_shape("gpt", **WIDTHS)
    fast = peaks_of(layout, shape)
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: False)
    copies = 2 * 4 * 512 * 512
    for found, without in zip(peaks_of(layout, shape), fast, strict=True):
        assert without < found <= without + copies
