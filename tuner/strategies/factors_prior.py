"""The prior of the step time's factors: data sheets and papers, refined by what is known from elsewhere."""

from __future__ import annotations

from typing import Final

import numpy as np

from search_spaces.estimates.time_factors import FACTOR_PRIORS
from tuner.calibration.time import TimeCalibration
from tuner.problem import SearchProblem
from tuner.strategies.step_belief import FactorsPrior

_SCALE_LOG_SD: Final = 0.3
"""Spread of a factor on the whole step: all efficiencies up or down together."""
_HERE: Final = "this campaign"


def factors_prior(problem: SearchProblem) -> FactorsPrior:
    """What is believed of the factors before the search's own first probe."""
    calibration = TimeCalibration.fit(problem.knowledge.samples)
    if not len(calibration.evidence):
        deviations = [factor.log_sd for factor in FACTOR_PRIORS.values()]
        variances = np.square([*deviations, _SCALE_LOG_SD])
        return FactorsPrior(mean=np.zeros(len(variances)), covariance=np.diag(variances))
    mean, covariance = calibration.deviations(
        problem.model,
        problem.cluster,
        num_devices=problem.layouts.layout(0).num_devices,
        software=problem.software,
        campaign=_HERE,
    )
    return FactorsPrior(mean=mean, covariance=covariance)
