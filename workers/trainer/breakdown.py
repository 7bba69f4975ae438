"""Where an iteration's time goes: from each rank's stopwatch to one breakdown of the whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple
from statistics import median

import torch
from torch import distributed as dist

from search_spaces.layout import Layout
from search_spaces.measurement import Breakdown
from workers.trainer.stopwatch import PARTS, Part
from workers.trainer.timing import TimedStep


def break_down(
    steps: Sequence[TimedStep], layout: Layout, *, device: torch.device
) -> list[Breakdown]:
    """The breakdown of each step, its parts the mean over the ranks; one all-reduce over all.

    What the parts leave of the slowest rank's time is unexplained, so that they add up to it.
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
    """One step's breakdown.

    Waiting for every rank at the step's end goes to the axis that makes ranks unequal: the
    pipeline, whose last stages are done first, else dp, else tp. An axis of one rank has no time.
    """
    axes: dict[Part, int] = {"pp": layout.pp, "dp": layout.dp, "tp": layout.tp}
    exposed_s = {name: parts_s[name] if size > 1 else 0.0 for name, size in axes.items()}
    waiting = next((name for name, size in axes.items() if size > 1), None)
    if waiting is not None:
        exposed_s[waiting] += parts_s["idle"]
    compute_s, optimizer_s = parts_s["compute"], parts_s["optimizer"]
    return Breakdown(
        compute_s=compute_s,
        tp_s=exposed_s["tp"],
        pp_s=exposed_s["pp"],
        dp_s=exposed_s["dp"],
        optimizer_s=optimizer_s,
        unexplained_s=step_time_s - (compute_s + optimizer_s + sum(exposed_s.values())),
    )


def median_breakdown(breakdowns: Sequence[Breakdown], *, step_time_s: float) -> Breakdown:
    """The median of each part, scaled so that together they are the median step.

    Medians of parts do not add up to the median of the whole; the factor is close to 1, and a step
    that something else disturbed moves neither.
    """
    medians = [median(parts) for parts in zip(*map(astuple, breakdowns), strict=True)]
    scale = step_time_s / sum(medians)
    return Breakdown(
        **{
            name: scale * seconds
            for name, seconds in zip(Breakdown.__slots__, medians, strict=True)
        }
    )
