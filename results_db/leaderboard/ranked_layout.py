"""Records of the leaderboard: ranked layouts, winners, and the query that selects them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from results_db.errors import ListingInvalidError
from results_db.records import TrialRecord
from results_db.trials.filter import KNOB_FIELDS, TrialFilter
from search_spaces.documents.reading import nearest
from search_spaces.protocol.metrics import METRICS

MAX_WITHIN_PERCENT: Final = 100.0

LISTING_SORT_KEYS: Final[tuple[str, ...]] = (*KNOB_FIELDS, *METRICS)
"""Sort keys of a leaderboard besides the rank: the knobs and metrics that filters know."""

if TYPE_CHECKING:
    ListingSortKey = str
else:
    ListingSortKey = Literal[LISTING_SORT_KEYS]  # FastAPI reads the choices from it
"""One of LISTING_SORT_KEYS."""


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
    sort: str | None = None
    """One of `LISTING_SORT_KEYS`: a knob, or a metric of the layout's first trial. Layouts without
    a value come last, whichever direction; of equals the one with the larger objective comes first,
    then the earlier. None: by rank, or by cost with `within_percent`."""
    descending: bool = False
    """Whether the largest value of `sort` comes first."""

    def __post_init__(self) -> None:
        if self.sort is not None and self.sort not in LISTING_SORT_KEYS:
            hint = nearest(self.sort, LISTING_SORT_KEYS)
            raise ListingInvalidError(f"sort={self.sort!r} is unknown{hint}")
        if self.descending and self.sort is None:
            raise ListingInvalidError(
                "order=desc needs a sort key: without one the leaderboard is in the order of the "
                "ranks; add sort=KEY, or leave the order out"
            )
        within = self.within_percent
        if within is not None and not 0 <= within <= MAX_WITHIN_PERCENT:
            raise ListingInvalidError(f"within={within} is not a percentage from 0 to 100")

    @property
    def unsorted(self) -> LeaderboardQuery:
        """The same layouts, in the order of a query without a sort key."""
        return replace(self, sort=None, descending=False)

    @property
    def is_whole(self) -> bool:
        """Whether every ranked layout is listed, the best first."""
        return self == WHOLE


WHOLE: Final = LeaderboardQuery()
