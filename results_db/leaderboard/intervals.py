"""The 95 % intervals of the layouts of a leaderboard, and which are tied with the first.

All pages, tables and decisions take their intervals from here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice
from typing import Final, Self

import numpy as np
from sqlalchemy.orm import Session

from layout_tuner.predictions.statistics.confidence import Estimate, can_be_told_apart
from layout_tuner.predictions.statistics.disturbance import possible_slowdown
from layout_tuner.predictions.statistics.pooling import pooled_reach, variance_factor
from layout_tuner.predictions.statistics.run_spread import RunSpread
from layout_tuner.results_db.leaderboard.measured_runs import earlier_repeats, timed_iterations
from layout_tuner.results_db.leaderboard.rank_layouts import (
    Leaderboard,
    MeasuredLayout,
    RunErrors,
    TimedIterations,
)

_NEAR: Final = 3.0
"""Layouts within so many standard errors of the first tell how far it is flattered."""
_MOST_NEAR: Final = 1000
"""Of them, the best so many."""


class Intervals:
    """The intervals of some layouts of a leaderboard."""

    def __init__(self, board: Leaderboard, errors: RunErrors, timed: TimedIterations) -> None:
        self._board = board
        self._errors = errors
        self._timed = timed

    @classmethod
    def read(
        cls,
        session: Session,
        campaign_id: int,
        board: Leaderboard,
        layouts: Sequence[MeasuredLayout],
    ) -> Self:
        """Reads the data for the intervals of some layouts and of the first layout."""
        if board.run_errors is None:
            prior = RunSpread.prior().updated(earlier_repeats(session, campaign_id))
            board.run_errors = run_errors(board, prior)
        known = [*board.layouts[:1], *layouts]
        timed = timed_iterations(session, [run.id for each in known for run in each.runs])
        return cls(board, board.run_errors, timed)

    def estimate(self, layout: MeasuredLayout) -> Estimate:
        """A layout's value with its error, which is wider where every run was disturbed.

        That of the first is shrunk, since the best of many is flattered.
        """
        # An imported measurement may have a step time and no iterations.
        runs = [self._timed.get(run.id) or [run.step_time_s] for run in layout.runs]
        flattery = self._errors.flattery if layout is self._board.layouts[0] else 0.0
        slowdown = max(possible_slowdown(run.others_share, run.throttled) for run in layout.runs)
        reach = pooled_reach(runs, self._errors.spread) + slowdown
        return Estimate(log=math.log(layout.value) - flattery, reach=reach)

    def ends(self, layout: MeasuredLayout) -> tuple[float, float]:
        """Both ends of the 95 % interval of a layout's value.

        They enclose the value. The upper one is at most what the peak of the devices allows.
        """
        found, first = self.estimate(layout), layout.first
        high = math.exp(found.log + found.reach)
        if first.hfu:
            share_of_peak = first.hfu * first.step_time_s / layout.step_time_s
            high = min(high, layout.value / share_of_peak)
        return min(math.exp(found.log - found.reach), layout.value), max(high, layout.value)

    def is_tied(self, layout: MeasuredLayout) -> bool:
        """Whether a layout is the first, or cannot be told apart from it with 95 % confidence."""
        first = self._board.layouts[0]
        return layout is first or not can_be_told_apart(self.estimate(first), self.estimate(layout))


def run_errors(board: Leaderboard, prior: RunSpread) -> RunErrors:
    """How far the figures of a leaderboard may be off.

    `prior` is what is known from earlier campaigns.
    """
    spread = prior.updated(
        [run.step_time_s for run in each.runs] for each in board.layouts if not each.disturbed
    )
    return RunErrors(spread=spread, flattery=_flattery(board, spread))


def _flattery(board: Leaderboard, spread: RunSpread) -> float:
    """By how much the logarithm of the first layout's value is expected to be too large.

    Of many layouts the one whose run was lucky is first. Empirical Bayes: the true values of the
    layouts near it are normal, with the mean and the variance that their measured ones have beyond
    the spread of runs (DerSimonian and Laird 1986); the first is shrunk towards them.
    """
    if not board.layouts:
        return 0.0
    first = board.layouts[0]
    error = math.sqrt(spread.variance * (variance_factor(len(first.runs)) + 1.0))
    least = first.value * math.exp(-_NEAR * error)
    near = [
        (math.log(each.value), spread.variance * variance_factor(len(each.runs)))
        for each in islice(board.layouts, _MOST_NEAR)
        if each.value >= least and (each is first or not each.shortened)
    ]
    if len(near) < 3:
        return 0.0
    values, variances = np.array(near).T
    weights = 1.0 / variances
    mean = float(weights @ values / weights.sum())
    beyond = float(weights @ (values - mean) ** 2) - (len(near) - 1)
    between = max(beyond / float(weights.sum() - weights @ weights / weights.sum()), 0.0)
    return max(float(values[0] - mean) * float(variances[0] / (between + variances[0])), 0.0)
