"""One rank's training: the step that the probe times and the training job takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import Work

from search_spaces.model_shape import ModelShape
from workers.trainer.collectives import all_reduce, finish, start_all_reduce
from workers.trainer.data import Batch, SampleSource, SyntheticTokens, cut_batch
from workers.trainer.flat import FlatBuffers, num_flat_elements
from workers.trainer.mesh import Mesh
from workers.trainer.model import Stage
from workers.trainer.optimizer import FlatOptimizer, OptimizerSettings
from workers.trainer.pipeline import Pipeline
from workers.trainer.precision import COMPUTE_DTYPES, keeps_master_weights
from workers.trainer.stopwatch import Stopwatch, part


@dataclass(frozen=True, kw_only=True, slots=True)
class StepStats:
    """What a step says of the global batch; the same on every rank."""

    loss: float
    """Mean over the tokens of the global batch, before the update, in nats."""
    grad_norm: float
    """Norm of the whole model's gradient, before any clipping."""
    num_tokens: int
    """Tokens that the first stages embedded, all replicas together."""


class Training:
    """A rank's share of the model, its optimizer, and the step over both."""

    def __init__(
        self,
        shape: ModelShape,
        mesh: Mesh,
        *,
        seed: int,
        device: torch.device,
        settings: OptimizerSettings,
        source: SampleSource | None = None,
    ) -> None:
        """Builds the rank's share; batches come from the source, else they are synthetic."""
        layout = mesh.layout
        dtype = COMPUTE_DTYPES[layout.precision]
        self.shape, self.mesh, self.seed, self.device = shape, mesh, seed, device
        self.settings = settings
        self.source = source or SyntheticTokens(shape=shape, seed=seed)
        self.stage = Stage(shape, mesh, recompute=layout.recompute)
        self.flat = FlatBuffers(self.stage, mesh, dtype=dtype, device=device, seed=seed)
        self.stage.prepare_rotary(shape, dtype=dtype, device=device)
        self.optimizer = FlatOptimizer(
            self.flat, mesh, settings, master_weights=keeps_master_weights(layout.precision)
        )
        self.pipeline = Pipeline(self.stage, mesh, hidden_size=shape.hidden_size, dtype=dtype)
        self.stopwatch = Stopwatch(device)

    def batch(self, step: int) -> Batch:
        """This replica's tokens of a step."""
        return cut_batch(
            self.source,
            self.mesh.layout,
            step=step,
            dp_rank=self.mesh.place.dp_rank,
            device=self.device,
        )

    def step(self, batch: Batch, *, learning_rate: float | None = None) -> StepStats:
        """One optimizer step over the global batch.

        Communicates over tp and pp as the passes do, over tp the replicated gradients where tokens
        are cut, over the embedding group the gradient of a tied embedding, over dp gradients and
        weights, and one sum of three numbers over all ranks.
        """
        self.flat.expect_gradients()
        loss, num_tokens = self.pipeline.run(batch)
        assert self.flat.has_all_gradients, "a parameter took no part in the step"
        if self.mesh.cuts_tokens:
            with part("tp"):
                self.flat.sum_replicated(self.mesh.tp_group)
        tied = self.stage.tied_weight
        if tied is not None:
            with part("pp"):
                all_reduce(tied.main_grad, self.mesh.embedding_group)
        with part("dp"):
            self.optimizer.reduce_gradients()
        with part("optimizer"):
            sums = self._start_sums(loss, num_tokens)
            if self.settings.clip_grad_norm is not None:
                self.optimizer.clip(sums.stats().grad_norm)
            self.optimizer.step(
                self.settings.learning_rate if learning_rate is None else learning_rate
            )
        return sums.stats()

    def _start_sums(self, loss: Tensor, num_tokens: int) -> _Sums:
        """Starts adding up what each rank knows; tp ranks know the same, so the first one speaks."""
        speaks = float(self.mesh.place.tp_rank == 0)
        tokens = torch.tensor(float(num_tokens), dtype=torch.float64, device=self.device)
        parts = (loss * speaks, tokens * speaks, self.optimizer.squared_norm())
        sums = torch.stack(parts)
        world = dist.group.WORLD if self.mesh.layout.num_devices > 1 else None
        return _Sums(sums, start_all_reduce(sums, world))

    def persistent_tensors(self) -> list[Tensor]:
        """Every tensor that outlives a step."""
        rotary = self.stage.rotary_tables
        buffers = [self.flat.weights, self.flat.gradients]
        return [*buffers, *self.optimizer.state_tensors, *rotary]


class _Sums:
    """Three sums over all ranks, under way: loss, tokens, squared norm of the gradient."""

    def __init__(self, sums: Tensor, work: Work | None) -> None:
        self._sums, self._work = sums, work

    def stats(self) -> StepStats:
        """Waits for the sums, the first time, and reads them."""
        with part("idle"):
            finish(self._work)
        self._work = None
        loss, num_tokens, squared_norm = self._sums.tolist()
        return StepStats(loss=loss, grad_norm=math.sqrt(squared_norm), num_tokens=round(num_tokens))


def persistent_bytes(shape: ModelShape, mesh: Mesh, settings: OptimizerSettings) -> int:
    """Bytes of weights, gradients and optimizer states of a rank, before any of it is made."""
    layout = mesh.layout
    stage = Stage(shape, mesh, recompute=layout.recompute)
    elements = num_flat_elements(stage, dp=layout.dp)
    mixed = keeps_master_weights(layout.precision)
    weight_bytes = COMPUTE_DTYPES[layout.precision].itemsize
    state_bytes = (8 if settings.kind == "adamw" else 0) + (4 if mixed else 0)
    owned = elements // layout.dp if layout.zero_stage == 1 else elements
    return elements * (weight_bytes + 4) + owned * state_bytes
