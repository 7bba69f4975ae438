"""Sums gradients over the ranks that hold the same weights during the backward pass.

A bucket is sent as soon as its last gradient of the step is final. This happens in the backward
pass of the last micro-batch; nothing is sent while gradients still accumulate. Every rank starts
the buckets in the order of the buffer, so that no two ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from layout_tuner.workers.trainer.comm.collectives import (
    Pending,
    all_reduce,
    finish,
    start_all_reduce,
    start_sum_of_shares,
)
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.parallel.flat_buffers import FlatBuffers, Span
from layout_tuner.workers.trainer.stopwatch import part

_BUCKETS_IN_FLIGHT: Final = 2
"""Buckets whose shares may be in flight at once on the CPU; the receive buffers take memory."""


class GradientReduction:
    """Reduces the gradients of one rank, bucket by bucket.

    Communicates, for each bucket: a reduce-scatter over the shard group (ZeRO-1), then an
    all-reduce of the owned span over the replica group. After the last bucket, of the owned
    elements: an all-reduce over tp of the gradients of replicated parameters of which each tp rank
    has a part (under sequence parallelism, all), and for a tied embedding an all-reduce over the
    embedding group.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh) -> None:
        self.flat, self.mesh = flat, mesh
        self.owned = flat.owned
        self._waits_early = [
            copies.shard_group is not None
            and (copies.replica_group is not None or flat.gradients.device.type == "cpu")
            for copies in flat.copies
        ]
        self._summed_over_tp = [
            slot
            for slot in flat.slots
            if mesh.tp_group is not None
            and slot.parameter.replicated
            and not slot.parameter.of_experts
            and (mesh.cuts_tokens or slot.parameter.parts[0].partial_gradient)
        ]
        self._members = [0] * len(self.owned)
        self._pending: list[Pending | None] = []
        self._is_scattered = [False] * len(self.owned)
        self._sums = any(copies.size > 1 for copies in flat.copies)
        for slot in flat.slots if self._sums else ():
            self._members[slot.bucket] += 1
            slot.parameter.when_final = partial(self._count, slot.bucket)

    def begin(self) -> None:
        """Begins a step, in which no gradient is final yet."""
        self.flat.expect_gradients(self.mesh.layout.num_microbatches)
        self._missing = list(self._members)
        self._pending, self._is_scattered = [], [False] * len(self.owned)

    def finished(self) -> Iterator[int]:
        """Yields the buckets in order, each when its owned gradients are of the global batch."""
        needs_sums = bool(self._summed_over_tp) or self.mesh.embedding_group is not None
        if self._sums:
            assert len(self._pending) == len(self.owned), "a bucket was not started"
        for bucket in range(len(self.owned)):
            with part("dp"):
                self._finish(bucket)
            if not needs_sums:
                yield bucket
        if needs_sums:
            self._sum_replicated()
            self._sum_tied()
            yield from range(len(self.owned))

    def _count(self, bucket: int) -> None:
        """Counts a final gradient of the bucket; starts every bucket that is complete and next."""
        self._missing[bucket] -= 1
        while len(self._pending) < len(self.owned) and not self._missing[len(self._pending)]:
            with part("dp"):
                self._start(len(self._pending))

    def _start(self, index: int) -> None:
        if self._waits_early[index] and index >= _BUCKETS_IN_FLIGHT:
            self._end_scatter(index - _BUCKETS_IN_FLIGHT)
        copies = self.flat.copies[index]
        whole = self.flat.own_gradients(self.flat.plan.buckets[index])
        if copies.shard_group is not None:
            self._pending.append(start_sum_of_shares(whole, copies.shard_group, tag=index))
        else:
            self._pending.append(start_all_reduce(whole, copies.replica_group))
        if not self.mesh.options.overlap_scatter:
            self._end_scatter(index)
            finish(self._pending[index])
            self._pending[index] = None

    def _end_scatter(self, index: int) -> None:
        """Waits for the sum over the shard group, and starts the sum over the replica group."""
        copies = self.flat.copies[index]
        if copies.shard_group is None or self._is_scattered[index]:
            return
        finish(self._pending[index])
        self._pending[index] = start_all_reduce(self._own(index), copies.replica_group)
        self._is_scattered[index] = True

    def _finish(self, index: int) -> None:
        if not self._sums:
            return
        if self.flat.copies[index].replica_group is not None:
            # Starts the replica sums of all later buckets before it waits for the first one.
            for later in range(index, len(self.owned)):
                self._end_scatter(later)
        else:
            self._end_scatter(index)
        finish(self._pending[index])
        self._pending[index] = None

    def _own(self, index: int) -> Tensor:
        return self.flat.own_gradients(self.owned[index])

    def _sum_replicated(self) -> None:
        """Sums the gradients of which each tp rank has a part, in one all-reduce.

        Under sequence parallelism each tp rank computes them from its own tokens.
        """
        views = [
            self.flat.own_gradients(Span(*overlap))
            for slot in self._summed_over_tp
            for overlap in slot.overlaps(self.owned)
        ]
        if not views:  # the other tp ranks have none either: their buffers have the same plan
            return
        sums = torch.cat(views)
        with part("tp"):
            all_reduce(sums, self.mesh.tp_group)
        torch._foreach_copy_(views, torch.split(sums, [len(view) for view in views]))

    def _sum_tied(self) -> None:
        """Sums the tied embedding's gradients of first and last stage over the embedding group."""
        index = self.flat.plan.shared_bucket
        if self.mesh.embedding_group is not None:
            assert index is not None, "the tied embedding has no bucket of its own"
            with part("pp"):
                all_reduce(self._own(index), self.mesh.embedding_group)
