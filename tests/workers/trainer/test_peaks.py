"""The peak of each rank is what the memory model estimates, beside every knob that changes it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from search_spaces.estimates.memory import peak_memory_bytes, stage_memory
from search_spaces.schedules import Schedule
from search_spaces.spec.layout import CP_COMM_TYPES, RECOMPUTE_MODES, ZERO_STAGES, Layout, Recompute
from search_spaces.spec.model_shape import ModelShape
from tests.workers.trainer.cases import COLUMNS, CUT, PP, TP, ZERO_3, in_turn, make_shape, on_layout
from workers.trainer.model import matrix_products
from workers.trainer.probe.measurement import rehearse
from workers.trainer.training import Training

pytestmark = pytest.mark.ranks

SIZES = {"num_layers": 8, "hidden_size": 128, "seq_length": 64, "vocab_size": 512}
WIDE = SIZES | {"ffn_hidden_size": 512}
DENSE = ("gpt", "llama")
FULL, SELECTIVE, BF16 = {"recompute": "full"}, {"recompute": "selective"}, {"precision": "bf16"}
EP = {"dp": 2, "ep": 2}


@pytest.fixture(autouse=True)
def _fast_16_bit_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a processor that has them: elsewhere fp32 copies of a product's factors are added."""
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: True)


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
    assert_estimated(layout, make_shape(family, **WIDE), 0.975, 1.0)


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
    assert_estimated(layout, make_shape(family, **WIDE | widths), low, high)


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
    assert_estimated(layout, make_shape(family, **WIDE), 0.96, 1.01)


@pytest.mark.sampled(4)
@in_turn(
    ("axes", "family"),
    [{}, {"tp_columns": 4}, TP, CUT, PP, {"cp": 2}, ZERO_3, FULL, SELECTIVE, BF16],
    DENSE,
)
def test_ranks_of_tensor_columns_hold_what_is_estimated(axes: dict[str, Any], family: str) -> None:
    """Left out are a few numbers a token of each layer, among them statistics of norms."""
    layout = Layout(micro_batch_size=8, num_microbatches=4 if "pp" in axes else 2, **COLUMNS | axes)
    assert_estimated(layout, make_shape(family, **WIDE), 0.98, 1.0)


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
    shape = make_shape("gpt", **WIDE)
    fast = peaks_of(layout, shape)
    monkeypatch.setattr(matrix_products, "has_fast_16_bit_products", lambda: False)
    copies = 2 * 4 * 512 * 512
    for found, without in zip(peaks_of(layout, shape), fast, strict=True):
        assert without < found <= without + copies
