"""Memory of a trainer whose storage is not known: a mixture over the ways in which it may store.

What trainers keep differs in kind (`predictions.estimates.trainer_storage.storage_hypotheses`).
Each hypothesis has a belief of its own, which all measurements correct, and a weight: its prior
weight times the probability that it gave to the outcomes. A probability of fitting is the weighted
mean of those of the hypotheses. A known trainer has one hypothesis, and this is its belief.
"""

# ruff: noqa: N806 (shapes in names: H hypotheses, N layouts)

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Self

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.predictions.belief.job_knobs.knob_memory import NO_KNOB_MEMORY, KnobMemory
from layout_tuner.predictions.belief.peaks.corrected_peak import MemoryBelief, PeakSample
from layout_tuner.predictions.belief.peaks.memory_fit import LOGISTIC_PER_NORMAL, logistic
from layout_tuner.predictions.estimates.distinct_layouts import distinct_peaks
from layout_tuner.predictions.estimates.peak_memory import MemoryTerms
from layout_tuner.predictions.estimates.trainer_storage import TrainerStorage, storage_hypotheses
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

Peaks = tuple[Floats, Floats]
"""Means and standard deviations of peaks in bytes."""
HypothesesTerms = Sequence[MemoryTerms]
"""The terms of the peaks of many layouts, for each hypothesis."""

_SHARES: Final = np.array([[0.1], [0.5], [0.9]])
"""Probabilities of the lower end, the median and the upper end of an 80 % interval."""
_HALVINGS: Final = 40

_LEAST_WEIGHT: Final = 0.003
"""A hypothesis with a smaller share of the largest weight is not computed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecidingProperty:
    """A property that a trainer may have, and what it means for layouts."""

    name: str
    """The property, in words."""
    share: float
    """Probability that the trainer has it."""
    fits: float
    """Mean probability of the layouts to fit if it has."""
    fits_without: float
    """The same if it has not."""

    @property
    def words(self) -> str:
        """A sentence without full stop."""
        return (
            "the trainer's memory is not known. Whether these layouts fit depends most on "
            f"{self.name}: P(fits) is {self.fits:.2f} on average with it (probability "
            f"{self.share:.2f}), {self.fits_without:.2f} without"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainerMemory:
    """Peak memory of layouts under every hypothesis about their trainer.

    It is immutable: `updated` returns a new one.
    """

    names: tuple[str, ...]
    """What each hypothesis says: its properties, separated by commas."""
    priors: tuple[float, ...]
    """Their weights before any outcome."""
    beliefs: tuple[MemoryBelief, ...]
    """The belief under each of them."""

    @classmethod
    def prior(
        cls,
        cluster: Cluster,
        *,
        software: str = "",
        campaign: str = "",
        knobs: KnobMemory = NO_KNOB_MEMORY,
    ) -> Self:
        """The belief without any measurement; for the arguments see `MemoryBelief.prior`."""
        every = storage_hypotheses(software, cluster)
        return cls(
            names=tuple(each.name for each in every),
            priors=tuple(each.weight for each in every),
            beliefs=tuple(
                MemoryBelief.prior(
                    cluster,
                    software=software,
                    campaign=campaign,
                    storage=each.storage,
                    knobs=knobs,
                )
                for each in every
            ),
        )

    def updated(self, samples: Iterable[PeakSample], *, elsewhere: bool = False) -> Self:
        """See `MemoryBelief.updated`."""
        every = list(samples)
        beliefs = (each.updated(every, elsewhere=elsewhere) for each in self.beliefs)
        return replace(self, beliefs=tuple(beliefs))

    @cached_property
    def weights(self) -> Floats:
        """Probability of each hypothesis after all outcomes; 0 where it is too small to count."""
        if len(self.beliefs) == 1:
            return np.ones(1)
        logs = np.log(self.priors) + np.array([each.log_evidence for each in self.beliefs])
        odds = np.exp(logs - logs.max())
        odds[odds < _LEAST_WEIGHT] = 0.0
        return np.asarray(odds / odds.sum())

    @property
    def storage(self) -> TrainerStorage:
        """The storage by the likeliest hypothesis; they all leave as much of a device usable."""
        return self.beliefs[int(self.weights.argmax())].storage

    def terms(self, columns: LayoutColumns, model: ModelShape) -> HypothesesTerms:
        """See `MemoryBelief.terms`."""
        return [each.terms(columns, model) for each in self.beliefs]

    def each_peak_bytes(
        self, layouts: Layout | LayoutColumns | HypothesesTerms, model: ModelShape
    ) -> list[tuple[float, Peaks]]:
        """The weight of each hypothesis that counts, and the peaks under it."""
        every: Sequence[Layout | LayoutColumns | MemoryTerms] = (
            [layouts] * len(self.beliefs)
            if isinstance(layouts, Layout | LayoutColumns)
            else layouts
        )
        return self._weighted(lambda place, belief: belief.peak_bytes(every[place], model))

    def peak_bytes(
        self, layouts: Layout | LayoutColumns | HypothesesTerms, model: ModelShape
    ) -> Peaks:
        """Mean and standard deviation of the fullest rank's peak, of each layout."""
        return mixed(self.each_peak_bytes(layouts, model))

    def stage_peak_bytes(self, layout: Layout, model: ModelShape) -> Peaks:
        """See `MemoryBelief.stage_peak_bytes`."""
        return mixed(self.each_stage_peak_bytes(layout, model))

    def each_stage_peak_bytes(self, layout: Layout, model: ModelShape) -> list[tuple[float, Peaks]]:
        """The same under each hypothesis that counts, with its weight."""
        return self._weighted(lambda _, belief: belief.stage_peak_bytes(layout, model))

    def _weighted(self, of: Callable[[int, MemoryBelief], Peaks]) -> list[tuple[float, Peaks]]:
        return [(float(self.weights[place]), of(place, each)) for place, each in self.counting]

    def fits(
        self, layouts: Layout | LayoutColumns, model: ModelShape, capacity_bytes: float
    ) -> Floats:
        """Probability that each layout fits into a device with so much memory; never 0.

        Of columns of a tile (`layout_tiles`) it has the tile's shape.
        """
        if not isinstance(layouts, Layout) and layouts.tp.ndim > 1:
            shards = any(belief.storage.shards_bf16_states for belief in self.beliefs)
            few, places = distinct_peaks(layouts, always_shards=shards)
            return np.take(self.fits(few, model, capacity_bytes), places)
        parts = [
            self.weights[place] * belief.fits(layouts, model, capacity_bytes)
            for place, belief in self.counting
        ]
        return np.asarray(sum(parts[1:], start=parts[0]))

    def deciding(
        self, layouts: LayoutColumns, model: ModelShape, capacity_bytes: float
    ) -> DecidingProperty | None:
        """The property of the trainer on which it depends most whether the layouts fit.

        It explains most of the variance between the hypotheses' mean probabilities of fitting.
        None: the trainer is known, or one hypothesis is left.
        """
        fits_H = np.zeros(len(self.names))
        for place, belief in self.counting:
            fits_H[place] = belief.fits(layouts, model, capacity_bytes).mean()
        found: dict[DecidingProperty, float] = {}
        for name in dict.fromkeys(part for each in self.names for part in each.split(", ")):
            has_H = np.array([name in each.split(", ") for each in self.names])
            share = float(self.weights[has_H].sum())
            if 0.0 < share < 1.0 - 1e-9:
                with_it, without = (
                    float(np.average(fits_H[side], weights=self.weights[side]))
                    for side in (has_H, ~has_H)
                )
                each = DecidingProperty(name=name, share=share, fits=with_it, fits_without=without)
                found[each] = share * (1.0 - share) * (with_it - without) ** 2
        return max(found, key=lambda each: found[each], default=None)

    @property
    def counting(self) -> list[tuple[int, MemoryBelief]]:
        """The places of the hypotheses that count, and their beliefs."""
        return [(at, each) for at, each in enumerate(self.beliefs) if self.weights[at] > 0.0]


def mixed(parts: Sequence[tuple[float, Peaks]]) -> Peaks:
    """Mean and standard deviation of a mixture of weighted means and standard deviations."""
    if len(parts) == 1:
        return parts[0][1]
    mean = sum((weight * of for weight, (of, _) in parts[1:]), start=parts[0][0] * parts[0][1][0])
    squares = [weight * (sd**2 + (of - mean) ** 2) for weight, (of, sd) in parts]
    return mean, np.sqrt(sum(squares[1:], start=squares[0]))


def quantiles(parts: Sequence[tuple[float, Peaks]]) -> Floats:
    """10, 50 and 90 % of a mixture, by bisection; shape [3, layouts].

    The logarithm of each part is logistic, as in `MemoryBelief.fits`: a layout fits into its 90 %
    quantile with probability 0.9. The mean and the deviation of a mixture of "23 GiB" and "150 GiB"
    describe neither.
    """
    each_H = [
        (weight, np.log(mean), LOGISTIC_PER_NORMAL * mean / deviation)
        for weight, (mean, deviation) in parts
    ]
    odds = np.log(_SHARES / (1.0 - _SHARES))
    of_each = np.stack([center + odds / slope for _, center, slope in each_H])
    low, high = of_each.min(axis=0), of_each.max(axis=0)
    for _ in range(_HALVINGS if len(parts) > 1 else 0):
        middle = 0.5 * (low + high)
        below = sum(w * logistic(slope * (middle - center)) for w, center, slope in each_H)
        is_under = below < _SHARES
        low, high = np.where(is_under, middle, low), np.where(is_under, high, middle)
    return np.asarray(np.exp(0.5 * (low + high)))
