"""The query of a leaderboard: which ranked layouts are listed, and in which order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from results_db.errors import ListingInvalidError
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


EVERY_TRIAL: Final = TrialFilter()


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaderboardListing:
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


WHOLE: Final = LeaderboardListing()
