"""What is believed of a layout's step time: the closed form, corrected by what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from search_spaces.cluster import Cluster
from search_spaces.columns import LayoutColumns
from search_spaces.estimates.time import PRIOR, TimeTerms, time_terms
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from tuner.calibration.time_evidence import (
    Origin,
    TimeEvidence,
    TimeSample,
    evidence_of,
    joined,
    nothing,
)
from tuner.calibration.time_fit import TimePosterior, TimePrior, fit
from tuner.calibration.time_range import warning_outside

__all__ = ["TimeCalibration", "TimePrior", "TimeSample"]

Floats = NDArray[np.float64]

ELSEWHERE = "elsewhere"
"""The campaign of samples that nobody says it of."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeCalibration:
    """Step times of layouts as mean and spread of their logarithm.

    It never changes: `told` answers a new one, and fits it from where this one is.
    """

    prior: TimePrior = field(default_factory=TimePrior)
    """What is believed without measurements."""
    evidence: TimeEvidence = field(default_factory=nothing)
    """What was measured."""
    start: TimePosterior | None = None
    """The fit of some of that evidence."""

    @classmethod
    def fit(cls, samples: Iterable[TimeSample] = (), *, prior: TimePrior | None = None) -> Self:
        """A calibration on samples from elsewhere; without any the priors alone."""
        return cls(prior=prior or TimePrior()).told(samples, campaign=ELSEWHERE)

    def told(self, samples: Iterable[TimeSample], *, campaign: str) -> Self:
        """The calibration after more samples, of one campaign."""
        evidence = evidence_of(samples, campaign)
        if not len(evidence):
            return self
        start = self.posterior if len(self.evidence) else None
        return replace(self, evidence=joined([self.evidence, evidence]), start=start)

    @cached_property
    def posterior(self) -> TimePosterior | None:
        """The fit; None without measurements."""
        if not len(self.evidence):
            return None
        return fit(self.evidence, self.prior, self.start)

    def predict(
        self,
        layouts: Layout | LayoutColumns,
        model: ModelShape,
        cluster: Cluster,
        *,
        software: str = "",
        campaign: str = "",
    ) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the logarithm of each layout's step time, in seconds.

        Args:
            layouts: the layouts.
            model: what they train.
            cluster: where.
            software: what runs them: a table's source; empty for this project's own trainer.
            campaign: the campaign that asks, if its own samples were told.
        """
        columns = LayoutColumns.of(layouts).flattened()
        devices = columns.num_devices
        mean, deviation = np.empty(devices.size), np.empty(devices.size)
        for count in np.unique(devices):
            rows = np.flatnonzero(devices == count)
            here = columns.rows(rows)
            belief = self.deviations(
                model, cluster, num_devices=int(count), software=software, campaign=campaign
            )
            mean[rows], deviation[rows] = self._of(time_terms(here, model, cluster), *belief)
        return mean, deviation

    def deviations(
        self,
        model: ModelShape,
        cluster: Cluster,
        *,
        num_devices: int,
        software: str = "",
        campaign: str = "",
    ) -> tuple[Floats, Floats]:
        """Logarithms of the factors there over `PRIOR`, that of the whole step last: mean and covariance."""
        origin = Origin(
            cluster=cluster.name,
            software=software,
            model=model,
            num_devices=num_devices,
            campaign=campaign,
        )
        if self.posterior is None:
            variances = self.prior.log_variances
            return np.zeros(variances.size), np.diag(variances)
        return self.posterior.deviation_of(origin)

    def outside(
        self,
        layouts: Layout | LayoutColumns,
        model: ModelShape,
        cluster: Cluster,
        *,
        software: str = "",
    ) -> str | None:
        """A warning where the layouts are beyond what was measured; None where they are not."""
        return warning_outside(self.evidence, LayoutColumns.of(layouts), model, cluster, software)

    def _of(
        self, terms: TimeTerms, deviations: Floats, covariance: Floats
    ) -> tuple[Floats, Floats]:
        factors = PRIOR * np.exp(deviations[:-1])
        mean = np.log(terms.step_time_s(factors)) + deviations[-1]
        jacobian = np.concatenate([terms.shares(factors), np.ones((mean.size, 1))], axis=1)
        variance = np.einsum("nt,nt->n", jacobian @ covariance, jacobian)
        return mean, np.sqrt(np.maximum(variance, 0.0) + self.misfit_log_sd**2)

    @property
    def misfit_log_sd(self) -> float:
        """Standard deviation of a measurement about the best factors."""
        return self.posterior.misfit_log_sd if self.posterior else self.prior.misfit_log_sd
