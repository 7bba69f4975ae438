"""The optimizer on flat buffers: ZeRO-0 (every replica updates all) and ZeRO-1 to 3 (its share).

Communication of a step over the dp axis: ZeRO-0 all-reduces the gradients. ZeRO-1 reduce-scatters
them and all-gathers the updated weights in place. Both send the same bytes (arXiv:1910.02054).
ZeRO-2 reduce-scatters the gradients of each micro-batch. ZeRO-3 gathers no updated weights: each
pass gathers those of its layers.
With `zero_replicas` a shard group has dp / zero_replicas neighbouring ranks. Weights are gathered
within it, and gradients are also summed over the ranks that own the same share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from layout_tuner.workers.trainer.comm.collectives import Pending, finish, start_gather_of_shares
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.precision import keeps_master_weights
from layout_tuner.workers.trainer.parallel.flat_buffers import FlatBuffers, Span
from layout_tuner.workers.trainer.parallel.loss_scaling import LossScaler
from layout_tuner.workers.trainer.stopwatch import part


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    kind: Literal["adamw", "sgd"] = "adamw"
    """sgd has no momentum. It shows a wrongly scaled gradient, which AdamW hides."""
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_grad_norm: float | None = None
    """Largest norm of the global gradient; None: no clipping."""


MOMENT_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""What AdamW's moments are stored in, by `Layout.optimizer_states`."""

_ROUNDED_ELEMENTS: Final = 1 << 20
"""Elements whose 16-bit moments are in fp32 at the same time: 8 MiB of both."""


class FlatOptimizer:
    """Updates the part of the flat weights that this rank owns, from the reduced gradients.

    Every list has one item for each bucket.
    """

    def __init__(self, flat: FlatBuffers, mesh: Mesh, settings: OptimizerSettings) -> None:
        self.flat, self.mesh, self.settings = flat, mesh, settings
        self.spans = spans = flat.owned
        self.weights = [flat.own_weights(span) for span in spans]
        self.gradients = [flat.own_gradients(span) for span in spans]
        # One tensor for each kind of state, divided like the weights: few allocations.
        self.is_mixed = keeps_master_weights(mesh.layout.precision)
        self.masters = self._like_spans(spans) if self.is_mixed else self.weights
        self.scaler = LossScaler() if mesh.layout.precision == "fp16" else None
        if self.is_mixed:
            for master, weights in zip(self.masters, self.weights, strict=True):
                master.copy_(weights)
        adamw = settings.kind == "adamw"
        moments = MOMENT_DTYPES[mesh.layout.optimizer_states]
        self.first_moments = self._like_spans(spans, moments) if adamw else []
        self.second_moments = self._like_spans(spans, moments) if adamw else []
        self.steps = [torch.zeros((), device=flat.weights.device) for _ in spans] if adamw else []
        self._norm_views = [self._counted(bucket) for bucket in range(len(spans))]
        self._gathering: list[Pending | None] = []

    def _like_spans(self, spans: list[Span], dtype: torch.dtype = torch.float32) -> list[Tensor]:
        sizes = [span.end - span.start for span in spans]
        state = torch.zeros(sum(sizes), dtype=dtype, device=self.flat.weights.device)
        return list(torch.split(state, sizes))

    def _counted(self, bucket: int) -> list[Tensor]:
        """The gradients of an owned span that this rank, and no other, counts in the norm."""
        copies, views = self.flat.copies[bucket], list[Tensor]()
        counted = self.spans[bucket].share(copies.num_replicas, copies.replica_rank)
        for slot in self.flat.slots:
            if slot.parameter.counted:
                overlaps = slot.overlaps([counted])
                views += [self.flat.own_gradients(Span(*overlap)) for overlap in overlaps]
        return views

    @property
    def loss_scale(self) -> float:
        """The factor that the gradients of a step contain until the update; 1 without fp16."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def waits_for_norm(self) -> bool:
        """Whether the update needs the norm of the whole gradient (clipping, or loss scaling)."""
        return self.settings.clip_grad_norm is not None or self.scaler is not None

    @property
    def state_tensors(self) -> list[Tensor]:
        """Every tensor that the optimizer holds in addition to the flat buffers."""
        states = [*self.first_moments, *self.second_moments, *self.steps]
        return [*states, *self.masters] if self.is_mixed else states

    def norms(self, bucket: int) -> list[Tensor]:
        """Norms of the gradients of a bucket that this rank counts in the model's norm."""
        views = self._norm_views[bucket]
        return list(torch._foreach_norm(views)) if views else []

    def divisor(self, grad_norm: float) -> float | None:
        """Divisor of the gradients in the update: loss scale times clipping factor; None for 1."""
        limit = self.settings.clip_grad_norm
        clips = limit is not None and grad_norm > limit
        divisor = (grad_norm / limit if clips and limit else 1.0) * self.loss_scale
        return None if divisor == 1.0 else divisor

    def start_step(
        self, learning_rate: float, buckets: Iterable[int], *, divisor: float | None = None
    ) -> None:
        """Updates the owned weights of these buckets.

        Communicates: starts an all-gather of each bucket's weights over the shard group (ZeRO-1
        and 2).
        """
        scale = None
        if divisor is not None and self.settings.kind == "adamw":
            scale = torch.full((), divisor, device=self.flat.weights.device)
        with torch.no_grad():
            for index in buckets:
                if self.settings.kind == "sgd":
                    rate = learning_rate / (divisor or 1.0)
                    self.masters[index].add_(self.gradients[index], alpha=-rate)
                else:
                    self._update_adamw(index, learning_rate, scale)
                self._start_publishing(index)

    def publish_weights(self) -> None:
        """Rounds the master weights to the weights' type, and updates every replica's copy.

        Communicates: an all-gather of every bucket over the shard group (ZeRO-1 and 2).
        """
        with torch.no_grad():
            for index in range(len(self.spans)):
                self._start_publishing(index)
        self.finish_step()

    def _start_publishing(self, index: int) -> None:
        if self.is_mixed:
            self.weights[index].copy_(self.masters[index])
        copies = self.flat.copies[index]
        group = copies.shard_group
        if group is not None and not copies.shards_weights:
            whole = self.flat.own_weights(self.flat.plan.buckets[index])
            with part("dp"):
                self._gathering.append(start_gather_of_shares(whole, group, tag=index))

    def finish_step(self) -> None:
        """Waits for the all-gathers that `start_step` started."""
        with part("dp"):
            for pending in self._gathering:
                finish(pending)
        self._gathering = []

    def _update_adamw(self, bucket: int, learning_rate: float, divisor: Tensor | None) -> None:
        """AdamW (arXiv:1711.05101), which divides the gradient by `divisor` in the same pass.

        Moments that are stored in 16 bits are computed in fp32, a part of the bucket at a time: the
        weights are updated with them before they are rounded.
        """
        self.steps[bucket].add_(1.0)
        states = (self.masters, self.gradients, self.first_moments, self.second_moments)
        whole = [state[bucket] for state in states]
        if whole[-1].dtype == torch.float32:
            self._adamw(bucket, learning_rate, divisor, whole)
            return
        for master, gradient, *stored in zip(
            *(torch.split(state, _ROUNDED_ELEMENTS) for state in whole), strict=True
        ):
            moments = [moment.float() for moment in stored]
            self._adamw(bucket, learning_rate, divisor, [master, gradient, *moments])
            torch._foreach_copy_(stored, moments)

    def _adamw(
        self, bucket: int, learning_rate: float, divisor: Tensor | None, states: list[Tensor]
    ) -> None:
        """Updates weights, gradients and both moments of a bucket, or of a part of it."""
        settings, (weights, gradients, first, second) = self.settings, states
        torch._fused_adamw_(
            [weights],
            [gradients],
            [first],
            [second],
            [],
            [self.steps[bucket]],
            lr=learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.epsilon,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )

    def forget(self) -> None:
        """Resets moments, step count and loss scale to their initial values."""
        for state in (*self.first_moments, *self.second_moments, *self.steps):
            state.zero_()
        if self.scaler is not None:
            self.scaler = LossScaler()
