"""Prior mean of each layout's residual, from measurements of other campaigns.

What the closed form cannot express is much the same for a model of another size or on more devices
of the same cluster, under the same software. The errors that the calibration leaves are
observations of one Gaussian process over knobs and sizes (`predictions.belief.residual`); its
posterior mean is the prior mean of the campaign's own residual. The campaign's own measurements
alone choose the amplitude of what is left.
"""

# ruff: noqa: N806 (shapes in names: K known measurements, N layouts, O origins)

from __future__ import annotations

from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import log_step_s
from layout_tuner.predictions.belief.residual import ResidualKernel, relative_coordinates
from layout_tuner.predictions.belief.slow_runs import run_weights
from layout_tuner.predictions.belief.time_evidence import Origin
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

_KERNEL: Final = ResidualKernel(amplitude=0.2, length=2.0)
_NOISE: Final = 0.4
"""Standard deviation of a measurement's noise, as a share of the misfit after the calibration:
much misfit is that of stalls, which do not repeat."""
_DOUBLINGS: Final = 4.0
"""Doublings of parameters or devices over which the correlation falls to 1/e."""
_MOST: Final = 300
"""Known measurements that count, those of the most similar origins."""
_LEAST_WEIGHT: Final = 1e-3
"""Weight below which a run was slowed down and teaches nothing."""
_CHUNK: Final = 1 << 9
"""Layouts whose residuals are computed together: their covariances stay in the cache."""


def known_residual(calibration: TimeCalibration, origin: Origin, layouts: LayoutColumns) -> Floats:
    """The expected residual of each layout, in logarithms of the step time; shape [layouts].

    The calibration is on measurements from elsewhere; the origin is what will measure the layouts,
    which are of one axis.
    """
    evidence, posterior = calibration.evidence, calibration.posterior
    if posterior is None:
        return np.broadcast_to(0.0, layouts.num_devices.size)
    expected_N = np.zeros(layouts.num_devices.size)
    of_K = evidence.origin_of
    settings = evidence.settings(posterior.knobs)
    missed_K = evidence.log_s - log_step_s(evidence.terms, posterior.deviations[of_K], settings)
    weights_K = run_weights(missed_K, posterior.misfit_log_sd)
    every = (origin, *evidence.origins)
    alike_OO = np.array([[_correlation(one, other) for other in every[1:]] for one in every])
    alike_K, alike_OO = alike_OO[0, of_K], alike_OO[1:]
    counts = np.flatnonzero((alike_K > 0.0) & (weights_K > _LEAST_WEIGHT))
    if not counts.size:
        return expected_N
    kept = counts[np.argsort(-alike_K[counts], kind="stable")[:_MOST]]
    jobs = (*evidence.columns.jobs, *layouts.jobs)
    points_K = relative_coordinates(evidence.columns.rows(kept), jobs)
    covariance_KK = alike_OO[np.ix_(of_K[kept], of_K[kept])] * _KERNEL.between(points_K, points_K)
    noise = _NOISE * posterior.misfit_log_sd
    covariance_KK[np.diag_indices_from(covariance_KK)] += noise**2 / weights_K[kept]
    pull_K = alike_K[kept] * np.linalg.solve(covariance_KK, missed_K[kept])
    for start in range(0, expected_N.size, _CHUNK):
        rows = slice(start, start + _CHUNK)
        points_N = relative_coordinates(layouts.rows(rows), jobs)
        expected_N[rows] = _KERNEL.between(points_N, points_K) @ pull_K
    return expected_N


def _correlation(one: Origin, other: Origin) -> float:
    """Correlation of the residuals of equal layouts; it falls with each doubling of the job."""
    if (one.cluster, one.software) != (other.cluster, other.software):
        return 0.0
    return float(np.exp(-sum(one.doublings_from(other)) / _DOUBLINGS))
