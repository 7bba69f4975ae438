"""Bayesian linear regression of memory's factors: measured, censored and doubtful peaks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.peaks.memory_evidence import (
    FAILED,
    LEVEL_SHARES,
    MEASURED,
    RAN,
    Evidence,
    SampleGroup,
)

LOGISTIC_PER_NORMAL: Final = 1.702
"""The logistic function of 1.702 z is within 0.01 of the normal distribution function of z."""

_ITERATIONS: Final = 8
_DEGREES_OF_FREEDOM: Final = 4.0
"""Of Student's distribution of the measured ratios."""
_NOISE_PRIOR_SAMPLES: Final = 4.0
"""Samples' worth of trust in the prior noise."""
_BOUNDARY_NOISE: Final = 0.05
"""Spread of the border between what fits and what does not, as a share of the device's memory."""
_CRASHES: Final = 0.1
"""Share of layouts that fail although they would fit, where the reason of failures is unknown."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Factors:
    """Deviations of the factors in one context, in prior standard deviations."""

    mean: Floats
    """Shape [factors]."""
    covariance: Floats
    """Shape [factors, factors]."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Posterior:
    """Deviations of the factors in every group that was seen."""

    groups: dict[SampleGroup, int]
    """Place of each group."""
    mean: Floats
    """Shape [groups * factors]."""
    covariance: Floats
    """Shape [groups * factors, groups * factors]."""
    noise: float
    """How far measured ratios are from the sum: the factor on their prior standard deviation."""
    log_evidence: float
    """Logarithm of the probability of all samples, averaged over the factors by Laplace's
    approximation (MacKay 1992) and up to a constant: it compares storages of one trainer."""

    num_factors: int
    """Factors of each group."""

    def factors(self, groups: tuple[SampleGroup, ...]) -> Factors:
        """The sum of the groups' deviations; groups without samples keep their prior."""
        known = [group for group in groups if group in self.groups]
        unknown = sum(LEVEL_SHARES[group.level] for group in groups if group not in self.groups)
        chosen = np.zeros((self.num_factors, self.mean.size))
        for group in known:
            at = self.groups[group] * self.num_factors
            chosen[:, at : at + self.num_factors] += np.eye(self.num_factors)
        return Factors(
            mean=chosen @ self.mean,
            covariance=chosen @ self.covariance @ chosen.T + unknown * np.eye(self.num_factors),
        )


def fit(evidence: Evidence) -> Posterior:
    """The posterior by a few reweighted least-squares fits; in each the fullest stage is chosen."""
    groups: dict[SampleGroup, int] = {}
    num_factors, alike = evidence.num_factors, _alike(evidence)
    for row in alike:
        for group in evidence.groups[row]:
            groups.setdefault(group, len(groups))
    shares = np.array([LEVEL_SHARES[group.level] for group in groups])
    prior_precision = np.repeat(1.0 / shares, num_factors) if groups else np.empty(0)
    mean = np.zeros(prior_precision.size)
    covariance = np.diag(1.0 / prior_precision)
    noise, log_evidence = 1.0, 0.0
    design = _design(evidence, groups, alike)
    for _ in range(_ITERATIONS if len(evidence) else 0):
        rows, expected, noises = _fullest(evidence, design, mean)
        ratio = expected + rows @ mean
        spread = np.sum((rows @ covariance) * rows, axis=1)
        precision, target, noise = _pseudo_targets(evidence.kinds, ratio, spread, noises, noise)
        weighed = rows * precision[:, None]
        normal = rows.T @ weighed + np.diag(prior_precision)
        covariance = np.asarray(np.linalg.inv(normal), dtype=np.float64)
        mean = covariance @ (weighed.T @ (target - expected))
    if len(evidence):
        rows, expected, noises = _fullest(evidence, design, mean)
        log_evidence = _log_likelihood(evidence.kinds, expected + rows @ mean, noises, noise)
        shrunk = np.linalg.slogdet(covariance)[1] + np.log(prior_precision).sum()
        log_evidence += 0.5 * float(shrunk - prior_precision @ np.square(mean))
    return Posterior(
        groups=groups,
        mean=mean,
        covariance=covariance,
        noise=noise,
        log_evidence=log_evidence,
        num_factors=num_factors,
    )


def _log_likelihood(kinds: Ints, ratio: Floats, noises: Floats, noise: float) -> float:
    """Logarithm of the probability of all outcomes at some factors, as in `_pseudo_targets`."""
    measured = kinds == MEASURED
    scales = noises[measured] * noise
    tails = np.log1p(np.square((ratio[measured] - 1.0) / scales) / _DEGREES_OF_FREEDOM)
    total = -0.5 * (_DEGREES_OF_FREEDOM + 1.0) * tails.sum() - np.log(scales).sum()
    # The prior of the noise counts as so many samples that were as far off as expected.
    total -= _NOISE_PRIOR_SAMPLES * (np.log(noise) + 0.5 / noise**2)
    over = logistic(LOGISTIC_PER_NORMAL * (ratio - 1.0) / np.hypot(noises * noise, _BOUNDARY_NOISE))
    ran, failed = 1.0 - over, over + _CRASHES * (1.0 - over)
    chances = np.select([kinds == RAN, kinds == FAILED], [ran, failed], over)[~measured]
    return float(total + np.log(np.maximum(chances, np.finfo(float).tiny)).sum())


def _alike(evidence: Evidence) -> dict[int, list[int]]:
    """Rows of the same groups, by the first of them; samples that came together share one tuple."""
    first: dict[int, int] = {}
    alike: dict[int, list[int]] = {}
    for row, of_sample in enumerate(evidence.groups):
        alike.setdefault(first.setdefault(id(of_sample), row), []).append(row)
    return alike


def _design(
    evidence: Evidence, groups: dict[SampleGroup, int], alike: dict[int, list[int]]
) -> Floats:
    """A sample's weights in the columns of each of its groups; shape [samples, stages, columns]."""
    num_factors = evidence.num_factors
    design = np.zeros((len(evidence), 2, len(groups) * num_factors))
    for first, rows in alike.items():
        for group in evidence.groups[first]:
            at = groups[group] * num_factors
            design[rows, :, at : at + num_factors] = evidence.weights[rows]
    return design


def _fullest(evidence: Evidence, design: Floats, mean: Floats) -> tuple[Floats, Floats, Floats]:
    """The rows, means and noises of each sample's fullest stage, by the current factors."""
    stage = np.argmax(evidence.expected + design @ mean, axis=1)
    each = np.arange(len(evidence))
    return design[each, stage], evidence.expected[each, stage], evidence.noises[each, stage]


def _pseudo_targets(
    kinds: Ints, ratio: Floats, spread: Floats, noises: Floats, noise: float
) -> tuple[Floats, Floats, float]:
    """What each sample would be as a normal observation of its ratio: precision and value.

    Measured ratios are 1 with Student's noise. Censored ones are over 1, or under it, by a logistic
    likelihood, for which the bound of Jaakkola and Jordan (2000) is a normal one.
    """
    measured = kinds == MEASURED
    residuals = (ratio - 1.0) / (noises * noise)
    weights = (_DEGREES_OF_FREEDOM + 1.0) / (_DEGREES_OF_FREEDOM + residuals**2)
    squares = weights * ((ratio - 1.0) / noises) ** 2
    total = _NOISE_PRIOR_SAMPLES + squares[measured].sum()
    noise = float(np.sqrt(total / (_NOISE_PRIOR_SAMPLES + weights[measured].sum())))
    blurred = np.hypot(noises * noise, _BOUNDARY_NOISE)
    slope = LOGISTIC_PER_NORMAL / blurred
    distance = slope * np.sqrt((ratio - 1.0) ** 2 + spread)
    bound = np.tanh(0.5 * distance) / (4.0 * distance)
    sign = np.where(kinds == RAN, -1.0, 1.0)
    censored = 2.0 * bound * slope**2
    # A failed layout ran out of memory, or crashed for another reason.
    over = logistic(LOGISTIC_PER_NORMAL * (ratio - 1.0) / np.sqrt(spread + blurred**2))
    trust = np.where(kinds == FAILED, over / (over + _CRASHES * (1.0 - over)), 1.0)
    precision = np.where(measured, weights / (noises * noise) ** 2, censored * trust)
    target = np.where(measured, 1.0, 1.0 + sign / (4.0 * bound * slope))
    return precision, target, noise


def logistic(x: Floats) -> Floats:
    """1 / (1 + exp(-x)), without overflow; over 0 wherever x is not below -700."""
    return np.asarray(1.0 / (1.0 + np.exp(np.minimum(-x, 700.0))), dtype=np.float64)
