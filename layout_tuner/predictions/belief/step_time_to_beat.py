"""The step time above which a layout is certainly worse than what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.search_spaces.campaigns.campaign import ESTIMATE_MARGIN, CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM, objective_factors
from layout_tuner.trainers.embedded import EMBEDDED

ToBeat = float | Sequence[Sequence[float | None]]
"""The low end of the best value of the one objective, or the objectives of each layout on the
Pareto front; None: not measured."""

FRONT_MARGIN: Final = 0.03
"""Share by which the rates of a front are taken lower: so far may two runs of a layout differ."""


def stop_above_s(to_beat: ToBeat, spec: CampaignSpec, layout: Layout) -> float | None:
    """The step time above which a layout is worse than what is known; None: none is.

    With one objective it equals the low end of the winner's interval, not the figure of one lucky
    run. With several, a layout of the front is better in all of them.
    """
    if not isinstance(to_beat, float):
        return _dominated_above_s(to_beat, spec, layout)
    return _factor(spec.objective, spec, layout) / to_beat


def _dominated_above_s(
    front: Sequence[Sequence[float | None]], spec: CampaignSpec, layout: Layout
) -> float | None:
    """The least step time at which some layout of the front is better in every objective.

    The memory of what has not run is taken from the estimate, less its margin.
    """
    if MEMORY_HEADROOM in spec.objectives and spec.probe.trainer != EMBEDDED.name:
        return None  # what another trainer stores is not estimated as surely
    (peak,) = peak_memory_bytes(LayoutColumns.of_each([layout]), spec.model)
    largest = 1.0 - (1.0 - ESTIMATE_MARGIN) * float(peak) / spec.cluster.device_memory_bytes
    above_s = []
    for point in front:
        known = {
            name: value
            for name, value in zip(spec.objectives, point, strict=False)
            if value is not None
        }
        if len(known) < len(spec.objectives) or known.pop(MEMORY_HEADROOM, 1.0) < largest:
            continue
        rates = {name: value * (1.0 - FRONT_MARGIN) for name, value in known.items()}
        above_s.append(max(_factor(name, spec, layout) / rate for name, rate in rates.items()))
    return min(above_s, default=None)


def _factor(objective: str, spec: CampaignSpec, layout: Layout) -> float:
    return float(objective_factors(objective, LayoutColumns.of(layout), spec.model))
