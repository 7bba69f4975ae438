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
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What fixes the order of passes."""

    pp: int
    """Ranks of the pipeline."""
    vpp: int
    """Stages that each of them holds; 1 is plain 1F1B."""
    num_microbatches: int
    """Micro-batches of a step."""

    @property
    def num_stages(self) -> int:
        """Stages of the whole pipeline."""
        return self.pp * self.vpp


class Pass(NamedTuple):
    """One micro-batch through one stage, forward or backward."""

    is_forward: bool
    stage: int
    microbatch: int


def rank_order(schedule: Schedule, rank: int) -> list[Pass]:
    """The passes of one rank in order: forward passes to warm up, then one of each in turn.

    1F1B warms up with one pass for each later rank (arXiv:2006.09503). The interleaved schedule
    takes micro-batches in groups of pp. Each group passes through all stages of a rank before the
    next group. Its warm-up is two passes for each later rank and (vpp - 1) pp more
    (arXiv:2104.04473, section 2.2).
    """
    pp, vpp, total = schedule.pp, schedule.vpp, schedule.vpp * schedule.num_microbatches
    if vpp == 1:
        num_warmup = pp - 1 - rank
    else:
        assert schedule.num_microbatches % pp == 0, f"{schedule} has micro-batches left over"
        num_warmup = 2 * (pp - 1 - rank) + (vpp - 1) * pp
    num_warmup = min(num_warmup, total)
    forwards = [_virtual(schedule, rank, k, is_forward=True) for k in range(total)]
    backwards = [_virtual(schedule, rank, k, is_forward=False) for k in range(total)]
    order = forwards[:num_warmup]
    for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
        order += [forward, backward]
    return order + backwards[total - num_warmup :]


def _virtual(schedule: Schedule, rank: int, k: int, *, is_forward: bool) -> Pass:
    """The k-th forward or backward pass of a rank."""
    if schedule.vpp == 1:
        return Pass(is_forward, rank, k)
    group, within = divmod(k, schedule.pp * schedule.vpp)
    chunk, place = divmod(within, schedule.pp)
    if not is_forward:
        chunk = schedule.vpp - 1 - chunk
    return Pass(is_forward, chunk * schedule.pp + rank, group * schedule.pp + place)


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


def most_in_flight(schedule: Schedule, rank: int) -> int:
    """Most passes of a rank whose activations are held at once, each of one of its stages."""
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
    sender_waits: bool | None = None,
) -> Timeline:
    """Walks one step.

    Args:
        schedule: of all the layouts.
        forward_SN: seconds of a forward pass.
        backward_SN: seconds of a backward pass.
        hop_RN: seconds from a rank to the next one, or back; the last rank's next is the first.
        sender_waits: whether a rank stands still while it sends. None: under 1F1B alone;
            interleaved transfers run beside the passes.
    """
    pp, last = schedule.pp, schedule.num_stages - 1
    waits = schedule.vpp == 1 if sender_waits is None else sender_waits
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
        if waits and sends:
            end = end + hop_RN[(each.stage if each.is_forward else each.stage - 1) % pp]
        free_RN[rank] = end
    return Timeline(rank_end_s=free_RN, last_backward_start_s=start_SN, last_backward_end_s=end_SN)
