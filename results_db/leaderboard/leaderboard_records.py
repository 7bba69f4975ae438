"""Records that the store's methods for leaderboards and baselines return."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.records import MeasurementRecord, TrialRecord
from layout_tuner.search_spaces.layouts.layout import Layout

KnobValues = Mapping[str, Mapping[Any, int]]
"""By knob, each value that occurs, in order, with the number of layouts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """A layout on the leaderboard, pooled from all of its runs."""

    trial: TrialRecord
    """The first of its runs. Where the peaks of the campaign's runs differ, its mfu and hfu are by
    the largest, as those of all rows."""
    rank: int
    """Rank on the whole leaderboard of the campaign, from 1, whichever layouts are listed."""
    value: float
    """The objective at the median step time of its runs; more is better."""
    value_low: float
    """Lower end of the 95 % interval of the value."""
    value_high: float
    """Upper end of the interval; that of the first layout is lowered, but not below the value,
    since the best of many is flattered."""
    step_time_s: float
    """Median of its runs."""
    step_time_low_s: float
    step_time_high_s: float
    trial_ids: tuple[int, ...]
    """The runs that count, the first one first."""
    shortened: bool
    """Whether every run was stopped early because it was slower than the best."""
    tied_with_first: bool
    """Whether it is the first, or does not differ from the first with 95 % confidence."""
    disturbed: bool = False
    """Whether others took its devices during every run that counts. The least disturbed count."""

    @property
    def num_runs(self) -> int:
        """Number of runs that count."""
        return len(self.trial_ids)

    @property
    def number(self) -> int:
        """Number of its trial in the campaign."""
        return self.trial.number

    @property
    def layout(self) -> Layout:
        return self.trial.layout

    @property
    def is_baseline(self) -> bool:
        return self.trial.is_baseline

    @property
    def measurement(self) -> MeasurementRecord | None:
        """What its first run measured; what is ranked was measured."""
        return self.trial.measurement


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """The best layout that a campaign measured in full, as lists of campaigns show it."""

    value: float
    """The campaign's objective at the median step time of its runs."""
    trial_number: int
    """Of the first of its runs."""
    layout_key: str
    disturbed: bool
    """Whether every run that counts was disturbed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOfLayouts:
    """A page of the leaderboard, with what is shown above it."""

    layouts: Sequence[RankedLayout]
    front: Collection[int]
    """Ids of the trials whose layouts are on the campaign's Pareto front."""
    total: int
    constrained: int
    """Completed trials that are not ranked because they break the campaign's constraints."""
    source: str | None
    """Where the measurements of an imported campaign come from; None: it ran here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedSummary:
    """The leaderboard of a campaign in three figures."""

    num_ranked: int
    num_shortened: int
    """Those of them that were stopped early; their values are estimates."""
    median_complete: float | None
    """The median value of the others; None: there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GainRead:
    """The value of a layout over the value of the campaign's baseline; over 1 is better."""

    ratio: float
    ratio_low: float | None
    """Lower end of the 95 % interval of the ratio; null: the interval of one of the values is
    unknown."""
    ratio_high: float | None
    """Upper end of the interval."""
    trial_number: int
    """Number of the first trial of the layout that is compared with the baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineRead:
    """The baseline of a campaign: the layout that its users run today, and its measurement."""

    layout: Layout
    layout_key: str
    """The canonical key of the layout."""
    outside_space: bool
    """Whether the layout is none of the space's: then the search learns nothing from it."""
    trial_id: int | None
    """The first of its trials that is ranked, else its newest; null: not proposed yet."""
    trial_number: int | None
    """Number of that trial in the campaign."""
    state: TrialState | None
    """State of that trial."""
    reason: str | None
    """Why the trial does not count; null unless INFEASIBLE, FAILED or CANCELLED."""
    message: str
    """The problem, in a sentence."""
    is_ranked: bool
    """Whether it is on the leaderboard; a measurement that is oversubscribed or breaks a constraint
    is not."""
    value: float | None
    """The campaign's objective, at the median step time of all runs; null: not measured."""
    value_low: float | None
    """Lower end of the 95 % interval of the value; null: unknown."""
    value_high: float | None
    """Upper end of the interval."""
    disturbed: bool
    """Whether others took its devices during all runs that count."""
    gain: GainRead | None
    """The winner's value over the baseline's; null while one of them is unknown."""


class KnobCell(NamedTuple):
    """The ranked layouts with some values of knobs."""

    values: tuple[Any, ...]
    """One for each knob."""
    num_layouts: int
    best: float
    """The campaign's own objective of the best of them."""
