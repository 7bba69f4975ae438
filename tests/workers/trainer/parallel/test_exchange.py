"""Sums and copies of shares among ranks: what the CPU sends instead of gloo's own collectives."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.trainer.cases import make_layout
from tests.workers.trainer.parallel_layers import CountingCollectives
from tests.workers.trainer.ranks import run_ranks
from workers.trainer.comm.collectives import start_gather_of_shares, start_sum_of_shares
from workers.trainer.comm.groups import AxisGroup
from workers.trainer.comm.mesh import build_mesh

pytestmark = pytest.mark.ranks

NUM_RANKS, SHARE = 3, 192


def world_group(rank: int, *, shares_memory: bool) -> AxisGroup:
    layout = make_layout(dp=NUM_RANKS, num_microbatches=1)
    mesh = build_mesh(rank, layout, tied_embeddings=False, shares_memory=shares_memory)
    assert mesh.world_group is not None
    assert (mesh.world_group.lane is not None) is shares_memory
    return mesh.world_group


def drawn(rank: int, shares: int = NUM_RANKS, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(shares * SHARE, generator=generator)


@pytest.mark.parametrize("shares_memory", [True, False])
def test_the_shares_of_the_peers_are_added_in_their_order(shares_memory: bool) -> None:
    """To what has this rank's part: its own share of the buffer is not looked at."""

    def work(rank: int) -> Any:
        group = world_group(rank, shares_memory=shares_memory)
        buffer, sum_ = drawn(rank), drawn(rank, 1, seed=9)
        buffer.view(NUM_RANKS, -1)[rank] = math.nan
        pending = start_sum_of_shares(buffer, group, 0, into=sum_, accumulates=True)
        assert pending is not None
        pending.wait()
        sent = drawn(rank)
        sent.view(NUM_RANKS, -1)[rank] = math.nan
        assert torch.equal(buffer.nan_to_num(), sent.nan_to_num()), "the buffer stays as it is"
        return sum_.numpy()

    for rank, found in enumerate(run_ranks(NUM_RANKS, work)):
        expected = drawn(rank, 1, seed=9)
        for peer in range(NUM_RANKS):
            if peer != rank:
                expected += drawn(peer).view(NUM_RANKS, -1)[rank]
        assert torch.equal(torch.from_numpy(found), expected)


def test_a_rank_sends_no_more_than_what_others_need() -> None:
    """gloo's reduce-scatter sends what an all-reduce does, and its all-gather copies once more."""

    def work(rank: int) -> Any:
        group = world_group(rank, shares_memory=False)
        whole = drawn(rank)
        with CountingCollectives() as counting:
            for start in (start_sum_of_shares, start_gather_of_shares):
                pending = start(whole, group, 0)
                assert pending is not None
                pending.wait()
        return dict(counting.counts)

    for counts in run_ranks(NUM_RANKS, work):
        assert counts == {"c10d::send": 4, "c10d::recv_": 4}
