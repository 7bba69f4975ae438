"""Expert parallelism: what goes where, and what a rank holds."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.comm.collectives import start_all_to_all_rows
from layout_tuner.workers.trainer.comm.host_lanes import SLOT_BYTES
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.training import Training
from tests.workers.trainer.cases import (
    ADAMW,
    assert_same_training,
    in_turn,
    make_layout,
    make_shape,
    on_layout,
    train,
)
from tests.workers.trainer.parallel_layers import sent_in
from tests.workers.trainer.ranks import run_ranks
from tests.workers.trainer.test_parity import reference

pytestmark = pytest.mark.ranks


def test_experts_that_get_no_row_are_no_error() -> None:
    """16 experts and one choice: some of the 32 tokens' ranks send nothing to each other."""
    shape = make_shape("moe", num_experts=16, experts_per_token=1)
    assert_same_training(train(shape, make_layout(dp=2, ep=2)), reference(shape, ADAMW))


@pytest.mark.parametrize(("ep", "etp"), [(2, 1), (4, 1), (2, 2), (1, 2)])
def test_a_rank_sends_as_many_rows_as_the_formulas_say(ep: int, etp: int) -> None:
    """Balanced: of etp L k rows (n - 1) / n, in four all-to-alls a layer and micro-batch."""
    shape = make_shape("moe", shared_expert_ffn_hidden_size=0)
    layout = make_layout(dp=4, ep=ep, etp=etp, micro_batch_size=1, num_microbatches=2)

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
            lane._start = functools.partial(noting, start=lane._start)
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
    shape = make_shape("moe", shared_expert_ffn_hidden_size=0, qk_norm=False)
    assert not sent_in(make_layout(dp=2), shape)


@in_turn(("dtype", "shares_memory"), [torch.float32, torch.bfloat16, torch.int64], [True, False])
def test_unequal_shares_arrive_where_they_belong(dtype: torch.dtype, shares_memory: bool) -> None:
    """Some of no row, some of more than a slot; three ranks, so that no share is a neighbour's."""
    longest = 2 * SLOT_BYTES // 64
    counts = [[0, 3, longest], [5, 0, 0], [1, longest + 7, 2]]

    def work(rank: int) -> bool:
        mesh = build_mesh(rank, Layout(tp=3), tied_embeddings=False, shares_memory=shares_memory)
        sent, received = counts[rank], [of[rank] for of in counts]
        for trial in range(3):

            def rows(source: int, to: int, count: int, trial: int = trial) -> Any:
                start = 1000 * source + 100 * to + trial
                return (start + torch.arange(count * 4) % 97).view(count, 4).to(dtype)

            own = torch.cat([rows(rank, to, count) for to, count in enumerate(sent)])
            found, work = start_all_to_all_rows(
                own, mesh.tp_group, sent, received, largest=longest + 7
            )
            work.wait()
            expected = [rows(source, rank, count) for source, count in enumerate(received)]
            assert torch.equal(found, torch.cat(expected))
        return True

    assert all(run_ranks(3, work))


def test_a_rank_makes_the_groups_of_its_experts() -> None:
    layout = Layout(dp=4, ep=2, zero_stage=1)

    def work(rank: int) -> Any:
        mesh = build_mesh(rank, layout, tied_embeddings=False, has_experts=True)
        ep, experts = mesh.ep_group, mesh.expert_copies
        dense = build_mesh(rank, layout, tied_embeddings=False)
        assert (dense.ep_group, dense.expert_copies) == (None, dense.copies)
        as_many = Layout(tp=2, dp=2, etp=2)
        alike = build_mesh(rank, as_many, tied_embeddings=False, has_experts=True)
        assert alike.expert_copies is alike.copies, "they need no buckets of their own"
        return ep.ranks, experts.shard_group.ranks, experts.num_shards, mesh.copies.num_shards

    assert run_ranks(4, work) == [
        ((0, 1), (0, 2), 2, 4),
        ((0, 1), (1, 3), 2, 4),
        ((2, 3), (0, 2), 2, 4),
        ((2, 3), (1, 3), 2, 4),
    ]
