"""Peak memory by the closed form, corrected by measurements and outcomes; mean and spread.

A peak is a sum of terms (`MEMORY_TERMS` of `predictions.estimates.peak_memory`), each with a
factor whose prior is 1, as far as the trainer's storage is known. Measured peaks, completed runs
and runs out of memory move the factors, by Bayesian regression on ratios (`memory_fit.py` beside
this module).
A run out of memory is a censored observation: the true peak is at least the memory of the device.
So is a completed run without a measured peak. The variance of a factor is divided over levels: all
samples, this software on this cluster, this model there, this campaign. So samples from elsewhere
count for the levels that they share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.job_knobs.knob_memory import (
    NO_KNOB_MEMORY,
    KnobMemory,
    deviation_bytes,
)
from layout_tuner.predictions.belief.known_measurements import ELSEWHERE
from layout_tuner.predictions.belief.peaks.memory_evidence import (
    Evidence,
    PeakSample,
    StagePeak,
    evidence_of,
    groups_of,
    usable_bytes,
)
from layout_tuner.predictions.belief.peaks.memory_fit import (
    LOGISTIC_PER_NORMAL,
    Posterior,
    fit,
    logistic,
)
from layout_tuner.predictions.estimates.peak_memory import MemoryTerms, memory_terms, stage_terms
from layout_tuner.predictions.estimates.trainer_storage import TrainerStorage, storage_of
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

__all__ = ["MemoryBelief", "PeakSample", "StagePeak"]


_CHUNK: Final = 4096
"""Layouts that are computed together: the intermediate arrays fit into the cache."""


@dataclass(frozen=True, kw_only=True, eq=False)
class MemoryBelief:
    """Peak memory of layouts as mean and spread, in one campaign.

    It is immutable: `updated` returns a new belief.
    """

    cluster: str
    software: str
    storage: TrainerStorage
    campaign: str = ""
    """The campaign whose samples count in full."""
    evidence: Evidence = field(default_factory=Evidence)
    """The measurements and outcomes so far."""
    knobs: KnobMemory = NO_KNOB_MEMORY
    """What job knobs do to peaks."""

    @classmethod
    def prior(
        cls,
        cluster: Cluster,
        *,
        software: str = "",
        campaign: str = "",
        storage: TrainerStorage | None = None,
        knobs: KnobMemory = NO_KNOB_MEMORY,
    ) -> Self:
        """The belief without any measurement.

        `software` is a table's source, empty for this project's own trainer; `campaign` the name of
        the campaign whose samples will follow; `storage` what the software is taken to store, None:
        see `storage_of`.
        """
        storage = storage or storage_of(software, cluster)
        return cls(
            cluster=cluster.name,
            software=software,
            storage=storage,
            campaign=campaign,
            evidence=Evidence.nothing(knobs.num_factors),
            knobs=knobs,
        )

    def updated(self, samples: Iterable[PeakSample], *, elsewhere: bool = False) -> Self:
        """The belief after more samples: of its own campaign, or of other ones and of tables."""
        campaign = ELSEWHERE if elsewhere else self.campaign
        more = evidence_of(samples, campaign, {self.software: self.storage}, self.knobs)
        return replace(self, evidence=self.evidence.with_more(more))

    @property
    def log_evidence(self) -> float:
        """How well the storage explains all samples, up to a constant (see `Posterior`)."""
        return self._posterior.log_evidence

    def terms(self, columns: LayoutColumns, model: ModelShape) -> MemoryTerms:
        """The terms of the peaks, to be computed once for layouts that are used often.

        They are in single precision, since such layouts are many.
        """
        terms = memory_terms(columns, model, self.storage, dtype=np.float32)
        return self.with_settings(terms, columns, model)

    def with_settings(
        self, terms: MemoryTerms, columns: LayoutColumns, model: ModelShape
    ) -> MemoryTerms:
        """The terms of layouts with the settings of jobs, which `columns` have."""
        return self.knobs.applied(terms, columns.flattened(), model, (self.software,))

    def peak_bytes(
        self, layouts: Layout | LayoutColumns | MemoryTerms, model: ModelShape
    ) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the fullest rank's peak, of each layout."""
        if not isinstance(layouts, MemoryTerms):
            columns = LayoutColumns.of(layouts)
            terms = memory_terms(columns, model, self.storage)
            layouts = self.with_settings(terms, columns, model)
        means, deviations = self._of_terms(layouts, model)
        fullest = np.argmax(means, axis=0)
        each = np.arange(fullest.size)
        return means[fullest, each], deviations[fullest, each]

    def stage_peak_bytes(self, layout: Layout, model: ModelShape) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the peak of each stage's fullest rank, in order."""
        terms = stage_terms(layout, model, self.storage)
        terms = self.with_settings(terms, LayoutColumns.of(layout), model)
        means, deviations = self._of_terms(terms, model)
        return means[0], deviations[0]

    def fits(
        self,
        layouts: Layout | LayoutColumns | MemoryTerms,
        model: ModelShape,
        capacity_bytes: float,
    ) -> Floats:
        """Probability that each layout fits into a device with so much memory.

        It is never 0, so that no layout is ruled out: a logistic distribution of the peak's
        logarithm.
        """
        mean, deviation = self.peak_bytes(layouts, model)
        usable = usable_bytes(capacity_bytes, self.storage)
        distance = np.log(usable / mean) * mean / deviation
        return logistic(LOGISTIC_PER_NORMAL * distance)

    def _of_terms(self, terms: MemoryTerms, model: ModelShape) -> tuple[Floats, Floats]:
        """Mean and standard deviation of the sums of terms; shape [stages, layouts]."""
        groups = groups_of(
            cluster=self.cluster, software=self.software, model=model, campaign=self.campaign
        )
        factors = self._posterior.factors(groups)
        weights = np.vstack([factors.mean, np.linalg.cholesky(factors.covariance).T])
        num_knobs = len(self.knobs.values)
        if terms.knob_bytes is None:  # without settings the factors of knobs do not count
            known, num_knobs = len(factors.mean) - num_knobs, 0
            weights = weights[: known + 1, :known]
        mean, variance = np.empty((2, *terms.scatter_bytes.shape))
        for start in range(0, mean.shape[1], _CHUNK):
            rows = slice(start, start + _CHUNK)
            part = terms.rows(rows)
            weighed = weights @ deviation_bytes(part, num_knobs)
            expected = part.num_bytes.sum(axis=1)
            # Factors may extrapolate badly: a sum never falls below a tenth of its prior.
            mean[:, rows] = np.maximum(expected + weighed[:, 0], 0.1 * expected)
            variance[:, rows] = np.square(weighed[:, 1:]).sum(axis=1)
            variance[:, rows] += np.square(self._posterior.noise) * (
                np.square(self.storage.spread.noise * mean[:, rows]) + np.square(part.scatter_bytes)
            )
        return mean, np.sqrt(variance)

    @cached_property
    def _posterior(self) -> Posterior:
        return fit(self.evidence)
