"""The samples of other campaigns whose figures are plausible: only these calibrate.

A figure that is very far from its estimate shows a wrong unit, in the measurement or in the
constants of the cluster, and no property of the machine. It would move the factors of every
prediction on that cluster, so it carries no weight.

The bounds are seven times beyond what 11 published tables show, over the estimates before any
measurement: 2,119 step times were 0.25 to 142 times as long, and 1,036 peaks 0.21 to 1.7 times as
large. For peaks the upper bound is the inverse of the lower one. The estimate of a large model
takes a third of the devices' peak at least, so a thirtieth of it would need ten times their peak.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from layout_tuner.predictions.belief.known_measurements import Sample
from layout_tuner.predictions.belief.peaks.memory_evidence import (
    MEASURED,
    RAN,
    kind_of,
    known_bytes,
)
from layout_tuner.predictions.estimates.peak_memory import memory_terms
from layout_tuner.predictions.estimates.step_time import time_terms
from layout_tuner.predictions.estimates.trainer_kernels import kernels_of
from layout_tuner.predictions.estimates.trainer_storage import storage_of
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

LEAST_RATIO: Final = 1 / 30
"""Least plausible measured figure, over its estimate."""
MOST_TIMES: Final = 1000.0
"""Longest plausible step time, over its estimate."""
MOST_PEAK: Final = 30.0
"""Largest plausible peak, over its estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlausibleSamples:
    """The samples that calibrate."""

    time: tuple[Sample, ...]
    """Those that calibrate step times."""
    memory: tuple[Sample, ...]
    """Those that calibrate peaks."""
    num_samples: int
    """All that are known."""

    @property
    def num_step_times(self) -> int:
        """Step times that calibrate."""
        return sum(sample.step_time_s is not None for sample in self.time)

    @property
    def num_peaks(self) -> int:
        """Measured peaks that calibrate."""
        return sum(sample.peak_memory_bytes is not None for sample in self.memory)

    @property
    def warnings(self) -> Iterator[str]:
        """How many figures are left out, and why."""
        units = "if most are, check the constants of the cluster and their units"
        if left_out := self.num_samples - len(self.time):
            yield (
                f"{left_out} of {self.num_step_times + left_out} measured step times are left out of "
                f"the calibration, as they are below 1/{1 / LEAST_RATIO:.0f} or above "
                f"{MOST_TIMES:,.0f} times what the constants of the cluster let expect; {units}"
            )
        if left_out := self.num_samples - len(self.memory):
            yield (
                f"{left_out} of {self.num_samples} runs are left out of the calibration of memory, as "
                f"their peaks are {MOST_PEAK:.0f} times off the estimate; {units}"
            )


def plausible_samples(known: Iterable[Sample]) -> PlausibleSamples:
    """The samples with plausible figures, in their order, by the constants of their clusters.

    A sample without a step time is kept for both. A peak that is known only to be above or below
    the memory of the device is left out where that bound is implausible.
    """
    every = tuple(known)
    groups: dict[tuple[int, int, str], list[int]] = {}
    for place, sample in enumerate(every):
        key = (id(sample.model), id(sample.cluster), sample.software)
        groups.setdefault(key, []).append(place)
    timely, fitting = np.ones((2, len(every)), dtype=bool)
    for places in groups.values():
        group = [every[place] for place in places]
        model, cluster, software = group[0].model, group[0].cluster, group[0].software
        columns = LayoutColumns.of_each(sample.layout for sample in group)
        kernels, storage = kernels_of(software, cluster), storage_of(software, cluster)
        expected_s = time_terms(columns, model, cluster, kernels=kernels).step_time_s()
        times = [sample.step_time_s or np.nan for sample in group] / expected_s
        timely[places] = ~((times < LEAST_RATIO) | (times > MOST_TIMES))
        expected_bytes = memory_terms(columns, model, storage).num_bytes.sum(axis=1).max(axis=0)
        peaks = [known_bytes(sample, storage) for sample in group] / expected_bytes
        kinds = np.array([kind_of(sample) for sample in group])
        too_low = (peaks < LEAST_RATIO) & np.isin(kinds, (MEASURED, RAN))
        fitting[places] = ~(too_low | ((peaks > MOST_PEAK) & (kinds != RAN)))
    return PlausibleSamples(
        time=tuple(every[place] for place in np.flatnonzero(timely)),
        memory=tuple(every[place] for place in np.flatnonzero(fitting)),
        num_samples=len(every),
    )
