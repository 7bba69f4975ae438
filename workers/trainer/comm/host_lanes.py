"""Collectives and transfers of ranks that share memory; what they promise is what gloo's do.

A message goes in pieces through the slots of its writer's stream. Who starts an operation writes
what has room at once, so that others can read it while this rank computes; the rest follows
whenever this rank waits for anything.

A group's operations are done in the order in which they were started, the same on all its ranks.
A sum is added up in the order of the ranks, on each rank the same bits; what has 16 bits is added
up in fp32 and rounded once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final, Literal

import torch
from torch import Tensor

from workers.trainer.host import Host, Operation
from workers.trainer.shared_memory import SLOT_BYTES, SLOTS_A_HALF, Region, slot_index

MESSAGE_BYTES: Final = SLOT_BYTES * SLOTS_A_HALF
"""What fits into a stream at once, so that its writer can compute on."""

Reduction = Literal["sum", "max"]


class _Ring:
    """The writer's or a reader's end of a stream: which slot a piece of a message lies in."""

    def __init__(self) -> None:
        self._num_messages = self._num_pieces = 0
        self._last_use = [0] * (2 * SLOTS_A_HALF)

    def begin(self, num_pieces: int) -> tuple[int, int]:
        """A message's number, and how many pieces came before it."""
        number, first = self._num_messages, self._num_pieces
        self._num_messages += 1
        self._num_pieces += num_pieces
        return number, first

    def free_from(self, slot: int) -> int:
        """How many pieces must have been taken before the slot may be written over."""
        return self._last_use[slot]

    def use(self, slot: int, piece: int) -> None:
        """The slot holds this piece, counted from 1 over all messages."""
        self._last_use[slot] = piece


class Lane:
    """The shared memory of a group: collectives of all its ranks, and transfers to neighbours."""

    def __init__(self, host: Host, region: Region, *, ranks: Sequence[int], rank: int) -> None:
        """Of a group of these global ranks; `rank` is this one's place among them."""
        self.host, self.region, self.rank, self.size = host, region, rank, len(ranks)
        self.peers = tuple(peer for place, peer in enumerate(ranks) if place != rank)
        self.ranks = tuple(ranks)
        self.ring = _Ring()
        self.counts: Counter[str] = Counter()
        """Operations that were started, by kind."""
        self._queue = host.new_queue()
        self._links: dict[tuple[int, bool], tuple[_Ring, deque[Operation]]] = {}

    def start_all_reduce(self, tensor: Tensor, reduction: Reduction = "sum") -> Operation:
        """Starts reducing the tensor over the group, in place."""
        return self._start("all_reduce", _AllReduce(self, tensor, reduction))

    def start_reduce_scatter(self, own: Tensor, whole: Tensor) -> Operation:
        """Starts summing `whole`; this rank's share lands in `own`, which may be a part of it."""
        return self._start("reduce_scatter", _ReduceScatter(self, own, whole))

    def start_all_gather(self, whole: Tensor, own: Tensor) -> Operation:
        """Starts filling `whole` with every rank's `own`, which may be a part of it."""
        return self._start("all_gather", _AllGather(self, whole, own))

    def start_send(self, tensor: Tensor, to: int, channel: int) -> Operation:
        """Starts sending to the place `to` of the group; its stream is (this rank, channel)."""
        ring, queue = self._link(self.rank, channel, is_writer=True)
        self.counts["send"] += 1
        operation = _Send(self, tensor, self._link_stream(self.rank, channel), ring, to)
        self.host.start(operation, queue)
        return operation

    def start_receive(self, tensor: Tensor, source: int, channel: int) -> Operation:
        """Starts receiving from the stream (source, channel), of which this rank is the only reader."""
        ring, queue = self._link(source, channel, is_writer=False)
        self.counts["receive"] += 1
        operation = _Receive(self, tensor, self._link_stream(source, channel), ring, source)
        self.host.start(operation, queue)
        return operation

    def _start(self, kind: str, operation: Operation) -> Operation:
        self.counts[kind] += 1
        self.host.start(operation, self._queue)
        return operation

    def _link_stream(self, writer: int, channel: int) -> int:
        return self.size + 2 * writer + channel

    def _link(
        self, writer: int, channel: int, *, is_writer: bool
    ) -> tuple[_Ring, deque[Operation]]:
        key = self._link_stream(writer, channel), is_writer
        if key not in self._links:
            self._links[key] = _Ring(), self.host.new_queue()
        return self._links[key]


class _OfLane(Operation):
    """An operation of a group's shared memory."""

    def __init__(self, lane: Lane, peers: tuple[int, ...]) -> None:
        super().__init__(lane.host, peers)
        self._lane, self._region = lane, lane.region

    def arm(self) -> None:
        self._region.arm(self._lane.rank)

    def sleep(self, at_most_s: float) -> None:
        self._region.sleep(self._lane.rank, at_most_s)


class _Collective(_OfLane):
    """Every rank writes as many pieces as the others, and reads each of all streams at once."""

    def __init__(self, lane: Lane, num_pieces: int, dtype: torch.dtype) -> None:
        super().__init__(lane, lane.peers)
        self._num_pieces, self._dtype = num_pieces, dtype
        self._number, self._first = lane.ring.begin(num_pieces)
        self._posted = self._taken = 0
        self.is_done = num_pieces == 0

    @abstractmethod
    def _post(self, piece: int, slot: Tensor) -> None:
        """Writes what others need of this rank."""

    @abstractmethod
    def _take(self, piece: int, slots: list[Tensor]) -> None:
        """Reads what this rank needs of all, in the order of the ranks."""

    def advance(self) -> bool:
        lane, region, first = self._lane, self._region, self._first
        moved = False
        while self._posted < self._num_pieces:
            index = slot_index(self._number, self._posted)
            free_from = lane.ring.free_from(index)
            if any(region.taken(stream) < free_from for stream in range(lane.size)):
                break
            self._post(self._posted, region.slot(lane.rank, index, self._dtype))
            self._posted += 1
            lane.ring.use(index, first + self._posted)
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
    """Every rank reads all of what every other one has, and reduces all of it."""

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
    """A piece has a stretch of every rank's share, one after the other."""

    def __init__(self, lane: Lane, own: Tensor, whole: Tensor) -> None:
        size = max(SLOT_BYTES // whole.itemsize // lane.size, 1)
        self._shares = [torch.split(share, size) for share in whole.view(lane.size, -1)]
        self._own = torch.split(own.view(-1), size)
        self._size = size
        super().__init__(lane, len(self._own) if own.numel() else 0, whole.dtype)

    def _post(self, piece: int, slot: Tensor) -> None:
        for place, share in enumerate(self._shares):
            # Two ranks' sum has one order: what is this rank's own needs no copy.
            if self._lane.size > 2 or place != self._lane.rank:
                mine = share[piece]
                slot[place * self._size :][: len(mine)].copy_(mine)

    def _take(self, piece: int, slots: list[Tensor]) -> None:
        out, rank = self._own[piece], self._lane.rank
        parts = [slot[rank * self._size :][: len(out)] for slot in slots]
        if self._lane.size == 2:
            parts[rank] = self._shares[rank][piece]
        _add_up(parts, out)


class _AllGather(_Collective):
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


class _Transfer(_OfLane):
    """One end of a stream from one rank to another."""

    def __init__(self, lane: Lane, tensor: Tensor, stream: int, ring: _Ring, peer: int) -> None:
        super().__init__(lane, (lane.ranks[peer],))
        self._stream, self._ring = stream, ring
        self._pieces = torch.split(tensor.view(-1), SLOT_BYTES // tensor.itemsize)
        self._number, self._first = ring.begin(len(self._pieces))
        self._moved = 0

    def advance(self) -> bool:
        before = self._moved
        for piece in self._pieces[before:]:
            index = slot_index(self._number, self._moved)
            slot = self._region.slot(self._stream, index, piece.dtype)[: len(piece)]
            count = self._first + self._moved + 1
            if not self._may_move(index, count):
                break
            self._move(piece, slot)
            self._ring.use(index, count)
            self._tell(count)
            self._moved += 1
        self.is_done = self._moved == len(self._pieces)
        if self._moved > before:
            self._region.wake_others(self._lane.rank)
        return self._moved > before

    @abstractmethod
    def _may_move(self, index: int, count: int) -> bool:
        """Whether the other end is so far that the stream's count-th piece can be copied."""

    @abstractmethod
    def _move(self, piece: Tensor, slot: Tensor) -> None:
        """Copies it."""

    @abstractmethod
    def _tell(self, count: int) -> None:
        """Says that it is copied."""


class _Send(_Transfer):
    def _may_move(self, index: int, count: int) -> bool:  # noqa: ARG002 (the slot matters here)
        return self._region.taken(self._stream) >= self._ring.free_from(index)

    def _move(self, piece: Tensor, slot: Tensor) -> None:
        slot.copy_(piece)

    def _tell(self, count: int) -> None:
        self._region.set_posted(self._stream, count)


class _Receive(_Transfer):
    def _may_move(self, index: int, count: int) -> bool:  # noqa: ARG002 (the count matters here)
        return self._region.posted(self._stream) >= count

    def _move(self, piece: Tensor, slot: Tensor) -> None:
        piece.copy_(slot)

    def _tell(self, count: int) -> None:
        self._region.set_taken(self._stream, count)


def _add_up(parts: Sequence[Tensor], out: Tensor) -> None:
    """Sums in the order of the parts; more than two of 16 bits in fp32."""
    if len(parts) == 2:
        torch.add(parts[0], parts[1], out=out)  # in fp32 inside the operator, whatever the type
        return
    is_short = out.is_floating_point() and out.itemsize < 4
    total = parts[0].float() if is_short else torch.add(parts[0], parts[1], out=out)
    for part in parts[1 if is_short else 2 :]:
        total.add_(part)
    if is_short:
        out.copy_(total)
