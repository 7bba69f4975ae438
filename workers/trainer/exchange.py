"""Sums and copies of equal shares of a buffer: what ZeRO-1 sends over its shard group.

On GPUs these are the library's reduce-scatter and all-gather. gloo's reduce-scatter all-reduces a
copy of the whole buffer, and its all-gather fills a second buffer before it copies: on the CPU the
ranks send each other their shares directly instead, straight out of the buffer and, where nothing
is to be added, straight into it. Each rank sends (n - 1) / n of the buffer, the least there is.
Where they share memory its collectives do the same.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from workers.trainer.collectives import Pending, start_all_gather, start_reduce_scatter
from workers.trainer.groups import Group


def start_sum_of_shares(whole: Tensor, group: Group, tag: int) -> Pending | None:
    """Starts summing the buffer over the group; each rank gets the sum of its own share, in place.

    The other shares keep what they held. Tags, the same on every rank, tell apart what is under way
    at once in one group.
    """
    shares, rank = _shares(whole, group)
    if group.lane is not None or whole.device.type != "cpu":
        return start_reduce_scatter(shares[rank], whole, group)
    received = [torch.empty_like(shares[rank]) for _ in shares[1:]]

    def add() -> None:
        for share in received:
            shares[rank].add_(share)

    outgoing = [share for peer, share in enumerate(shares) if peer != rank]
    return _Exchange(outgoing, received, group, 2 * tag, add)


def start_gather_of_shares(whole: Tensor, group: Group, tag: int) -> Pending | None:
    """Starts bringing every rank's share to all ranks of the group, in place."""
    shares, rank = _shares(whole, group)
    if group.lane is not None or whole.device.type != "cpu":
        return start_all_gather(whole, shares[rank], group)
    incoming = [share for peer, share in enumerate(shares) if peer != rank]
    return _Exchange([shares[rank]] * len(incoming), incoming, group, 2 * tag + 1)


class _Exchange:
    """A tensor to each peer and one from each, in the order of the group's ranks."""

    def __init__(
        self,
        outgoing: list[Tensor],
        incoming: list[Tensor],
        group: Group,
        tag: int,
        when_received: Callable[[], None] = lambda: None,
    ) -> None:
        peers = [peer for place, peer in enumerate(group.ranks) if place != group.rank]
        self._receives = [
            dist.irecv(tensor, peer, group.process_group, tag)
            for tensor, peer in zip(incoming, peers, strict=True)
        ]
        self._sends = [
            dist.isend(tensor, peer, group.process_group, tag)
            for tensor, peer in zip(outgoing, peers, strict=True)
        ]
        self._when_received = when_received

    def wait(self) -> None:
        for work in self._receives:
            assert work is not None
            work.wait()
        self._when_received()
        for work in self._sends:
            assert work is not None
            work.wait()


def _shares(whole: Tensor, group: Group) -> tuple[tuple[Tensor, ...], int]:
    """The equal shares of the buffer in the order of the ranks, and this rank's place."""
    return torch.chunk(whole, group.size), group.rank
