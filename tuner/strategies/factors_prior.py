"""The prior of the step time's factors: the cluster's constants, refined by what is known from elsewhere."""

from __future__ import annotations

import numpy as np

from search_spaces.estimates.time_factors import FACTOR_PRIORS
from tuner.problem import SearchProblem
from tuner.strategies.step_belief import FactorsPrior

_SCALE_LOG_SD = 0.3
"""Spread of a factor on the whole step: all efficiencies up or down together."""


def factors_prior(problem: SearchProblem) -> FactorsPrior:
    """What is believed of the factors before the search's own first probe."""
    del problem
    deviations = [factor.log_sd for factor in FACTOR_PRIORS.values()]
    variances = np.square([*deviations, _SCALE_LOG_SD])
    return FactorsPrior(mean=np.zeros(len(variances)), covariance=np.diag(variances))
