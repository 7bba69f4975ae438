"""Which layouts of a leaderboard a query lists, and in which order: pure functions."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from operator import attrgetter, itemgetter
from typing import Any

from layout_tuner.protocol.metrics import METRICS
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, MeasuredLayout, Run
from layout_tuner.results_db.trials.filter import (
    KNOB_FIELDS,
    LeaderboardListing,
    TrialFilter,
    job_knob_name,
)
from layout_tuner.results_db.trials.job_values import (
    Knobs,
    job_condition,
    job_number,
    knob_of,
)
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.units import SECONDS_PER_HOUR


def listed_layouts(
    board: Leaderboard, listing: LeaderboardListing, knobs: Knobs
) -> Sequence[MeasuredLayout]:
    """The layouts that a query lists, in its order; `knobs` are the job knobs of the campaign.

    Raises:
        TrialFilterInvalidError: it asks about a job knob that the campaign does not have.
    """
    found = list(_passing(board, listing, knobs))
    if not found or (listing.sort is None and listing.within_percent is None):
        return found
    # The first rank may be before layouts that were stopped early at a larger value: put it back.
    insort(found, found.pop(0), key=lambda each: (-each.value, each.trial_id))
    if listing.sort is None:
        return sorted(found, key=lambda each: -_tokens_per_node_hour(each))
    key = sort_key(listing.sort, knobs)
    keyed = [(key(each.figures), each) for each in found]
    known = [pair for pair in keyed if pair[0] is not None]
    known.sort(key=itemgetter(0), reverse=listing.descending)
    return [each for _, each in known] + [each for value, each in keyed if value is None]


def _passing(
    board: Leaderboard, listing: LeaderboardListing, knobs: Knobs
) -> Iterator[MeasuredLayout]:
    conditions = [*_conditions(listing.wanted, knobs)]
    least = None
    if listing.within_percent is not None and board.layouts:
        least = board.layouts[0].value * (1.0 - listing.within_percent / 100.0)
    for each in board.layouts:
        if listing.front and each.trial_id not in board.front:
            continue
        if least is not None and (
            each.value < least or (each.shortened and board.winner is not None)
        ):
            continue
        if all(holds(each.figures) for holds in conditions):
            yield each


def _conditions(wanted: TrialFilter, knobs: Knobs) -> Iterator[Callable[[Run], bool]]:
    """Whether a completed run meets the conditions of a filter."""
    if wanted.reasons or (wanted.states and "COMPLETED" not in wanted.states):
        yield lambda _run: False
    for name in ("numbers", "nodes", *KNOB_FIELDS):
        if values := frozenset(getattr(wanted, name)):
            yield _is_one_of(attrgetter(_FIELDS.get(name, name)), values)
    for name in METRICS:
        low, high = wanted.bounds(name)
        if low is not None or high is not None:
            yield _is_between(_metric(name), low, high)
    if wanted.of_jobs:
        holds = cache(job_condition(wanted, knobs))
        yield lambda run: holds(run.job)


_FIELDS = {"numbers": "number", "nodes": "node"}
"""Fields of a run that are not called as the filter's fields are."""


def _is_one_of(read: Callable[[Run], Any], values: frozenset[Any]) -> Callable[[Run], bool]:
    return lambda run: read(run) in values


def _is_between(
    read: Callable[[Run], float | None], low: float | None, high: float | None
) -> Callable[[Run], bool]:
    def holds(run: Run) -> bool:
        value = read(run)
        if value is None:
            return False
        return (low is None or value >= low) and (high is None or value <= high)

    return holds


def _metric(name: str) -> Callable[[Run], float | None]:
    """Reads a run's value of a metric; None: not measured."""
    if METRICS[name].is_measured:
        return attrgetter(name)
    return lambda run: run.tokens_per_s * SECONDS_PER_HOUR / run.num_nodes


def knob_number(name: str, value: Any) -> int:
    """The value of a knob as a number to sort by; words by the memory that they save."""
    knob = KNOBS.get(name)
    return int(value) if knob is None else knob.code(value)


def reader(name: str, knobs: Knobs) -> Callable[[Run], Any]:
    """Reads a run's value of a knob, of a layout or of a job."""
    if not job_knob_name(name):
        return attrgetter(name)
    knob = knob_of(name, knobs)
    return lambda run: knob.value_of(run.job)


def sort_key(name: str, knobs: Knobs) -> Callable[[Run], Any]:
    """Reads the value of a sort key as a number; None: not measured."""
    if name in METRICS:
        return _metric(name)
    if job_knob_name(name):
        of_job = cache(partial(job_number, knob_of(name, knobs)))
        return lambda run: of_job(run.job)
    read, number = attrgetter(name), cache(partial(knob_number, name))
    return lambda run: number(read(run))


def _tokens_per_node_hour(layout: MeasuredLayout) -> float:
    """At the median step time of the layout's runs."""
    first = layout.first
    rate = first.tokens_per_s * SECONDS_PER_HOUR / first.num_nodes
    return float(rate * (first.step_time_s / layout.step_time_s))
