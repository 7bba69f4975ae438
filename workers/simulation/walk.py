"""The walk through a step: start and end of each pass and transfer, on each rank of a pipeline.

Nothing here knows a formula of the bubble. A rank takes the actions of the trainer's own table
(`search_spaces.layouts.schedules`) in their order, as the trainer does: one transfer is under way
at a time, a pass waits for the transfer that brings its input, and a transfer starts once both ends
have come to it. Layouts that share a schedule are walked together, as columns; one alone as floats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Self

import numpy as np

from layout_tuner.search_spaces.layouts import schedules
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.schedules import Backward, Forward, Transfer

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
    def of(cls, layout: Layout) -> Self:
        return cls(
            pp=layout.pp,
            vpp=layout.vpp,
            num_microbatches=layout.num_microbatches,
            name=layout.schedule,
        )

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp


class TracedSpan(NamedTuple):
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


class _Run(NamedTuple):
    """Events of a rank that are repeated, each time for later micro-batches."""

    events: Sequence[_Event]
    first: int
    """Micro-batches that the first time is later than the events say."""
    repeats: int
    step: int
    """Micro-batches from one time to the next."""


@lru_cache(maxsize=64)
def rank_runs(schedule: Schedule) -> tuple[tuple[_Run, ...], ...]:
    """The events of each rank in their order.

    A long schedule is that of fewer micro-batches with the block that one more group of them adds,
    repeated; with gpipe there are two such blocks, so that its table is taken as it is.
    """
    pp, m = schedule.pp, schedule.num_microbatches
    step = pp if schedule.vpp > 1 else 1
    few = 2 * pp
    few += (m - few) % step
    if schedule.name == "gpipe" or m <= few + step:
        return tuple((_Run(_events(schedule, rank), 0, 1, 0),) for rank in range(pp))
    short, longer = (replace(schedule, num_microbatches=n) for n in (few, few + step))
    repeats = (m - few) // step
    found = []
    for rank in range(pp):
        events, more = _events(short, rank), _events(longer, rank)
        pairs = enumerate(zip(events, more, strict=False))
        head = next(place for place, (one, other) in pairs if one != other)
        block = more[head : head + len(more) - len(events)]
        found.append(
            (
                _Run(events[:head], 0, 1, 0),
                _Run(block, 0, repeats, step),
                _Run(events[head:], repeats * step, 1, 0),
            )
        )
    return tuple(found)


def rank_events(schedule: Schedule, rank: int) -> Iterator[tuple[_Event, int]]:
    """Each event of a rank, with the micro-batches that it is later than it says."""
    for events, first, repeats, step in rank_runs(schedule)[rank]:
        for later in range(first, first + repeats * max(step, 1), max(step, 1)):
            for event in events:
                yield event, later


def _events(schedule: Schedule, rank: int) -> list[_Event]:
    # A message is known by its micro-batch, its kind and the stage that receives it.
    pp, before, stages = schedule.pp, (rank - 1) % schedule.pp, schedule.num_stages
    each = 2 * stages
    events: list[_Event] = []
    activation = gradient = None
    for action in schedules.pipeline_schedule(
        rank,
        pp=pp,
        vpp=schedule.vpp,
        num_microbatches=schedule.num_microbatches,
        schedule=schedule.name,
    ):
        if isinstance(action, Transfer):
            messages = []
            if activation := action.receive_activation:
                messages.append((activation[1] * each + activation[0] * pp + rank, before))
            if gradient := action.receive_gradient:
                messages.append((gradient[1] * each + stages + gradient[0] * pp + rank, rank))
            if of := action.send_activation:
                messages.append((of[1] * each + of[0] * pp + rank + 1, rank))
            if of := action.send_gradient:
                messages.append((of[1] * each + stages + of[0] * pp + rank - 1, before))
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
    enough = 3 * schedule.pp
    if schedule.name == "gpipe":
        return (((schedule.num_microbatches, 0),),) * schedule.pp
    if schedule.num_microbatches > enough:
        return held_passes(replace(schedule, num_microbatches=enough))
    held = []
    for rank in range(schedule.pp):
        in_flight = late = 0
        seen = {(0, 0)}
        for event, _ in rank_events(schedule, rank):
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
    spans: list[TracedSpan] | None = None,
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
    each = 2 * schedule.num_stages
    streams = [rank_events(schedule, rank) for rank in range(schedule.pp)]
    coming: list[tuple[_Event, int] | None] = [next(stream) for stream in streams]
    free = [begin] * schedule.pp
    current: list[list[int]] = [[] for _ in range(schedule.pp)]
    last_start, last_end = [begin] * schedule.num_stages, [begin] * schedule.num_stages
    posted: dict[int, Seconds] = {}
    ended: dict[int, Seconds] = {}
    waiting: dict[int, int] = {}
    runnable = deque(range(schedule.pp))
    while runnable:
        rank = runnable.popleft()
        now, under_way, stream, item = free[rank], current[rank], streams[rank], coming[rank]
        while item is not None:
            event, later = item
            kind = event[0]
            if under_way and (kind == _TRANSFER or event[3]):
                missing = next((key for key in under_way if key not in ended), None)
                if missing is not None:
                    waiting[missing] = rank
                    break
                for key in under_way:
                    now = latest(now, ended[key])
                under_way = []
            if kind != _TRANSFER:
                stage = event[1]
                last_start[stage] = now
                now = now + pass_s[kind][stage]
                last_end[stage] = now
                if spans is not None:
                    spans.append(
                        TracedSpan(rank, kind, stage, event[2] + later, last_start[stage], now)
                    )
                item = next(stream, None)
                continue
            for message, link in event[1]:
                key = message + later * each
                under_way.append(key)
                if key not in posted:
                    posted[key] = now
                    continue
                start = latest(posted.pop(key), now)
                ended[key] = start + hop_s[link]
                if key in waiting:
                    runnable.append(waiting.pop(key))
                if spans is not None:
                    spans.append(_message(key, schedule, start, ended[key]))
            item = next(stream, None)
        free[rank], current[rank], coming[rank] = now, under_way, item
    assert not waiting, f"the ranks of {schedule} wait for each other"
    return Timeline(rank_end_s=free, last_start_s=last_start, last_end_s=last_end)


def _message(key: int, schedule: Schedule, start_s: float, end_s: float) -> TracedSpan:
    microbatch, which = divmod(key, 2 * schedule.num_stages)
    kind, stage = divmod(which, schedule.num_stages)
    return TracedSpan(stage % schedule.pp, ACTIVATION + kind, stage, microbatch, start_s, end_s)
