"""The search that physics guides: a belief about step times, a belief about memory, and DeepHyper's CBO.

A proposal is worth what it is expected to gain: over joint draws from the belief, by how much a
layout beats whatever is best by then, what is pending included, times its probability of running.
"""

# ruff: noqa: N806 (arrays carry their shape in the name: S draws, N layouts, P pending)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

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
MAX_FIRST_LOOK: Final = 16_000
"""Layouts whose spread is looked at: the best by what the closed form expects."""
MAX_SECOND_LOOK: Final = 4000
"""Layouts for which the residual is looked at: the best by the closed form alone."""
CAUTION: Final = 4.0
"""Power of the probability of running: a failed probe costs more than the gain that it forgoes."""
SMOOTHING: Final = 0.005
"""Logarithm of the objective over which a gain begins: where no draw gains, the nearest counts."""
TRACE: Final = 1e-3
"""Share of a gain that fades slowly below the incumbent."""
HEAD_START: Final = 0.5
"""How far below the median free layout, in logarithms, the incumbent is put before anything ran."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Outlook:
    """What one proposal looks at."""

    belief: StepBelief
    """Step times after what was measured."""
    rows: Ints
    """The layouts that are worth a closer look."""
    fitting: Fitting
    """Whether they run."""
    pending_fitting: Fitting
    """Whether the pending ones run."""
    weighing: Weighing
    """How the objectives are weighed."""
    best: float
    """The figure to beat."""


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
        outlook = self._look(history, rng)
        figures_SN = self._draw_figures(outlook, outlook.rows, outlook.fitting, rng)
        runs_SN = rng.random(figures_SN.shape) < outlook.fitting.probability
        best_S = np.where(runs_SN, figures_SN - outlook.best, 0.0).max(axis=1, initial=0.0)
        return float(np.expm1(best_S).mean())

    def weigh(self, history: History, rng: np.random.Generator) -> tuple[Ints, Floats]:
        """The candidates, and the logarithm of what each is expected to gain."""
        outlook = self._look(history, rng)
        pending, count = np.array(list(history.pending), dtype=np.int64), len(outlook.rows)
        fits = outlook.fitting.joined(outlook.pending_fitting)
        every = np.concatenate([outlook.rows, pending])
        figures_SN = self._draw_figures(outlook, every, fits, rng)
        runs_SP = rng.random((NUM_DRAWS, len(pending))) < fits.probability[count:]
        pending_SP = np.where(runs_SP, figures_SN[:, count:], -np.inf)
        best_S = np.maximum(outlook.best, pending_SP.max(axis=1, initial=-np.inf))
        gains = soft_gains((figures_SN[:, :count] - best_S[:, None]) / SMOOTHING).mean(axis=0)
        caution = CAUTION * np.log(outlook.fitting.probability)
        return outlook.rows, np.asarray(np.log(gains) + caution)

    def _look(self, history: History, rng: np.random.Generator) -> _Outlook:
        """Every free layout by the closed form, the best of them with the residual, few to be drawn."""
        prospect = self._prospect
        belief = prospect.belief(history)
        free = np.flatnonzero(history.is_free)
        pending = np.array(list(history.pending), dtype=np.int64)
        judged = prospect.fitting.judge(history, np.concatenate([free, pending]))
        fitting = judged.rows(np.arange(len(free)))
        mean = belief.physical_mean(free)
        values = prospect.goals.values(free, mean, fitting.peak_mean_bytes)
        weighing = prospect.goals.weighing(values, history.num_taken, rng)
        figures = weighing.figure(values)
        best = self._incumbent(history, weighing, figures)
        penalty = CAUTION * np.log(fitting.probability)
        places = _largest(figures + penalty, MAX_FIRST_LOOK)
        if len(places) > MAX_SECOND_LOOK:
            deviation = belief.physical_deviation(free[places])
            chosen = _best_places(
                figures[places], deviation, best, penalty[places], MAX_SECOND_LOOK
            )
            places = places[chosen]
        if len(places) > MAX_CANDIDATES:
            mean, deviation = belief.marginals(free[places])
            values = prospect.goals.values(free[places], mean, fitting.peak_mean_bytes[places])
            figures, penalty = weighing.figure(values), penalty[places]
            places = places[_best_places(figures, deviation, best, penalty, MAX_CANDIDATES)]
        return _Outlook(
            belief=belief,
            rows=free[places],
            fitting=fitting.rows(places),
            pending_fitting=judged.rows(np.arange(len(free), len(free) + len(pending))),
            weighing=weighing,
            best=best,
        )

    def _draw_figures(
        self, outlook: _Outlook, rows: Ints, fitting: Fitting, rng: np.random.Generator
    ) -> Floats:
        log_s_SN = outlook.belief.draws(rows, NUM_DRAWS, rng)
        peaks_SN = fitting.draw_peaks(NUM_DRAWS, rng)
        return outlook.weighing.figure(self._prospect.goals.values(rows, log_s_SN, peaks_SN))

    def _incumbent(self, history: History, weighing: Weighing, figures: Floats) -> float:
        """The best figure so far; before anything ran, less than half of the free ones have."""
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
        return best if best > -np.inf else float(np.median(figures)) - HEAD_START


def _best_places(
    figures: Floats, deviation: Floats, best: float, penalty: Floats, count: int
) -> Ints:
    """Places of the best by what is expected of them, and by what they may gain; half of them each.

    The gain is the expected improvement over the best so far (Jones et al. 1998, equation 15).
    """
    if len(figures) <= count:
        return np.arange(len(figures))
    deviation = np.maximum(deviation, SMOOTHING)
    over = (figures - best) / deviation
    density = np.exp(-0.5 * over**2) / np.sqrt(2.0 * np.pi)
    gain = deviation * (density + over * ndtr(over))
    hoped = np.log(np.maximum(gain, 1e-12)) + penalty
    return np.union1d(_largest(figures + penalty, count // 2), _largest(hoped, count // 2))


def _largest(values: Floats, count: int) -> Ints:
    """Places of the largest values; of all, where there are no more."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.argpartition(-values, count)[:count]


def soft_gains(above: Floats) -> Floats:
    """What is over 0 of each figure, rounded off: log(1 + exp(x)), and a trace that fades as -1 / (4 x).

    The trace decides where no draw gains anything: by the exponential tail alone, what cannot fit
    would be worth more than what is a tenth worse.
    """
    rounded = np.logaddexp(0.0, above)
    return np.asarray(rounded + TRACE * 0.5 * (above + np.sqrt(above**2 + 1.0)))
