"""Sums gradients over the data-parallel ranks while the backward pass goes on.

A bucket is sent as soon as its last gradient of the step is final, which is in the backward pass
of the last micro-batch: nothing is sent while gradients still accumulate. Buckets start in the
order of the buffer on every rank, so that no two ranks wait for each other's next one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Final

import torch
from torch import Tensor

from workers.trainer.collectives import Pending, all_reduce, start_all_reduce
from workers.trainer.exchange import start_sum_of_shares
from workers.trainer.flat import FlatBuffers
from workers.trainer.mesh import Mesh
from workers.trainer.stopwatch import part

_BUCKETS_UNDER_WAY: Final = 2
"""Buckets whose shares may be under way at once on the CPU: what they receive takes memory."""


class GradientReduction:
    """The gradient sums of one rank, bucket by bucket.

    Communicates, a bucket: over the shard group a sum of shares (ZeRO-1), over the replica group
    an all-reduce of what this rank owns. After the last one, where they apply: over tp the
    replicated gradients of cut tokens, and over the embedding group a tied embedding's, both of
    the owned elements alone.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh) -> None:
        self.flat, self.mesh = flat, mesh
        self.owned = [
            bucket.share(mesh.num_shards, mesh.shard_rank) for bucket in flat.plan.buckets
        ]
        self._waits_early = mesh.shard_group is not None and (
            mesh.replica_group is not None or flat.gradients.device.type == "cpu"
        )
        self._members = [0] * len(self.owned)
        self._pending: list[Pending | None] = []
        self._num_scattered = 0
        if mesh.layout.dp > 1:
            self._listen()

    def _listen(self) -> None:
        for slot in self.flat.slots:
            bucket = self.flat.plan.bucket_of(slot.start)
            self._members[bucket] += 1
            slot.parameter.when_final = partial(self._count, bucket)

    def begin(self) -> None:
        """Begins a step: no gradient is final."""
        self._missing = list(self._members)
        self._pending, self._num_scattered = [], 0

    def finished(self) -> Iterator[int]:
        """The buckets in order, each once its owned gradients are those of the global batch."""
        needs_sums = self.mesh.cuts_tokens or self.mesh.embedding_group is not None
        if self.mesh.layout.dp > 1:
            assert len(self._pending) == len(self.owned), "a bucket was not started"
        for bucket in range(len(self.owned)):
            with part("dp"):
                self._finish(bucket)
            if not needs_sums:
                yield bucket
        if not needs_sums:
            return
        self._sum_replicated()
        self._sum_tied()
        yield from range(len(self.owned))

    def _count(self, bucket: int) -> None:
        """A gradient of the bucket is final: starts every bucket whose turn it is."""
        self._missing[bucket] -= 1
        while len(self._pending) < len(self.owned) and not self._missing[len(self._pending)]:
            with part("dp"):
                self._start(len(self._pending))

    def _start(self, index: int) -> None:
        if self._waits_early and index >= _BUCKETS_UNDER_WAY:
            self._end_scatter(index - _BUCKETS_UNDER_WAY)
        bucket, mesh = self.flat.plan.buckets[index], self.mesh
        whole = self.flat.gradients[bucket.start : bucket.end]
        if mesh.shard_group is not None:
            self._pending.append(start_sum_of_shares(whole, mesh.shard_group, tag=index))
        else:
            self._pending.append(start_all_reduce(whole, mesh.replica_group))

    def _end_scatter(self, index: int) -> None:
        """Waits for the sum over the shard group; starts the one over the replicas."""
        if self.mesh.shard_group is None or index < self._num_scattered:
            return
        _wait(self._pending[index])
        self._pending[index] = start_all_reduce(self._own(index), self.mesh.replica_group)
        self._num_scattered = index + 1

    def _finish(self, index: int) -> None:
        if self.mesh.layout.dp == 1:
            return
        if self.mesh.replica_group is not None:
            # All of them go to the replicas before the first is waited for.
            for later in range(index, len(self.owned)):
                self._end_scatter(later)
        else:
            self._end_scatter(index)
        _wait(self._pending[index])
        self._pending[index] = None

    def _own(self, index: int) -> Tensor:
        span = self.owned[index]
        return self.flat.gradients[span.start : span.end]

    def _sum_replicated(self) -> None:
        """Over tp, what every tp rank holds and saw other tokens of; one all-reduce for all."""
        if not self.mesh.cuts_tokens:
            return
        slots = [slot for slot in self.flat.slots if slot.parameter.replicated]
        views = [
            self.flat.gradients[start:end]
            for slot in slots
            for start, end in slot.overlaps(self.owned)
        ]
        if not views:  # as on the other tp ranks, whose buffers are laid out alike
            return
        sums = torch.cat(views)
        with part("tp"):
            all_reduce(sums, self.mesh.tp_group)
        torch._foreach_copy_(views, torch.split(sums, [len(view) for view in views]))

    def _sum_tied(self) -> None:
        """Over the embedding group, the gradients that the two ends of the model have."""
        index = self.flat.plan.shared_bucket
        if self.mesh.embedding_group is not None:
            assert index is not None, "the tied embedding lies in a bucket of its own"
            with part("pp"):
                all_reduce(self._own(index), self.mesh.embedding_group)


def _wait(pending: Pending | None) -> None:
    if pending is not None:
        pending.wait()
