"""Implementations of the same training step, timed in turns within the same ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import distributed as dist
from torch.distributed import ReduceOp

from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.workers.trainer.batches import Batch
from layout_tuner.workers.trainer.comm.collectives import barrier

Step = Callable[[Batch], float]
"""Takes an optimizer step; returns this rank's share of the mean loss, which ranks add up."""


class LossesDifferError(Exception):
    """Two implementations that should train the same model do not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """What one implementation needed, step by step."""

    step_times_s: tuple[float, ...]
    """From barrier to barrier, of the slowest rank."""
    cpu_times_s: tuple[float, ...]
    """Processor time of all ranks together."""
    losses: tuple[float, ...]
    """Of the global batch, warm-up included."""

    @property
    def step_time_s(self) -> float:
        return quartiles(self.step_times_s)[1]

    @property
    def cpu_time_s(self) -> float:
        return quartiles(self.cpu_times_s)[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times longer the peer takes."""

    of_medians: float
    q25: float
    of_pairs: float
    """Median over pairs of consecutive steps on the same batch."""
    q75: float


def ratio(ours: Sequence[float], peer: Sequence[float]) -> Ratio:
    """Compares two series that were taken in turns."""
    pairs = [theirs / our for our, theirs in zip(ours, peer, strict=True)]
    q25, median, q75 = quartiles(pairs)
    of_medians = quartiles(peer)[1] / quartiles(ours)[1]
    return Ratio(of_medians=of_medians, q25=q25, of_pairs=median, q75=q75)


def take_turns(
    sides: Mapping[str, Step],
    make_batch: Callable[[int], Batch],
    *,
    num_rounds: int,
    num_warmup: int,
    between: Callable[[], None] = lambda: None,
    device: torch.device | None = None,
) -> dict[str, Series]:
    """Every side takes a step on each batch; who begins alternates. Needs the process group.

    Args:
        sides: implementations by name.
        make_batch: this rank's tokens of a step.
        num_rounds: timed steps of each side.
        num_warmup: steps of each side before those.
        between: called after each round, on every rank, outside of any timing.
        device: what the ranks compute on; None: the CPU.
    """
    device = device or torch.device("cpu")
    taken: dict[str, list[list[float]]] = {name: [] for name in sides}
    for index in range(num_warmup + num_rounds):
        batch = make_batch(index)
        for name in list(sides)[:: 1 if index % 2 else -1]:
            taken[name].append(_timed(sides[name], batch, device))
        between()
    series = {}
    for name, rows in taken.items():
        times_s, cpu_s, losses = zip(*rows, strict=True)
        series[name] = Series(
            step_times_s=times_s[num_warmup:], cpu_times_s=cpu_s[num_warmup:], losses=losses
        )
    return series


def _timed(step: Step, batch: Batch, device: torch.device) -> list[float]:
    barrier(device)
    started, cpu_started = time.perf_counter(), time.process_time()
    share_of_loss = step(batch)
    cpu_s = time.process_time() - cpu_started
    barrier(device)
    elapsed_s = time.perf_counter() - started
    slowest = torch.tensor(elapsed_s, dtype=torch.float64, device=device)
    sums = torch.tensor([cpu_s, share_of_loss], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=ReduceOp.MAX)
    dist.all_reduce(sums)
    return [slowest.item(), *sums.tolist()]


def refuse_different_losses(
    series: Mapping[str, Series], *, tolerance: float, what: str
) -> dict[str, float]:
    """The largest relative difference of a side's losses from the first's; NaN where a loss is NaN.

    Raises:
        LossesDifferError: it is over the tolerance.
    """
    (first, reference), *others = series.items()
    found = {}
    for name, other in others:
        pairs = list(zip(reference.losses, other.losses, strict=True))
        apart = [abs(a - b) / abs(a) for a, b in pairs]
        found[name] = math.nan if any(map(math.isnan, apart)) else max(apart)
        if not found[name] <= tolerance:
            shown = ", ".join(f"{a:.5f} {b:.5f}" for a, b in pairs)
            raise LossesDifferError(
                f"{what}: losses of {first} and {name} differ by {found[name]:.1e} of their size, "
                f"over {tolerance:.0e}: {shown}; they do not train the same model"
            )
    return found
