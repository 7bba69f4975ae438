"""Whether a campaign has spent its budget or converged, and the message of its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.results_db.records import TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.campaign_settings import Budget
from layout_tuner.tuner.driver.campaign_search import CampaignSearch
from layout_tuner.units import SECONDS_PER_HOUR

LARGEST_RESERVE: Final = 0.25
"""Largest share of a budget that is reserved for measuring the best layouts again."""
LEAST_REPEATS: Final = 2
"""Smallest number of repeats for which anything is reserved: two layouts, each once."""
LEAST_COMPLETED: Final = 5
"""Completed trials before a campaign may be called converged: with fewer, the prediction of what is
left to gain comes mostly from the prior."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """The costs of a campaign so far."""

    trials: int
    """Trials that exist, whatever their state, unless they were cancelled."""
    node_seconds: float
    """Seconds of nodes that probes held."""
    wall_time_s: float
    """Seconds that the campaign was RUNNING while a worker could serve it."""
    full_trials: int | None = None
    """Trials that ran their layouts in full, as far as they have ended; None: there are no others.
    Cheap probes cost less, and are never repeated for the ranking."""
    full_node_seconds: float | None = None
    """Seconds of nodes that those held; None: all that any held."""

    def of_full_trial(self, used: float) -> float:
        """The part of a cost that a trial takes that runs its layout in full; 0: there is none."""
        if self.full_trials is None or self.full_node_seconds is None:
            return used / self.trials if self.trials else 0.0
        share = self.full_node_seconds / self.node_seconds if self.node_seconds else 1.0
        return used * share / self.full_trials if self.full_trials else 0.0


def trials_left(budget: Budget, spent: Spent) -> int | None:
    """Trials that may still be created; None: the budget does not limit them."""
    return None if budget.trials is None else max(budget.trials - spent.trials, 0)


def node_seconds_left(budget: Budget, spent: Spent) -> float | None:
    """Node-seconds that the ended trials have left; None: the budget does not count them."""
    if budget.node_hours is None:
        return None
    return max(budget.node_hours * SECONDS_PER_HOUR - spent.node_seconds, 0.0)


def is_reserved(budget: Budget, spent: Spent, num_repeats: int) -> bool:
    """Whether the rest of some bound is reserved for repeats, so that the search must stop.

    A repeat is taken to cost as much as an average trial that ran its layout in full; before one
    did, nothing is reserved. At most a quarter of a bound is reserved, and nothing where that is
    too little for two repeats.
    """
    full_trials = spent.trials if spent.full_trials is None else spent.full_trials
    if num_repeats < LEAST_REPEATS or not full_trials:
        return False
    if budget.trials is not None:
        num_reserved = min(num_repeats, int(budget.trials * LARGEST_RESERVE))
        if num_reserved >= LEAST_REPEATS and spent.trials >= budget.trials - num_reserved:
            return True
    node_seconds = None if budget.node_hours is None else budget.node_hours * SECONDS_PER_HOUR
    for limit, used in (
        (node_seconds, spent.node_seconds),
        (budget.wall_time_s, spent.wall_time_s),
    ):
        if limit is None:
            continue
        each = spent.of_full_trial(used)
        reserve = min(num_repeats * each, limit * LARGEST_RESERVE)
        if reserve >= LEAST_REPEATS * each and used >= limit - reserve:
            return True
    return False


def time_is_up(budget: Budget, spent: Spent) -> str | None:
    """Which budget of time is spent, as a message; None: neither is.

    Once one is spent, waiting trials are cancelled. A spent budget of trials does not cancel any.
    """
    if budget.node_hours is not None and spent.node_seconds >= budget.node_hours * SECONDS_PER_HOUR:
        return budget.used_words(spent.node_seconds)
    if budget.wall_time_s is not None and spent.wall_time_s >= budget.wall_time_s:
        return f"{spent.wall_time_s:.0f} of {budget.wall_time_s:g} s of wall time spent"
    return None


def too_little_left(budget: Budget, spent: Spent) -> str:
    """The ending of a campaign whose remaining node-hours pay for no full probe."""
    left = (node_seconds_left(budget, spent) or 0.0) / SECONDS_PER_HOUR
    return f"{left:.3g} of {budget.node_hours:g} node-hours left, too few for a full probe"


def closing_message(
    ending: str, trials: Sequence[TrialRecord], *, full_probe_node_s: float | None = None
) -> str:
    """How the campaign ended and how its trials ended, in one sentence.

    Where no trial completed, the sentence names the most common reason. Where only cheap probes
    did, it names that of the full ones; if none of these ran, it says what one takes.
    """
    states = Counter(trial.state for trial in trials)
    whole = [trial for trial in trials if not trial.is_cheap]
    if states["COMPLETED"]:
        parts = [f"{count} {state.lower()}" for state, count in sorted(states.items())]
        counted = f"{ending} ({', '.join(parts)})"
        if any(trial.state == "COMPLETED" for trial in whole):
            return counted
        counted += "; no layout was measured in full, so there is no winner"
        if reason := _most_common_reason(whole):
            return f"{counted}; most common reason: {reason}"
        takes = "" if full_probe_node_s is None else _takes_words(full_probe_node_s)
        return f"{counted}: clone the campaign with a larger budget{takes}"
    reason = _most_common_reason(trials)
    if reason is None:
        return f"{ending}; no trial was run"
    return f"{ending}; no trial completed; most common reason: {reason}"


def _most_common_reason(trials: Iterable[TrialRecord]) -> str | None:
    """Why most trials did not complete; None: all were cancelled, or there is none."""
    reasons = Counter(
        trial.reason or trial.state.lower() for trial in trials if trial.state != "CANCELLED"
    )
    if not reasons:
        return None
    reason, count = max(reasons.items(), key=lambda item: (item[1], item[0]))
    return f"{reason} ({count} of {reasons.total()})"


def _takes_words(node_s: float) -> str:
    hours = node_s / SECONDS_PER_HOUR
    return f"; a full probe of the layout that promised most is expected to take {hours:.2g} node-hours"


def why_converged(store: Store, campaign_id: int, search: CampaignSearch) -> str | None:
    """Why a campaign has converged, as a message; None: the search goes on."""
    share = search.spec.stop.converged_within
    if share is None:
        return None
    num_completed = store.campaigns.count_trials(campaign_id)["COMPLETED"]
    if num_completed < LEAST_COMPLETED or not search.has_measured:
        return None
    possible = search.possible_improvement()
    if possible is None or possible >= share:
        return None
    what = "best" if len(search.spec.objectives) == 1 else "front's hypervolume"
    return (
        f"what is left improves the {what} by more than {possible:.2%} only with a probability "
        f"of 10 %, which is less than the {share:g} of stop.converged_within, after "
        f"{num_completed} completed trials"
    )
