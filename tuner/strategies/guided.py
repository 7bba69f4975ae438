"""The strategy `guided`: the largest expected gain by calibrated predictions of time and memory.

The gain of a layout is the mean, over joint draws from the predictions, of how much it exceeds the
best of all measured and pending layouts. Its value is that gain, times its probability of running,
minus what a failure costs, times the probability of one.
"""

# ruff: noqa: N806 (arrays carry their shape in the name: S draws, N layouts, P pending)

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.belief.observation import Observation
from search_spaces.belief.step_belief import StepBelief
from search_spaces.campaigns.fidelity import Fidelity
from search_spaces.estimates.prediction import Prediction
from search_spaces.spec.objectives import pareto_front
from search_spaces.statistics.hypervolume import hypervolume
from tuner.strategies.base import History
from tuner.strategies.cheap_probes import Candidate, CheapProbes
from tuner.strategies.fitting import Fitting
from tuner.strategies.goals import Weighing
from tuner.strategies.improvement import best_places, largest, mean_gains
from tuner.strategies.predictions import Predictions
from tuner.strategies.search_problem import SearchProblem

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

NUM_DRAWS: Final = 192
NUM_FRONT_DRAWS: Final = 64
"""Draws of whole fronts, which take longer."""
MAX_CANDIDATES: Final = 320
"""Layouts that a proposal compares by joint draws."""
MAX_FIRST_LOOK: Final = 16_000
"""Layouts whose spread is computed: the best by the expected closed form."""
MAX_SECOND_LOOK: Final = 4000
"""Layouts whose residual is computed: the best by the closed form alone."""
FAILURE_COST: Final = 0.5
"""Cost of a failed probe, in expected gains of the best candidate: it gains nothing itself, and may
take its node with it."""
_LIKELY: Final = 0.5
"""Probability of running above which a layout counts for the ranges of the objectives: the headroom
of what cannot run would make that of the others look alike."""
GAIN_RISK: Final = 0.1
"""Probability that the best improves by more than `possible_improvement`."""
HEAD_START: Final = 0.5
"""Before anything ran, the figure to beat is this far (in logarithms) below the median free
layout."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Candidates:
    """The candidates of one proposal, and the predictions about them."""

    belief: StepBelief
    """The prediction of step times."""
    rows: Ints
    """Positions of the candidates."""
    fitting: Fitting
    """Whether the candidates run."""
    sound: Floats
    """Probability of each that it does not stall."""
    pending_fitting: Fitting
    """Whether the pending layouts run."""
    weighing: Weighing
    """The weights of the objectives."""
    best: float
    """The figure to beat."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposed:
    """A proposal."""

    row: int
    fidelity: Fidelity | None
    """The part of the layout to be probed; None: all of it."""
    prediction: Prediction
    """What was predicted of what runs."""


class GuidedProposer:
    """Learns factors and residual of the closed form; proposes the largest expected gain."""

    def __init__(self, problem: SearchProblem, *, seed: int) -> None:
        self._predictions = Predictions(problem)
        self._allowed_bytes = problem.allowed_memory_bytes
        self._seed = seed
        self._cheap = (
            None
            if problem.costs is None
            else CheapProbes(problem, problem.costs, self._predictions)
        )
        self._proposed: _Proposed | None = None
        """What was proposed last."""

    def propose(self, history: History) -> int | None:
        """The candidate of the largest value; None: the budget allows nothing, now at least."""
        rng, belief = self._rng(history), self._predictions.belief(history)
        if self._rests(history, belief):
            return None
        candidates = self._select(history, belief, rng)
        chosen, fidelity = self._choose(history, candidates, rng)
        place = np.array([chosen])
        rows, fitting = candidates.rows[place], candidates.fitting.rows(place)
        prediction = self._predictions.of_one(
            history, candidates.belief, fitting, rows, fidelity=fidelity
        )
        self._proposed = _Proposed(row=int(rows[0]), fidelity=fidelity, prediction=prediction)
        return int(rows[0])

    def _rng(self, history: History) -> np.random.Generator:
        """Draws for one state of the history: a rebuilt search draws the same."""
        return np.random.default_rng(
            [self._seed, history.num_taken, *([len(history.cheap)] if history.cheap else [])]
        )

    def fidelity(self, index: int) -> Fidelity | None:
        """The part of the layout that was proposed last to be probed; None: all of it."""
        proposed = self._proposed
        return proposed.fidelity if proposed is not None and proposed.row == index else None

    def predict(self, history: History, index: int) -> Prediction:
        """What is predicted of a layout; for the one that was proposed last, as of its proposal."""
        if self._proposed is not None and self._proposed.row == index:
            return self._proposed.prediction
        rows = np.array([index])
        fitting = self._predictions.fitting.judge(history, rows)
        belief = self._predictions.belief(history)
        return self._predictions.of_one(history, belief, fitting, rows)

    def possible_improvement(self, history: History) -> float | None:
        """The share by which the best may improve if every free layout were tried.

        Of the joint draws from the predictions, one in ten gains more; layouts that do not run or
        that stall gain nothing. Of several objectives it is the hypervolume of the front that
        improves. None before anything ran.
        """
        if not self._has_ranked(history):
            return None
        rng, belief = self._rng(history), self._predictions.belief(history)
        num_objectives = self._predictions.goals.num_objectives
        if num_objectives > 1:
            # Each selection of candidates looks at another part of the front.
            gains = [
                self._front_gains(history, self._select(history, belief, rng, turn=turn), rng)
                for turn in range(num_objectives + 1)
            ]
            return max(float(np.quantile(gains_S, 1.0 - GAIN_RISK)) for gains_S in gains)
        candidates = self._select(history, belief, rng)
        figures_SN = self._draw_figures(candidates, candidates.rows, candidates.fitting, rng)
        runs_SN = rng.random(figures_SN.shape) < candidates.fitting.probability * candidates.sound
        best_S = np.where(runs_SN, figures_SN - candidates.best, 0.0).max(axis=1, initial=0.0)
        return float(np.expm1(np.quantile(best_S, 1.0 - GAIN_RISK)))

    def _front_gains(
        self, history: History, candidates: _Candidates, rng: np.random.Generator
    ) -> Floats:
        """By which share the hypervolume of the measured front grows, in each draw."""
        goals, rows = self._predictions.goals, candidates.rows
        measured_MG = np.concatenate(
            [self._measured_values(row, seen) for row, seen in self._ranked(history)]
        )
        best_G = measured_MG.max(axis=0)
        front_MG = goals.shares(measured_MG, best_G)
        log_s_SN = candidates.belief.draws(rows, NUM_FRONT_DRAWS, rng)
        peaks_SN = candidates.fitting.draw_peaks(NUM_FRONT_DRAWS, rng)
        drawn_SNG = goals.shares(goals.values(rows, log_s_SN, peaks_SN), best_G)
        runs_SN = rng.random(log_s_SN.shape) < candidates.fitting.probability * candidates.sound
        now = hypervolume(front_MG)
        grown = []
        for drawn_NG, runs in zip(drawn_SNG, runs_SN, strict=True):
            every = np.concatenate([front_MG, drawn_NG[runs]])
            grown.append(hypervolume(every[pareto_front(every)]))
        return np.asarray(grown) / max(now, np.finfo(float).tiny) - 1.0

    def _choose(
        self, history: History, candidates: _Candidates, rng: np.random.Generator
    ) -> tuple[int, Fidelity | None]:
        """The place of the next candidate, and the part of it to be probed."""
        if self._cheap is None:
            return int(self.weigh(history, candidates, rng).argmax()), None
        rows = candidates.rows
        log_s, log_sd = candidates.belief.marginals(rows)
        peaks = candidates.fitting.peak_mean_bytes
        figures = candidates.weighing.figure(self._predictions.goals.values(rows, log_s, peaks))
        is_probed = np.isin(rows, list(history.cheap.keys() - history.observations.keys()))
        best_full = candidates.best if self._has_ranked(history) else -np.inf
        hopes = self._hopes(history, candidates, figures, is_probed)
        best_probed = int(hopes.argmax())
        may_be_ranked = bool(hopes[best_probed] > -np.inf)
        leads = may_be_ranked and bool(figures[best_probed] > best_full)
        over = best_probed if leads else None
        values = self.weigh(history, candidates, rng, over=over)
        place = int(np.where(is_probed, -np.inf, values).argmax())
        candidate = Candidate(
            row=int(rows[place]),
            log_s=float(log_s[place]),
            log_sd=float(log_sd[place]),
            above_best=float(figures[place] - (figures[best_probed] if leads else candidates.best)),
            runs=float(candidates.fitting.probability[place]),
        )
        fidelity, node_s = self._cheap.choose(candidates.belief, candidate)
        if candidate.row in history.observations:  # a repetition of a full probe
            fidelity, node_s = None, self._cheap.full_node_s(candidate.row, candidate.log_s)
        needs_full = self._needs_full(history)
        if is_probed.all() or (needs_full and may_be_ranked):
            return best_probed, None
        if may_be_ranked:
            gain = np.inf
            if best_full > -np.inf or any(row in history.cheap for row in history.pending):
                gain = float(self.weigh(history, candidates, rng)[best_probed])
            left_node_s = self._left_node_s(history, candidates.belief)
            at = slice(best_probed, best_probed + 1)
            # Only a first full probe may exceed the budget: without it there is no winner.
            pays = gain == np.inf or left_node_s >= self._cheap.least_full_node_s(
                rows[at], log_s[at]
            )
            if pays and self._cheap.is_turn_of_full(
                left_node_s,
                gain,
                self._cheap.full_node_s(int(rows[best_probed]), log_s[best_probed]),
                self._open_gain(history, candidates, rng, ~is_probed, over=over),
                node_s,
            ):
                return best_probed, None
        return place, None if needs_full else fidelity

    def _hopes(
        self,
        history: History,
        candidates: _Candidates,
        figures: Floats,
        is_probed: NDArray[np.bool_],
    ) -> Floats:
        """What decides which of the layouts of cheap probes is measured in full first.

        It is the expected figure, lowered where the layout rather does not run. -inf: no cheap
        probe measured it, or one showed that it breaks the memory headroom and is never ranked.
        """
        peaks = {row: run.observation.peak_memory_bytes or 0 for row, run in history.cheap.items()}
        keeps = [peaks.get(row, 0) <= self._allowed_bytes for row in candidates.rows.tolist()]
        runs = candidates.fitting.probability
        doubt = np.where(runs > _LIKELY, 0.0, np.log(runs))
        return np.where(is_probed & keeps, figures + doubt, -np.inf)

    def _open_gain(
        self,
        history: History,
        candidates: _Candidates,
        rng: np.random.Generator,
        among: NDArray[np.bool_],
        *,
        over: int | None,
    ) -> float:
        """The largest expected gain among some candidates and the parts of layouts that run now."""
        rows = np.array([r for r, part in history.pending.items() if part is not None], dtype=int)
        is_part = np.isin(list(history.pending), rows)
        fits = candidates.fitting.joined(candidates.pending_fitting.rows(np.flatnonzero(is_part)))
        every = np.concatenate([candidates.rows, rows])
        figures_SN = self._draw_figures(candidates, every, fits, rng)
        best_S1 = candidates.best if over is None else figures_SN[:, [over]]
        gains_N = fits.probability * mean_gains(figures_SN - best_S1)
        gains_N[: len(among)] *= candidates.sound * among
        return float(gains_N.max())

    def _rests(self, history: History, belief: StepBelief) -> bool:
        """Whether nothing more is to be proposed, at least before what is pending has ended.

        What is pending decides the last trial, or is expected to use up the budget. Or the budget
        has less left than any full probe takes, without which a layout cannot win any more.
        """
        if self._cheap is None or history.left_node_s is None:
            return False
        if history.pending and self._needs_full(history):
            return True
        left_node_s = self._left_node_s(history, belief)
        if history.pending and left_node_s <= 0:
            return True
        if not self._has_ranked(history):
            return False
        rows = np.flatnonzero(history.is_free)
        return left_node_s < self._cheap.least_full_node_s(rows, belief.physical_mean(rows))

    def _needs_full(self, history: History) -> bool:
        """Whether the last trial has to run in full, since there is no winner without it."""
        runs_in_full = any(part is None for part in history.pending.values())
        return history.is_last and not runs_in_full and not self._has_ranked(history)

    def _left_node_s(self, history: History, belief: StepBelief) -> float:
        """What the budget leaves beside the probes that wait or run."""
        if self._cheap is None or history.left_node_s is None:
            return np.inf
        pending = (
            self._cheap.expected_node_s(belief, row, fidelity)
            for row, fidelity in history.pending.items()
        )
        return history.left_node_s - sum(pending)

    def weigh(
        self,
        history: History,
        candidates: _Candidates,
        rng: np.random.Generator,
        *,
        over: int | None = None,
    ) -> Floats:
        """The value of each candidate; a failure is not cheaper because others are pending.

        Args:
            history: with the pending layouts.
            candidates: all of them.
            rng: draws the figures.
            over: the place of the candidate whose figure is to be exceeded; None: the best figure.
        """
        pending, count = np.array(list(history.pending), dtype=np.int64), len(candidates.rows)
        fits = candidates.fitting.joined(candidates.pending_fitting)
        every = np.concatenate([candidates.rows, pending])
        figures_SN = self._draw_figures(candidates, every, fits, rng)
        runs_SP = rng.random((NUM_DRAWS, len(pending))) < fits.probability[count:]
        pending_SP = np.where(runs_SP, figures_SN[:, count:], -np.inf)
        alone_S1 = candidates.best if over is None else figures_SN[:, [over]]
        beside_S1 = np.maximum(alone_S1, pending_SP.max(axis=1, initial=-np.inf)[:, None])
        runs_N = candidates.fitting.probability
        alone_N, beside_N = (
            candidates.sound * mean_gains(figures_SN[:, :count] - best)
            for best in (alone_S1, beside_S1)
        )
        cost = FAILURE_COST * (runs_N * alone_N).max()
        return np.asarray(runs_N * beside_N - (1.0 - runs_N) * cost)

    def _select(
        self, history: History, belief: StepBelief, rng: np.random.Generator, *, turn: int = 0
    ) -> _Candidates:
        """Selects the candidates in three steps; each computes more for fewer layouts.

        Args:
            history: the measurements.
            belief: the prediction of step times after them.
            rng: draws the weights of several objectives.
            turn: every third selection considers the first objective alone.
        """
        predictions = self._predictions
        free = np.flatnonzero(history.is_free)
        pending = np.array(list(history.pending), dtype=np.int64)
        doubted = predictions.doubted(history, belief)
        again = np.array(list(doubted), dtype=np.int64)
        judged = predictions.fitting.judge(history, np.concatenate([free, pending, again]))
        fitting = judged.rows(np.arange(len(free)))
        mean = belief.physical_mean(free)
        values = predictions.goals.values(free, mean, fitting.peak_mean_bytes)
        likely = fitting.probability > _LIKELY
        ranged = values[likely] if likely.any() else values
        weighing = predictions.goals.weighing(ranged, history.num_taken + turn, rng)
        figures = weighing.figure(values)
        best = self._incumbent(history, weighing, figures)
        sound = predictions.sound(belief, free)
        penalty = np.log(fitting.probability) + np.log(sound)
        places = largest(figures + penalty, MAX_FIRST_LOOK)
        if len(places) > MAX_SECOND_LOOK:
            deviation = belief.physical_deviation(free[places])
            chosen = best_places(figures[places], deviation, best, penalty[places], MAX_SECOND_LOOK)
            places = places[chosen]
        if len(places) > MAX_CANDIDATES:
            mean, deviation = belief.marginals(free[places])
            values = predictions.goals.values(free[places], mean, fitting.peak_mean_bytes[places])
            figures, penalty = weighing.figure(values), penalty[places]
            places = places[best_places(figures, deviation, best, penalty, MAX_CANDIDATES)]
        probed = np.flatnonzero(np.isin(free, list(history.cheap)))
        places = np.union1d(places, probed).astype(np.int64) if len(probed) else places
        others = np.arange(len(free), len(free) + len(pending) + len(again))
        repeated = judged.rows(others[len(pending) :])
        repeated = replace(repeated, probability=np.ones(len(again)))  # they ran
        return _Candidates(
            belief=belief,
            rows=np.concatenate([free[places], again]),
            fitting=fitting.rows(places).joined(repeated),
            # A repetition gains nothing where the first run was not slowed down.
            sound=np.concatenate([sound[places], list(doubted.values())]),
            pending_fitting=judged.rows(others[: len(pending)]),
            weighing=weighing,
            best=best,
        )

    def _draw_figures(
        self, candidates: _Candidates, rows: Ints, fitting: Fitting, rng: np.random.Generator
    ) -> Floats:
        log_s_SN = candidates.belief.draws(rows, NUM_DRAWS, rng)
        peaks_SN = fitting.draw_peaks(NUM_DRAWS, rng)
        return candidates.weighing.figure(self._predictions.goals.values(rows, log_s_SN, peaks_SN))

    def _incumbent(self, history: History, weighing: Weighing, figures: Floats) -> float:
        """The best figure so far; before anything ran, one below the median free layout."""
        best = max(
            (
                float(weighing.figure(self._measured_values(row, seen))[0])
                for row, seen in self._ranked(history)
            ),
            default=-np.inf,
        )
        return best if best > -np.inf else float(np.median(figures)) - HEAD_START

    def _ranked(self, history: History) -> Iterator[tuple[int, Observation]]:
        """The completed layouts that keep the memory headroom, in the order of the tells."""
        for row, seen in history.observations.items():
            peak = seen.peak_memory_bytes
            if seen.objective is not None and (peak is None or peak <= self._allowed_bytes):
                yield row, seen

    def _has_ranked(self, history: History) -> bool:
        return any(True for _ in self._ranked(history))

    def _measured_values(self, row: int, seen: Observation) -> Floats:
        """The measured objectives of a layout; shape [1, objectives]."""
        log_s = np.array([self._predictions.goals.log_step_s(row, seen)])
        peak = seen.peak_memory_bytes
        peaks = np.array([self._predictions.fitting.peak_bytes(row) if peak is None else peak])
        return self._predictions.goals.values(np.array([row]), log_s, peaks.astype(np.float64))
