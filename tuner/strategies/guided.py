"""The strategy `guided`: the largest expected gain by calibrated predictions of time and memory.

The gain of a layout is the mean, over joint draws from the predictions, of how much it exceeds the
best of all measured and pending layouts. Its value is that gain, times its probability of running,
minus what a failure costs, times the probability of one.
"""

# ruff: noqa: N806 (arrays carry their shape in the name: S draws, N layouts, P pending)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Bools, Floats, Ints
from layout_tuner.predictions.belief.observation import Observation
from layout_tuner.predictions.belief.step_belief import StepBelief
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.search_spaces.campaigns.fidelity import Fidelity
from layout_tuner.search_spaces.objectives import pareto_front
from layout_tuner.tuner.strategies.ask_and_tell import History, Proposer
from layout_tuner.tuner.strategies.cheap_probes import Candidate, CheapProbes
from layout_tuner.tuner.strategies.fitting import Fitting
from layout_tuner.tuner.strategies.improvement import best_places, hypervolume, largest, mean_gains
from layout_tuner.tuner.strategies.objective_values import Weighing
from layout_tuner.tuner.strategies.predictions import Predictions
from layout_tuner.tuner.strategies.search_problem import SearchProblem

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

    history: History
    """The measurements, and what is pending."""
    rng: np.random.Generator
    """Draws the figures."""
    belief: StepBelief
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


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Probed:
    """The candidates that cheap probes measured, by their places among all candidates."""

    is_probed: Bools
    """Whether cheap probes alone measured it."""
    log_s: Floats
    """Expected logarithm of each candidate's step time."""
    log_sd: Floats
    """Standard deviation of that."""
    figures: Floats
    """Expected figure of each candidate."""
    best: int
    """The place of the best of the probed ones."""
    may_win: bool
    """Whether that one exists and would be ranked."""
    to_beat: int | None
    """Its place where it is expected to be better than all that was measured in full: others must
    exceed it. None: others must exceed the best of those."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Proposed:
    """A proposal."""

    row: int
    fidelity: Fidelity | None
    """The part of the layout to be probed; None: all of it."""
    prediction: Prediction
    """What was predicted of what runs."""


class GuidedProposer(Proposer):
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
        if self._is_held_back(history, belief):
            return None
        candidates = self._select(history, belief, rng)
        chosen, fidelity = self._choose(candidates)
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
        fitting = self._predictions.fitting.predict(history, rows)
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
        num_objectives = self._predictions.objectives.num_objectives
        if num_objectives > 1:
            # Each selection of candidates looks at another part of the front.
            gains = [
                self._front_gains(self._select(history, belief, rng, turn=turn))
                for turn in range(num_objectives + 1)
            ]
            return max(float(np.quantile(gains_S, 1.0 - GAIN_RISK)) for gains_S in gains)
        candidates = self._select(history, belief, rng)
        figures_SN = self._draw_figures(candidates, candidates.rows, candidates.fitting)
        runs_SN = rng.random(figures_SN.shape) < candidates.fitting.probability * candidates.sound
        best_S = np.where(runs_SN, figures_SN - candidates.best, 0.0).max(axis=1, initial=0.0)
        return float(np.expm1(np.quantile(best_S, 1.0 - GAIN_RISK)))

    def _front_gains(self, candidates: _Candidates) -> Floats:
        """By which share the hypervolume of the measured front grows, in each draw."""
        objectives, rows, rng = self._predictions.objectives, candidates.rows, candidates.rng
        ranked = candidates.history.ranked(self._allowed_bytes)
        measured_MG = np.concatenate([self._measured_values(row, seen) for row, seen in ranked])
        best_G = measured_MG.max(axis=0)
        front_MG = objectives.shares(measured_MG, best_G)
        log_s_SN = candidates.belief.draws(rows, NUM_FRONT_DRAWS, rng)
        peaks_SN = candidates.fitting.draw_peaks(NUM_FRONT_DRAWS, rng)
        drawn_SNG = objectives.shares(objectives.values(rows, log_s_SN, peaks_SN), best_G)
        runs_SN = rng.random(log_s_SN.shape) < candidates.fitting.probability * candidates.sound
        now = hypervolume(front_MG)
        grown = []
        for drawn_NG, runs in zip(drawn_SNG, runs_SN, strict=True):
            every = np.concatenate([front_MG, drawn_NG[runs]])
            grown.append(hypervolume(every[pareto_front(every)]))
        return np.asarray(grown) / max(now, np.finfo(float).tiny) - 1.0

    def _choose(self, candidates: _Candidates) -> tuple[int, Fidelity | None]:
        """The place of the candidate to be probed, and the part of it that runs; None: all of it.

        Without cheap probes it is the candidate of the largest value. With them it is one of two:
        the best layout that cheap probes measured, which is now measured in full; or the most
        valuable other layout, mostly in part.
        """
        if self._cheap is None:
            return int(self.weigh(candidates).argmax()), None
        probed, needs_full = self._probed(candidates), self._needs_full(candidates.history)
        if probed.is_probed.all() or (needs_full and probed.may_win):
            return probed.best, None
        place, fidelity, node_s = self._best_unprobed(candidates, probed, self._cheap)
        if probed.may_win and self._is_turn_of_full(candidates, probed, node_s, self._cheap):
            return probed.best, None
        return place, None if needs_full else fidelity

    def _probed(self, candidates: _Candidates) -> _Probed:
        """The candidates of which only cheap probes have run, and the best of them.

        The best has the largest value: it may be the fastest one or a less sure one. Before a
        layout was measured in full it has the largest expected figure, lowered where the layout
        rather does not run. A layout whose cheap probe broke the memory headroom is never ranked,
        and so never the best.
        """
        history, rows = candidates.history, candidates.rows
        log_s, log_sd = candidates.belief.marginals(rows)
        peaks = candidates.fitting.peak_mean_bytes
        figures = candidates.weighing.figure(
            self._predictions.objectives.values(rows, log_s, peaks)
        )
        is_probed = np.isin(rows, list(history.cheap.keys() - history.observations.keys()))
        seen = {row: run.observation.peak_memory_bytes or 0 for row, run in history.cheap.items()}
        keeps = [seen.get(row, 0) <= self._allowed_bytes for row in rows.tolist()]
        runs = candidates.fitting.probability
        doubt = np.where(runs > _LIKELY, 0.0, np.log(runs))
        is_ranked = self._has_ranked(history)
        values = self.weigh(candidates) if is_ranked and is_probed.any() else figures + doubt
        order = np.where(is_probed & keeps, values, -np.inf)
        best = int(order.argmax())
        may_win = bool(order[best] > -np.inf)
        leads = may_win and (figures[best] > candidates.best or not is_ranked)
        return _Probed(
            is_probed=is_probed,
            log_s=log_s,
            log_sd=log_sd,
            figures=figures,
            best=best,
            may_win=may_win,
            to_beat=best if leads else None,
        )

    def _best_unprobed(
        self, candidates: _Candidates, probed: _Probed, cheap: CheapProbes
    ) -> tuple[int, Fidelity | None, float]:
        """The most valuable other candidate, the part of it to be probed, and its node-seconds."""
        values = self.weigh(candidates, over=probed.to_beat)
        place = int(np.where(probed.is_probed, -np.inf, values).argmax())
        best = candidates.best if probed.to_beat is None else probed.figures[probed.to_beat]
        candidate = Candidate(
            row=int(candidates.rows[place]),
            log_s=float(probed.log_s[place]),
            log_sd=float(probed.log_sd[place]),
            above_best=float(probed.figures[place] - best),
            runs=float(candidates.fitting.probability[place]),
        )
        if candidate.row in candidates.history.observations:  # a repetition of a full probe
            return place, None, cheap.full_node_s(candidate.row, candidate.log_s)
        return place, *cheap.choose(candidates.belief, candidate)

    def _is_turn_of_full(
        self, candidates: _Candidates, probed: _Probed, cheap_node_s: float, cheap: CheapProbes
    ) -> bool:
        """Whether the best probed layout is measured in full before another is probed.

        Only the first full probe may exceed the budget: without it there is no winner.
        """
        history, at, gain = candidates.history, slice(probed.best, probed.best + 1), np.inf
        rows, log_s = candidates.rows[at], probed.log_s[at]
        left_node_s = self._left_node_s(history, candidates.belief)
        if self._has_ranked(history) or any(row in history.cheap for row in history.pending):
            gain = float(self.weigh(candidates)[probed.best])
            if left_node_s < cheap.least_full_node_s(rows, log_s):
                return False
        others = self._gain_of_others(candidates, probed)
        node_s = cheap.full_node_s(int(rows[0]), log_s[0])
        return cheap.is_turn_of_full(left_node_s, gain, node_s, others, cheap_node_s)

    def _gain_of_others(self, candidates: _Candidates, probed: _Probed) -> float:
        """The largest expected gain of other candidates and of layouts of which a part runs now."""
        pending = candidates.history.pending
        rows = np.array([row for row, part in pending.items() if part is not None], dtype=int)
        is_part = np.isin(list(pending), rows)
        fits = candidates.fitting.joined(candidates.pending_fitting.rows(np.flatnonzero(is_part)))
        every = np.concatenate([candidates.rows, rows])
        figures_SN = self._draw_figures(candidates, every, fits)
        best_S1 = candidates.best if probed.to_beat is None else figures_SN[:, [probed.to_beat]]
        gains_N = fits.probability * mean_gains(figures_SN - best_S1)
        gains_N[: len(candidates.rows)] *= candidates.sound * ~probed.is_probed
        return float(gains_N.max())

    def _is_held_back(self, history: History, belief: StepBelief) -> bool:
        """Whether nothing more is to be proposed, at least before what is pending has ended.

        What is pending decides the last trial, or is expected to use up the budget. Or the budget
        has less left than any full probe takes, without which a layout cannot win any more.
        """
        if self._cheap is None or history.limits.left_node_s is None:
            return False
        if history.pending and self._needs_full(history):
            return True
        left_node_s = self._left_node_s(history, belief)
        if history.pending and left_node_s <= 0:
            return True
        if not self._has_ranked(history):
            return False
        return left_node_s < self._least_full_node_s(history, belief)

    def _least_full_node_s(self, history: History, belief: StepBelief) -> float:
        """Node-seconds of the full probe that takes least; see `CheapProbes.least_full_node_s`."""
        assert self._cheap is not None, "there are cheap probes"
        return self._cheap.least_full_node_s(*self._predictions.shortest(history, belief))

    def _needs_full(self, history: History) -> bool:
        """Whether the last trial has to run in full, since there is no winner without it."""
        runs_in_full = any(part is None for part in history.pending.values())
        return history.limits.is_last and not runs_in_full and not self._has_ranked(history)

    def _left_node_s(self, history: History, belief: StepBelief) -> float:
        """What the budget leaves beside the probes that wait or run."""
        if self._cheap is None or history.limits.left_node_s is None:
            return np.inf
        pending = (
            self._cheap.expected_node_s(belief, row, fidelity)
            for row, fidelity in history.pending.items()
        )
        return history.limits.left_node_s - sum(pending)

    def weigh(self, candidates: _Candidates, *, over: int | None = None) -> Floats:
        """The value of each candidate; a failure is not cheaper because others are pending.

        `over` is the place of the candidate whose figure is to be exceeded; None: the best figure.
        """
        pending = np.array(list(candidates.history.pending), dtype=np.int64)
        count = len(candidates.rows)
        fits = candidates.fitting.joined(candidates.pending_fitting)
        every = np.concatenate([candidates.rows, pending])
        figures_SN = self._draw_figures(candidates, every, fits)
        runs_SP = candidates.rng.random((NUM_DRAWS, len(pending))) < fits.probability[count:]
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

        Every third turn considers the first objective alone.
        """
        predictions = self._predictions
        looked: tuple[Weighing, float] | None = None
        if predictions.jobs is None:
            free = history.free()
        else:
            of_all = predictions.of_layouts(history, belief)
            weighing, figures = self._weighed(history, of_all.values, of_all.fitting, rng, turn)
            looked = weighing, self._incumbent(history, weighing, figures)
            free = predictions.jobs_to_look_at(history, belief, of_all, weighing.figure)
        pending = np.array(list(history.pending), dtype=np.int64)
        doubted = predictions.doubted(history, belief) if history.limits.may_doubt else {}
        again = np.array(list(doubted), dtype=np.int64)
        predicted = predictions.fitting.predict(history, np.concatenate([free, pending, again]))
        fitting = predicted.rows(np.arange(len(free)))
        mean = belief.physical_mean(free)
        values = predictions.objectives.values(free, mean, fitting.peak_mean_bytes)
        if looked is None:
            weighing, figures = self._weighed(history, values, fitting, rng, turn)
            best = self._incumbent(history, weighing, figures)
        else:
            (weighing, best), figures = looked, looked[0].figure(values)
        sound = predictions.sound(belief, free)
        penalty = np.log(fitting.probability) + np.log(sound)
        places = largest(figures + penalty, MAX_FIRST_LOOK)
        if len(places) > MAX_SECOND_LOOK:
            deviation = belief.physical_deviation(free[places])
            chosen = best_places(figures[places], deviation, best, penalty[places], MAX_SECOND_LOOK)
            places = places[chosen]
        if len(places) > MAX_CANDIDATES:
            mean, deviation = belief.marginals(free[places])
            values = predictions.objectives.values(
                free[places], mean, fitting.peak_mean_bytes[places]
            )
            figures, penalty = weighing.figure(values), penalty[places]
            places = places[best_places(figures, deviation, best, penalty, MAX_CANDIDATES)]
        probed = np.flatnonzero(np.isin(free, list(history.cheap)))
        places = np.union1d(places, probed).astype(np.int64) if len(probed) else places
        others = np.arange(len(free), len(free) + len(pending) + len(again))
        repeated = predicted.rows(others[len(pending) :])
        repeated = replace(repeated, probability=np.ones(len(again)))  # they ran
        return _Candidates(
            history=history,
            rng=rng,
            belief=belief,
            rows=np.concatenate([free[places], again]),
            fitting=fitting.rows(places).joined(repeated),
            # A repetition gains nothing where the first run was not slowed down.
            sound=np.concatenate([sound[places], list(doubted.values())]),
            pending_fitting=predicted.rows(others[: len(pending)]),
            weighing=weighing,
            best=best,
        )

    def _weighed(
        self, history: History, values: Floats, fits: Fitting, rng: np.random.Generator, turn: int
    ) -> tuple[Weighing, Floats]:
        """The weights of the objectives, and the figures of these layouts by them."""
        likely = fits.probability > _LIKELY
        ranged = values[likely] if likely.any() else values
        number = history.num_taken + turn
        weighing = self._predictions.objectives.weighing(ranged, number, rng)
        return weighing, weighing.figure(values)

    def _draw_figures(self, candidates: _Candidates, rows: Ints, fitting: Fitting) -> Floats:
        log_s_SN = candidates.belief.draws(rows, NUM_DRAWS, candidates.rng)
        peaks_SN = fitting.draw_peaks(NUM_DRAWS, candidates.rng)
        return candidates.weighing.figure(
            self._predictions.objectives.values(rows, log_s_SN, peaks_SN)
        )

    def _incumbent(self, history: History, weighing: Weighing, figures: Floats) -> float:
        """The best figure so far; before anything ran, one below the median free layout."""
        best = max(
            (
                float(weighing.figure(self._measured_values(row, seen))[0])
                for row, seen in history.ranked(self._allowed_bytes)
            ),
            default=-np.inf,
        )
        return best if best > -np.inf else float(np.median(figures)) - HEAD_START

    def _has_ranked(self, history: History) -> bool:
        return any(True for _ in history.ranked(self._allowed_bytes))

    def _measured_values(self, row: int, seen: Observation) -> Floats:
        """The measured objectives of a layout; shape [1, objectives]."""
        log_s = np.array([self._predictions.objectives.log_step_s(row, seen)])
        peak = seen.peak_memory_bytes
        peaks = np.array([self._predictions.fitting.peak_bytes(row) if peak is None else peak])
        return self._predictions.objectives.values(np.array([row]), log_s, peaks.astype(np.float64))
