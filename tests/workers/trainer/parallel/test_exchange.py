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
from tests.workers.trainer.tolerances import assert_close
from workers.trainer.comm.collectives import start_gather_of_shares, start_sum_of_shares
from workers.trainer.comm.groups import AxisGroup
from workers.trainer.comm.mesh import build_mesh

pytestmark = pytest.mark.ranks

SHARE = 192


def world_group(rank: int, num_ranks: int, *, shares_memory: bool) -> AxisGroup:
    layout = make_layout(dp=num_ranks, num_microbatches=1)
    mesh = build_mesh(rank, layout, tied_embeddings=False, shares_memory=shares_memory)
    assert mesh.world_group is not None
    assert (mesh.world_group.lane is not None) is shares_memory
    return mesh.world_group


def drawn(rank: int, num_ranks: int, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(num_ranks * SHARE, generator=generator)


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_rank_gets_the_sum_of_its_share(num_ranks: int, shares_memory: bool) -> None:
    def work(rank: int) -> Any:
        group = world_group(rank, num_ranks, shares_memory=shares_memory)
        buffers = [drawn(rank, num_ranks, seed=seed) for seed in range(3)]
        pending = [start_sum_of_shares(b, group, tag) for tag, b in enumerate(buffers)]
        for each in reversed(pending):  # in any order: they do not take each other's
            assert each is not None
            each.wait()
        return [buffer.numpy() for buffer in buffers]

    for rank, buffers in enumerate(run_ranks(num_ranks, work)):
        for seed, found in enumerate(buffers):
            sent = [drawn(peer, num_ranks, seed=seed) for peer in range(num_ranks)]
            own = slice(rank * SHARE, (rank + 1) * SHARE)
            assert_close(torch.from_numpy(found)[own], sum(sent)[own], length=num_ranks)
            others = torch.ones(num_ranks * SHARE, dtype=torch.bool)
            others[own] = False
            assert torch.equal(torch.from_numpy(found)[others], sent[rank][others])


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_shares_of_the_peers_are_added_in_their_order(
    num_ranks: int, shares_memory: bool
) -> None:
    """To what has this rank's part: its own share of the buffer is not looked at."""

    def work(rank: int) -> Any:
        group = world_group(rank, num_ranks, shares_memory=shares_memory)
        buffer, sum_ = drawn(rank, num_ranks), drawn(rank, 1, seed=9)
        buffer.view(num_ranks, -1)[rank] = math.nan
        pending = start_sum_of_shares(buffer, group, 0, into=sum_, accumulates=True)
        assert pending is not None
        pending.wait()
        return sum_.numpy()

    for rank, found in enumerate(run_ranks(num_ranks, work)):
        expected = drawn(rank, 1, seed=9)
        for peer in range(num_ranks):
            if peer != rank:
                expected += drawn(peer, num_ranks).view(num_ranks, -1)[rank]
        assert torch.equal(torch.from_numpy(found), expected)


@pytest.mark.parametrize("shares_memory", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_rank_gets_every_share(dtype: torch.dtype, shares_memory: bool) -> None:
    def work(rank: int) -> Any:
        group = world_group(rank, 3, shares_memory=shares_memory)
        whole = torch.full((3 * SHARE,), -1.0, dtype=dtype)
        whole[rank * SHARE : (rank + 1) * SHARE] = rank
        pending = start_gather_of_shares(whole, group, 0)
        assert pending is not None
        pending.wait()
        return whole.float().numpy()

    expected = torch.arange(3.0).repeat_interleave(SHARE)
    for found in run_ranks(3, work):
        assert torch.equal(torch.from_numpy(found), expected)


def test_a_rank_sends_no_more_than_what_others_need() -> None:
    """gloo's reduce-scatter sends what an all-reduce does, and its all-gather copies once more."""

    def work(rank: int) -> Any:
        group = world_group(rank, 3, shares_memory=False)
        whole = drawn(rank, 3)
        with CountingCollectives() as counting:
            for start in (start_sum_of_shares, start_gather_of_shares):
                pending = start(whole, group, 0)
                assert pending is not None
                pending.wait()
        return dict(counting.counts)

    for counts in run_ranks(3, work):
        assert counts == {"c10d::send": 4, "c10d::recv_": 4}
