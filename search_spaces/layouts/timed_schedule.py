"""The times of the passes of a pipeline schedule, if transfers took none, and what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

from layout_tuner.search_spaces.layouts.schedules import (
    Backward,
    Forward,
    Schedule,
    Transfer,
    pipeline_schedule,
    splits_backward,
    stage_of,
)

Kind = Literal["forward", "backward", "weights"]


class TimedPass(NamedTuple):
    """A pass of a chunk with its times, in durations of a mean chunk's forward pass."""

    kind: Kind
    """`weights`: the products of weight gradients that a backward pass has left out."""
    chunk: int
    microbatch: int
    start: float
    end: float


class TimedSchedule(NamedTuple):
    """When each rank of a pipeline runs its passes, if transfers took no time."""

    ranks: Sequence[Sequence[TimedPass]]
    """The passes of each pipeline rank in order."""
    length: float
    """The end of the last pass."""


@lru_cache(maxsize=8)
def timed_schedule(
    *,
    pp: int,
    vpp: int,
    num_microbatches: int,
    backward_units: float | tuple[float, ...],
    schedule: Schedule = "1f1b",
    stage_units: tuple[float, ...] = (),
    weights_units: float = 1.0,
) -> TimedSchedule:
    """Starts each pass when its rank is free and its input is there.

    A backward pass takes `backward_units` as long as a forward pass (a number for all stages, or
    one for each), and `weights_units` less where it leaves out the products of weight gradients.
    `stage_units`: durations of the stages' passes over those of a mean stage; empty: all equal.
    """
    durations: dict[Kind, float] = {"forward": 1.0, "weights": weights_units}
    if not isinstance(backward_units, tuple):
        backward_units = (backward_units,) * (pp * vpp)
    put_off = weights_units if splits_backward(schedule) else 0.0
    waiting = [_passes(rank, pp, vpp, num_microbatches, schedule)[::-1] for rank in range(pp)]
    ranks: list[list[TimedPass]] = [[] for _ in range(pp)]
    # When the pass of a stage and micro-batch ended.
    ends: dict[tuple[Kind, int, int], float] = {}
    last_stage = pp * vpp - 1
    units = stage_units or (1.0,) * (pp * vpp)
    while any(waiting):
        for rank, passes in enumerate(waiting):
            while passes:
                kind, chunk, microbatch = passes[-1]
                stage = stage_of(chunk, rank, pp, schedule)
                before = stage + {"forward": -1, "backward": 1, "weights": 0}[kind]
                has_input = 0 <= before <= last_stage and kind != "weights"
                arrived = ends.get((kind, before, microbatch)) if has_input else 0.0
                if arrived is None:
                    break
                passes.pop()
                free = ranks[rank][-1].end if ranks[rank] else 0.0
                start = max(free, arrived)
                duration = durations.get(kind, backward_units[stage] - put_off)
                end = start + duration * units[stage]
                ends[kind, stage, microbatch] = end
                ranks[rank].append(TimedPass(kind, chunk, microbatch, start, end))
    return TimedSchedule(ranks, max(passes[-1].end for passes in ranks))


def _passes(
    rank: int, pp: int, vpp: int, num_microbatches: int, schedule: Schedule
) -> list[tuple[Kind, int, int]]:
    kinds: dict[type, Kind] = {Forward: "forward", Backward: "backward"}
    return [
        (kinds.get(type(action), "weights"), action.of.chunk, action.of.microbatch)
        for action in pipeline_schedule(
            rank, pp=pp, vpp=vpp, num_microbatches=num_microbatches, schedule=schedule
        )
        if not isinstance(action, Transfer)
    ]


class HeldLayers(NamedTuple):
    """Layers times micro-batches on a rank when it holds the most."""

    in_flight: float
    """Those whose activations wait for the backward pass."""
    late: float
    """Those that wait for the products of weight gradients alone."""


_LATE_SHARE = 0.5
"""Assumed size of what late weight gradients need, over a layer's activations: it decides at which
pass a rank is the fullest."""


@lru_cache(maxsize=1024)
def held_layers(
    layers: tuple[int, ...], pp: int, vpp: int, num_microbatches: int, schedule: Schedule
) -> tuple[HeldLayers, ...]:
    """What each rank of a pipeline holds at most, of stages with these layers."""
    found = []
    for rank in range(pp):
        in_flight = late = 0
        most = HeldLayers(0, 0)
        for kind, chunk, _ in _passes(rank, pp, vpp, num_microbatches, schedule):
            own = layers[stage_of(chunk, rank, pp, schedule)]
            if kind == "forward":
                in_flight += own
            elif kind == "backward":
                in_flight -= own
                late += own if splits_backward(schedule) else 0
            else:
                late -= own
            if in_flight + _LATE_SHARE * late > most.in_flight + _LATE_SHARE * most.late:
                most = HeldLayers(in_flight, late)
        found.append(most)
    return tuple(found)
