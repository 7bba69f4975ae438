"""The optimizer over flat shards: ZeRO stage 0 (every replica updates all) and 1 (its share).

Per step, over the dp axis: stage 0 all-reduces the gradients; stage 1 sums each share of them where
it is owned, and gathers the updated weights in place. Both send the same bytes (arXiv:1910.02054).
With `zero_replicas` the shares are those of a shard group, dp / zero_replicas neighbouring ranks,
which alone sends weights; the owners of the same share sum their gradients over the groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers.trainer.collectives import Pending
from workers.trainer.exchange import start_gather_of_shares
from workers.trainer.flat import FlatBuffers, Span
from workers.trainer.loss_scaling import LossScaler
from workers.trainer.mesh import Mesh
from workers.trainer.precision import needs_loss_scaling
from workers.trainer.stopwatch import part


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """How weights follow gradients."""

    kind: Literal["adamw", "sgd"] = "adamw"
    """sgd is plain: it shows a wrongly scaled gradient, which AdamW hides."""
    learning_rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    clip_grad_norm: float | None = None
    """Largest norm of the global gradient; None: no clipping."""


class FlatOptimizer:
    """Updates the part of the flat weights that this rank owns, from the reduced gradients.

    Every list has an item a bucket.
    """

    def __init__(
        self, flat: FlatBuffers, mesh: Mesh, settings: OptimizerSettings, *, master_weights: bool
    ) -> None:
        self.flat, self.mesh, self.settings = flat, mesh, settings
        spans = [bucket.share(mesh.num_shards, mesh.shard_rank) for bucket in flat.plan.buckets]
        self.spans = spans
        self.weights = [flat.weights[span.start : span.end] for span in spans]
        self.gradients = [flat.gradients[span.start : span.end] for span in spans]
        # One tensor a kind of state, cut like the weights: few tensors, and memory that adds up.
        self.masters = self._like_spans(spans) if master_weights else self.weights
        self.is_mixed = master_weights
        self.scaler = LossScaler() if needs_loss_scaling(mesh.layout.precision) else None
        if master_weights:
            for master, weights in zip(self.masters, self.weights, strict=True):
                master.copy_(weights)
        adamw = settings.kind == "adamw"
        self.first_moments = self._like_spans(spans) if adamw else []
        self.second_moments = self._like_spans(spans) if adamw else []
        self.steps = [torch.zeros((), device=flat.weights.device) for _ in spans] if adamw else []
        self._norm_views = [self._counted(span) for span in spans]
        self._gathering: list[Pending | None] = []

    def _like_spans(self, spans: list[Span]) -> list[Tensor]:
        sizes = [span.end - span.start for span in spans]
        state = torch.zeros(sum(sizes), device=self.flat.weights.device)
        return list(torch.split(state, sizes))

    def _counted(self, span: Span) -> list[Tensor]:
        """The gradients of an owned span that this rank counts, and no other one."""
        mesh, views = self.mesh, []
        counted = span.share(mesh.layout.dp // mesh.num_shards, mesh.replica_rank)
        for slot in self.flat.slots:
            elsewhere = slot.parameter.replicated and mesh.place.tp_rank > 0
            if slot.parameter.counted and not elsewhere:
                overlaps = slot.overlaps([counted])
                views += [self.flat.gradients[first:last] for first, last in overlaps]
        return views

    @property
    def loss_scale(self) -> float:
        """What the gradients of a step are multiplied by until the update."""
        return 1.0 if self.scaler is None else self.scaler.scale

    @property
    def waits_for_norm(self) -> bool:
        """Whether the update needs to know the norm of the whole gradient."""
        return self.settings.clip_grad_norm is not None or self.scaler is not None

    @property
    def state_tensors(self) -> list[Tensor]:
        """Every tensor that the optimizer keeps beside the flat buffers."""
        states = [*self.first_moments, *self.second_moments, *self.steps]
        return [*states, *self.masters] if self.is_mixed else states

    def norms(self, bucket: int) -> list[Tensor]:
        """Norms of what this rank counts of a bucket's gradients; all ranks' make the model's."""
        views = self._norm_views[bucket]
        return list(torch._foreach_norm(views)) if views else []

    def divisor(self, grad_norm: float) -> float | None:
        """What the gradients are divided by in the update: the loss's scale, and what clips them.

        None where that would be 1.
        """
        limit = self.settings.clip_grad_norm
        clips = limit is not None and grad_norm > limit
        divisor = (grad_norm / limit if clips and limit else 1.0) * self.loss_scale
        return None if divisor == 1.0 else divisor

    def start_step(
        self, learning_rate: float, buckets: Iterable[int], *, divisor: float | None = None
    ) -> None:
        """Updates the owned weights of these buckets, and starts sending each to the other shards."""
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
        """Rounds the masters to the weights' type, and brings every replica's copy up to date."""
        with torch.no_grad():
            for index in range(len(self.spans)):
                self._start_publishing(index)
        self.finish_step()

    def _start_publishing(self, index: int) -> None:
        if self.is_mixed:
            self.weights[index].copy_(self.masters[index])
        group, bucket = self.mesh.shard_group, self.flat.plan.buckets[index]
        if group is not None:
            whole = self.flat.weights[bucket.start : bucket.end]
            with part("dp"):
                self._gathering.append(start_gather_of_shares(whole, group, tag=index))

    def finish_step(self) -> None:
        """Waits until every weight of this rank is up to date."""
        with part("dp"):
            for pending in self._gathering:
                if pending is not None:
                    pending.wait()
        self._gathering = []

    def _update_adamw(self, bucket: int, learning_rate: float, divisor: Tensor | None) -> None:
        """AdamW (arXiv:1711.05101); divides the gradient in the same pass."""
        settings, one = self.settings, slice(bucket, bucket + 1)
        self.steps[bucket].add_(1.0)
        torch._fused_adamw_(
            self.masters[one],
            self.gradients[one],
            self.first_moments[one],
            self.second_moments[one],
            [],
            self.steps[one],
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
        """Clears the moments and the step count, as at the start; so is the loss's scale."""
        for state in (*self.first_moments, *self.second_moments, *self.steps):
            state.zero_()
        if self.scaler is not None:
            self.scaler = LossScaler()
