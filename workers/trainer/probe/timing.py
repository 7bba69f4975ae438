"""Timing: an iteration lasts from barrier to barrier, and the slowest rank's clock counts."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from search_spaces.outcome import MIN_WARMUP
from workers.trainer.collectives import barrier
from workers.trainer.errors import LossDivergedError
from workers.trainer.stopwatch import Part, part
from workers.trainer.training import StepStats, Training

MAX_EXTRA_WARMUP: Final = 8
"""Warm-up steps beyond those that were asked for, while step times have not settled."""
SETTLED_WITHIN: Final = 0.1
"""Step times have settled when one differs from the one before by at most this part of the shorter."""


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
        LossDivergedError: the loss or the gradient norm is not finite; of a step that fp16's loss
            scaler has skipped, the loss alone.
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
    _refuse_divergence(stats, index)
    return TimedStep(step_time_s=elapsed.item(), parts_s=training.stopwatch.seconds(), stats=stats)


def _refuse_divergence(stats: StepStats, index: int) -> None:
    if not math.isfinite(stats.loss):
        raise LossDivergedError(f"loss is {stats.loss} at iteration {index}")
    if not math.isfinite(stats.grad_norm) and not stats.is_skipped:
        raise LossDivergedError(f"gradient norm is {stats.grad_norm} at iteration {index}")


def has_settled(step_times_s: Sequence[float]) -> bool:
    """Whether the last two steps took the same time, within `SETTLED_WITHIN`.

    Against the step before, not against the shortest so far: a step that is the shortest yet says
    nothing about whether the next one will be shorter still.
    """
    if len(step_times_s) < MIN_WARMUP:  # two: there is nothing to compare one with
        return False
    before_s, last_s = step_times_s[-2:]
    return abs(last_s - before_s) <= SETTLED_WITHIN * min(before_s, last_s)


def is_warm(step_times_s: Sequence[float], *, at_least: int) -> bool:
    """Whether warm-up ends here: step times have settled, or it has gone on for long enough.

    Step times are those of the slowest rank, so every rank decides the same.
    """
    if len(step_times_s) < at_least:
        return False
    return has_settled(step_times_s) or len(step_times_s) >= at_least + MAX_EXTRA_WARMUP
