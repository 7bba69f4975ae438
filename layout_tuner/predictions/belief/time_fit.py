"""The factors of the step time from measurements of many models, clusters and campaigns.

The regression (`predictions.belief.factor_regression`) gives each origin factors of its own. The
share of the prior that two origins have in common is a sum over levels: everywhere, this cluster,
this software there, this model, this campaign. Heavy tails (Student's t, by reweighting, Lange et
al. 1989) keep a run on a sick node from bending the factors.
"""

# ruff: noqa: N806 (shapes in names: M measurements, F factors, O origins)

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.factor_regression import (
    Linearised,
    Regression,
    StepFactors,
    log_step_s,
)
from layout_tuner.predictions.belief.job_knobs.knob_step_time import NO_KNOB_FACTORS, KnobFactors
from layout_tuner.predictions.belief.slow_runs import run_weights
from layout_tuner.predictions.belief.time_evidence import Origin, TimeEvidence
from layout_tuner.predictions.estimates.step_time import FACTOR_PRIORS

_STEPS: Final = 8
_CLOSE: Final = 2e-3
"""Change of the logarithms of the predictions (their root mean square) at which a fit has
settled."""


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
    def factors(self) -> StepFactors:
        """The prior of one origin's factors."""
        deviations = [*(factor.log_sd for factor in FACTOR_PRIORS.values()), self.scale_log_sd]
        return StepFactors(
            mean=np.zeros(len(deviations)), covariance=np.diag(np.square(deviations))
        )

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


TIME_PRIOR: Final = TimePrior()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimePosterior:
    """The posterior distribution of the factors, which can be evaluated for any origin."""

    evidence: TimeEvidence
    regression: Regression
    deviations: Floats
    """Log of the best factors over their prior, of each origin; that of the whole step last."""
    misfit_log_sd: float
    knobs: KnobFactors = NO_KNOB_FACTORS
    """The knobs whose factors stand behind the others."""

    def factors(self, origin: Origin) -> StepFactors:
        """The factors of some origin."""
        shared_O = np.array([TIME_PRIOR.shared(origin, each) for each in self.evidence.origins])
        own = TIME_PRIOR.shared(origin, origin)
        return self.regression.factors(shared_O[self.evidence.origin_of], own)


def fit(
    evidence: TimeEvidence,
    start: TimePosterior | None = None,
    knobs: KnobFactors = NO_KNOB_FACTORS,
) -> TimePosterior:
    """The posterior of the factors.

    There is at least one measurement; from an earlier posterior, `start`, fewer steps are needed.
    `knobs` are those that have factors.
    """
    prior = TIME_PRIOR
    origin_of, factors = evidence.origin_of, prior.factors.with_knobs(knobs)
    settings = evidence.settings(knobs)
    shared_OO = np.array([[prior.shared(a, b) for b in evidence.origins] for a in evidence.origins])
    shared_OM = shared_OO[:, origin_of]
    begin = (
        knobs.aligned(start.factors(each).mean, start.knobs) if start else factors.mean
        for each in evidence.origins
    )
    deviations_OF, misfit = np.array(list(begin)), (start or prior).misfit_log_sd
    for step in range(_STEPS):
        here = Linearised.near(
            deviations_OF[origin_of], factors, evidence.terms, evidence.log_s, settings
        )
        if step == 0:
            # The factors of this campaign may still explain what is missed.
            spread_M = np.diagonal(here.spread) * np.diagonal(shared_OO)[origin_of]
            weights = run_weights(here.missed, np.sqrt(spread_M + misfit**2))
        regression = Regression(here, np.diag(misfit**2 / weights), shared_OM[origin_of])
        moved_OF = regression.moved(deviations_OF, shared_OM)
        change_M = (here.slopes * (moved_OF - deviations_OF)[origin_of]).sum(axis=1)
        deviations_OF = moved_OF
        if step > 0 and np.sqrt(np.mean(np.square(change_M))) < _CLOSE:
            break
        expected_M = log_step_s(evidence.terms, deviations_OF[origin_of], settings)
        missed_M = evidence.log_s - expected_M
        weights = run_weights(missed_M, misfit)
        misfit = _misfit(missed_M, weights, factors.mean.size)
    return TimePosterior(
        evidence=evidence,
        regression=regression,
        deviations=deviations_OF,
        misfit_log_sd=float(misfit),
        knobs=knobs,
    )


def _misfit(residual: Floats, weights: Floats, num_factors: int) -> float:
    """Standard deviation of the misfit: the prior's guess, corrected by the residuals.

    A fit of T factors leaves less than was there; half of the measurements are taken to be spent on
    them at most.
    """
    free = max(weights.sum() - num_factors, weights.sum() / 2.0)
    weight = TIME_PRIOR.misfit_weight
    guess = weight * TIME_PRIOR.misfit_log_sd**2
    return float(np.sqrt((guess + weights @ np.square(residual)) / (weight + free)))
