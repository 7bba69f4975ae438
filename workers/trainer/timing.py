"""Timing: an iteration lasts from barrier to barrier, and the slowest rank's clock counts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from workers.trainer.collectives import barrier
from workers.trainer.errors import LossDivergedError
from workers.trainer.stopwatch import Part, part
from workers.trainer.training import StepStats, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """One step, and how long it took."""

    step_time_s: float
    """Seconds from barrier to barrier, of the slowest rank; the same on every rank."""
    parts_s: Mapping[Part, float]
    """Seconds of each part of this rank's step; together they are its own time."""
    stats: StepStats
    """The same on every rank."""

    @property
    def tokens_per_s(self) -> float:
        return self.stats.num_tokens / self.step_time_s


def timed_step(training: Training, index: int) -> TimedStep:
    """Takes one step over the batch of this index; tokens are made before the clock starts.

    Raises:
        LossDivergedError: the loss or the gradient norm is not finite.
    """
    batch = training.batch(index)
    barrier(training.device)
    started = time.perf_counter()
    with training.stopwatch.running():
        stats = training.step(batch)
        with part("idle"):
            barrier(training.device)
    elapsed = torch.tensor(
        time.perf_counter() - started, dtype=torch.float64, device=training.device
    )
    dist.all_reduce(elapsed, op=ReduceOp.MAX)
    for name, value in (("loss", stats.loss), ("gradient norm", stats.grad_norm)):
        if not math.isfinite(value):
            raise LossDivergedError(f"{name} is {value} at iteration {index}")
    return TimedStep(step_time_s=elapsed.item(), parts_s=training.stopwatch.seconds(), stats=stats)
