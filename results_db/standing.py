"""How a campaign's layouts stand: repeats pooled, the best first, the winner measured in full."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from results_db.records import TrialRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A layout's place on the leaderboard, from all of its runs."""

    trial: TrialRecord
    """The first of its runs."""
    value: float
    """The objective at the median step time of its runs; more is better."""
    low: float | None
    """Where the 95 % interval of the value begins; None where one iteration was timed in all."""
    high: float | None
    """Where it ends."""
    step_time_s: float
    """Median over its runs."""
    step_time_low_s: float | None
    step_time_high_s: float | None
    trial_ids: tuple[int, ...]
    """The runs that count, the first one first."""
    shortened: bool
    """Whether every run was stopped early, since it was slower than the best."""
    is_tied: bool
    """Whether it cannot be told apart from the first with 95 % confidence, or is the first."""

    @property
    def num_runs(self) -> int:
        """How often the layout was measured."""
        return len(self.trial_ids)


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One ranked measurement."""

    trial_id: int
    layout_key: str
    value: float
    step_time_s: float
    shortened: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """The runs of one layout that count."""

    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        """The run that stands for the layout."""
        return self.runs[0]

    @property
    def shortened(self) -> bool:
        """Whether no run went to its end."""
        return self.first.shortened

    @property
    def step_time_s(self) -> float:
        """Median over the runs."""
        return median(run.step_time_s for run in self.runs)

    @property
    def value(self) -> float:
        """The objective at that step time: every objective that ranks is a rate."""
        return self.first.value * (self.first.step_time_s / self.step_time_s)


def rank(runs: Iterable[Run]) -> list[RankedLayout]:
    """Layouts, the best first; of equals, the one measured earlier.

    Shortened runs count where a layout has no other. What was stopped early was slower than the best
    of its day; should that one fall (its losses are off), a shortened one is still not the winner: the
    best that was measured in full comes first.
    """
    by_layout: defaultdict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_layout[run.layout_key].append(run)
    layouts = [RankedLayout(runs=_counting(of_layout)) for of_layout in by_layout.values()]
    layouts.sort(key=lambda layout: (-layout.value, layout.first.trial_id))
    winner = next((layout for layout in layouts if not layout.shortened), None)
    if winner is not None:
        layouts.remove(winner)
        layouts.insert(0, winner)
    return layouts


def _counting(runs: Sequence[Run]) -> tuple[Run, ...]:
    in_order = sorted(runs, key=lambda run: run.trial_id)
    return tuple(run for run in in_order if not run.shortened) or tuple(in_order)
