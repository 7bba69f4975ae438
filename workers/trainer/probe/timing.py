"""Timing of iterations, the end of warm-up, and early stop.

An iteration lasts from barrier to barrier, and its time is that of the slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED, shows_enough
from layout_tuner.workers.trainer.comm.collectives import barrier
from layout_tuner.workers.trainer.errors import LossDivergedError
from layout_tuner.workers.trainer.stopwatch import Part, part
from layout_tuner.workers.trainer.training import StepStats, Training


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    step_time_s: float
    """Seconds from barrier to barrier on the slowest rank; the same on every rank."""
    parts_s: Mapping[Part, float]
    """Seconds of each part of the step on this rank; they add up to this rank's time."""
    stats: StepStats
    """The same on every rank."""

    @property
    def tokens_per_s(self) -> float:
        return self.stats.num_tokens / self.step_time_s


def timed_step(training: Training, index: int) -> TimedStep:
    """Takes one step on the batch of this index. The batch is made before the clock starts.

    Communicates, besides the step: two barriers and one all-reduce over all ranks.

    Raises:
        LossDivergedError: the loss or the gradient norm is not finite. A step that fp16's loss
            scaling skipped may have an infinite gradient norm.
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
    if not math.isfinite(stats.loss):
        raise LossDivergedError(f"loss is {stats.loss} at iteration {index}")
    if not math.isfinite(stats.grad_norm) and not stats.is_skipped:
        raise LossDivergedError(f"gradient norm is {stats.grad_norm} at iteration {index}")
    return TimedStep(step_time_s=elapsed.item(), parts_s=training.stopwatch.seconds(), stats=stats)


def stops_early(steps: Sequence[TimedStep], than_s: float, training: Training) -> bool:
    """Whether these timed iterations show that the layout is slower than `than_s` per step.

    Communicates: a broadcast of one number from rank 0 over all ranks, between two iterations, once
    `LEAST_TIMED` iterations have been timed. All ranks have the same step times, but the last bit
    of a logarithm depends on the machine, so rank 0 decides for all.
    """
    if len(steps) < LEAST_TIMED:
        return False
    stops = torch.zeros(1, dtype=torch.int64, device=training.device)
    if training.mesh.rank == 0:
        # A probe that skipped all steps is not stopped early: it fails as diverged at its end.
        was_trained = any(not step.stats.is_skipped for step in steps)
        stops += was_trained and shows_enough([step.step_time_s for step in steps], than_s)
    dist.broadcast(stops, src=0)
    return bool(stops.item())
