"""Posterior of every layout's step time: the closed form with uncertain factors, plus a residual.

The errors of the regression of the factors (`predictions.belief.factor_regression`) are a
Gaussian process over the knobs, the residual, and noise. In the posterior of the factors, layouts
are correlated as far as they spend their time on the same terms: one measurement of a layout with
much tensor parallelism improves the prediction of all such layouts.
"""

# ruff: noqa: N803, N806 (shapes in names: N layouts, M measured, F factors, S draws)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.factor_regression import (
    Linearised,
    Regression,
    StepFactors,
    drawn_log_step_s,
    log_sd,
    log_step_s,
    rows_of,
)
from layout_tuner.predictions.belief.job_knobs.knob_step_time import (
    JobRows,
    KnobSettings,
    joined_settings,
)
from layout_tuner.predictions.belief.residual import (
    SETTING_DISTANCE,
    KnobPoints,
    ResidualKernel,
    candidate_kernels,
    log_likelihood,
)
from layout_tuner.predictions.belief.slow_runs import run_weights, sound_probability
from layout_tuner.predictions.estimates.step_time import TimeTerms
from layout_tuner.search_spaces.spaces.search_space import EVERY_ROW

_STEPS: Final = 6
_CLOSE: Final = 1e-3
"""Change of every factor's logarithm at which a fit has settled."""
_WEIGHINGS: Final = 2
"""How often kernel, weights and factors are fitted in turn."""
_UNLIKELY: Final = 0.1
"""Odds, to the most likely kernel, below which a kernel has no draws."""
_MAX_FOR_KERNEL: Final = 150
"""Latest measurements that choose the kernel: more would not change the choice."""
_JITTER: Final = 1e-6
"""Share of the largest variance that is added to all, so that the Cholesky factor exists."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepModel:
    """The closed form of some layouts, their coordinates and what is expected of its error."""

    terms: TimeTerms
    """One row a layout."""
    points: Floats | KnobPoints
    """One row a layout (`predictions.belief.residual.knob_coordinates`)."""
    residual: Floats
    """Prior mean of each layout's residual (`predictions.belief.known_residuals`)."""
    settings: KnobSettings | None = None
    """One row a layout: the settings of its job; None: the default of each knob."""
    of_jobs: JobRows | None = None
    """Finds the rows of jobs; None: each row is a job."""

    def rows(self, rows: Ints) -> StepModel:
        """The model of some of the layouts, or of some jobs where `of_jobs` finds them."""
        points = self.points_of(rows)
        settings = None if self.settings is None else self.settings.rows(rows)
        if self.of_jobs is not None:
            rows, settings = self.of_jobs.rows(rows)
        return StepModel(
            terms=rows_of(self.terms, rows),  # all may be in single precision
            points=points,
            residual=self.residual[rows],
            settings=settings,
        )

    def points_of(self, rows: Ints) -> Floats:
        """The coordinates of some of the layouts, or of some jobs where `of_jobs` finds them."""
        if self.of_jobs is None:
            return np.asarray(self.points[rows])
        layouts, settings = self.of_jobs.rows(rows)
        return np.hstack([self.points[layouts], SETTING_DISTANCE * settings.of_rows])

    @property
    def few_points(self) -> Floats:
        """The coordinates of a model of some rows."""
        assert isinstance(self.points, np.ndarray), "ask for the rows first"
        return self.points

    def log_s(self, deviations_F: Floats) -> Floats:
        """Logarithm of each step in seconds, with the prior mean of the residual."""
        return np.asarray(log_step_s(self.terms, deviations_F, self.settings) + self.residual)

    def log_sd(self, factors: StepFactors) -> Floats:
        """Standard deviation of each logarithm because of the factors."""
        return log_sd(self.terms, factors, self.settings)

    def drawn_log_s(self, deviations_SF: Floats) -> Floats:
        """The same with each row of deviations; shape [draws, layouts]."""
        drawn_SN = drawn_log_step_s(self.terms, deviations_SF, self.settings)
        return np.asarray(drawn_SN + self.residual)


def joined(models: Sequence[StepModel]) -> StepModel:
    """The rows of several models, one after the other."""
    return StepModel(
        terms=TimeTerms.joined([each.terms for each in models]),
        points=np.concatenate([each.few_points for each in models]),
        residual=np.concatenate([each.residual for each in models]),
        settings=joined_settings([each.settings for each in models]),
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class MeasuredParts:
    """What ran in each measurement, where some measured a part of a layout."""

    model: StepModel
    """The closed form of what ran; the coordinates of the layout that it stands for."""
    errors: Floats
    """Covariance of the errors, in logarithms, of a part as a measurement of its layout; shape
    [measurements, measurements]."""


class StepBelief:
    """The posterior after some measurements."""

    def __init__(
        self,
        model: StepModel,
        prior: StepFactors,
        rows: Ints,
        log_s: Floats,
        parts: MeasuredParts | None = None,
    ) -> None:
        """Fits factors and residual.

        `model` has every layout that may be asked about, `prior` is that of the factors, `rows` are
        the measured layouts, and `log_s` the logarithms of their step times. Without `parts` all of
        them ran in full.
        """
        self._model = model
        self._prior = prior
        self.rows = rows
        """The measured layouts, in the order of their runs."""
        self._measured = model.rows(rows) if parts is None else parts.model
        self._errors_MM = np.zeros((len(rows),) * 2) if parts is None else parts.errors
        self._log_s_M = log_s
        self.kernel = ResidualKernel()
        self.kernels: dict[ResidualKernel, float] = {self.kernel: 1.0}
        """Kernels that explain the measurements nearly as well, with their probabilities."""
        self._factors = prior
        self.weights_M = np.ones(len(rows))
        """How much each measurement counts (`predictions.belief.slow_runs`)."""
        if len(rows):
            self._fit_factors()
            for _ in range(_WEIGHINGS):
                self._choose_kernel()
                self.weights_M = run_weights(*self._left_out())
                self._fit_factors()
        self._inverse_MM = self._inverse(self.kernel)

    def _inverse(self, kernel: ResidualKernel) -> Floats:
        return np.asarray(np.linalg.inv(self._covariance(kernel)), dtype=np.float64)

    def _covariance(self, kernel: ResidualKernel, rows: slice = EVERY_ROW) -> Floats:
        """Covariance of some measurements about the closed form, noise included."""
        points, weights = self._measured.few_points[rows], self.weights_M[rows]
        return np.asarray(kernel.of_measured(points, weights) + self._errors_MM[rows, rows])

    def _fit_factors(self) -> None:
        """Gauss-Newton steps from the current factors."""
        noise_MM, moved_F = self._covariance(self.kernel), self._factors.mean
        for _ in range(_STEPS):
            before_F, regression = moved_F, Regression(self._linearised(moved_F), noise_MM)
            moved_F = regression.moved(before_F)
            if np.abs(moved_F - before_F).max() < _CLOSE:
                break
        self._factors = replace(regression.factors(), mean=moved_F)

    def _linearised(self, deviations_F: Floats) -> Linearised:
        log_s_M = self._log_s_M - self._measured.residual
        measured = self._measured
        return Linearised.near(
            deviations_F, self._prior, measured.terms, log_s_M, measured.settings
        )

    def _choose_kernel(self) -> None:
        """The kernels by likelihood, with the factors' prior spread on top."""
        latest = slice(-_MAX_FOR_KERNEL, None)
        here = self._linearised(self._factors.mean)
        spread, target = here.spread[latest, latest], here.target[latest]
        logs = {
            kernel: kernel.log_prior
            + log_likelihood(spread + self._covariance(kernel, latest), target)
            for kernel in candidate_kernels()
        }
        self.kernel = max(logs, key=lambda kernel: logs[kernel])
        odds = {kernel: np.exp(log - logs[self.kernel]) for kernel, log in logs.items()}
        likely = {kernel: each for kernel, each in odds.items() if each > _UNLIKELY}
        self.kernels = {kernel: each / sum(likely.values()) for kernel, each in likely.items()}

    def _left_out(self) -> tuple[Floats, Floats]:
        """By how much each measurement misses its prediction from all others, and the spread.

        Rasmussen and Williams 2006, equations 5.10 to 5.12. The spread is that of a sound run.
        """
        here = self._linearised(self._factors.mean)
        regression = Regression(here, self._covariance(self.kernel))
        variance_M = 1.0 / np.diagonal(np.linalg.inv(regression.covariance_MM))
        missed_M = regression.weighted_M * variance_M
        own_M = self.kernel.noise**2 * (1.0 / self.weights_M - 1.0)
        return missed_M, np.sqrt(np.maximum(variance_M - own_M, self.kernel.noise**2))

    @cached_property
    def slowed(self) -> Floats:
        """How likely each measured run was slowed down, by its prediction from all others."""
        if not len(self.rows):
            return np.zeros(0)
        return np.asarray(1.0 - sound_probability(*self._left_out()))

    def physical_mean(self, rows: Ints) -> Floats:
        """Expected logarithms without what the measurements say of the residual: that is slow."""
        if self._model.of_jobs is not None:
            return self._model.rows(rows).log_s(self._factors.mean)
        # Not of the rows alone, which would copy all terms where the rows are most layouts.
        return self._model.log_s(self._factors.mean)[rows]

    @property
    def layout_mean(self) -> Floats:
        """Expected logarithms of all rows of the model: of layouts without settings."""
        return self._model.log_s(self._factors.mean)

    @property
    def factors(self) -> StepFactors:
        """The posterior of the factors."""
        return self._factors

    def physical_deviation(self, rows: Ints) -> Floats:
        """Standard deviations of those."""
        return self._model.rows(rows).log_sd(self._factors)

    def marginals(self, rows: Ints) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithms of some step times.

        Factors and residual are treated as independent, so the spread is slightly too large.
        """
        return self.marginals_of(self._model.rows(rows))

    def marginals_of(self, asked: StepModel) -> tuple[Floats, Floats]:
        """The same for any closed forms, such as those of parts of layouts."""
        across = self.kernel.between(asked.few_points, self._measured.few_points)
        known = np.einsum("nm,nm->n", across @ self._inverse_MM, across)
        residual = np.maximum(self.kernel.amplitude**2 - known, 0.0)
        missed_M = self._log_s_M - self._measured.log_s(self._factors.mean)
        mean = asked.log_s(self._factors.mean) + across @ (self._inverse_MM @ missed_M)
        return mean, np.sqrt(np.square(asked.log_sd(self._factors)) + residual)

    def draws(self, rows: Ints, num_draws: int, rng: np.random.Generator) -> Floats:
        """Joint draws of the logarithms of some step times; shape [draws, layouts].

        The closed form is evaluated at each draw of the factors, not linearised. Each kernel has
        its share of the draws.
        """
        asked = self._model.rows(rows)
        deviations_SF = self._factors.mean + normal_draws(self._factors.covariance, num_draws, rng)
        physics_SN = asked.drawn_log_s(deviations_SF)
        left_SM = self._log_s_M - self._measured.drawn_log_s(deviations_SF)
        residual_SN = np.empty_like(physics_SN)
        ends = np.rint(np.cumsum(list(self.kernels.values())) * num_draws).astype(int)
        for kernel, end, start in zip(self.kernels, ends, [0, *ends[:-1]], strict=True):
            across_NM = kernel.between(asked.few_points, self._measured.few_points)
            gains_NM = across_NM @ self._inverse(kernel)
            covariance_NN = (
                kernel.between(asked.few_points, asked.few_points) - gains_NM @ across_NM.T
            )
            residual_SN[start:end] = left_SM[start:end] @ gains_NM.T
            residual_SN[start:end] += normal_draws(covariance_NN, end - start, rng)
        return np.asarray(physics_SN + residual_SN)


def normal_draws(covariance: Floats, num_draws: int, rng: np.random.Generator) -> Floats:
    """Draws of a normal vector of mean 0, also for a singular covariance."""
    jitter = _JITTER * max(float(np.diagonal(covariance).max(initial=0.0)), _JITTER)
    try:
        root = np.linalg.cholesky(covariance + jitter * np.eye(len(covariance)))
    except np.linalg.LinAlgError:
        values, vectors = np.linalg.eigh(covariance)
        root = vectors * np.sqrt(np.maximum(values, 0.0))
    return np.asarray(rng.standard_normal((num_draws, len(covariance))) @ root.T)
