"""Records of baselines and of what other layouts gain over them."""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.protocol.states import TrialState
from search_spaces.spec.layout import Layout


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
