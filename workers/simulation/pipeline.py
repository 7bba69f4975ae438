"""Event simulation of a pipeline: start and end of each pass on each rank.

Nothing here knows a formula of the bubble: a rank takes its passes in its schedule's order, and
each begins when the rank is free and its input has come. All layouts that share a schedule are
walked together, as columns.

Shapes: S stages (pp * vpp of them; stage s lives on rank s % pp), R ranks of the pipeline, N
layouts.
"""

# ruff: noqa: N803, N806 (arrays carry their shape in the name)

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from search_spaces.arrays import Floats
from search_spaces.schedules import Forward, Transfer, pipeline_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What fixes the order of passes."""

    pp: int
    """Ranks of the pipeline."""
    vpp: int
    """Stages that each of them holds; 1 is plain 1F1B."""
    num_microbatches: int

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp


class Pass(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    is_forward: bool
    stage: int
    microbatch: int


def rank_order(schedule: Schedule, rank: int) -> list[Pass]:
    """The passes of one rank in the order of the trainer's schedule."""
    actions = pipeline_schedule(
        rank, pp=schedule.pp, vpp=schedule.vpp, num_microbatches=schedule.num_microbatches
    )
    return [
        Pass(isinstance(each, Forward), each.of.chunk * schedule.pp + rank, each.of.microbatch)
        for each in actions
        if not isinstance(each, Transfer)
    ]


def event_order(schedule: Schedule) -> list[Pass]:
    """All passes of all ranks, in an order in which each finds its input made."""
    queues = [deque(rank_order(schedule, rank)) for rank in range(schedule.pp)]
    made: set[Pass] = set()
    waiting: dict[Pass, int] = {}
    order: list[Pass] = []
    runnable = deque(range(schedule.pp))
    while runnable:
        rank = runnable.popleft()
        while queues[rank]:
            needed = input_of(queues[rank][0], schedule.num_stages)
            if needed is not None and needed not in made:
                waiting[needed] = rank
                break
            done = queues[rank].popleft()
            order.append(done)
            made.add(done)
            if done in waiting:
                runnable.append(waiting.pop(done))
    assert not any(queues), f"the ranks of {schedule} wait for each other"
    return order


def input_of(each: Pass, num_stages: int) -> Pass | None:
    """The pass whose output this one needs; None: it reads the batch."""
    if each.is_forward:
        return each._replace(stage=each.stage - 1) if each.stage else None
    if each.stage == num_stages - 1:
        return each._replace(is_forward=True)
    return each._replace(stage=each.stage + 1)


@lru_cache(maxsize=1 << 16)
def most_in_flight(schedule: Schedule, rank: int) -> int:
    """Most passes of a rank whose activations are held at once, each of one of its stages.

    Beyond the warm-up the length of a schedule does not matter.
    """
    enough = 2 * schedule.pp * max(schedule.vpp, 1) * schedule.pp
    if schedule.num_microbatches > enough:
        return most_in_flight(replace(schedule, num_microbatches=enough), rank)
    held = most = 0
    for each in rank_order(schedule, rank):
        held += 1 if each.is_forward else -1
        most = max(most, held)
    return most


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """When things ended, in seconds from the step's beginning; of shape (R, N) or (S, N)."""

    rank_end_s: Floats
    """The end of each rank's last pass."""
    last_backward_start_s: Floats
    """The beginning of each stage's last backward pass: from then on its gradients become final."""
    last_backward_end_s: Floats
    """Its end."""


def walk(
    schedule: Schedule,
    *,
    forward_SN: Floats,
    backward_SN: Floats,
    hop_RN: Floats,
) -> Timeline:
    """Walks one step.

    Args:
        schedule: of all the layouts.
        forward_SN: seconds of a forward pass.
        backward_SN: seconds of a backward pass.
        hop_RN: seconds from a rank to the next one, or back; the last rank's next is the first.
    """
    pp, last = schedule.pp, schedule.num_stages - 1
    sender_waits = schedule.vpp == 1  # interleaved transfers run beside the passes
    free_RN = np.zeros((pp, forward_SN.shape[1]))
    ends: dict[Pass, Floats] = {}
    start_SN, end_SN = np.zeros_like(forward_SN), np.zeros_like(forward_SN)
    for each in event_order(schedule):
        rank = each.stage % pp
        needed = input_of(each, schedule.num_stages)
        start = free_RN[rank]
        if needed is not None:
            arrival = ends.pop(needed)
            if needed.stage != each.stage:
                # A link is named after the rank on its left, whichever way it is used.
                arrival = arrival + hop_RN[min(needed.stage, each.stage) % pp]
            start = np.maximum(start, arrival)
        end = start + (forward_SN if each.is_forward else backward_SN)[each.stage]
        ends[each] = end
        if not each.is_forward and each.microbatch == schedule.num_microbatches - 1:
            start_SN[each.stage], end_SN[each.stage] = start, end
        sends = each.stage < last if each.is_forward else each.stage > 0
        if sender_waits and sends:
            end = end + hop_RN[(each.stage if each.is_forward else each.stage - 1) % pp]
        free_RN[rank] = end
    return Timeline(rank_end_s=free_RN, last_backward_start_s=start_SN, last_backward_end_s=end_SN)
