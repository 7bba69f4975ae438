"""Collectives over one axis of the mesh. A group of None is an axis of one rank: nothing to do.

Ranks of one host exchange CPU tensors through shared memory, other ranks through gloo, NCCL or
RCCL. Inside a forward or backward pass the stopwatch counts a collective as tensor parallelism,
elsewhere as the part of the step that is open.

`start_sum_of_shares` and `start_gather_of_shares` are what ZeRO sends over its shard group, in
place. gloo's reduce-scatter all-reduces a copy of the whole buffer, and its all-gather fills a
second buffer and copies it. With gloo the ranks therefore send each other their shares directly.
Each rank sends (n - 1) / n of the buffer, the least that is possible.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import ReduceOp, Work
from torch.utils._python_dispatch import _get_current_dispatch_mode

from layout_tuner.workers.trainer.comm.groups import AxisGroup
from layout_tuner.workers.trainer.comm.host_lanes import Reduction
from layout_tuner.workers.trainer.rank_memory import LogicalPeak
from layout_tuner.workers.trainer.stopwatch import communication

_RELEASED_WITHIN_S: Final = 1.0
"""How long a collective's tensors may be held after its end; what is held longer is counted."""
_POLL_S: Final = 2e-5
_RING_TAG: Final = 1 << 16
"""Above the tags of shares of buckets, whose exchanges may be in flight in the same group."""


class Pending(Protocol):
    """Communication that was started."""

    def wait(self) -> Any:
        """Returns once received tensors may be read and sent tensors may be overwritten."""


def all_reduce(tensor: Tensor, group: AxisGroup | None) -> None:
    """Sums the tensor over the group, in place."""
    finish(start_all_reduce(tensor, group))


def all_reduce_max(tensor: Tensor, group: AxisGroup | None) -> None:
    """Takes the maximum of each element over the group, in place."""
    finish(start_all_reduce(tensor, group, "max"))


def start_all_reduce(
    tensor: Tensor, group: AxisGroup | None, reduction: Reduction = "sum"
) -> Pending | None:
    """Starts reducing the tensor over the group, in place; `finish` before reading it."""
    if group is None:
        return None
    with communication:
        if group.lane is not None:
            return group.lane.start_all_reduce(tensor, reduction)
        operation = ReduceOp.MAX if reduction == "max" else ReduceOp.SUM
        return _start_collective(dist.all_reduce, tensor, op=operation, group=group.process_group)


def start_reduce_scatter(own: Tensor, whole: Tensor, group: AxisGroup) -> Pending | None:
    """Starts summing `whole` over the group; `own` gets this rank's share of the sum."""
    # Newer torch deprecates the old name, and older torch lacks the new one.
    reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    with communication:
        if group.lane is not None:
            return group.lane.start_reduce_scatter(own, whole)
        return _start_collective(reduce_scatter, own, whole, group=group.process_group)


def start_all_gather(whole: Tensor, own: Tensor, group: AxisGroup) -> Pending | None:
    """Starts filling `whole` with the `own` of every rank, in the order of the ranks."""
    all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    with communication:
        if group.lane is not None:
            return group.lane.start_all_gather(whole, own)
        return _start_collective(all_gather, whole, own, group=group.process_group)


def start_scatter_rows(whole: Tensor, group: AxisGroup) -> tuple[Tensor, Pending | None]:
    """Starts a reduce-scatter of `whole`; returns this rank's rows of the sum."""
    own = whole.new_empty(whole.shape[0] // group.size, *whole.shape[1:])
    return own, start_reduce_scatter(own, whole, group)


def start_gather_rows(own: Tensor, group: AxisGroup) -> tuple[Tensor, Pending | None]:
    """Starts an all-gather of every rank's rows; returns all rows."""
    whole = own.new_empty(own.shape[0] * group.size, *own.shape[1:])
    return whole, start_all_gather(whole, own.contiguous(), group)


def scatter_rows(whole: Tensor, group: AxisGroup) -> Tensor:
    """Reduce-scatter: this rank's rows of the sum of `whole` over the group."""
    own, work = start_scatter_rows(whole, group)
    finish(work)
    return own


def gather_rows(own: Tensor, group: AxisGroup) -> Tensor:
    """All-gather: the rows of every rank, in the order of the ranks."""
    whole, work = start_gather_rows(own, group)
    finish(work)
    return whole


def scatter_columns(whole: Tensor, group: AxisGroup) -> Tensor:
    """Reduce-scatter: this rank's columns of the sum of `whole` over the group."""
    shares = whole.view(len(whole), group.size, -1)
    return scatter_rows(shares.transpose(0, 1).flatten(0, 1), group)


def gather_columns(own: Tensor, group: AxisGroup) -> Tensor:
    """All-gather: the columns of every rank, in the order of the ranks."""
    shares = gather_rows(own, group).view(group.size, *own.shape)
    return shares.transpose(0, 1).flatten(1)


def finish(work: Pending | None) -> None:
    """Waits for the communication that a `start_` function returned."""
    if work is not None:
        with communication:
            work.wait()


def all_to_all(shares: Tensor, group: AxisGroup) -> Tensor:
    """Sends share r to rank r of the group; returns what the ranks sent, in their order."""
    each = [len(shares) // group.size] * group.size
    received, work = start_all_to_all_rows(shares, group, each, each, largest=each[0])
    finish(work)
    return received


def start_all_to_all_rows(
    rows: Tensor, group: AxisGroup, sent: list[int], received: list[int], *, largest: int
) -> tuple[Tensor, Pending | None]:
    """Starts sending the next `sent[r]` rows to rank r of the group; returns what ranks sent.

    `rows` has the rows for each rank, one after the other; `largest` is the most rows that any rank
    of the group sends to one rank.
    """
    into = rows.new_empty(sum(received), *rows.shape[1:])
    with communication:
        if group.lane is not None:
            return into, group.lane.start_all_to_all(into, rows, received, sent, largest)
        return into, _start_collective(
            dist.all_to_all_single,
            into,
            rows,
            output_split_sizes=received,
            input_split_sizes=sent,
            group=group.process_group,
        )


def start_ring_step(
    outgoing: Tensor, incoming: Tensor, group: AxisGroup, channel: int
) -> list[Pending]:
    """Starts sending a tensor to the next rank of the group, and receiving the previous one's.

    Tensors on different channels, 0 and 1, may be in flight at once.
    """
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    with communication:
        if group.lane is not None:
            return [
                group.lane.start_send(outgoing, after, channel),
                group.lane.start_receive(incoming, before, channel),
            ]
        ranks, pg, tag = group.ranks, group.process_group, _RING_TAG + channel
        return list(
            dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, outgoing, ranks[after], pg, tag),
                    dist.P2POp(dist.irecv, incoming, ranks[before], pg, tag),
                ]
            )
        )


def barrier(device: torch.device) -> None:
    """Waits for the device, then for every rank of the job."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
    else:
        dist.barrier()


def start_sum_of_shares(
    whole: Tensor,
    group: AxisGroup,
    tag: int,
    into: Tensor | None = None,
    *,
    accumulates: bool = False,
) -> Pending | None:
    """Starts summing the buffer over the group; each rank gets the sum of its own share, in place.

    The other shares keep their values. `tag` is the same on every rank and distinguishes exchanges
    that run at the same time in one group. With `into` the sum goes there, and the own share of the
    buffer may be lost. With `accumulates` it is added to what is there; on a CPU this rank's part
    is there already.
    """
    shares = torch.chunk(whole, group.size)
    own = shares[group.rank]
    if into is None:
        into = own
    elif group.lane is not None:
        with communication:
            return group.lane.start_reduce_scatter(into, whole, accumulates=accumulates)
    elif whole.device.type != "cpu":
        work = start_reduce_scatter(own, whole, group)
        return _Moved(work, own, into, accumulates=accumulates)
    elif not accumulates:
        into.copy_(own)
    if group.lane is not None or whole.device.type != "cpu":
        return start_reduce_scatter(own, whole, group)
    received = [torch.empty_like(own) for _ in shares[1:]]
    outgoing = [share for peer, share in enumerate(shares) if peer != group.rank]
    return _Exchange(outgoing, received, group, 2 * tag, add_to=into)


def start_gather_of_shares(
    whole: Tensor, group: AxisGroup, tag: int, own: Tensor | None = None
) -> Pending | None:
    """Starts an all-gather of the ranks' shares: of `own`, or without it of shares in the buffer.

    On a GPU it runs on the communicator's stream, after what the computing stream has been given
    before: a buffer may be filled again as soon as the kernels that read it were launched.
    """
    shares = torch.chunk(whole, group.size)
    if group.lane is not None or whole.device.type != "cpu":
        return start_all_gather(whole, shares[group.rank] if own is None else own, group)
    if own is None:
        own = shares[group.rank]
    else:
        shares[group.rank].copy_(own)
    incoming = [share for peer, share in enumerate(shares) if peer != group.rank]
    return _Exchange([own] * len(incoming), incoming, group, 2 * tag + 1)


class _Moved:
    """A collective whose result goes, or is added, to another tensor at its end."""

    def __init__(
        self, work: Pending | None, own: Tensor, into: Tensor, *, accumulates: bool
    ) -> None:
        self._work, self._own, self._into, self._accumulates = work, own, into, accumulates

    def wait(self) -> None:
        assert self._work is not None
        self._work.wait()
        if self._accumulates:
            self._into.add_(self._own)
        else:
            self._into.copy_(self._own)


class _Exchange:
    """One tensor to and one from each peer, in the order of the group's ranks.

    The received tensors are added to `add_to`, where it is given, in the same order.
    """

    def __init__(
        self,
        outgoing: list[Tensor],
        incoming: list[Tensor],
        group: AxisGroup,
        tag: int,
        add_to: Tensor | None = None,
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
        self._incoming, self._add_to = incoming, add_to

    def wait(self) -> None:
        for work in self._receives:
            assert work is not None
            work.wait()
        if self._add_to is not None:
            for tensor in self._incoming:
                self._add_to.add_(tensor)
        for work in self._sends:
            assert work is not None
            work.wait()


def _start_collective(collective: Callable[..., Any], *tensors: Tensor, **options: Any) -> Work:
    """Starts a collective over these tensors.

    A thread of gloo's holds the tensors for some microseconds after it has reported the end of the
    collective, on a busy core for milliseconds. They would be counted as live memory in tests that
    count tensors to the byte. There, and only there, waiting for a collective includes waiting
    until the thread has released its tensors.
    """
    counting = _get_current_dispatch_mode()
    if not isinstance(counting, LogicalPeak):
        work: Work = collective(*tensors, async_op=True, **options)
        return work
    # The transport gets its own tensor objects over the same memory, which die when released.
    shared = [tensor.detach() for tensor in tensors]
    work = collective(*shared, async_op=True, **options)
    return _ReleasedWork(work, shared, counting)


class _ReleasedWork(Work):
    """A collective that ends when the transport has released its tensors."""

    def __init__(self, work: Work, shared: list[Tensor], counting: LogicalPeak) -> None:
        super().__init__()
        self._work: Work | None = work
        self._held: list[weakref.ref[Any]] = [weakref.ref(tensor) for tensor in shared]
        self._counting = counting

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits for the collective, then until its tensors are released."""
        if self._work is None:
            return True
        before = list(self._counting.storages.values())
        self._work.wait(timeout)
        self._work = None
        # gloo's reduce-scatter works on a copy, which is first seen when the result is cut from it.
        known = {id(storage) for storage in before}
        storages = self._counting.storages.values()
        self._held += [storage for storage in storages if id(storage) not in known]
        deadline = time.monotonic() + _RELEASED_WITHIN_S
        while any(held() is not None for held in self._held) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return True
