"""Predictions for the layouts of one campaign before any of them runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.best_chances import MAX_COMPARED, BestChances, LayoutDraws
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import term_factors
from layout_tuner.predictions.belief.job import predicted_step
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.peaks.memory_evidence import usable_bytes
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty, TrainerMemory
from layout_tuner.predictions.belief.plausible_samples import PlausibleSamples, plausible_samples
from layout_tuner.predictions.estimates.step_time import TimePart, step_time_parts, step_time_s
from layout_tuner.predictions.estimates.storage import TrainerStorage, score_traffic_of
from layout_tuner.predictions.statistics.job_duration import StepInterval
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import objective_factors
from layout_tuner.search_spaces.spaces.search_space import LegalSet
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

_CHUNK: Final = 1 << 14
"""Layouts that are predicted together; a column takes 128 KiB."""
_LEAST_FIT: Final = 1e-300
"""Probability of fitting below which all layouts are alike: its logarithm stays finite."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankedLayouts:
    """All layouts of a legal set, the best first; arrays of shape [layouts]."""

    order: Ints
    """Their positions in the legal set."""
    step_time_s: Floats
    """Predicted medians of their step times."""
    fits: Floats
    """Probabilities that they fit into memory beside the campaign's headroom."""
    score: Floats
    """Logarithms of what they are ranked by."""

    def rank(self, score: float) -> int:
        """The rank of a layout of this score, from 1."""
        # Scores of the same layout differ in their last digits by how many are computed together.
        return 1 + int(np.searchsorted(-self.score, -(score + 1e-9)))


@dataclass(frozen=True, kw_only=True)
class LayoutPredictions:
    """Predictions for the layouts of one campaign."""

    spec: CampaignSpec
    software: str = ""
    """What will run it, as a table's source says it; empty: this project's trainer."""
    knowledge: Knowledge = field(default_factory=Knowledge)

    @property
    def trainer(self) -> str:
        """The name of what will run it."""
        return self.software or EMBEDDED_TRAINER

    @cached_property
    def plausible(self) -> PlausibleSamples:
        """What of the knowledge calibrates, by the constants of the campaign's cluster."""
        return plausible_samples(self.knowledge.on(self.spec.cluster))

    @cached_property
    def time(self) -> TimeCalibration:
        return TimeCalibration.fit(self.plausible.time)

    @cached_property
    def memory(self) -> TrainerMemory:
        """The belief about peaks."""
        prior = TrainerMemory.prior(self.spec.cluster, software=self.software)
        return prior.updated(self.plausible.memory, elsewhere=True)

    def rank(self, legal: LegalSet) -> RankedLayouts:
        """All layouts by their first objective times their probability of fitting.

        Only means are computed, some thousand layouts at a time. Equal layouts stay in the
        canonical order.
        """
        steps, fits, score = np.empty((3, len(legal)))
        for start in range(0, len(legal), _CHUNK):
            rows = slice(start, start + _CHUNK)
            steps[rows], fits[rows], score[rows] = self._scored(legal.columns(rows))
        order = np.argsort(-score, kind="stable")
        return RankedLayouts(
            order=order, step_time_s=steps[order], fits=fits[order], score=score[order]
        )

    def score(self, layout: Layout) -> float:
        """The logarithm of what one layout is ranked by."""
        return float(self._scored(LayoutColumns.of_each([layout]))[2][0])

    def _scored(self, columns: LayoutColumns) -> tuple[Floats, Floats, Floats]:
        """Seconds a step, probabilities of fitting, and logarithms of what ranks."""
        log_s, fits = self.log_step_s(columns), self.fits(columns)
        factors = objective_factors(self.spec.objective, columns, self.spec.model)
        score = np.log(factors) - log_s + np.log(np.maximum(fits, _LEAST_FIT))
        return np.exp(log_s), fits, score

    def log_step_s(self, columns: LayoutColumns) -> Floats:
        """Logarithms of the predicted medians of step times in seconds, of columns of one axis."""
        devices = np.asarray(columns.num_devices)
        log_s = np.empty(devices.size)
        for count in np.unique(devices):
            rows = devices == count
            best, here = self._deviations(int(count)), columns.rows(rows)
            step_s = step_time_s(
                here, self.spec.model, self.spec.cluster, term_factors(best), self._score_traffic
            )
            log_s[rows] = np.log(step_s) + best[-1]
        return log_s

    def fits(self, columns: LayoutColumns) -> Floats:
        """Probability that each layout fits into a device and keeps the campaign's headroom."""
        return self.memory.fits(columns, self.spec.model, self._capacity_bytes)

    def chances(
        self, legal: LegalSet, ranked: RankedLayouts, *, most_step_s: float = np.inf
    ) -> BestChances:
        """The chances of the best layouts; of a large set only `MAX_COMPARED` are compared.

        `most_step_s`: see `LayoutDraws.chances`.
        """
        columns = self._best_columns(legal, ranked, MAX_COMPARED)
        spec = self.spec
        draws = LayoutDraws(
            model=spec.model,
            cluster=spec.cluster,
            software=self.software,
            time=self.time,
            memory=self.memory,
        )
        factors = objective_factors(spec.objective, columns, spec.model)
        log_factors = np.log(factors)
        return draws.chances(columns, log_factors, self._capacity_bytes, most_step_s=most_step_s)

    def deciding(self, legal: LegalSet, ranked: RankedLayouts, top: int) -> DecidingProperty | None:
        """On what about the trainer it depends most whether the best layouts fit."""
        columns = self._best_columns(legal, ranked, top)
        return self.memory.deciding(columns, self.spec.model, self._capacity_bytes)

    def _best_columns(self, legal: LegalSet, ranked: RankedLayouts, top: int) -> LayoutColumns:
        return LayoutColumns.of_each(legal.layout(int(row)) for row in ranked.order[:top])

    def step(self, layout: Layout) -> StepInterval:
        """The predicted step time of one layout: its median and 95 % interval."""
        (mean,), (deviation,) = self.time.predict(
            layout, self.spec.model, self.spec.cluster, software=self.software
        )
        return predicted_step(mean, deviation)

    def parts(self, layout: Layout) -> list[TimePart]:
        """The parts of one layout's predicted step, which add up to it but for a common factor."""
        factors = term_factors(self._deviations(layout.num_devices))
        return step_time_parts(
            layout, self.spec.model, self.spec.cluster, factors, self._score_traffic
        )

    def _deviations(self, num_devices: int) -> Floats:
        """The best deviations of the factors on so many devices."""
        if num_devices not in self._known_deviations:
            spec, software = self.spec, self.software
            self._known_deviations[num_devices] = self.time.factors(
                spec.model, spec.cluster, num_devices=num_devices, software=software
            ).mean
        return self._known_deviations[num_devices]

    @cached_property
    def _known_deviations(self) -> dict[int, Floats]:
        return {}

    @cached_property
    def _score_traffic(self) -> float:
        return score_traffic_of(self.software, self.spec.cluster)

    @cached_property
    def _capacity_bytes(self) -> float:
        """A device's memory; with headroom, that of the device which the allowed peak just fits."""
        capacity = float(self.spec.cluster.device_memory_bytes)
        storage, allowed = self.memory.storage, self.spec.allowed_memory_bytes
        if allowed >= usable_bytes(capacity, storage):
            return capacity
        return _capacity_for(allowed, storage)


def _capacity_for(peak_bytes: float, storage: TrainerStorage) -> float:
    """The memory of the smallest device that a peak fits into: the inverse of `usable_bytes`."""
    reserved = peak_bytes * (1.0 + storage.reserved_share)
    return min(reserved + storage.context_bytes, 2.0 * reserved)
