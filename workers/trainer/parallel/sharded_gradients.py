"""Sharded gradients (ZeRO-2 and 3): a rank keeps the sums of its own shares alone.

The gradients of a layer are whole only from its backward pass until they have been sent, so they
are sent for each micro-batch. To send them once a step they would have to accumulate in a whole
buffer, which is what ZeRO-1 has. The window holds two layers: the gradients of one are on their way
while the next layer's are computed. Peers that share memory with this rank read them there.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import NamedTuple

from torch import Tensor

from layout_tuner.workers.trainer.comm.collectives import (
    Pending,
    finish,
    start_all_reduce,
    start_sum_of_shares,
)
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.parameters import ModelParameter
from layout_tuner.workers.trainer.parallel.flat_buffers import FlatBuffers, Slot, Span, Window
from layout_tuner.workers.trainer.parallel.gradient_reduction import GradientReduction
from layout_tuner.workers.trainer.stopwatch import part


class _Sent(NamedTuple):
    """A bucket's gradients of one micro-batch, on their way."""

    bucket: int
    span: Span
    """Their place in the window."""
    work: Pending | None


class ShardedGradients(GradientReduction):
    """Reduces the gradients of one rank, for each bucket and micro-batch.

    Communicates, for each bucket: a reduce-scatter over the shard group for each micro-batch; after
    the last one an all-reduce of the owned share over the replica group. Then, as
    `GradientReduction` does, over tp and the embedding group. The order is that of the passes,
    which is the same on all ranks along dp.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh) -> None:
        super().__init__(flat, mesh)
        assert flat.gradient_window is not None
        self._window: Window = flat.gradient_window
        self._slots: list[list[Slot]] = [[] for _ in self.owned]
        self._in_share: dict[ModelParameter, Tensor] = {}
        """The gradients of parameters that are whole in the own share: from the second micro-batch
        on they are added there. A GPU's reduction sums all parts at once, so there it has none."""
        self._adds_own = flat.gradients.device.type == "cpu"
        for slot in flat.slots:
            self._slots[slot.bucket].append(slot)
            span = Span(slot.start, slot.end)
            if self._adds_own and span in slot.overlaps([self.owned[slot.bucket]]):
                self._in_share[slot.parameter] = flat.own_gradients(span).view(slot.shape)
            if flat.copies[slot.bucket].shards_gradients:
                slot.parameter.when_first = partial(self._open, slot.bucket)
        self._shares = [self._own(index) for index in range(len(self.owned))]
        self._views: dict[tuple[int, Span], tuple[list[Tensor], list[Tensor]]] = {}

    def begin(self) -> None:
        """Begins a step, in which no gradient is there yet."""
        for slot in self.flat.slots:
            is_sharded = self.flat.copies[slot.bucket].shards_gradients
            slot.expect_gradients(1 if is_sharded else self.mesh.layout.num_microbatches)
        self._missing = list(self._members)
        self._unsent = [self.mesh.layout.num_microbatches] * len(self.owned)
        self._open_at: dict[int, Span] = {}
        self._sent: deque[_Sent] = deque()
        self._pending = [None] * len(self.owned)

    def _open(self, bucket: int) -> None:
        """Gives the gradients of a bucket their place, at the first of a micro-batch."""
        if bucket in self._open_at:
            return
        size, window = self.flat.plan.size(bucket), self._window
        is_reserved = bucket == self.flat.plan.used_twice
        with part("dp"):
            while any(sent.bucket == bucket for sent in self._sent) or not (
                is_reserved or window.fits(size)
            ):
                self._end_first()
        span = Span(window.end, window.end + size) if is_reserved else window.take(size)
        self._open_at[bucket] = span
        views, gaps = self._views_at(bucket, span)
        in_share = {} if self._is_first(bucket) else self._in_share
        for slot, view in zip(self._slots[bucket], views, strict=True):
            slot.parameter.main_grad = in_share.get(slot.parameter, view)
            slot.parameter.main_grad_is_stale = slot.parameter not in in_share
        for gap in gaps:
            gap.zero_()

    def _views_at(self, bucket: int, span: Span) -> tuple[list[Tensor], list[Tensor]]:
        """The gradients of a bucket's parameters, and the padding after each."""
        if (bucket, span) not in self._views:
            slots, of = self._slots[bucket], self.flat.plan.buckets[bucket]
            memory = self._window.memory[slice(*span)]
            ends = [*(slot.start for slot in slots[1:]), of.end]
            gaps = [
                memory[slot.end - of.start : end - of.start]
                for slot, end in zip(slots, ends, strict=True)
                if slot.end < end
            ]
            values = [
                memory[slot.start - of.start : slot.end - of.start].view(slot.shape)
                for slot in slots
            ]
            self._views[bucket, span] = values, gaps
        return self._views[bucket, span]

    def _count(self, bucket: int) -> None:
        """Counts a parameter that has its gradients of a micro-batch; sends a complete bucket."""
        self._missing[bucket] -= 1
        if self._missing[bucket]:
            return
        copies = self.flat.copies[bucket]
        if not copies.shards_gradients:
            with part("dp"):
                self._pending[bucket] = start_all_reduce(self._shares[bucket], copies.replica_group)
            return
        span, group = self._open_at.pop(bucket), copies.shard_group
        assert group is not None, "a bucket of one rank is sharded"
        whole, share = self._window.memory[slice(*span)], self._shares[bucket]
        accumulates = not self._is_first(bucket)
        with part("dp"):
            if accumulates and self._adds_own:
                self._add_own(bucket, whole)
            work = start_sum_of_shares(
                whole, group, tag=bucket, into=share, accumulates=accumulates
            )
            if not self.mesh.options.overlap_scatter:
                finish(work)
                work = None
        self._sent.append(_Sent(bucket, span, work))
        self._unsent[bucket] -= 1
        if self._unsent[bucket]:
            self._missing[bucket] = self._members[bucket]
            for slot in self._slots[bucket]:
                slot.expect_gradients(1)

    def _is_first(self, bucket: int) -> bool:
        return self._unsent[bucket] == self.mesh.layout.num_microbatches

    def _add_own(self, bucket: int, whole: Tensor) -> None:
        """Adds to the own share what the window has of it."""
        at = self.flat.plan.buckets[bucket].start
        for slot in self._slots[bucket]:
            if slot.parameter not in self._in_share:
                for start, end in slot.overlaps([self.owned[bucket]]):
                    self.flat.own_gradients(Span(start, end)).add_(whole[start - at : end - at])

    def _end_first(self) -> None:
        """Waits until the gradients that were sent first are in the share."""
        assert self._sent, "more layers have open gradients than the window holds"
        bucket, span, work = self._sent.popleft()
        finish(work)
        if bucket != self.flat.plan.used_twice:
            self._window.give_back(span)
        if not self._unsent[bucket] and all(sent.bucket != bucket for sent in self._sent):
            replicas = self.flat.copies[bucket].replica_group
            self._pending[bucket] = start_all_reduce(self._shares[bucket], replicas)

    def _finish(self, index: int) -> None:
        while self._sent:
            self._end_first()
        finish(self._pending[index])
        self._pending[index] = None
