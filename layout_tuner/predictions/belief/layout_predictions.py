"""Predictions for the layouts of one campaign before any of them runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats, Ints
from layout_tuner.predictions.belief.best_chances import MAX_COMPARED, BestChances, LayoutDraws
from layout_tuner.predictions.belief.corrected_step_time import TimeCalibration
from layout_tuner.predictions.belief.factor_regression import StepFactors, term_factors
from layout_tuner.predictions.belief.job import predicted_step
from layout_tuner.predictions.belief.job_knobs.knob_memory import KnobMemory
from layout_tuner.predictions.belief.job_knobs.knob_step_time import NUM_STEP_FACTORS, KnownKnobs
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.peaks.memory_evidence import usable_bytes
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty, TrainerMemory
from layout_tuner.predictions.belief.plausible_samples import PlausibleSamples, plausible_samples
from layout_tuner.predictions.estimates.distinct_rows import different
from layout_tuner.predictions.estimates.step_time import TimePart, step_time_parts, step_time_s
from layout_tuner.predictions.estimates.trainer_kernels import TrainerKernels, kernels_of
from layout_tuner.predictions.estimates.trainer_storage import TrainerStorage
from layout_tuner.predictions.statistics.job_duration import StepInterval
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.objectives import objective_factors
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.search_spaces.spaces.layout_tiles import layout_tiles
from layout_tuner.search_spaces.spaces.search_space import LegalSet
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

_TOGETHER: Final = 1 << 16
"""Layouts that are looked at together."""
LEAST_FIT: Final = 1e-300
"""Probability of fitting below which all layouts are alike: its logarithm stays finite."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankedLayouts:
    """All layouts of a legal set, or the best jobs, the best first; arrays of shape [layouts]."""

    order: Ints
    """Their positions in the legal set, or among the jobs."""
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

    def first_with(self, legal: LegalSet | JobSet, knob: str, value: int) -> int | None:
        """The place of the best layout with a knob's value, from 0; None: there is none."""
        for start in range(0, len(self.order), _TOGETHER):
            values = legal.column(knob, self.order[start : start + _TOGETHER])
            if len(places := np.flatnonzero(values == value)):
                return start + int(places[0])
        return None


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
    def known_knobs(self) -> KnownKnobs:
        """The declarations of the campaign's job knobs, which are those of its trainer alone."""
        return KnownKnobs(software=self.spec.software, knobs=self.spec.space.job.knobs)

    @cached_property
    def time(self) -> TimeCalibration:
        return TimeCalibration.fit(self.plausible.time, self.known_knobs)

    @cached_property
    def knob_memory(self) -> KnobMemory:
        """What the campaign's job knobs do to peaks."""
        return KnobMemory(known=self.known_knobs)

    @cached_property
    def memory(self) -> TrainerMemory:
        """The belief about peaks."""
        prior = TrainerMemory.prior(
            self.spec.cluster, software=self.software, knobs=self.knob_memory
        )
        return prior.updated(self.plausible.memory, elsewhere=True)

    def rank(self, legal: LegalSet) -> RankedLayouts:
        """All layouts by their first objective times their probability of fitting.

        Only means are computed, a tile of layouts at a time. Equal layouts stay in the
        canonical order.
        """
        steps, fits, score = (np.empty(len(legal)) for _ in range(3))
        for rows, tile, places in layout_tiles(legal):
            for values, of_tile in zip((steps, fits, score), self._scored(tile), strict=True):
                values[rows] = np.take(of_tile, places)
        order = _sort_descending(score)
        # One after the other, since each takes 8 bytes a layout.
        steps = steps[order]
        fits = fits[order]
        return RankedLayouts(order=order, step_time_s=steps, fits=fits, score=score)

    def score(self, layout: Layout) -> float:
        """The logarithm of what one layout is ranked by."""
        return float(self._scored(LayoutColumns.of_each([layout]))[2][0])

    def _scored(self, columns: LayoutColumns) -> tuple[Floats, Floats, Floats]:
        """Seconds a step, probabilities of fitting, and logarithms of what ranks."""
        steps, fits = self.step_times_s(columns), self.fits(columns)
        factors = objective_factors(self.spec.objective, columns, self.spec.model)
        return steps, fits, np.log(factors / steps) + np.log(np.maximum(fits, LEAST_FIT))

    def step_times_s(self, columns: LayoutColumns) -> Floats:
        """Predicted medians of step times in seconds, of columns of one axis or of a tile."""
        if any(columns.jobs):
            spec, software = self.spec, self.software
            return np.exp(
                self.time.predict(columns, spec.model, spec.cluster, software=software)[0]
            )
        devices, step_s = columns.num_devices.reshape(-1), np.empty(columns.shape)
        for count in different(devices):
            rows = devices == count
            best, spec = self.deviations(int(count)), self.spec
            here, factors, kernels = columns.rows(rows), term_factors(best), self.kernels
            found = step_time_s(here, spec.model, spec.cluster, factors, kernels, is_tile=True)
            step_s[rows] = np.exp(best[NUM_STEP_FACTORS - 1]) * found
        return step_s

    def fits(self, columns: LayoutColumns) -> Floats:
        """Probability that each layout fits into a device and keeps the campaign's headroom."""
        return self.memory.fits(columns, self.spec.model, self._capacity_bytes)

    def chances(
        self, legal: LegalSet | JobSet, ranked: RankedLayouts, *, most_step_s: float = np.inf
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

    def deciding(
        self, legal: LegalSet | JobSet, ranked: RankedLayouts, top: int
    ) -> DecidingProperty | None:
        """On what about the trainer it depends most whether the best layouts fit."""
        columns = self._best_columns(legal, ranked, top)
        return self.memory.deciding(columns, self.spec.model, self._capacity_bytes)

    def _best_columns(
        self, legal: LegalSet | JobSet, ranked: RankedLayouts, top: int
    ) -> LayoutColumns:
        return legal.columns(ranked.order[:top])

    def step(self, layout: Layout) -> StepInterval:
        """The predicted step time of one layout: its median and 95 % interval."""
        (mean,), (deviation,) = self.time.predict(
            layout, self.spec.model, self.spec.cluster, software=self.software
        )
        return predicted_step(mean, deviation)

    def parts(self, layout: Layout) -> list[TimePart]:
        """The parts of one layout's predicted step, which add up to it but for a common factor."""
        settings = self.time.knobs.settings(self.software, (layout.job,), np.zeros(1, np.int64))
        (deviations,) = settings.deviations(self.deviations(layout.num_devices))
        factors = term_factors(deviations)
        return step_time_parts(layout, self.spec.model, self.spec.cluster, factors, self.kernels)

    def deviations(self, num_devices: int) -> Floats:
        """The best deviations of the factors on so many devices, those of job knobs included."""
        return self.factors(num_devices).mean

    def factors(self, num_devices: int) -> StepFactors:
        """The factors on so many devices, those of job knobs included."""
        if num_devices not in self._known_factors:
            spec, software = self.spec, self.software
            self._known_factors[num_devices] = self.time.factors(
                spec.model, spec.cluster, num_devices=num_devices, software=software
            )
        return self._known_factors[num_devices]

    @cached_property
    def _known_factors(self) -> dict[int, StepFactors]:
        return {}

    @cached_property
    def kernels(self) -> TrainerKernels:
        return kernels_of(self.software, self.spec.cluster)

    @cached_property
    def _capacity_bytes(self) -> float:
        """A device's memory; with headroom, that of the device which the allowed peak just fits."""
        capacity = float(self.spec.cluster.device_memory_bytes)
        storage, allowed = self.memory.storage, self.spec.allowed_memory_bytes
        if allowed >= usable_bytes(capacity, storage):
            return capacity
        return _capacity_for(allowed, storage)


def _sort_descending(values: Floats) -> Ints:
    """Sorts values in place, the largest first; of equal ones the first. Returns their positions.

    numpy's stable sort takes three times as long.
    """
    np.negative(values, out=values)
    order = np.argsort(values)
    values[:] = values[order]
    is_equal = values[1:] == values[:-1]
    tied = np.flatnonzero(np.append(is_equal, False) | np.append(False, is_equal))
    order[tied] = order[tied][np.lexsort((order[tied], values[tied]))]
    np.negative(values, out=values)
    return order


def _capacity_for(peak_bytes: float, storage: TrainerStorage) -> float:
    """The memory of the smallest device that a peak fits into: the inverse of `usable_bytes`."""
    reserved = peak_bytes * (1.0 + storage.reserved_share)
    return min(reserved + storage.context_bytes, 2.0 * reserved)
