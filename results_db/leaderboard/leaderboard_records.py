"""Records that the store's methods for leaderboards return."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from results_db.records import TrialRecord


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """A layout on the leaderboard, pooled from all of its runs."""

    trial: TrialRecord
    """The first of its runs."""
    rank: int
    """Rank on the whole leaderboard of the campaign, from 1, whichever layouts are listed."""
    value: float
    """The objective at the median step time of its runs; more is better."""
    low: float
    """Lower end of the 95 % interval of the value."""
    high: float
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
    is_tied: bool
    """Whether it is the first, or does not differ from the first with 95 % confidence."""
    disturbed: bool = False
    """Whether others took its devices during every run that counts. The least disturbed count."""

    @property
    def num_runs(self) -> int:
        """Number of runs that count."""
        return len(self.trial_ids)


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
