"""Regression of the closed form's factors on measured step times.

The logarithm of a step time is g(f) + e. g is the closed form (`predictions.estimates.step_time`),
f the logarithms of its factors with a normal prior, and e a normal error. Measurements may have
factors of their own: the covariance between those of two is the prior's, times the share of it that
the two have in common. Gauss-Newton linearises g about the best factors so far; each step then is
Gaussian process regression (Rasmussen and Williams 2006, section 2.7).
"""

# ruff: noqa: N803, N806 (shapes in names: N layouts, M measurements, F factors)

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.job_knobs.knob_step_time import KnobFactors, KnobSettings
from layout_tuner.predictions.estimates.step_time import PRIOR, TimeTerms

_WHOLE: Final = len(PRIOR)
"""The place of the factor on the whole step, behind those of the terms."""
_LARGEST_MOVE: Final = 1.0
"""Largest change of a factor's logarithm in one step of Gauss-Newton: beyond it the linearisation
says little."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepFactors:
    """Normal distribution of log(factor / `PRIOR`), of each term and of the whole step.

    Behind these may stand logarithms of factors of job knobs (`job_knobs.knob_step_time`).
    """

    mean: Floats
    """Shape [factors]."""
    covariance: Floats
    """Shape [factors, factors]."""

    def with_knobs(self, knobs: KnobFactors) -> StepFactors:
        """The same, with independent factors of knobs behind the others."""
        if not len(knobs):
            return self
        known = len(self.mean)
        covariance = np.zeros((known + len(knobs),) * 2)
        covariance[:known, :known] = self.covariance
        covariance[known:, known:] = np.diag(np.square(knobs.log_sd))
        return StepFactors(mean=np.concatenate([self.mean, knobs.mean]), covariance=covariance)


def term_factors(deviations: Floats) -> Floats:
    """The factors of the terms, without those of the whole step and of knobs."""
    return np.asarray(PRIOR * np.exp(deviations[..., : len(PRIOR)]))


def log_step_s(
    terms: TimeTerms, deviations: Floats, settings: KnobSettings | None = None
) -> Floats:
    """Logarithm of each step in seconds; deviations of all layouts, or one row for each layout.

    Without `settings` all knobs have their defaults.
    """
    if settings is not None:
        deviations = settings.deviations(deviations)
    return np.asarray(np.log(terms.step_time_s(term_factors(deviations))) + deviations[..., _WHOLE])


def drawn_log_step_s(
    terms: TimeTerms, deviations: Floats, settings: KnobSettings | None = None
) -> Floats:
    """The same of each layout with each row of deviations; shape [rows, layouts]."""
    if settings is None:
        times = terms.drawn_step_times_s(term_factors(deviations))
        return np.asarray(np.log(times) + deviations[:, _WHOLE, None])
    drawn = np.empty((len(deviations), len(settings.job)))
    for job in np.unique(settings.job):
        rows = np.flatnonzero(settings.job == job)
        here = replace(settings, job=np.full(len(deviations), job))
        drawn[:, rows] = drawn_log_step_s(rows_of(terms, rows), here.deviations(deviations))
    return drawn


def slopes(terms: TimeTerms, deviations: Floats, settings: KnobSettings | None = None) -> Floats:
    """By how much each logarithm grows with each deviation; shape [layouts, factors]."""
    if settings is not None:
        return settings.slopes(slopes(terms, settings.deviations(deviations)))
    shares = terms.shares(term_factors(deviations))
    parts = [shares, np.ones((len(shares), 1))]
    if num_knobs := deviations.shape[-1] - _WHOLE - 1:
        parts.append(np.zeros((len(shares), num_knobs)))
    return np.concatenate(parts, axis=1)


def log_sd(terms: TimeTerms, factors: StepFactors, settings: KnobSettings | None = None) -> Floats:
    """Standard deviation of the logarithm of each step because of the factors."""
    slopes_NF = slopes(terms, factors.mean, settings)
    variance_N = np.einsum("nf,nf->n", slopes_NF @ factors.covariance, slopes_NF)
    return np.asarray(np.sqrt(np.maximum(variance_N, 0.0)))


def rows_of(terms: TimeTerms, rows: Ints) -> TimeTerms:
    """The terms of some layouts, in double precision."""
    return TimeTerms(
        names=terms.names,
        seconds=terms.seconds[rows].astype(np.float64),
        backward_share=terms.backward_share[rows],
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Linearised:
    """Measurements as linear functions of their factors, near some factors."""

    prior: StepFactors
    slopes: Floats
    """Shape [measurements, factors]."""
    missed: Floats
    """Measured less predicted logarithms at these factors; shape [measurements]."""
    target: Floats
    """The same at the mean of the prior, by the linear functions."""

    @classmethod
    def near(
        cls,
        deviations: Floats,
        prior: StepFactors,
        terms: TimeTerms,
        log_s: Floats,
        settings: KnobSettings | None = None,
    ) -> Self:
        """The linear functions near some deviations: one row, or a row for each measurement."""
        slopes_MF = slopes(terms, deviations, settings)
        missed = log_s - log_step_s(terms, deviations, settings)
        target = missed + (slopes_MF * (deviations - prior.mean)).sum(axis=1)
        return cls(prior=prior, slopes=slopes_MF, missed=missed, target=target)

    @property
    def spread(self) -> Floats:
        """Covariance of the measurements because of the prior, where all have the same factors."""
        return np.asarray(self.slopes @ self.prior.covariance @ self.slopes.T)


class Regression:
    """The posterior of the factors, for any share in common with those of the measurements."""

    def __init__(
        self, linear: Linearised, noise_MM: Floats, shared_MM: Floats | float = 1.0
    ) -> None:
        self._prior, self._slopes_MF = linear.prior, linear.slopes
        self.covariance_MM = linear.spread * shared_MM + noise_MM
        """Covariance of the measurements by prior and errors."""
        self.weighted_M = np.linalg.solve(self.covariance_MM, linear.target)
        """Its inverse times the targets."""

    def factors(self, shared_M: Floats | float = 1.0, own: float = 1.0) -> StepFactors:
        """The posterior of factors that share so much of the prior with measurements and itself."""
        gains_FM = self._prior.covariance @ self._slopes_MF.T * shared_M
        known_FF = gains_FM @ np.linalg.solve(self.covariance_MM, gains_FM.T)
        mean = self._prior.mean + gains_FM @ self.weighted_M
        return StepFactors(mean=mean, covariance=own * self._prior.covariance - known_FF)

    def moved(self, deviations: Floats, shared: Floats | float = 1.0) -> Floats:
        """Deviations after a step of Gauss-Newton; one row, or one for each row of shares."""
        pull = (shared * self.weighted_M) @ self._slopes_MF @ self._prior.covariance
        move = np.clip(self._prior.mean + pull - deviations, -_LARGEST_MOVE, _LARGEST_MOVE)
        return np.asarray(deviations + move)
