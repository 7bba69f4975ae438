"""Regression of the closed form's factors on measured step times.

The logarithm of a step time is g(f) + e. g is the closed form (`predictions.estimates.step_time`),
f the logarithms of its factors with a normal prior, and e a normal error. Measurements may have
factors of their own: the covariance between those of two is the prior's, times the share of it that
the two have in common. Gauss-Newton linearises g about the best factors so far; each step then is
Gaussian process regression (Rasmussen and Williams 2006, section 2.7).
"""

# ruff: noqa: N803, N806 (shapes in names: N layouts, M measurements, F factors)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.estimates.step_time import PRIOR, TimeTerms

_LARGEST_MOVE: Final = 1.0
"""Largest change of a factor's logarithm in one step of Gauss-Newton: beyond it the linearisation
says little."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepFactors:
    """Normal distribution of log(factor / `PRIOR`); the last factor is on the whole step."""

    mean: Floats
    """Shape [factors]."""
    covariance: Floats
    """Shape [factors, factors]."""


def term_factors(deviations: Floats) -> Floats:
    """The factors of the terms, without that on the whole step."""
    return np.asarray(PRIOR * np.exp(deviations[..., :-1]))


def log_step_s(terms: TimeTerms, deviations: Floats) -> Floats:
    """Logarithm of each step in seconds; deviations of all layouts, or one row for each layout."""
    return np.asarray(np.log(terms.step_time_s(term_factors(deviations))) + deviations[..., -1])


def drawn_log_step_s(terms: TimeTerms, deviations: Floats) -> Floats:
    """The same of each layout with each row of deviations; shape [rows, layouts]."""
    times = terms.drawn_step_times_s(term_factors(deviations))
    return np.asarray(np.log(times) + deviations[:, -1:])


def slopes(terms: TimeTerms, deviations: Floats) -> Floats:
    """By how much each logarithm grows with each deviation; shape [layouts, factors]."""
    shares = terms.shares(term_factors(deviations))
    return np.concatenate([shares, np.ones((len(shares), 1))], axis=1)


def log_sd(terms: TimeTerms, factors: StepFactors) -> Floats:
    """Standard deviation of the logarithm of each step because of the factors."""
    slopes_NF = slopes(terms, factors.mean)
    variance_N = np.einsum("nf,nf->n", slopes_NF @ factors.covariance, slopes_NF)
    return np.asarray(np.sqrt(np.maximum(variance_N, 0.0)))


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
    def near(cls, deviations: Floats, prior: StepFactors, terms: TimeTerms, log_s: Floats) -> Self:
        """The linear functions near some deviations: one row, or a row for each measurement."""
        slopes_MF = slopes(terms, deviations)
        missed = log_s - log_step_s(terms, deviations)
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
