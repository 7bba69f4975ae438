"""Budgets: whether a campaign may go on, and in which words it ends. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

SECONDS_PER_HOUR = 3600.0

LARGEST_RESERVE: Final = 0.25
"""Largest share of a budget that is kept back for measuring the best again."""
LEAST_REPEATS: Final = 2
"""Repeats that a reserve is worth having for: of two layouts, each once."""


class Limits(Protocol):
    """What a campaign may spend; None is no limit. `search_spaces.campaign.Budget` is one."""

    @property
    def trials(self) -> int | None:
        """Trials, repeats included, cancelled ones not."""
        ...

    @property
    def node_hours(self) -> float | None:
        """Hours of nodes that probes held."""
        ...

    @property
    def wall_time_s(self) -> float | None:
        """Seconds that the campaign was RUNNING; pauses do not count."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """What a campaign has spent so far."""

    trials: int
    """Trials that exist, whatever their state, unless they were cancelled."""
    node_seconds: float
    """Seconds of nodes that probes held."""
    wall_time_s: float
    """Seconds that the campaign was RUNNING."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedTrial:
    """What the closing words need to know of a trial."""

    state: str
    """COMPLETED, INFEASIBLE, FAILED or CANCELLED."""
    reason: str | None
    """Why it is not COMPLETED."""


def trials_left(limits: Limits, spent: Spent) -> int | None:
    """Trials that may still be created; None: the budget does not count them."""
    return None if limits.trials is None else max(limits.trials - spent.trials, 0)


def is_kept_back(limits: Limits, spent: Spent, num_repeats: int) -> bool:
    """Whether what is left of some bound is kept back for so many repeats: the search's part is spent.

    A repeat costs what trials did on average; no more than a quarter of a budget is kept back, and
    nothing where that is not enough for two.
    """
    if num_repeats < LEAST_REPEATS or not spent.trials:
        return False
    if limits.trials is not None:
        num_kept = min(num_repeats, int(limits.trials * LARGEST_RESERVE))
        if num_kept >= LEAST_REPEATS and spent.trials >= limits.trials - num_kept:
            return True
    node_seconds = None if limits.node_hours is None else limits.node_hours * SECONDS_PER_HOUR
    for limit, used in (
        (node_seconds, spent.node_seconds),
        (limits.wall_time_s, spent.wall_time_s),
    ):
        if limit is None:
            continue
        each = used / spent.trials
        reserve = min(num_repeats * each, limit * LARGEST_RESERVE)
        if reserve >= LEAST_REPEATS * each and used >= limit - reserve:
            return True
    return False


def time_is_up(limits: Limits, spent: Spent) -> str | None:
    """Says which of the budgets of time is spent, or None.

    Unlike the budget of trials, these end what is merely waiting: it would spend more.
    """
    if limits.node_hours is not None and spent.node_seconds >= limits.node_hours * SECONDS_PER_HOUR:
        used = spent.node_seconds / SECONDS_PER_HOUR
        return f"{used:.3g} of {limits.node_hours:g} node-hours spent"
    if limits.wall_time_s is not None and spent.wall_time_s >= limits.wall_time_s:
        return f"{spent.wall_time_s:.0f} of {limits.wall_time_s:g} s of wall time spent"
    return None


def closing_words(ending: str, trials: Iterable[EndedTrial]) -> str:
    """How the campaign ended and what came of its trials, in one sentence.

    When none completed, the sentence names the most common reason: it is what to look into.
    """
    ended = list(trials)
    states = Counter(trial.state for trial in ended)
    if states["COMPLETED"]:
        parts = [f"{count} {state.lower()}" for state, count in sorted(states.items())]
        return f"{ending} ({', '.join(parts)})"
    reasons = Counter(
        trial.reason or trial.state.lower() for trial in ended if trial.state != "CANCELLED"
    )
    if not reasons:
        return f"{ending}; no trial was run"
    reason, count = max(reasons.items(), key=lambda item: (item[1], item[0]))
    return (
        f"{ending}; no trial completed; most common reason: {reason} ({count} of {reasons.total()})"
    )
