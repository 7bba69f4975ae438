"""One rank's training: the optimizer step of probes and training jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.workers.trainer.batches import Batch, SampleSource, SyntheticTokens, cut_batch
from layout_tuner.workers.trainer.comm.collectives import Pending, finish, start_all_reduce
from layout_tuner.workers.trainer.comm.mesh import Mesh
from layout_tuner.workers.trainer.model.model import RankModel
from layout_tuner.workers.trainer.model.precision import COMPUTE_DTYPES, keeps_master_weights
from layout_tuner.workers.trainer.parallel.flat_buffers import FlatBuffers, kept_of, plan_model
from layout_tuner.workers.trainer.parallel.gathered_weights import GatheredWeights
from layout_tuner.workers.trainer.parallel.gradient_reduction import GradientReduction
from layout_tuner.workers.trainer.parallel.optimizer import (
    MOMENT_DTYPES,
    FlatOptimizer,
    OptimizerSettings,
)
from layout_tuner.workers.trainer.parallel.pipeline import Pipeline
from layout_tuner.workers.trainer.parallel.sharded_gradients import ShardedGradients
from layout_tuner.workers.trainer.stopwatch import Stopwatch, part


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """Results of a step for the global batch; the same on every rank."""

    loss: float
    """Mean over the tokens of the global batch, before the update, in nats."""
    grad_norm: float
    """Norm of the whole model's gradient before clipping; not finite if fp16 overflowed."""
    num_tokens: int
    """Tokens that the first stages of all replicas embedded."""
    loss_scale: float = 1.0
    """Factor of the loss in the backward pass."""
    is_skipped: bool = False
    """Whether the gradients overflowed at this scale, so that the step changed nothing."""


class Training:
    """A rank's part of the model, its optimizer, and the step."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        *,
        seed: int,
        device: torch.device,
        settings: OptimizerSettings,
        balanced_routing: bool = False,
    ) -> None:
        """Builds the model. `balanced_routing` gives each expert the same number of tokens."""
        layout = mesh.layout
        dtype = COMPUTE_DTYPES[layout.precision]
        self.shape, self.mesh, self.seed, self.device = shape, mesh, seed, device
        self.settings = settings
        self.source: SampleSource = SyntheticTokens(shape=shape, seed=seed)
        self.model = RankModel(shape, mesh)
        self.flat = FlatBuffers(self.model, mesh, dtype=dtype, device=device, seed=seed)
        self.model.prepare_tables(shape, dtype=dtype, device=device)
        self.expert_loads = torch.zeros(2, device=device) if shape.num_experts else None
        """Since they were last set to 0: the sum over passes through layers with experts of the
        tokens of the fullest expert over the mean, and the number of passes."""
        for mixture in self.model.mixtures:
            mixture.balanced, mixture.load_sums = balanced_routing, self.expert_loads
        self.optimizer = FlatOptimizer(self.flat, mesh, settings)
        reduction = ShardedGradients if mesh.shards_gradients else GradientReduction
        self.reduction = reduction(self.flat, mesh)
        self.pipeline = Pipeline(
            self.model.stages, mesh, hidden_size=shape.hidden_size // layout.tp_columns, dtype=dtype
        )
        self.gathered = None
        if mesh.shards_weights:
            self.gathered = GatheredWeights(self.flat, self.model, self.pipeline.schedule)
        self.stopwatch = Stopwatch(device)

    def batch(self, step: int) -> Batch:
        """This rank's tokens of a step."""
        return cut_batch(
            self.source,
            self.mesh.layout,
            step=step,
            dp_rank=self.mesh.place.dp_rank,
            cp_rank=self.mesh.place.cp_rank,
            device=self.device,
        )

    def step(self, batch: Batch, *, learning_rate: float | None = None) -> StepStats:
        """Takes one optimizer step over the global batch.

        Communicates:
            - over tp, cp and pp in the passes over micro-batches;
            - over dp and cp, and where they apply over tp and the embedding group, gradients
              (`GradientReduction`, `ShardedGradients`) and weights (`FlatOptimizer`,
              `GatheredWeights`);
            - over all ranks an all-reduce of loss, tokens and squared gradient norm.

        A bucket's weights are updated while the next one's gradients arrive, unless clipping or
        fp16 make the update wait for the norm of the whole gradient. In fp16 a step whose gradients
        overflow is skipped on every rank.

        Raises:
            LossDivergedError: fp16 gradients overflow at the smallest loss scale.
        """
        rate = self.settings.learning_rate if learning_rate is None else learning_rate
        self.reduction.begin()
        if self.gathered is not None:
            self.gathered.begin()
        scale = self.optimizer.loss_scale
        loss, num_tokens = self.pipeline.run(batch, gradient_scale=scale)
        assert self.flat.has_all_gradients, "a parameter got too few or too many gradients"
        with part("optimizer"):
            return self._update(rate, loss, num_tokens)

    def _update(self, rate: float, loss: Tensor, num_tokens: int) -> StepStats:
        optimizer, norms = self.optimizer, list[Tensor]()
        buckets = self._with_norms(norms)
        if not optimizer.waits_for_norm:
            optimizer.start_step(rate, buckets)
            sums, work = self._start_sums(loss, num_tokens, norms)
            optimizer.finish_step()
            return self._finish_sums(sums, work)
        every = list(buckets)
        stats = self._finish_sums(*self._start_sums(loss, num_tokens, norms))
        divisor = optimizer.divisor(stats.grad_norm)
        if optimizer.scaler is not None and optimizer.scaler.update(stats.grad_norm):
            return replace(stats, is_skipped=True)
        optimizer.start_step(rate, every, divisor=divisor)
        optimizer.finish_step()
        return stats

    def _with_norms(self, norms: list[Tensor]) -> Iterator[int]:
        """Yields the buckets as their gradients arrive, and appends their norms to `norms`."""
        for bucket in self.reduction.finished():
            norms += self.optimizer.norms(bucket)
            yield bucket

    def _start_sums(
        self, loss: Tensor, num_tokens: int, norms: list[Tensor]
    ) -> tuple[Tensor, Pending | None]:
        """Starts the sums of loss, tokens and squared gradient norm; an all-reduce over all ranks.

        All ranks that divide the vocabulary have the same loss and tokens: the first one's count.
        """
        counts = float(self.mesh.vocabulary_rank == 0)
        numbers = [num_tokens * counts, 0.0]
        tokens, squares = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        if norms:
            squares = torch.stack(norms).double().square_().sum()
        sums = torch.stack((loss * counts, tokens, squares))
        return sums, start_all_reduce(sums, self.mesh.world_group)

    def _finish_sums(self, sums: Tensor, work: Pending | None) -> StepStats:
        with part("idle"):
            finish(work)
        loss, num_tokens, squared_norm = sums.tolist()
        loss_scale = self.optimizer.loss_scale
        return StepStats(
            loss=loss,
            grad_norm=math.sqrt(squared_norm) / loss_scale,
            num_tokens=round(num_tokens),
            loss_scale=loss_scale,
        )

    def persistent_tensors(self) -> list[Tensor]:
        """Every tensor that lives longer than a step."""
        windows = self.flat.weight_window, self.flat.gradient_window
        return [
            self.flat.weights,
            self.flat.gradients,
            *(window.memory for window in windows if window is not None),
            *self.optimizer.state_tensors,
            *self.model.tables,
        ]


def persistent_bytes(shape: ModelShape, mesh: Mesh, settings: OptimizerSettings) -> int:
    """Bytes of a rank's weights, gradients and optimizer states, before they are allocated.

    Sharded gradients and weights have whole ones of two layers beside them.
    """
    layout = mesh.layout
    plan = plan_model(RankModel(shape, mesh), mesh)
    mixed = keeps_master_weights(layout.precision)
    weight_bytes = COMPUTE_DTYPES[layout.precision].itemsize
    moment_bytes = MOMENT_DTYPES[layout.optimizer_states].itemsize
    state_bytes = (2 * moment_bytes if settings.kind == "adamw" else 0) + (4 if mixed else 0)
    weights, gradients = (kept.num_elements for kept in kept_of(plan, mesh))
    weights += plan.window_elements if mesh.shards_weights else 0
    gradients += plan.open_elements if mesh.shards_gradients else 0
    own = sum(
        plan.size(bucket) // mesh.copies_of(experts=of_experts).num_shards
        for bucket, of_experts in enumerate(plan.of_experts)
    )
    return weights * weight_bytes + gradients * 4 + own * state_bytes
