"""Collectives and transfers of ranks that share memory, with the same guarantees as gloo's.

A message is copied in pieces through the slots of its writer's stream. An operation writes as many
pieces as fit when it is started, so that peers can read them while this rank computes. The other
pieces follow while this rank waits for any operation. What lies in a window is read there.

The collectives of a group run in the order in which they were started, which must be the same on
all its ranks. A sum is added in the order of the ranks, so that all ranks get the same bits. 16-bit
values are added in fp32 and rounded once.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from layout_tuner.workers.trainer.comm.host_transfers import Host, Operation
from layout_tuner.workers.trainer.comm.shared_memory import (
    SLOT_BYTES,
    SLOTS_A_HALF,
    Region,
    slot_index,
)

MESSAGE_BYTES: Final = SLOT_BYTES * SLOTS_A_HALF
"""Largest message that fits into a stream at once, so that its writer need not wait."""

Reduction = Literal["sum", "max"]


class _Ring:
    """The writer's or a reader's count of the messages and pieces of a stream."""

    def __init__(self) -> None:
        self._num_messages = self._num_pieces = 0
        self.last_use = [0] * (2 * SLOTS_A_HALF)
        """The piece that each slot holds, counted from 1 over all messages. Once this number of
        pieces has been read, the slot may be overwritten."""

    def begin(self, num_pieces: int) -> tuple[int, int]:
        """Starts a message; returns its number and how many pieces came before it."""
        number, first = self._num_messages, self._num_pieces
        self._num_messages += 1
        self._num_pieces += num_pieces
        return number, first


class Lane:
    """The shared memory of a group: collectives of all its ranks, transfers between two of them."""

    def __init__(self, host: Host, region: Region, *, ranks: Sequence[int], rank: int) -> None:
        """For the group of these global ranks; `rank` is this rank's index in `ranks`."""
        self.host, self.region, self.rank, self.size = host, region, rank, len(ranks)
        self.peers = tuple(peer for place, peer in enumerate(ranks) if place != rank)
        self.ranks = tuple(ranks)
        self.ring = _Ring()
        self.counts: Counter[str] = Counter()
        """Number of operations started, by kind."""
        self.windows: list[Tensor] = []
        """Of each rank the memory that all of them can read, once `window` has opened it."""
        self._queue = host.new_queue()
        self._links: dict[int, tuple[_Ring, deque[Operation]]] = {}

    def window(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """This rank's window, which has the same size as every other one."""
        self.windows = [self.region.window(rank, num_elements, dtype) for rank in range(self.size)]
        return self.windows[self.rank]

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Operation:
        """Starts reducing the tensor over the group, in place."""
        return self._start("all_reduce", _AllReduce(self, tensor, reduction))

    def start_reduce_scatter(
        self, own: Tensor, whole: Tensor, *, accumulates: bool = False
    ) -> Operation:
        """Starts summing `whole`; `own`, which may be a part of it, gets this rank's share.

        With `accumulates` the other ranks' parts are added to `own`, which has this rank's. A part
        of the window is not copied.
        """
        begin = whole.untyped_storage().data_ptr()
        is_in_window = any(window.data_ptr() == begin for window in self.windows)
        kind = _WindowScatter if is_in_window else _ReduceScatter
        operation = kind(self, own, whole, accumulates=accumulates)
        return self._start("reduce_scatter", operation)

    def start_all_gather(self, whole: Tensor, own: Tensor) -> Operation:
        """Starts filling `whole` with the `own` of every rank; `own` may be a part of `whole`."""
        return self._start("all_gather", _AllGather(self, whole, own))

    def start_all_to_all(
        self,
        received: Tensor,
        shares: Tensor,
        rows_received: list[int],
        rows_sent: list[int],
        largest: int,
    ) -> Operation:
        """Starts sending each rank its rows of `shares`, and filling `received` with the peers'."""
        operation = _AllToAll(self, received, shares, rows_received, rows_sent, largest)
        return self._start("all_to_all", operation)

    def start_send(self, tensor: Tensor, to: int, channel: int) -> Operation:
        """Starts sending to rank `to` of the group, over the stream (this rank, channel)."""
        return self._start_transfer("send", tensor, writer=self.rank, peer=to, channel=channel)

    def start_receive(self, tensor: Tensor, source: int, channel: int) -> Operation:
        """Starts receiving over the stream (source, channel), which only this rank reads."""
        return self._start_transfer("receive", tensor, writer=source, peer=source, channel=channel)

    def _start(
        self, kind: str, operation: Operation, queue: deque[Operation] | None = None
    ) -> Operation:
        self.counts[kind] += 1
        self.host.start(operation, self._queue if queue is None else queue)
        return operation

    def _start_transfer(
        self, kind: str, tensor: Tensor, *, writer: int, peer: int, channel: int
    ) -> Operation:
        stream = self.size + 2 * writer + channel
        if stream not in self._links:
            self._links[stream] = _Ring(), self.host.new_queue()
        ring, queue = self._links[stream]
        is_writer = writer == self.rank
        operation = _Transfer(self, tensor, stream, ring, peer, is_writer=is_writer)
        return self._start(kind, operation, queue)


class _Collective(Operation):
    """Every rank writes the same number of pieces, and reads a piece from all streams at once."""

    def __init__(self, lane: Lane, num_pieces: int, dtype: torch.dtype) -> None:
        super().__init__(lane.host, lane.region, lane.rank, lane.peers)
        self._lane = lane
        self._num_pieces, self._dtype = num_pieces, dtype
        self._number, self._first = lane.ring.begin(num_pieces)
        self._posted = self._taken = 0
        self.is_done = num_pieces == 0

    @abstractmethod
    def _post(self, piece: int, slot: Tensor) -> None:
        """Writes this rank's piece into its slot."""

    @abstractmethod
    def _take(self, piece: int, slots: list[Tensor]) -> None:
        """Reads the piece from all ranks' slots, in the order of the ranks."""

    def advance(self) -> bool:
        lane, region, first = self._lane, self.region, self._first
        moved = False
        while self._posted < self._num_pieces:
            index = slot_index(self._number, self._posted)
            free_from = lane.ring.last_use[index]
            if any(region.taken(stream) < free_from for stream in range(lane.size)):
                break
            self._post(self._posted, region.slot(lane.rank, index, self._dtype))
            self._posted += 1
            lane.ring.last_use[index] = first + self._posted
            region.set_posted(lane.rank, first + self._posted)
            moved = True
        while self._taken < self._posted:
            needed = first + self._taken + 1
            if any(region.posted(stream) < needed for stream in range(lane.size)):
                break
            index = slot_index(self._number, self._taken)
            slots = [region.slot(stream, index, self._dtype) for stream in range(lane.size)]
            self._take(self._taken, slots)
            self._taken += 1
            region.set_taken(lane.rank, needed)
            moved = True
        self.is_done = self._taken == self._num_pieces
        if moved:
            region.wake_others(lane.rank)
        return moved


class _AllReduce(_Collective):
    """Every rank reads the whole tensor of every other rank and reduces all of it."""

    def __init__(self, lane: Lane, tensor: Tensor, reduction: Reduction) -> None:
        self._pieces = torch.split(tensor.view(-1), SLOT_BYTES // tensor.itemsize)
        super().__init__(lane, len(self._pieces) if tensor.numel() else 0, tensor.dtype)
        self._reduction = reduction

    def _post(self, piece: int, slot: Tensor) -> None:
        mine = self._pieces[piece]
        slot[: len(mine)].copy_(mine)

    def _take(self, piece: int, slots: list[Tensor]) -> None:
        out = self._pieces[piece]
        parts = [slot[: len(out)] for slot in slots]
        if self._reduction == "sum":
            _add_up(parts, out)
        else:
            torch.maximum(parts[0], parts[1], out=out)
            for part in parts[2:]:
                torch.maximum(out, part, out=out)


class _ReduceScatter(_Collective):
    """A piece holds a part of every rank's share, one after the other."""

    def __init__(self, lane: Lane, own: Tensor, whole: Tensor, *, accumulates: bool) -> None:
        self._accumulates = accumulates
        size = max(SLOT_BYTES // whole.itemsize // lane.size, 1)
        self._shares = [torch.split(share, size) for share in whole.view(lane.size, -1)]
        self._own = torch.split(own.view(-1), size)
        self._size = size
        super().__init__(lane, len(self._own) if own.numel() else 0, whole.dtype)

    def _post(self, piece: int, slot: Tensor) -> None:
        for place, share in enumerate(self._shares):
            # A sum of two values does not depend on their order: no copy of this rank's own share.
            if place != self._lane.rank or not (self._accumulates or self._lane.size == 2):
                mine = share[piece]
                slot[place * self._size :][: len(mine)].copy_(mine)

    def _take(self, piece: int, slots: list[Tensor]) -> None:
        out, rank = self._own[piece], self._lane.rank
        parts = [slot[rank * self._size :][: len(out)] for slot in slots]
        if self._lane.size == 2:
            parts[rank] = self._shares[rank][piece]
        _sum_into(out, parts, rank, accumulates=self._accumulates)


class _WindowScatter(_Collective):
    """A reduce-scatter that reads the ranks' windows in place: one piece, in no slot.

    It is done once every rank has read, so that windows may be overwritten.
    """

    def __init__(self, lane: Lane, own: Tensor, whole: Tensor, *, accumulates: bool) -> None:
        self._own, self._accumulates = own.view(1, -1), accumulates
        self._start = whole.storage_offset() + lane.rank * own.numel()
        super().__init__(lane, 1, own.dtype)

    def _post(self, piece: int, slot: Tensor) -> None:
        """What others read is in the window."""

    def _take(self, piece: int, slots: list[Tensor]) -> None:  # noqa: ARG002 - none is used
        out = self._own[piece]
        parts = [window[self._start :][: len(out)] for window in self._lane.windows]
        _sum_into(out, parts, self._lane.rank, accumulates=self._accumulates)

    def advance(self) -> bool:
        moved = super().advance()
        readers = range(self._lane.size)
        self.is_done = all(self.region.taken(reader) > self._first for reader in readers)
        return moved


class _AllGather(_Collective):
    """A piece holds a part of the writer's share."""

    def __init__(self, lane: Lane, whole: Tensor, own: Tensor) -> None:
        size = SLOT_BYTES // own.itemsize
        self._own = torch.split(own.view(-1), size)
        self._shares = [torch.split(share, size) for share in whole.view(lane.size, -1)]
        super().__init__(lane, len(self._own) if own.numel() else 0, own.dtype)

    def _post(self, piece: int, slot: Tensor) -> None:
        mine = self._own[piece]
        slot[: len(mine)].copy_(mine)
        into = self._shares[self._lane.rank][piece]
        if into.data_ptr() != mine.data_ptr():
            into.copy_(mine)

    def _take(self, piece: int, slots: list[Tensor]) -> None:
        for place, slot in enumerate(slots):
            if place != self._lane.rank:
                into = self._shares[place][piece]
                into.copy_(slot[: len(into)])


class _AllToAll(_Collective):
    """A piece holds a part of every other rank's share; a reader takes its own.

    Shares may differ in size: those that are not the largest have fewer pieces. `largest` is the
    most rows that any rank of the group sends to one rank.
    """

    def __init__(
        self,
        lane: Lane,
        received: Tensor,
        shares: Tensor,
        rows_received: list[int],
        rows_sent: list[int],
        largest: int,
    ) -> None:
        size = max(SLOT_BYTES // shares.itemsize // (lane.size - 1), 1)
        width, self._size = math.prod(shares.shape[1:]), size
        sent, into = torch.split(shares, rows_sent), torch.split(received, rows_received)
        into[lane.rank].copy_(sent[lane.rank])
        self._shares = [torch.split(share.view(-1), size) for share in sent]
        self._received = [torch.split(share.view(-1), size) for share in into]
        super().__init__(lane, -(-largest * width // size), shares.dtype)

    def _post(self, piece: int, slot: Tensor) -> None:
        for place, share in enumerate(self._shares):
            if place != self._lane.rank and piece < len(share):
                at = self._place(self._lane.rank, place)
                slot[at:][: len(share[piece])].copy_(share[piece])

    def _take(self, piece: int, slots: list[Tensor]) -> None:
        for place, slot in enumerate(slots):
            if place != self._lane.rank and piece < len(self._received[place]):
                into, at = self._received[place][piece], self._place(place, self._lane.rank)
                into.copy_(slot[at:][: len(into)])

    def _place(self, writer: int, reader: int) -> int:
        """Where a writer's slot has the reader's part."""
        return (reader - writer - 1) % self._lane.size * self._size


class _Transfer(Operation):
    """A message between two ranks: on the writer a send, on the reader a receive."""

    def __init__(
        self, lane: Lane, tensor: Tensor, stream: int, ring: _Ring, peer: int, *, is_writer: bool
    ) -> None:
        super().__init__(lane.host, lane.region, lane.rank, (lane.ranks[peer],))
        self._stream, self._ring, self._is_writer = stream, ring, is_writer
        self._pieces = torch.split(tensor.view(-1), SLOT_BYTES // tensor.itemsize)
        self._number, self._first = ring.begin(len(self._pieces))
        self._moved = 0

    def advance(self) -> bool:
        region, stream, ring = self.region, self._stream, self._ring
        before = self._moved
        for piece in self._pieces[before:]:
            index = slot_index(self._number, self._moved)
            slot = region.slot(stream, index, piece.dtype)[: len(piece)]
            count = self._first + self._moved + 1
            if self._is_writer:
                if region.taken(stream) < ring.last_use[index]:
                    break
                slot.copy_(piece)
                ring.last_use[index] = count
                region.set_posted(stream, count)
            else:
                if region.posted(stream) < count:
                    break
                piece.copy_(slot)
                region.set_taken(stream, count)
            self._moved += 1
        self.is_done = self._moved == len(self._pieces)
        if self._moved > before:
            region.wake_others(self.rank)
        return self._moved > before


def _sum_into(out: Tensor, parts: list[Tensor], rank: int, *, accumulates: bool) -> None:
    """Sums the ranks' parts; with `accumulates`, the others' onto `out`, which has this rank's."""
    if accumulates:
        for part in (*parts[:rank], *parts[rank + 1 :]):
            out.add_(part)
    else:
        _add_up(parts, out)


def _add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sums in the order of the parts; more than two 16-bit parts in fp32, rounded once."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # the operator adds in fp32, whatever the type
        return
    is_short = out.is_floating_point() and out.itemsize < 4
    total = parts[0].float() if is_short else torch.add(parts[0], parts[1], out=out)
    for part in parts[1 if is_short else 2 :]:
        total.add_(part)
    if is_short:
        out.copy_(total)
