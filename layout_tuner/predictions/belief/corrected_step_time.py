"""Step times by the closed form, corrected by measurements; mean and spread."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.factor_regression import StepFactors, log_sd, log_step_s
from layout_tuner.predictions.belief.job_knobs.knob_step_time import (
    NO_KNOBS,
    KnobFactors,
    KnobSettings,
    KnobValue,
    KnownKnobs,
)
from layout_tuner.predictions.belief.known_measurements import ELSEWHERE, Sample
from layout_tuner.predictions.belief.measured_range import warning_outside
from layout_tuner.predictions.belief.time_evidence import (
    Origin,
    TimeEvidence,
    evidence_of,
    joined,
    nothing,
)
from layout_tuner.predictions.belief.time_fit import TIME_PRIOR, TimePosterior, fit
from layout_tuner.predictions.estimates.distinct_rows import different
from layout_tuner.predictions.estimates.step_time import time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape


@dataclass(frozen=True, kw_only=True, eq=False)
class TimeCalibration:
    """Step times of layouts as mean and spread of their logarithm.

    It is immutable: `updated` returns a new calibration, whose fit starts from this one.
    """

    evidence: TimeEvidence = field(default_factory=nothing)
    start: TimePosterior | None = None
    """The fit of some of that evidence."""
    known: KnownKnobs = NO_KNOBS
    """Declarations of job knobs."""

    @classmethod
    def fit(cls, samples: Iterable[Sample] = (), known: KnownKnobs = NO_KNOBS) -> Self:
        """A calibration on samples from elsewhere; without samples it is the prior."""
        return cls(known=known).updated(samples, campaign=ELSEWHERE)

    def updated(self, samples: Iterable[Sample], *, campaign: str) -> Self:
        """The calibration after more samples, of one campaign."""
        evidence = evidence_of(samples, campaign)
        if not len(evidence):
            return self
        start = self.posterior if len(self.evidence) else None
        return replace(self, evidence=joined([self.evidence, evidence]), start=start)

    @cached_property
    def knobs(self) -> KnobFactors:
        """The values of job knobs that were measured or that the campaign may try."""
        return KnobFactors.of((*self.evidence.knob_values, *self.known.values), self.known)

    @cached_property
    def posterior(self) -> TimePosterior | None:
        """The fit; None without measurements."""
        if not len(self.evidence):
            return None
        return fit(self.evidence, self.start, self.knobs)

    def with_settings(
        self, factors: StepFactors, columns: LayoutColumns, software: str
    ) -> tuple[StepFactors, KnobSettings | None]:
        """The factors with those of all settings of columns of one axis, and these settings.

        None: all knobs have their defaults.
        """
        if not any(columns.jobs):
            return factors, None
        asked = (each for settings in columns.jobs for each in KnobValue.of(software, settings))
        knobs = KnobFactors.of((*self.knobs.values, *asked), self.known)
        unknown = KnobFactors.of(knobs.values[len(self.knobs) :], self.known)
        job = np.broadcast_to(columns.job, columns.tp.shape)
        return factors.with_knobs(unknown), knobs.settings(software, columns.jobs, job)

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

        `software` is a table's source, empty for this project's own trainer; `campaign` is the
        campaign that asks, if its own samples were added.
        """
        columns = LayoutColumns.of(layouts).flattened()
        devices = columns.num_devices
        mean, deviation = np.empty(devices.size), np.empty(devices.size)
        kernels = kernels_of(software, cluster)
        for count in different(devices):
            rows = np.flatnonzero(devices == count)
            here = columns.rows(rows)
            factors = self.factors(
                model, cluster, num_devices=int(count), software=software, campaign=campaign
            )
            terms = time_terms(here, model, cluster, kernels=kernels)
            factors, settings = self.with_settings(factors, here, software)
            mean[rows] = log_step_s(terms, factors.mean, settings)
            deviation[rows] = np.hypot(log_sd(terms, factors, settings), self.misfit_log_sd)
        return mean, deviation * self.spread_share(software, cluster)

    def spread_share(self, software: str, cluster: Cluster) -> float:
        """The share of the spread that remains where errors of cold estimates are known."""
        measured = (cluster.name, software)
        if any((each.cluster, each.software) == measured for each in self.evidence.origins):
            return 1.0
        return known_share(software, cluster)

    def factors(
        self,
        model: ModelShape,
        cluster: Cluster,
        *,
        num_devices: int,
        software: str = "",
        campaign: str = "",
    ) -> StepFactors:
        """The factors of a campaign that trains this model on so many devices of this cluster.

        Those of `knobs` stand behind the others.
        """
        origin = Origin(
            cluster=cluster.name,
            software=software,
            model=model,
            num_devices=num_devices,
            campaign=campaign,
        )
        if self.posterior is None:
            return TIME_PRIOR.factors.with_knobs(self.knobs)
        return self.posterior.factors(origin)

    def outside(
        self,
        layouts: Layout | LayoutColumns,
        model: ModelShape,
        cluster: Cluster,
        *,
        software: str = "",
    ) -> str | None:
        """See `warning_outside`."""
        return warning_outside(self.evidence, LayoutColumns.of(layouts), model, cluster, software)

    @property
    def misfit_log_sd(self) -> float:
        """Standard deviation of a measurement about the best factors."""
        return self.posterior.misfit_log_sd if self.posterior else TIME_PRIOR.misfit_log_sd


_KNOWN_SHARES: Final = {
    ("nanotron", "h100"): 0.36,
    ("megatron", "a100"): 0.43,
    ("megatron", "mi250x"): 0.43,
    ("vtrain", "a100"): 0.43,
    ("llm-foundry", "a100"): 0.43,
    # B200 and B300 are also in GB200 and GB300.
    **{("megatron-bridge", device): 0.83 for device in ("h100", "b200", "b300")},
    ("megatron", "h100"): 0.57,
    ("megatron", "h800"): 0.57,
    ("torchtitan", "h100"): 0.62,
    ("torchtitan", "h200"): 0.62,
}
"""Errors of cold estimates over what the prior lets expect, by a word in the software and in the
device (the first that matches): docs/explanation/estimates.md, "Intervals"."""


def known_share(software: str, cluster: Cluster) -> float:
    """The share of the prior's spread that a trainer on a device has; 1 where either is unknown."""
    words, device = software.lower(), cluster.device.lower()
    shares = (
        share for (trainer, at), share in _KNOWN_SHARES.items() if trainer in words and at in device
    )
    return next(shares, 1.0)
