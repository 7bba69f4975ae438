"""Expert parallelism: layouts that divide experts train as those that do not."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from search_spaces.mesh import coordinates, expert_coordinates, expert_rank
from search_spaces.spec.layout import CP_COMM_TYPES, Layout
from tests.workers.trainer.cases import (
    ADAMW,
    CUT,
    REPLICAS,
    VPP,
    assert_same_training,
    make_layout,
    make_shape,
    movement,
    on_layout,
    over_axes,
    train,
)
from tests.workers.trainer.parallel_layers import CountingCollectives
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.test_parity import CLIPPED, FP16, SGD, reference
from tests.workers.trainer.tolerances import parameter_error
from workers.trainer.comm.collectives import start_all_to_all_rows
from workers.trainer.comm.host_lanes import SLOT_BYTES
from workers.trainer.comm.mesh import build_mesh
from workers.trainer.parallel.optimizer import OptimizerSettings
from workers.trainer.training import Training, persistent_bytes

pytestmark = pytest.mark.ranks

EP, ETP = {"dp": 2, "ep": 2}, {"dp": 2, "etp": 2}
OF_FOUR = {"dp": 4, "micro_batch_size": 1, "num_microbatches": 2}
WITHOUT_WINDOWS: dict[str, Any] = {"attention_window": None, "full_attention_every": None}


def moe_layout(**axes: Any) -> Layout:
    """Each of at most four ranks has one sequence or more of the global batch of 8."""
    layout = make_layout(**axes)
    return make_layout(**OF_FOUR | axes) if layout.dp == 4 else layout


@pytest.mark.sampled(6)
@over_axes(
    EP,
    ETP,
    CUT,
    CUT | {"ep": 2},
    CUT | {"etp": 2},
    {"dp": 4, "ep": 4},
    {"dp": 4, "ep": 2},
    {"dp": 4, "ep": 2, "etp": 2},
    {"dp": 4, "etp": 4},
    CUT | EP,
    CUT | ETP,
    CUT | {"dp": 2, "ep": 4},
    CUT | {"dp": 2, "ep": 2, "etp": 2},
    EP | {"pp": 2},
    ETP | {"pp": 2},
    *(EP | {"zero_stage": zero} for zero in (1, 2, 3)),
    *({"dp": 4, "ep": 2, "zero_stage": zero} for zero in (1, 2, 3)),
    *({"dp": 4, "etp": 2, "zero_stage": zero} for zero in (2, 3)),
    *(REPLICAS | {"ep": 2, "zero_stage": zero} for zero in (1, 2, 3)),
    CUT | EP | {"zero_stage": 3},
    CUT | {"zero_stage": 3},
    EP | VPP,
    EP | {"pp": 2, "zero_stage": 3, "recompute": "full"},
    EP | {"recompute": "full"},
    EP | {"recompute": "selective"},
    EP | {"pp": 2, "pipeline_split": "head"},
    slow=[EP | VPP | {"zero_stage": 3}, CUT | EP | {"pp": 2, "zero_stage": 2}],
)
def test_divided_experts_follow_the_reference(axes: dict[str, Any]) -> None:
    """Beside each other axis; the reference is a loop over experts."""
    shape = make_shape("moe", num_layers=3 if "pipeline_split" in axes else 4)
    assert_same_training(train(shape, moe_layout(**axes)), reference(shape, ADAMW))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("comm_type", CP_COMM_TYPES)
@over_axes({"ep": 2}, {"etp": 2}, EP | {"zero_stage": 3}, CUT | {"ep": 4})
def test_divided_experts_of_divided_sequences(comm_type: str, axes: dict[str, Any]) -> None:
    windows = {} if comm_type == "a2a" else WITHOUT_WINDOWS
    shape = make_shape("moe", num_layers=2, num_heads=8, num_kv_heads=4, **windows)
    layout = make_layout(cp=2, cp_comm_type=comm_type, **axes)
    assert_same_training(train(shape, layout), reference(shape, ADAMW))


@pytest.mark.sampled(3)
@over_axes(EP, ETP, CUT, CUT | EP, {"dp": 4, "ep": 2, "zero_stage": 1})
def test_sgd_and_clipping_move_every_weight_as_the_reference_does(axes: dict[str, Any]) -> None:
    """A gradient of the wrong scale, which AdamW forgives, shows in how far each weight moved."""
    shape = make_shape("moe")
    assert_same_training(train(shape, moe_layout(**axes), CLIPPED), reference(shape, CLIPPED))
    found, expected = train(shape, moe_layout(**axes), SGD), reference(shape, SGD)
    assert_same_training(found, expected)
    moved, should = movement(found), movement(expected)
    for name in moved:
        allowed = parameter_error(shape) * should[name].norm() + 1e-9
        assert (moved[name] - should[name]).norm() <= allowed, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("precision", [{"precision": "bf16"}, FP16], ids=str)
@over_axes({}, EP, CUT | {"ep": 2}, ETP | {"zero_stage": 3})
def test_16_bits_follow_fp32(axes: dict[str, Any], precision: dict[str, str]) -> None:
    shape = make_shape("moe")
    found = train(shape, make_layout(**axes, **precision), balanced_routing=True)
    assert_same_training(found, train(shape, make_layout(), balanced_routing=True))


@pytest.mark.sampled(2)
@over_axes(EP, {"dp": 4, "ep": 4}, {"dp": 4, "ep": 2, "etp": 2}, CUT | {"ep": 2}, CUT | {"etp": 2})
def test_balanced_routing_is_the_same_under_every_layout(axes: dict[str, Any]) -> None:
    shape = make_shape("moe")
    found = train(shape, moe_layout(**axes), balanced_routing=True)
    assert_same_training(found, train(shape, make_layout(), balanced_routing=True))


def test_experts_that_get_no_row_are_no_error() -> None:
    """16 experts and one choice: some of the 32 tokens' ranks send nothing to each other."""
    shape = make_shape("moe", num_experts=16, experts_per_token=1)
    assert_same_training(train(shape, make_layout(**EP)), reference(shape, ADAMW))


@pytest.mark.parametrize("ep_and_etp", [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_a_rank_sends_as_many_rows_as_the_formulas_say(ep_and_etp: tuple[int, int]) -> None:
    """Balanced: of etp L k rows (n - 1) / n, in four all-to-alls a layer and micro-batch."""
    ep, etp = ep_and_etp
    shape = make_shape("moe", shared_expert_ffn_hidden_size=0)
    layout = moe_layout(dp=4, ep=ep, etp=etp)

    def work(training: Training) -> Any:
        for mixture in training.model.mixtures:
            mixture.balanced = True
        sent = {"wide": 0, "all_to_all": 0, "gathered": 0, "scattered": 0}
        groups = training.mesh.ep_group, training.mesh.etp_group
        lanes = [group.lane for group in groups if group is not None]

        def noting(kind: str, operation: Any, start: Any) -> Any:
            if kind == "all_to_all":
                others = [
                    sum(len(piece) for piece in share)
                    for place, share in enumerate(operation._shares)
                    if place != operation._lane.rank
                ]
                sent["all_to_all"] += sum(others)
                sent["wide"] += sum(others) if sum(others) % shape.hidden_size == 0 else 0
            elif kind == "all_gather" and operation._dtype.is_floating_point:
                sent["gathered"] += sum(len(piece) for piece in operation._own)
            elif kind == "reduce_scatter":
                sent["scattered"] += sum(len(piece) for piece in operation._own)
            return start(kind, operation)

        for lane in lanes:
            lane._start = functools.partial(noting, start=lane._start)  # type: ignore[union-attr]
        training.pipeline.run(training.batch(0))
        return sent

    tokens = layout.micro_batch_size * shape.seq_length
    passes = layout.num_microbatches * shape.num_layers
    rows = etp * tokens * shape.experts_per_token * (ep - 1) // ep
    for sent in on_layout(layout, work, shape):
        # Rows, and their weights, forward and back, and the same of the gradients.
        assert sent["all_to_all"] == passes * rows * (4 * shape.hidden_size + 2)
        both_ways = 2 * passes * tokens * shape.hidden_size
        assert sent["gathered"] == (both_ways if etp > 1 else 0)
        assert sent["scattered"] == (both_ways if etp > 1 else 0)


def test_nothing_is_exchanged_where_no_rank_lacks_an_expert() -> None:
    def work(training: Training) -> Any:
        with CountingCollectives(training.mesh) as counting:
            training.pipeline.run(training.batch(0))
        return dict(counting.counts)

    shape = make_shape("moe", shared_expert_ffn_hidden_size=0, qk_norm=False)
    assert on_layout(make_layout(dp=2), work, shape) == [{}, {}]


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_unequal_shares_arrive_where_they_belong(shares_memory: bool, dtype: torch.dtype) -> None:
    """Some of no row, some of more than a slot; three ranks, so that no share is a neighbour's."""
    longest = 2 * SLOT_BYTES // 64
    counts = [[0, 3, longest], [5, 0, 0], [1, longest + 7, 2]]

    def work(rank: int) -> bool:
        mesh = build_mesh(rank, Layout(tp=3), tied_embeddings=False, shares_memory=shares_memory)
        assert mesh.tp_group is not None
        sent, received = counts[rank], [of[rank] for of in counts]
        for trial in range(3):

            def rows(source: int, to: int, count: int, trial: int = trial) -> Any:
                start = 1000 * source + 100 * to + trial
                return (start + torch.arange(count * 4) % 97).view(count, 4).to(dtype)

            own = torch.cat([rows(rank, to, count) for to, count in enumerate(sent)])
            found, work = start_all_to_all_rows(
                own, mesh.tp_group, sent, received, largest=longest + 7
            )
            assert work is not None
            work.wait()
            expected = [rows(source, rank, count) for source, count in enumerate(received)]
            assert torch.equal(found, torch.cat(expected))
        return True

    assert all(run_ranks(3, work))


def test_positions_of_experts_fold_over_those_of_attention() -> None:
    layout = Layout(tp=2, cp=2, dp=4, pp=2, ep=4, etp=2)
    for rank in range(layout.num_devices):
        place, attention = expert_coordinates(rank, layout), coordinates(rank, layout)
        assert expert_rank(place, attention.pp_rank, layout) == rank
        within = ((attention.dp_rank * 2) + attention.cp_rank) * 2 + attention.tp_rank
        assert within == (place.edp_rank * 4 + place.ep_rank) * 2 + place.etp_rank
    assert expert_coordinates(1, layout).etp_rank == 1, "etp varies fastest"


def test_a_rank_makes_the_groups_of_its_experts() -> None:
    layout = Layout(dp=4, ep=2, zero_stage=1)

    def work(rank: int) -> Any:
        mesh = build_mesh(rank, layout, tied_embeddings=False, has_experts=True)
        ep, experts = mesh.ep_group, mesh.expert_copies
        assert ep is not None
        assert experts.shard_group is not None
        dense = build_mesh(rank, layout, tied_embeddings=False)
        assert (dense.ep_group, dense.expert_copies) == (None, dense.copies)
        return ep.ranks, experts.shard_group.ranks, experts.num_shards, mesh.copies.num_shards

    assert run_ranks(4, work) == [
        ((0, 1), (0, 2), 2, 4),
        ((0, 1), (1, 3), 2, 4),
        ((2, 3), (0, 2), 2, 4),
        ((2, 3), (1, 3), 2, 4),
    ]


def test_experts_that_as_many_ranks_hold_need_no_buckets_of_their_own() -> None:
    def work(rank: int) -> bool:
        mesh = build_mesh(rank, Layout(tp=2, dp=2, etp=2), tied_embeddings=False, has_experts=True)
        return mesh.expert_copies is mesh.copies

    assert all(run_ranks(4, work))


@pytest.mark.sampled(2)
@over_axes(
    EP, {"dp": 4, "ep": 2, "zero_stage": 1}, {"dp": 4, "ep": 2, "zero_stage": 3}, CUT | EP, ETP
)
def test_persistent_bytes_are_known_before_anything_is_built(axes: dict[str, Any]) -> None:
    shape = make_shape("moe", num_layers=4)

    def work(training: Training) -> tuple[int, int]:
        aside = {id(t) for t in (*training.model.tables, *training.optimizer.steps)}
        tensors = [t for t in training.persistent_tensors() if id(t) not in aside]
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
        told = persistent_bytes(shape, training.mesh, OptimizerSettings())
        return told, sum(storages.values())

    for told, held in on_layout(moe_layout(**axes), work, shape):
        assert told == held
