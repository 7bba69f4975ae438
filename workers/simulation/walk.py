"""The walk through a step: start and end of each pass and transfer, on each rank of a pipeline.

Nothing here knows a formula of the bubble. A rank takes the actions of the trainer's own table
(`search_spaces.schedules`) in their order, as the trainer does: one transfer is under way at a
time, a pass waits for the transfer that brings its input, and a transfer starts once both ends have
come to it. Layouts that share a schedule are walked together, as columns; one alone as floats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from search_spaces import schedules
from search_spaces.schedules import Backward, Forward, Transfer
from search_spaces.spec.layout import Layout

FORWARD, BACKWARD, WEIGHTS, _TRANSFER = range(4)
"""Kinds of passes, and transfers."""
ACTIVATION, GRADIENT = 3, 4
"""Kinds of messages."""

Seconds = Any
"""A float, or an array of one number a layout."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """What fixes the order of passes."""

    pp: int
    vpp: int
    num_microbatches: int
    name: schedules.Schedule = "1f1b"

    @classmethod
    def of(cls, layout: Layout) -> Schedule:
        return cls(
            pp=layout.pp,
            vpp=layout.vpp,
            num_microbatches=layout.num_microbatches,
            name=layout.schedule,
        )

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp


class Span(NamedTuple):
    """A pass or a message, with its times in seconds from the step's beginning."""

    rank: int
    """Of the pipeline; of a message the receiver."""
    kind: int
    stage: int
    microbatch: int
    start_s: float
    end_s: float


_Event = tuple[Any, ...]
"""A pass: kind, stage, micro-batch, and whether it needs what the current transfer brings. Or a
transfer: its kind, and its messages, each with the rank on the left of its link."""


@lru_cache(maxsize=16)
def rank_events(schedule: Schedule) -> tuple[tuple[_Event, ...], ...]:
    """The events of each rank in their order."""
    return tuple(tuple(_events(schedule, rank)) for rank in range(schedule.pp))


def _events(schedule: Schedule, rank: int) -> list[_Event]:
    # A message is known by the stage that receives it: activations first, then gradients.
    pp, m, before = schedule.pp, schedule.num_microbatches, (rank - 1) % schedule.pp
    gradients = schedule.num_stages * m
    events: list[_Event] = []
    activation = gradient = None
    for action in schedules.pipeline_schedule(
        rank, pp=pp, vpp=schedule.vpp, num_microbatches=m, schedule=schedule.name
    ):
        if isinstance(action, Transfer):
            messages = []
            if activation := action.receive_activation:
                messages.append(((activation[0] * pp + rank) * m + activation[1], before))
            if gradient := action.receive_gradient:
                key = gradients + (gradient[0] * pp + rank) * m + gradient[1]
                messages.append((key, rank))
            if of := action.send_activation:
                messages.append(((of[0] * pp + rank + 1) * m + of[1], rank))
            if of := action.send_gradient:
                messages.append((gradients + (of[0] * pp + rank - 1) * m + of[1], before))
            events.append((_TRANSFER, tuple(messages)))
        elif isinstance(action, Forward):
            chunk, microbatch = action.of
            events.append((FORWARD, chunk * pp + rank, microbatch, activation == action.of))
        else:
            chunk, microbatch = action.of
            is_backward = isinstance(action, Backward)
            kind = BACKWARD if is_backward else WEIGHTS
            is_due = is_backward and gradient == action.of
            events.append((kind, chunk * pp + rank, microbatch, is_due))
    events.append((_TRANSFER, ()))
    return events


@lru_cache(maxsize=1 << 12)
def held_passes(schedule: Schedule) -> tuple[tuple[tuple[int, int], ...], ...]:
    """What each rank holds at some time: passes in flight, and passes with late weight gradients.

    Pairs that another one exceeds in both are left out. Beyond the warm-up and a few micro-batches
    the length of a schedule does not matter, except with gpipe, whose passes are all in flight.
    """
    enough = 4 * schedule.pp * schedule.vpp
    if schedule.name == "gpipe":
        return (((schedule.num_microbatches, 0),),) * schedule.pp
    if schedule.num_microbatches > enough:
        return held_passes(replace(schedule, num_microbatches=enough))
    held = []
    for events in rank_events(schedule):
        in_flight = late = 0
        seen = {(0, 0)}
        for event in events:
            if event[0] == FORWARD:
                in_flight += 1
            elif event[0] == BACKWARD:
                in_flight -= 1
                late += schedule.name == "zero_bubble"
            elif event[0] == WEIGHTS:
                late -= 1
            # While a backward pass ends, it still holds what it began with.
            seen.add((in_flight + (event[0] == BACKWARD), late))
        held.append(tuple(_largest(seen)))
    return tuple(held)


def _largest(pairs: set[tuple[int, int]]) -> list[tuple[int, int]]:
    kept: list[tuple[int, int]] = []
    for pair in sorted(pairs, reverse=True):
        if not kept or pair[1] > kept[-1][1]:
            kept.append(pair)
    return kept


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Timeline:
    """When things ended, in seconds from the step's beginning."""

    rank_end_s: list[Seconds]
    """The end of each rank's last pass and transfer."""
    last_start_s: list[Seconds]
    """The beginning of each stage's last pass: from then on its gradients become final."""
    last_end_s: list[Seconds]
    """Its end."""


def walk(
    schedule: Schedule,
    pass_s: Sequence[Sequence[Seconds]],
    hop_s: Sequence[Seconds],
    *,
    spans: list[Span] | None = None,
) -> Timeline:
    """Walks one step.

    Args:
        schedule: of all the layouts.
        pass_s: seconds of a pass by kind and stage.
        hop_s: seconds of a message from each rank to the next, or back; after the last comes the
            first.
        spans: where to note every pass and message; only with floats.
    """
    is_one = not isinstance(pass_s[FORWARD][0], np.ndarray)
    latest: Any = max if is_one else np.maximum
    begin = 0.0 if is_one else np.zeros_like(pass_s[FORWARD][0])
    queues, m = rank_events(schedule), schedule.num_microbatches
    free, at = [begin] * schedule.pp, [0] * schedule.pp
    current: list[_Event] = [()] * schedule.pp
    last_start, last_end = [begin] * schedule.num_stages, [begin] * schedule.num_stages
    posted: dict[int, Seconds] = {}
    ended: dict[int, Seconds] = {}
    waiting: dict[int, int] = {}
    runnable = deque(range(schedule.pp))
    while runnable:
        rank = runnable.popleft()
        now, under_way = free[rank], current[rank]
        events = queues[rank]
        for place in range(at[rank], len(events)):
            event = events[place]
            kind = event[0]
            if under_way and (kind == _TRANSFER or event[3]):
                missing = next((key for key, _ in under_way if key not in ended), None)
                if missing is not None:
                    waiting[missing] = rank
                    break
                for key, _ in under_way:
                    now = latest(now, ended[key])
                under_way = ()
            if kind != _TRANSFER:
                stage = event[1]
                last_start[stage] = now
                now = now + pass_s[kind][stage]
                last_end[stage] = now
                if spans is not None:
                    spans.append(Span(rank, kind, stage, event[2], last_start[stage], now))
                continue
            under_way = event[1]
            for key, link in under_way:
                if key not in posted:
                    posted[key] = now
                    continue
                start = latest(posted.pop(key), now)
                ended[key] = start + hop_s[link]
                if key in waiting:
                    runnable.append(waiting.pop(key))
                if spans is not None:
                    kind_of, stage = divmod(key // m, schedule.num_stages)
                    at_rank, end = stage % schedule.pp, ended[key]
                    spans.append(Span(at_rank, ACTIVATION + kind_of, stage, key % m, start, end))
        else:
            place = len(events)
        at[rank], free[rank], current[rank] = place, now, under_way
    assert not waiting, f"the ranks of {schedule} wait for each other"
    return Timeline(rank_end_s=free, last_start_s=last_start, last_end_s=last_end)
