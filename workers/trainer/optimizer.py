"""The optimizer over flat shards: ZeRO stage 0 (every replica updates all) and 1 (its share).

Per step, over the dp axis: stage 0 all-reduces the gradients; stage 1 reduce-scatters them, and
all-gathers the updated weights in place. Both send the same bytes (arXiv:1910.02054).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workers.trainer.collectives import (
    finish,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from workers.trainer.flat import FlatBuffers
from workers.trainer.mesh import Mesh
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
    """Updates the part of the flat weights that this rank owns, from the reduced gradients."""

    def __init__(
        self, flat: FlatBuffers, mesh: Mesh, settings: OptimizerSettings, *, master_weights: bool
    ) -> None:
        layout = mesh.layout
        self.flat, self.mesh, self.settings = flat, mesh, settings
        self.is_sharded = layout.zero_stage == 1 and layout.dp > 1
        self.shares = [b.share(layout.dp, mesh.place.dp_rank) for b in flat.plan.buckets]
        spans = self.shares if self.is_sharded else [(b.start, b.end) for b in flat.plan.buckets]
        self.spans = spans
        self.weights = [flat.weights[start:end] for start, end in spans]
        self.gradients = [flat.gradients[start:end] for start, end in spans]
        # One tensor a kind of state, cut like the weights: few kernels, and memory that adds up.
        self.masters = self._like_spans(spans) if master_weights else self.weights
        self.is_mixed = master_weights
        if master_weights:
            _copy_all(self.masters, self.weights)
        adamw = settings.kind == "adamw"
        self.first_moments = self._like_spans(spans) if adamw else []
        self.second_moments = self._like_spans(spans) if adamw else []
        self.steps = [torch.zeros((), device=flat.weights.device) for _ in spans] if adamw else []
        self.norm_views = self._norm_views()

    def _like_spans(self, spans: list[tuple[int, int]]) -> list[Tensor]:
        sizes = [end - start for start, end in spans]
        state = torch.zeros(sum(sizes), device=self.flat.weights.device)
        return list(torch.split(state, sizes))

    def _norm_views(self) -> list[Tensor]:
        """The gradients that this rank counts: of its share, those that no other rank counts."""
        views = []
        for slot in self.flat.slots:
            elsewhere = slot.parameter.replicated and self.mesh.place.tp_rank > 0
            if elsewhere or not slot.parameter.counted:
                continue
            for start, end in self.shares:
                first, last = max(start, slot.start), min(end, slot.end)
                if first < last:
                    views.append(self.flat.gradients[first:last])
        return views

    @property
    def state_tensors(self) -> list[Tensor]:
        """Every tensor that the optimizer keeps beside the flat buffers."""
        states = [*self.first_moments, *self.second_moments, *self.steps]
        return [*states, *self.masters] if self.is_mixed else states

    def reduce_gradients(self) -> None:
        """Sums the gradients over dp: all buckets are under way before the first is waited for."""
        group = self.mesh.dp_group
        if group is None:
            return
        works = []
        for bucket, own in zip(self.flat.plan.buckets, self.gradients, strict=True):
            whole = self.flat.gradients[bucket.start : bucket.end]
            if self.is_sharded:
                works.append(start_reduce_scatter(own, whole, group))
            else:
                works.append(start_all_reduce(whole, group))
        for work in works:
            finish(work)

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of the whole model's gradient."""
        if not self.norm_views:
            return torch.zeros((), dtype=torch.float64, device=self.flat.weights.device)
        norms = torch.stack(torch._foreach_norm(self.norm_views))
        return norms.double().square_().sum()

    def clip(self, grad_norm: float) -> None:
        """Scales the owned gradients down where the global norm is over the limit."""
        limit = self.settings.clip_grad_norm
        if limit is not None and grad_norm > limit:
            torch._foreach_mul_(self.gradients, limit / grad_norm)

    def step(self, learning_rate: float) -> None:
        """Updates the owned weights, and brings every replica's copy up to date."""
        with torch.no_grad():
            self._update(learning_rate)
            self.publish_weights()

    def publish_weights(self) -> None:
        """Rounds the masters to the weights' type, and brings every replica's copy up to date."""
        if self.is_mixed:
            _copy_all(self.weights, self.masters)
        with part("dp"):
            self._gather_weights()

    def _update(self, learning_rate: float) -> None:
        settings = self.settings
        if settings.kind == "sgd":
            torch._foreach_add_(self.masters, self.gradients, alpha=-learning_rate)
            return
        torch._foreach_add_(self.steps, 1.0)
        torch._fused_adamw_(
            self.masters,
            self.gradients,
            self.first_moments,
            self.second_moments,
            [],
            self.steps,
            lr=learning_rate,
            beta1=settings.beta1,
            beta2=settings.beta2,
            weight_decay=settings.weight_decay,
            eps=settings.epsilon,
            amsgrad=False,
            maximize=False,
        )

    def _gather_weights(self) -> None:
        group = self.mesh.dp_group
        if group is None or not self.is_sharded:
            return
        works = []
        for bucket, own in zip(self.flat.plan.buckets, self.weights, strict=True):
            whole = self.flat.weights[bucket.start : bucket.end]
            works.append(start_all_gather(whole, own, group))
        for work in works:
            finish(work)

    def forget(self) -> None:
        """Clears the moments and the step count, as at the start."""
        for state in (*self.first_moments, *self.second_moments, *self.steps):
            state.zero_()


def _copy_all(to: list[Tensor], source: list[Tensor]) -> None:
    for target, value in zip(to, source, strict=True):
        target.copy_(value)
