"""The search that physics guides: a belief about step times, a belief about memory, and DeepHyper's CBO.

A proposal is worth what it is expected to gain: over joint draws from the belief, by how much a
layout beats whatever is best by then, what is pending included, times its probability of running.
"""

# ruff: noqa: N806 (arrays carry their shape in the name: S draws, N layouts, P pending)

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from tuner.problem import SearchProblem
from tuner.strategies.base import History
from tuner.strategies.fitting import Fitting
from tuner.strategies.goals import Weighing
from tuner.strategies.physics_cbo import ask_cbo
from tuner.strategies.prospect import Prospect
from tuner.strategies.step_belief import StepBelief

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_DRAWS: Final = 192
MAX_CANDIDATES: Final = 320
"""Layouts that a proposal weighs by joint draws: the best at a first look."""
MAX_SECOND_LOOK: Final = 4000
"""Layouts for which the residual is looked at: the best by the closed form alone."""
HOPE: Final = 1.0
"""Standard deviations by which a layout may do better than expected, to get a closer look."""
CAUTION: Final = 3.0
"""Power of the probability of running: a failed probe costs more than the gain that it forgoes."""
SMOOTHING: Final = 0.005
"""Logarithm of the objective over which a gain begins: where no draw gains, the nearest counts."""
TRACE: Final = 1e-3
"""Share of a gain that fades slowly below the incumbent."""
HEAD_START: Final = 0.5
"""How far below the median candidate, in logarithms, the incumbent is put before anything ran."""


class GuidedProposer:
    """Learns the factors of the closed form and what it cannot say; asks for what may gain most."""

    def __init__(self, problem: SearchProblem, *, seed: int) -> None:
        self._prospect = Prospect(problem)
        self._allowed_bytes = problem.allowed_memory_bytes
        self._seed = seed

    def propose(self, history: History) -> int:
        """The candidate that DeepHyper's CBO picks by expected gain."""
        rng = np.random.default_rng([self._seed, history.num_taken])
        rows, values = self.weigh(history, rng)
        return int(rows[ask_cbo(values, int(rng.integers(2**31)))])

    def expected_improvement(self, history: History) -> float | None:
        """By which share the best is expected to be beaten, if every free layout were tried.

        The mean, over joint draws from the belief, of what the best of them gains; those that would not
        run gain nothing. None before anything ran, and where several objectives are weighed: their
        front has no single best.
        """
        if not any(True for _ in history.successes()) or self._prospect.goals.num_objectives > 1:
            return None
        rng = np.random.default_rng([self._seed, history.num_taken])
        belief = self._prospect.belief(history)
        free = np.flatnonzero(history.is_free)
        fitting = self._prospect.fitting.judge(history, free)
        chosen = self._shortlist(belief, free, fitting)
        rows, fits = free[chosen], fitting.rows(chosen)
        log_s_SN = belief.draws(rows, NUM_DRAWS, rng)
        values = self._prospect.goals.values(rows, log_s_SN, fits.draw_peaks(NUM_DRAWS, rng))
        weighing = self._prospect.goals.weighing(values.mean(axis=0), history.num_taken, rng)
        figures_SN = weighing.figure(values)
        gains_SN = figures_SN - self._incumbent(history, weighing, figures_SN)
        runs_SN = rng.random(gains_SN.shape) < fits.probability
        best_S = np.where(runs_SN, gains_SN, 0.0).max(axis=1, initial=0.0)
        return float(np.expm1(best_S).mean())

    def weigh(self, history: History, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """The candidates, and the logarithm of what each is expected to gain."""
        belief = self._prospect.belief(history)
        free = np.flatnonzero(history.is_free)
        fitting = self._prospect.fitting.judge(history, free)
        chosen = self._shortlist(belief, free, fitting)
        return free[chosen], self._log_gains(
            history, belief, free[chosen], fitting.rows(chosen), rng
        )

    def _shortlist(self, belief: StepBelief, free: Ints, fitting: Fitting) -> Ints:
        """Places, among the free layouts, of those that are worth a closer look."""
        places = np.arange(len(free))
        penalty = -CAUTION * np.log(fitting.probability)
        if len(places) > MAX_SECOND_LOOK:
            mean, deviation = belief.physical(free)
            places = _best_places(mean + penalty, deviation, MAX_SECOND_LOOK)
        if len(places) > MAX_CANDIDATES:
            mean, deviation = belief.marginals(free[places])
            places = places[_best_places(mean + penalty[places], deviation, MAX_CANDIDATES)]
        return places

    def _log_gains(
        self,
        history: History,
        belief: StepBelief,
        rows: Ints,
        fitting: Fitting,
        rng: np.random.Generator,
    ) -> Floats:
        pending = np.array(list(history.pending), dtype=np.int64)
        every = np.concatenate([rows, pending])
        fits = fitting.joined(self._prospect.fitting.judge(history, pending))
        log_s_SN = belief.draws(every, NUM_DRAWS, rng)
        peaks_SN = fits.draw_peaks(NUM_DRAWS, rng)
        values = self._prospect.goals.values(every, log_s_SN, peaks_SN)
        weighing = self._prospect.goals.weighing(values.mean(axis=0), history.num_taken, rng)
        figures_SN = weighing.figure(values)
        runs_SP = rng.random((NUM_DRAWS, len(pending))) < fits.probability[len(rows) :]
        best_S = self._incumbent(history, weighing, figures_SN[:, : len(rows)])
        pending_SP = np.where(runs_SP, figures_SN[:, len(rows) :], -np.inf)
        best_S = np.maximum(best_S, pending_SP.max(axis=1, initial=-np.inf))
        above = (figures_SN[:, : len(rows)] - best_S[:, None]) / SMOOTHING
        gains = soft_gains(above).mean(axis=0)
        return np.asarray(np.log(gains) + CAUTION * np.log(fitting.probability))

    def _incumbent(self, history: History, weighing: Weighing, figures: Floats) -> float:
        """The best figure so far; before anything ran, less than most candidates have."""
        best = -np.inf
        for row, observation in history.observations.items():
            if observation.objective is None:
                continue
            peak = observation.peak_memory_bytes
            if peak is not None and peak > self._allowed_bytes:
                continue
            rows = np.array([row])
            log_s = np.array([self._prospect.goals.log_step_s(row, observation)])
            peaks = np.array(
                [self._prospect.fitting.peak_bytes(row) if peak is None else float(peak)]
            )
            best = max(
                best, float(weighing.figure(self._prospect.goals.values(rows, log_s, peaks))[0])
            )
        return best if best > -np.inf else float(np.median(figures.mean(axis=0))) - HEAD_START


def _best_places(expected: Floats, deviation: Floats, count: int) -> Ints:
    """Places of the lowest of what is expected, and of what may be hoped for; half of them each."""
    half = count // 2
    hoped = expected - HOPE * deviation
    return np.union1d(np.argpartition(expected, half)[:half], np.argpartition(hoped, half)[:half])


def soft_gains(above: Floats) -> Floats:
    """What is over 0 of each figure, rounded off: log(1 + exp(x)), and a trace that fades as -1 / (4 x).

    The trace decides where no draw gains anything: by the exponential tail alone, what cannot fit
    would be worth more than what is a tenth worse.
    """
    rounded = np.logaddexp(0.0, above)
    return np.asarray(rounded + TRACE * 0.5 * (above + np.sqrt(above**2 + 1.0)))
