"""How a campaign's layouts stand: repeats pooled, the best first, the winner measured in full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from results_db.errors import ListingInvalidError
from results_db.records import TrialRecord
from results_db.trial_filter import TrialFilter

MAX_WITHIN_PERCENT: Final = 100.0


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
class Winner:
    """The best layout that a campaign measured in full, as far as lists of campaigns show it."""

    value: float
    """The campaign's objective at the median step time of its runs."""
    trial_number: int
    """Of the first of its runs."""
    layout_key: str


EVERY_TRIAL: Final = TrialFilter()


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """Which of the ranked layouts are listed, and in which order. Nothing stated: all, by the objective.

    Raises:
        ListingInvalidError: at construction, when a value is out of its range.
    """

    front: bool = False
    """Only the Pareto front over the campaign's objectives."""
    wanted: TrialFilter = EVERY_TRIAL
    """What the layout, and the measurement of its first trial, must be like."""
    within_percent: float | None = None
    """Only those that are at most so many percent under the winner's objective, the cheapest first: by
    node-hours a token. What was stopped early is not among them, while anything was measured in full."""

    def __post_init__(self) -> None:
        within = self.within_percent
        if within is not None and not 0 <= within <= MAX_WITHIN_PERCENT:
            raise ListingInvalidError(
                f"within={within} is no share of the best in percent, 0 to 100"
            )

    @property
    def is_unfiltered(self) -> bool:
        """Whether the layouts may be like anything."""
        return self.wanted == EVERY_TRIAL

    @property
    def is_whole(self) -> bool:
        """Whether every ranked layout is listed, the best first."""
        return not self.front and self.within_percent is None and self.is_unfiltered


WHOLE: Final = Listing()
