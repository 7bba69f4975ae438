"""Timing of iterations, early stop, and the breakdown of a step's time into its parts.

An iteration lasts from barrier to barrier, and its time is that of the slowest rank.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from statistics import median

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED, shows_enough
from layout_tuner.protocol.measurement import Breakdown
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.workers.trainer.comm.collectives import barrier
from layout_tuner.workers.trainer.errors import LossDivergedError
from layout_tuner.workers.trainer.stopwatch import PARTS, Part, part
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


def break_down(
    steps: Sequence[TimedStep], layout: Layout, *, device: torch.device
) -> list[Breakdown]:
    """The breakdown of each step; each part is the mean over the ranks.

    The difference to the slowest rank's time is unexplained, so that the parts add up to it.

    Communicates: one all-reduce over all ranks.
    """
    rows = [[step.parts_s[name] for name in PARTS] for step in steps]
    sums = torch.tensor(rows, dtype=torch.float64, device=device)
    dist.all_reduce(sums)
    means = (sums / layout.num_devices).tolist()
    return [
        breakdown_of(dict(zip(PARTS, row, strict=True)), layout, step_time_s=step.step_time_s)
        for row, step in zip(means, steps, strict=True)
    ]


def breakdown_of(parts_s: Mapping[Part, float], layout: Layout, *, step_time_s: float) -> Breakdown:
    """The breakdown of one step.

    The wait for all ranks at the end of the step counts for the axis that makes ranks unequal: pp,
    whose last stages finish first; else dp, else cp, else tp. An axis of one rank has no time,
    except dp under cp, over which gradients are summed too.
    """
    axes: dict[Part, int] = {"pp": layout.pp, "dp": layout.dp_cp, "cp": layout.cp}
    axes |= {"tp": layout.tp_ranks, "ep": layout.ep * layout.etp}
    exposed_s = {name: parts_s[name] if size > 1 else 0.0 for name, size in axes.items()}
    waiting = next((name for name, size in axes.items() if size > 1), None)
    if waiting is not None:
        exposed_s[waiting] += parts_s["idle"]
    compute_s, optimizer_s = parts_s["compute"], parts_s["optimizer"]
    return Breakdown(
        compute_s=compute_s,
        **{f"{name}_s": seconds for name, seconds in exposed_s.items()},
        optimizer_s=optimizer_s,
        unexplained_s=step_time_s - (compute_s + optimizer_s + sum(exposed_s.values())),
    )


def median_breakdown(breakdowns: Sequence[Breakdown], *, step_time_s: float) -> Breakdown:
    """The median of each part, scaled so that the parts add up to the median step time.

    The medians of the parts alone do not add up to it. The factor is close to 1, and a single
    disturbed step changes neither the medians nor the factor much.
    """
    medians = [median(parts) for parts in zip(*map(astuple, breakdowns), strict=True)]
    scale = step_time_s / sum(medians)
    return Breakdown(
        **{
            name: scale * seconds
            for name, seconds in zip(Breakdown.__slots__, medians, strict=True)
        }
    )
