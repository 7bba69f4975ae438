"""The factors of the step time from measurements: a hierarchical regression in log space.

The logarithm of a step is a function of the logarithms of the terms' factors. Their prior is
normal, and a deviation from it is shared out over levels: everywhere, this software on this
cluster, this model there, this campaign. Gauss-Newton linearises the function about the best
factors so far; each step then is Gaussian process regression with the kernel (J S J') * G, where J
is the derivative, S the prior variance of each factor, and G what two measurements share (Rasmussen
and Williams 2006, section 2.7). Factors stay positive because they are exponentials; heavy tails
(Student's t, by reweighting, Lange et al. 1989) keep a run on a sick node from bending them.
"""

# ruff: noqa: N803, N806 (shapes in names: N measurements, T factors, O origins)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from search_spaces.belief.slow_runs import run_weights
from search_spaces.belief.time_evidence import Origin, TimeEvidence
from search_spaces.estimates.time import FACTOR_PRIORS, PRIOR

Floats = NDArray[np.float64]

_STEPS: Final = 8
_CLOSE: Final = 2e-3
"""Change of the logarithms of the predictions (their root mean square) at which a fit has
settled."""
_LARGEST_MOVE: Final = 1.0
"""Most that the logarithm of a factor may move in a step: beyond it the linearisation says
little."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePrior:
    """The prior distribution of the factors, and the scatter of measurements.

    The shares divide a factor's variance by what measurements have in common; they sum to 1.
    """

    everywhere: float = 0.15
    """Common to all measurements."""
    cluster: float = 0.2
    """Common to one cluster."""
    software: float = 0.2
    """Common there to the same software."""
    size: float = 0.15
    """Common there to models of about the same size."""
    scale: float = 0.15
    """Common there to about as many devices."""
    model: float = 0.05
    """Common there to one model."""
    campaign: float = 0.1
    """Common to one campaign."""
    doublings: float = 4.0
    """Doublings of parameters or devices over which the correlation falls to 1/e."""
    scale_log_sd: float = 0.2
    """Standard deviation of a factor on the whole step: all efficiencies up or down together."""
    misfit_log_sd: float = 0.05
    """Standard deviation of a measurement about the formula: noise, and effects that it lacks."""
    misfit_weight: float = 10.0
    """Weight of this guess of the misfit, in measurements."""

    @property
    def log_variances(self) -> Floats:
        """Prior variance of the logarithm of each factor, that of the whole step last."""
        deviations = [factor.log_sd for factor in FACTOR_PRIORS.values()]
        return np.square([*deviations, self.scale_log_sd])

    def shared(self, one: Origin, other: Origin) -> float:
        """Share of the variance that two origins have in common."""
        common = self.everywhere
        if one.cluster != other.cluster:
            return common
        common += self.cluster
        if one.software != other.software:
            return common
        larger, more = one.doublings_from(other)
        common += self.software
        common += self.size * np.exp(-larger / self.doublings)
        common += self.scale * np.exp(-more / self.doublings)
        if one.model == other.model:
            common += self.model
            if one.campaign == other.campaign:
                common += self.campaign
        return float(common)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimePosterior:
    """The posterior distribution of the factors, which can be evaluated for any origin."""

    prior: TimePrior
    origins: tuple[Origin, ...]
    """The origins of the measurements."""
    deviations: Floats
    """Log of the best factors over their prior, of each origin; that of the whole step last."""
    misfit_log_sd: float
    """Standard deviation of the misfit."""
    jacobian: Floats
    weighted: Floats
    """Solution of the last linear system: the kernel's inverse times the residuals."""
    origin_of: NDArray[np.int64]
    cholesky: Floats

    def deviation_of(self, origin: Origin) -> tuple[Floats, Floats]:
        """Mean of the log factors over their prior, and their covariance, for some origin."""
        variances = self.prior.log_variances
        common_O = np.array([self.prior.shared(origin, other) for other in self.origins])
        common_N = common_O[self.origin_of]
        cross_TN = variances[:, None] * (self.jacobian * common_N[:, None]).T
        mean = cross_TN @ self.weighted
        half = np.linalg.solve(self.cholesky, cross_TN.T)
        own = self.prior.shared(origin, origin)
        return mean, np.diag(own * variances) - half.T @ half


def log_prediction(evidence: TimeEvidence, deviations_NT: Floats) -> Floats:
    """Logarithm of each step time, under factors of its own."""
    factors = PRIOR * np.exp(deviations_NT[:, :-1])
    return np.asarray(np.log(evidence.terms.step_time_s(factors)) + deviations_NT[:, -1])


def fit(
    evidence: TimeEvidence, prior: TimePrior, start: TimePosterior | None = None
) -> TimePosterior:
    """The posterior of the factors.

    Args:
        evidence: at least one measurement.
        prior: the distribution without measurements.
        start: an earlier posterior, from which fewer steps are needed.
    """
    variances, origin_of = prior.log_variances, evidence.origin_of
    common_OO = np.array([[prior.shared(a, b) for b in evidence.origins] for a in evidence.origins])
    deviations = _starting_point(evidence, variances.size, start)
    misfit = start.misfit_log_sd if start else prior.misfit_log_sd
    weights = np.ones(len(evidence))
    for step in range(_STEPS):
        jacobian, gap = _linearised(evidence, deviations[origin_of])
        target = gap + np.einsum("nt,nt->n", jacobian, deviations[origin_of])
        kernel = (jacobian * variances) @ jacobian.T * common_OO[np.ix_(origin_of, origin_of)]
        if step == 0:
            # The factors of this campaign may still explain the gap.
            weights = run_weights(gap, np.sqrt(np.diag(kernel) + misfit**2))
        kernel[np.diag_indices_from(kernel)] += misfit**2 / weights
        cholesky = np.linalg.cholesky(kernel)
        solved = np.linalg.solve(cholesky.T, np.linalg.solve(cholesky, target))
        moved = _moved(deviations, jacobian, solved, origin_of, common_OO, variances)
        change = np.einsum("nt,nt->n", jacobian, (moved - deviations)[origin_of])
        deviations = moved
        if step > 0 and np.sqrt(np.mean(np.square(change))) < _CLOSE:
            break
        residual = evidence.log_s - log_prediction(evidence, deviations[origin_of])
        weights = run_weights(residual, misfit)
        misfit = _misfit(residual, weights, prior, jacobian.shape[1])
    return TimePosterior(
        prior=prior,
        origins=evidence.origins,
        deviations=deviations,
        misfit_log_sd=float(misfit),
        jacobian=jacobian,
        weighted=solved,
        origin_of=origin_of,
        cholesky=cholesky,
    )


def _starting_point(evidence: TimeEvidence, size: int, start: TimePosterior | None) -> Floats:
    if start is None:
        return np.zeros((len(evidence.origins), size))
    return np.array([start.deviation_of(origin)[0] for origin in evidence.origins])


def _linearised(evidence: TimeEvidence, deviations_NT: Floats) -> tuple[Floats, Floats]:
    """Derivative of the log prediction by the log factors, and by how much it misses."""
    shares = evidence.terms.shares(PRIOR * np.exp(deviations_NT[:, :-1]))
    jacobian = np.concatenate([shares, np.ones((len(evidence), 1))], axis=1)
    return jacobian, evidence.log_s - log_prediction(evidence, deviations_NT)


def _moved(
    deviations: Floats,
    jacobian: Floats,
    solved: Floats,
    origin_of: NDArray[np.int64],
    common_OO: Floats,
    variances: Floats,
) -> Floats:
    """The next factors of each origin."""
    pull_OT = np.zeros_like(deviations)
    np.add.at(pull_OT, origin_of, jacobian * solved[:, None])
    wanted = variances * (common_OO @ pull_OT)
    move = np.clip(wanted - deviations, -_LARGEST_MOVE, _LARGEST_MOVE)
    return np.asarray(deviations + move)


def _misfit(residual: Floats, weights: Floats, prior: TimePrior, num_factors: int) -> float:
    """Standard deviation of the misfit: the prior's guess, corrected by the residuals.

    A fit of T factors leaves less than was there; half of the measurements are taken to be spent on
    them at most.
    """
    free = max(weights.sum() - num_factors, weights.sum() / 2.0)
    guess = prior.misfit_weight * prior.misfit_log_sd**2
    return float(np.sqrt((guess + weights @ np.square(residual)) / (prior.misfit_weight + free)))
