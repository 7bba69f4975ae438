"""What one step in each knob, away from the winner, does to the objective."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from results_db.records import KnobStep, StepDirection, StepState
from search_spaces.campaign import CampaignSpec
from search_spaces.columns import LayoutColumns
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.layout import LAYOUT_FIELDS, Layout
from search_spaces.objectives import objective_factors
from tuner.importance import FOLLOWERS, knobs_of
from tuner.strategies.base import LayoutSet

StepTime = Callable[[Layout], float]
"""Predicts the seconds of a layout's step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tried:
    """What the campaign knows of a layout that it tried."""

    trial_id: int
    state: StepState
    value: float | None
    """The objective, over all of its runs; None unless completed."""
    is_apart: bool | None
    """Whether it can be told apart from the winner; None where it is not ranked."""


def knob_steps(
    spec: CampaignSpec,
    layouts: LayoutSet,
    winner: Layout,
    value: float,
    tried: Mapping[str, Tried],
    step_time_s: StepTime,
) -> tuple[KnobStep, ...]:
    """One step down and one up in each knob that varies of itself, by knob.

    The next layout is the legal one with the knob's next value that differs in as few other knobs as
    possible; knobs that follow from others (replicas, micro-batches a step) do not count. Of several
    such, one that was tried. What was not tried is predicted, relative to what is predicted of the
    winner.

    Args:
        spec: the campaign's description.
        layouts: its legal set.
        winner: the layout around which the steps are taken; one of the set.
        value: its objective.
        tried: what is known of layouts, by their keys.
        step_time_s: predicts a layout's step time, in seconds.
    """
    place = layouts.index_of(winner)
    assert place is not None, f"the winner {winner.key} is not legal"
    knobs = knobs_of(layouts)
    differs = {name: ranks != ranks[place] for name, ranks in knobs.items()}
    steps = []
    for knob in sorted(knobs):
        others = [mask for name, mask in differs.items() if name not in (knob, *FOLLOWERS)]
        num_others = np.sum(others, axis=0) if others else np.zeros(len(layouts), dtype=np.int64)
        directions: tuple[tuple[StepDirection, int], ...] = (("down", -1), ("up", 1))
        for direction, by in directions:
            there = np.flatnonzero(knobs[knob] == knobs[knob][place] + by)
            if len(there):
                near = there[num_others[there] == num_others[there].min()]
                chosen = _nearest(layouts, near, winner, tried)
                steps.append(
                    _step(spec, knob, direction, winner, value, chosen, tried, step_time_s)
                )
    return tuple(steps)


def _nearest(
    layouts: LayoutSet, near: NDArray[np.int64], winner: Layout, tried: Mapping[str, Tried]
) -> Layout:
    candidates = [layouts.layout(int(index)) for index in near[:256]]
    return min(candidates, key=lambda each: (each.key not in tried, len(_differing(each, winner))))


def _differing(layout: Layout, winner: Layout) -> list[str]:
    return [name for name in LAYOUT_FIELDS if getattr(layout, name) != getattr(winner, name)]


def _step(
    spec: CampaignSpec,
    knob: str,
    direction: StepDirection,
    winner: Layout,
    value: float,
    layout: Layout,
    tried: Mapping[str, Tried],
    step_time_s: StepTime,
) -> KnobStep:
    known = tried.get(layout.key)
    if known is None:
        state, effect = _predicted(spec, winner, layout, step_time_s)
    else:
        state, effect = known.state, None if known.value is None else known.value / value - 1.0
    return KnobStep(
        knob=knob,
        direction=direction,
        value=_written(getattr(winner, knob)),
        stepped_value=_written(getattr(layout, knob)),
        also=tuple(name for name in _differing(layout, winner) if name != knob),
        layout_key=layout.key,
        source="predicted" if known is None else "measured",
        state=state,
        effect=effect,
        is_apart=None if known is None else known.is_apart,
        trial_id=None if known is None else known.trial_id,
    )


def _predicted(
    spec: CampaignSpec, winner: Layout, layout: Layout, step_time_s: StepTime
) -> tuple[StepState, float | None]:
    columns = LayoutColumns.of(layout)
    allowed = spec.constraints.allowed_memory_bytes(spec.cluster.device_memory_bytes)
    if float(peak_memory_bytes(columns, spec.model)) > allowed:
        return "out_of_memory", None
    there, here = (
        float(objective_factors(spec.objective, LayoutColumns.of(of), spec.model, spec.cluster))
        / step_time_s(of)
        for of in (layout, winner)
    )
    return "completed", there / here - 1.0


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
