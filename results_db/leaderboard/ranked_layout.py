"""Records of the leaderboard: ranked layouts, winners, and the query that selects them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from results_db.errors import ListingInvalidError
from results_db.records import TrialRecord
from results_db.trials.filter import TrialFilter

MAX_WITHIN_PERCENT: Final = 100.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedLayout:
    """A layout on the leaderboard, pooled from all of its runs."""

    trial: TrialRecord
    """The first of its runs."""
    rank: int
    """Rank on the whole leaderboard of the campaign, from 1, whichever layouts are listed."""
    value: float
    """The objective at the median step time of its runs; more is better."""
    low: float | None
    """Lower end of the 95 % interval of the value; None: a single iteration was timed in all."""
    high: float | None
    """Upper end of the interval."""
    step_time_s: float
    """Median of its runs."""
    step_time_low_s: float | None
    step_time_high_s: float | None
    trial_ids: tuple[int, ...]
    """The runs that count, the first one first."""
    shortened: bool
    """Whether every run was stopped early because it was slower than the best."""
    is_tied: bool
    """Whether it is the first, or does not differ from the first with 95 % confidence."""

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


EVERY_TRIAL: Final = TrialFilter()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardQuery:
    """Which ranked layouts are listed, and in which order. By default: all, by the objective.

    Raises:
        ListingInvalidError: at construction, when a value is out of its range.
    """

    front: bool = False
    """Only the Pareto front over the campaign's objectives."""
    wanted: TrialFilter = EVERY_TRIAL
    """Filter of the layout, and of the measurement of its first trial."""
    within_percent: float | None = None
    """Only layouts at most so many percent below the winner's objective, the cheapest first by
    node-hours per token. Shortened layouts are left out if any layout was measured in full."""

    def __post_init__(self) -> None:
        within = self.within_percent
        if within is not None and not 0 <= within <= MAX_WITHIN_PERCENT:
            raise ListingInvalidError(f"within={within} is not a percentage from 0 to 100")

    @property
    def is_unfiltered(self) -> bool:
        """Whether no filter is set."""
        return self.wanted == EVERY_TRIAL

    @property
    def is_whole(self) -> bool:
        """Whether every ranked layout is listed, the best first."""
        return not self.front and self.within_percent is None and self.is_unfiltered


WHOLE: Final = LeaderboardQuery()
