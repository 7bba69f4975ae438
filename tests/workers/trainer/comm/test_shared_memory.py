"""Collectives through shared memory: any group, type and size, and peers that do not come."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from layout_tuner.search_spaces.layouts.layout import CP_COMM_TYPES, Layout
from layout_tuner.workers.trainer.comm import groups
from layout_tuner.workers.trainer.comm.collectives import (
    all_reduce,
    all_reduce_max,
    all_to_all,
    gather_rows,
    scatter_rows,
    start_all_reduce,
    start_gather_of_shares,
    start_sum_of_shares,
)
from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.comm.host_lanes import MESSAGE_BYTES, Lane
from layout_tuner.workers.trainer.comm.mesh import build_mesh
from layout_tuner.workers.trainer.comm.shared_memory import (
    SLOT_BYTES,
    SLOTS_A_HALF,
    Region,
    SharedFile,
    can_share,
)
from layout_tuner.workers.trainer.parallel.pipeline import Message, start_messages
from tests.workers.trainer.cases import (
    CUT,
    DP,
    PP,
    TP,
    VPP,
    ZERO,
    ZERO_2,
    ZERO_3,
    in_turn,
    make_layout,
    make_shape,
    make_training,
)
from tests.workers.trainer.parallel_layers import CountingCollectives
from tests.workers.trainer.ranks import run_ranks

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.skipif(not can_share(), reason="ranks share memory on x86-64 Linux alone"),
]

SIZES = (0, 1, 7, 1000, SLOT_BYTES // 4 + 3, 3 * SLOT_BYTES)
"""Elements: from none to several pieces, and for wide types to more than half a ring of them."""
LONGER_THAN_A_RING = SLOT_BYTES // 8 * (2 * SLOTS_A_HALF + 3) + 5
"""Elements of 64 bits that wait for slots to be read."""


def world(rank: int, num_ranks: int, **options: Any) -> AxisGroup:
    return build_mesh(rank, Layout(tp=num_ranks), tied_embeddings=False, **options).tp_group


def lane_of(group: AxisGroup) -> Lane:
    assert group.lane is not None, "the ranks do not share memory"
    return group.lane


def drawn(rank: int, size: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * size + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, (size,), generator=generator, dtype=dtype)


def in_rank_order(parts: list[Tensor]) -> Tensor:
    """The sum as it is promised: rank after rank, 16 bits in fp32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


@pytest.mark.sampled(2)
@in_turn(
    ("dtype", "num_ranks"),
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64],
    [2, 3, 4],
)
def test_sums_are_to_the_bit_in_the_order_of_the_ranks(dtype: torch.dtype, num_ranks: int) -> None:
    parts = {size: [drawn(rank, size, dtype) for rank in range(num_ranks)] for size in SIZES}
    sums = {size: in_rank_order(each) for size, each in parts.items()}

    def work(rank: int) -> bool:
        group = world(rank, num_ranks)
        lane_of(group)
        for size in SIZES:
            all_reduce(parts[size][rank], group)
            assert torch.equal(parts[size][rank], sums[size]), size
        return True

    assert all(run_ranks(num_ranks, work))


def test_a_message_longer_than_the_ring_goes_round_it() -> None:
    def counted(rank: int, extra: int) -> Tensor:
        return torch.arange(LONGER_THAN_A_RING + extra) % (251 + rank)

    def work(rank: int) -> bool:
        group = world(rank, 3)
        tensors = [counted(rank, extra) for extra in range(2)]
        works = [start_all_reduce(tensor, group) for tensor in tensors]
        for work in reversed(works):  # whoever waits does all that comes before, too
            work.wait()
        sums = [counted(0, extra) + counted(1, extra) + counted(2, extra) for extra in range(2)]
        return all(torch.equal(a, b) for a, b in zip(tensors, sums, strict=True))

    assert all(run_ranks(3, work))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("num_ranks", [3, 2, 4])
def test_everything_else_equals_what_gloo_does(num_ranks: int) -> None:
    """On whole numbers, whose sums are exact in any order."""

    def work(rank: int) -> bool:
        results = []
        for shares_memory in (True, False):
            group = world(rank, num_ranks, shares_memory=shares_memory)
            assert (group.lane is not None) is shares_memory
            found = []
            for rows in (1, 5, SLOT_BYTES // 16):
                whole = (drawn(rank, rows * num_ranks * 8, torch.float32) * 100).round()
                largest = whole.clone()
                all_reduce_max(largest, group)
                shares, gathered = whole.clone(), whole.clone()
                summing = start_sum_of_shares(shares, group, 0)
                start_gather_of_shares(gathered, group, 1).wait()
                summing.wait()
                own = shares.view(num_ranks, -1)[rank]
                scattered = scatter_rows(whole.view(-1, 8), group)
                found += [largest, own, gathered, scattered, gather_rows(scattered, group)]
                found.append(all_to_all(whole.view(num_ranks, -1), group))
            results.append(found)
        return all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    assert all(run_ranks(num_ranks, work))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_the_shares_of_the_peers_are_added_in_their_order(shares_memory: bool) -> None:
    """To what has this rank's part: its own share of the buffer is not looked at."""
    num_ranks, share = 3, 192

    def sent(rank: int) -> Tensor:
        return drawn(rank, num_ranks * share, torch.float32).view(num_ranks, share)

    def work(rank: int) -> Any:
        group = world(rank, num_ranks, shares_memory=shares_memory)
        assert (group.lane is not None) is shares_memory
        buffer, sum_ = sent(rank), drawn(rank, share, torch.float32)
        buffer[rank] = math.nan
        before = buffer.nan_to_num()
        start_sum_of_shares(buffer.view(-1), group, 0, into=sum_, accumulates=True).wait()
        assert torch.equal(buffer.nan_to_num(), before), "the buffer stays as it is"
        return sum_

    for rank, found in enumerate(run_ranks(num_ranks, work)):
        expected = drawn(rank, share, torch.float32)
        for peer in range(num_ranks):
            expected += sent(peer)[rank] if peer != rank else 0.0
        assert torch.equal(found, expected)


def test_over_gloo_a_rank_sends_no_more_than_what_others_need() -> None:
    """gloo's reduce-scatter sends what an all-reduce does, and its all-gather copies once more."""

    def work(rank: int) -> Any:
        group, whole = world(rank, 3, shares_memory=False), torch.ones(3 * 192)
        with CountingCollectives() as counting:
            for start in (start_sum_of_shares, start_gather_of_shares):
                start(whole, group, 0).wait()
        return dict(counting.counts)

    assert run_ranks(3, work) == [{"c10d::send": 4, "c10d::recv_": 4}] * 3


def test_windows_are_summed_in_place_and_may_be_overwritten_then() -> None:
    """However late a rank reads. In the order of the ranks, or onto what has this rank's part."""
    num_ranks, share, at = 3, 1000, 64

    def sent(rank: int, seed: int) -> Tensor:
        return drawn(10 * seed + rank, num_ranks * share, torch.float32)

    def work(rank: int) -> list[bool]:
        lane = lane_of(world(rank, num_ranks))
        window, own = lane.window(at + num_ranks * share, torch.float32), torch.empty(share)
        found, mine = [], slice(rank * share, (rank + 1) * share)
        for seed in range(4):
            time.sleep(0.05 * ((rank + seed) % num_ranks))
            whole = window[at:]
            whole.copy_(sent(rank, seed))
            expected = sum(sent(each, seed)[mine] for each in range(num_ranks))
            if seed % 2:
                expected = own.clone()
                for peer in range(num_ranks):
                    expected += sent(peer, seed)[mine] if peer != rank else 0.0
            lane.start_reduce_scatter(own, whole, accumulates=seed % 2 == 1).wait()
            window.fill_(math.nan)
            found.append(torch.equal(own, expected))
        return found

    assert all(map(all, run_ranks(num_ranks, work)))


def test_transfers_arrive_in_their_order_on_each_channel() -> None:
    """Among three ranks in a ring, more of them under way than the ring of slots holds."""
    sizes = [3, SLOT_BYTES, 2 * SLOT_BYTES, 5, SLOTS_A_HALF * SLOT_BYTES // 4] * 3

    def work(rank: int) -> bool:
        lane = lane_of(world(rank, 3))
        following, preceding = (rank + 1) % 3, (rank - 1) % 3
        sends = []
        for channel, peer in ((0, following), (1, preceding)):
            for index, size in enumerate(sizes):
                value = torch.full((size,), 100.0 * rank + 10.0 * channel + index)
                sends.append(lane.start_send(value, peer, channel))
        for channel, peer in ((1, following), (0, preceding)):
            for index, size in enumerate(sizes):
                value = torch.empty(size)
                lane.start_receive(value, peer, channel).wait()
                assert torch.all(value == 100.0 * peer + 10.0 * channel + index)
        for send in sends:
            send.wait()
        return True

    assert all(run_ranks(3, work))


def test_many_more_ranks_than_cores_still_get_on() -> None:
    cores = min(os.sched_getaffinity(0))

    def work(rank: int) -> float:
        os.sched_setaffinity(0, {cores})
        group = world(rank, 6)
        tensor = torch.ones(1000)
        for _ in range(100):
            all_reduce(tensor, group)
            tensor.div_(6)
        return float(tensor.sum())

    assert run_ranks(6, work) == [1000.0] * 6


def test_ranks_of_several_hosts_keep_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 say that they are of one host, 2 and 3 of another."""

    def work(rank: int) -> tuple[bool, bool, float]:
        monkeypatch.setattr(groups, "host_identity", lambda: f"host {rank // 2}")
        mesh = build_mesh(rank, Layout(tp=2, dp=2), tied_embeddings=False)
        tensor = torch.ones(1)
        all_reduce(tensor, mesh.copies.replica_group)
        all_reduce(tensor, mesh.tp_group)
        return mesh.tp_group.lane is not None, mesh.world_group.lane is not None, float(tensor)

    assert run_ranks(4, work) == [(True, False, 4.0)] * 4


def test_groups_of_a_rank_that_cannot_share_keep_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(rank: int) -> tuple[bool, bool]:
        if rank == 3:
            monkeypatch.setattr(groups, "can_share", lambda: False)
        mesh = build_mesh(rank, Layout(tp=2, pp=2), tied_embeddings=False)
        tensor = torch.ones(1)
        all_reduce(tensor, mesh.world_group)
        assert float(tensor) == 4.0
        return mesh.tp_group.lane is not None, mesh.pp_group.lane is not None

    shared, mixed = (True, True), (False, False)
    assert run_ranks(4, work) == [shared, (True, False), (False, True), mixed]


def test_large_groups_keep_to_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "MAX_RANKS", 2)

    def work(rank: int) -> bool:
        return world(rank, 3).lane is None

    assert all(run_ranks(3, work))


def test_what_is_shared_has_no_name_that_could_be_left_behind() -> None:
    def work(rank: int) -> set[Path]:
        before = set(Path("/dev/shm").iterdir())
        group = world(rank, 2)
        lane_of(group)
        all_reduce(torch.ones(4), group)
        return {path for path in Path("/dev/shm").iterdir() if "ranks" in path.name} - before

    assert run_ranks(2, work) == [set(), set()]
    mapped = Path("/proc/self/maps").read_text()
    assert "memfd:ranks" not in mapped, "nothing is made before the ranks are forked"


def test_a_shared_file_that_is_not_the_one_that_was_named_is_refused() -> None:
    file = SharedFile(2)
    process, descriptor, nonce = file.place
    Region(file.place, 2)
    with pytest.raises(ValueError, match="is another file"):
        Region((process, descriptor, nonce + 1), 2)
    file.close()
    with pytest.raises(OSError):
        Region(file.place, 2)


@pytest.mark.sampled(4)
@in_turn(
    ("axes", "precision"),
    [
        *(TP, CUT, PP, VPP, DP, ZERO, ZERO_2, ZERO_3),
        *({"cp": 2, "cp_comm_type": each} for each in CP_COMM_TYPES),
    ],
    ["fp32", "bf16"],
)
def test_two_ranks_train_to_the_bit_as_over_gloo(axes: dict[str, Any], precision: str) -> None:
    """A sum of two is the same in any order, so that nothing but the transport differs."""
    layout = make_layout(precision=precision, **axes)

    def work(rank: int) -> list[Any]:
        found: list[Any] = []
        for shares_memory in (True, False):
            mesh = build_mesh(rank, layout, tied_embeddings=False, shares_memory=shares_memory)
            training = make_training(make_shape(num_layers=4), mesh=mesh)
            losses = [training.step(training.batch(index)).loss for index in range(3)]
            assert (mesh.world_group.lane is not None) is shares_memory
            found += [losses, training.flat.weights.float().numpy()]
        return found

    for losses, weights, gloo_losses, gloo_weights in run_ranks(2, work):
        assert losses == gloo_losses
        assert (weights == gloo_weights).all()


@pytest.mark.parametrize(("size", "shares"), [(1000, True), (MESSAGE_BYTES // 4 + 1, False)])
def test_a_message_that_does_not_fit_goes_over_the_wire(size: int, shares: bool) -> None:
    def work(rank: int) -> tuple[bool, float]:
        mesh = build_mesh(rank, Layout(pp=2), tied_embeddings=False)
        value = torch.full((size,), float(rank))
        for pending in start_messages([Message(value, 1 - rank, 0, rank == 0)], mesh):
            pending.wait()
        return bool(lane_of(mesh.pp_group).counts), float(value.sum())

    assert run_ranks(2, work) == [(shares, 0.0)] * 2
