"""Ranks the measured layouts of a campaign: a pure function of its runs.

All runs of a layout share one place, by the median of their step times. Objectives that rank are
rates: the value of a layout is that of its first run, scaled to the median step time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress, takewhile
from statistics import median
from typing import Any, Final, NamedTuple, cast

import numpy as np

from layout_tuner.predictions.statistics.disturbance import disturbed_least, is_disturbed
from layout_tuner.predictions.statistics.run_spread import RunSpread
from layout_tuner.protocol.metrics import METRICS
from layout_tuner.search_spaces.objectives import OBJECTIVES, measured_objective, pareto_front

Run = Any
"""A completed trial with its measurement: an object with the fields
`results_db.leaderboard.measured_runs.RUN_FIELDS`."""

_NO_RATES: Final = ("step_time_s", "peak_memory_bytes")
_RATES: Final = (
    *(name for name, each in METRICS.items() if each.is_measured and name not in _NO_RATES),
    "hfu",
)
"""Figures that are proportional to the speed."""

DevicePeaks = Mapping[str, tuple[float, str]]
"""By precision, the peak of a device in TFLOP/s, and its source."""

TimedIterations = Mapping[int, Sequence[float]]
"""The step times of timed iterations in seconds, by trial."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunErrors:
    """How far the figures of a leaderboard may be off."""

    spread: RunSpread
    """The spread between runs of one layout."""
    flattery: float
    """By how much the first layout's value is expected to be too large, as a logarithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingRules:
    """What a leaderboard ranks by."""

    objective: str
    objectives: tuple[str, ...]
    """The objectives of the campaign's Pareto front."""
    max_peak_memory_bytes: int | None
    """The largest peak of a run that is ranked; None: no limit."""
    device_memory_bytes: int | None
    """None: the campaign's description does not say."""
    peaks: DevicePeaks = field(default_factory=dict)
    """Of precisions whose runs have different peaks, the one for mfu and hfu of all rows."""


@dataclass(eq=False, slots=True)
class MeasuredLayout:
    """A layout on a leaderboard."""

    runs: Sequence[Run]
    """The runs that count, the first one first. Runs that were stopped early count only
    where the layout has no others, and then those that were disturbed least."""
    step_time_s: float
    """Median of these runs."""
    value: float
    """The objective that ranks, at this step time; more is better."""
    rank: int = 0
    """From 1; 0 until the layouts are in order."""

    @property
    def first(self) -> Run:
        """The run whose trial stands for the layout."""
        return self.runs[0]

    @property
    def figures(self) -> Run:
        """The first run, with its step time and rates at the median step time."""
        first = self.runs[0]
        if len(self.runs) == 1:
            return first
        known = {name: value for name in _RATES if (value := getattr(first, name)) is not None}
        longer = self.step_time_s / first.step_time_s
        rates = {name: value / longer for name, value in known.items()}
        return first._replace(step_time_s=self.step_time_s, **rates)

    @property
    def trial_id(self) -> int:
        return cast("int", self.runs[0].id)

    @property
    def shortened(self) -> bool:
        """Whether every run was stopped early."""
        return cast("bool", self.runs[0].shortened)

    @property
    def disturbed(self) -> bool:
        """Whether every run that counts was disturbed."""
        return all(is_disturbed(run.others_share, run.throttled) for run in self.runs)


@dataclass(kw_only=True, slots=True)
class Leaderboard:
    """The ranked layouts of a campaign."""

    layouts: Sequence[MeasuredLayout]
    """In the order of the ranks: the largest value first; of equal ones, the earlier layout. Only
    the first place differs: the best layout that was measured in full has it, where there is one. A
    layout that was stopped early was slower than the best of its time, also if that best is later
    rejected for its losses."""
    front: Mapping[int, tuple[float | None, ...]]
    """The Pareto front by `MeasuredLayout.trial_id`, with the campaign's objectives of each layout;
    None: not measured. Layouts that were stopped early are on it only where none was measured in
    full."""
    num_constrained: int
    """Runs that are not ranked because they break the campaign's constraints."""
    peaks: DevicePeaks = field(default_factory=dict)
    """See `RankingRules`."""
    run_errors: RunErrors | None = None
    """What its intervals need (`intervals.py`); None until one of them is asked for."""

    @property
    def winner(self) -> MeasuredLayout | None:
        """The best layout that was measured in full; None while there is none."""
        return self.layouts[0] if self.layouts and not self.layouts[0].shortened else None

    def find(self, layout_key: str) -> MeasuredLayout | None:
        """The layout with a key; None: it is not ranked."""
        same = (each for each in self.layouts if each.first.layout_key == layout_key)
        return next(same, None)


class Leader(NamedTuple):
    """The best layout from one end of a trial on, until the next leader."""

    ended_seq: int
    """The trial that ended, in the order of the ends."""
    layout: MeasuredLayout
    value: float
    """The objective at the median step time of the runs that had ended."""


def leaders(board: Leaderboard) -> list[Leader]:
    """The best layout, and its value, after each end of a run that changed them.

    Only runs that count on the leaderboard count here, so that the last leader is its winner.
    """
    found: list[Leader] = []
    values: dict[int, tuple[float, int]] = {}
    layouts = list(_that_may_lead(board))
    ends = [(run.ended_seq, place) for place, each in enumerate(layouts) for run in each.runs]
    best: int | None = None
    for ended_seq, place in sorted(ends):
        layout = layouts[place]
        times = [run.step_time_s for run in layout.runs if run.ended_seq <= ended_seq]
        value = layout.value * (layout.step_time_s / median(times))
        values[place] = (value, -layout.trial_id)  # of equal values, the earlier layout leads
        if place == best:
            best = max(values, key=values.__getitem__)
        elif best is None or values[place] > values[best]:
            best = place
        if not found or (layouts[best], values[best][0]) != found[-1][1:]:
            found.append(Leader(ended_seq, layouts[best], values[best][0]))
    return found


def _that_may_lead(board: Leaderboard) -> Iterator[MeasuredLayout]:
    """All layouts but those of one run that ended after the run of a better such layout."""
    earliest: float = math.inf
    for each in board.layouts:  # the best first
        run = each.runs[0]
        if run.shortened:
            continue
        if len(each.runs) > 1:
            yield each
        elif run.ended_seq < earliest:
            earliest = run.ended_seq
            yield each


def rank_layouts(runs: Sequence[Run], rules: RankingRules) -> Leaderboard:
    """Ranks the layouts of a campaign.

    The runs are all that would count without its constraints, the oldest first.
    """
    if rules.peaks:
        runs = [_by_peak(run, rules.peaks) for run in runs]
    ranked, limit = runs, rules.max_peak_memory_bytes
    num_constrained = 0
    if limit is not None:
        measured = [run for run in runs if run.peak_memory_bytes is not None]
        ranked = [run for run in measured if run.peak_memory_bytes <= limit]
        num_constrained = len(measured) - len(ranked)
    by_layout: defaultdict[str, list[Run]] = defaultdict(list)
    for run in ranked:
        by_layout[run.layout_key].append(run)
    layouts = [_pooled(each, rules.objective) for each in by_layout.values()]
    layouts.sort(key=lambda each: (-each.value, each.runs[0].id))
    in_full = (place for place, each in enumerate(layouts) if not each.runs[0].shortened)
    first = next(in_full, None)
    if first is not None:
        layouts.insert(0, layouts.pop(first))
    for rank, each in enumerate(layouts, 1):
        each.rank = rank
    return Leaderboard(
        layouts=layouts,
        front=_front(layouts, rules),
        num_constrained=num_constrained,
        peaks=rules.peaks,
    )


def _by_peak(run: Run, peaks: DevicePeaks) -> Run:
    """A run with its mfu and hfu by the leaderboard's peak."""
    tflops, _ = peaks.get(run.precision, (None, ""))
    if tflops is None or run.mfu is None:
        return run
    hfu = run.hardware_tflops_per_device / tflops
    return run._replace(mfu=run.model_tflops_per_device / tflops, hfu=hfu)


def _pooled(runs: list[Run], objective: str) -> MeasuredLayout:
    first = runs[0]
    step_time_s = first.step_time_s
    if len(runs) > 1:
        runs = [run for run in runs if not run.shortened] or runs
        counts = disturbed_least([(run.others_share, run.throttled) for run in runs])
        runs = list(compress(runs, counts))
        first, step_time_s = runs[0], median(run.step_time_s for run in runs)
    value = measured_objective(objective, first, num_nodes=first.num_nodes)
    assert value is not None  # every measurement has the objectives that rank
    return MeasuredLayout(runs, step_time_s, value * (first.step_time_s / step_time_s))


def _front(
    layouts: Sequence[MeasuredLayout], rules: RankingRules
) -> dict[int, tuple[float | None, ...]]:
    counting = [each for each in layouts if not each.shortened] or layouts
    if not counting:
        return {}
    if rules.objectives == (rules.objective,):
        best = counting[0].value
        return {each.trial_id: (best,) for each in takewhile(lambda e: e.value == best, counting)}
    values = [_pooled_objectives(each, rules) for each in counting]
    on_front = pareto_front(np.array(values, dtype=np.float64))
    return {counting[place].trial_id: values[place] for place in np.flatnonzero(on_front).tolist()}


def _pooled_objectives(layout: MeasuredLayout, rules: RankingRules) -> tuple[float | None, ...]:
    """The campaign's objectives of a layout: rates at its median step time, else the median.

    None: not measured.
    """
    values = [_objectives_of_run(run, rules) for run in layout.runs]
    if len(values) == 1:
        return values[0]
    times_longer = layout.step_time_s / layout.first.step_time_s
    known = np.array(values, dtype=np.float64)
    is_rate = [name in OBJECTIVES for name in rules.objectives]
    pooled = np.where(is_rate, known[0] / times_longer, np.median(known, axis=0))
    return tuple(None if np.isnan(value) else float(value) for value in pooled)


def _objectives_of_run(run: Run, rules: RankingRules) -> tuple[float | None, ...]:
    memory, num_nodes = rules.device_memory_bytes, run.num_nodes
    return tuple(
        [
            measured_objective(name, run, num_nodes=num_nodes, device_memory_bytes=memory)
            for name in rules.objectives
        ]
    )
