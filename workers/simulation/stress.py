"""Step times and peaks for which the estimates are wrong: a stress test for searches.

Each term of the closed-form step time, with its weight before any measurement, is off by 40 to
60 %, up or down. In addition the step time is distorted by 20 %, smoothly over the knobs; no
weights of the terms can express this. Memory is off by 10 to 15 %, and an allocator takes more.
"""

# ruff: noqa: N806 (arrays carry their shape in the name: N layouts, K knobs, F features, T terms)

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Self

import numpy as np

from search_spaces.arrays import Floats
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.estimates.time import PRIOR, time_terms
from search_spaces.spec.cluster import Cluster
from search_spaces.spec.layout_columns import LayoutColumns
from search_spaces.spec.model_shape import ModelShape

TERM_ERROR: Final = (0.4, 0.6)
"""Relative error of each term of the step time."""

DISTORTION: Final = 0.2 / math.sqrt(2)
"""Standard deviation of the distortion's logarithm over the landscape: that of a wave whose
amplitude is 20 %."""

MEMORY_ERROR: Final = (0.10, 0.15)
"""Relative error of the memory estimate, equal for all layouts."""

_FRAGMENTATION: Final = 0.03
_NUM_FEATURES: Final = 256
_LENGTH_SCALE: Final = 3.0
"""Doublings of one knob over which the distortion changes; knobs have three to five."""

_DOUBLING: Final = ("tp", "pp", "dp", "vpp", "micro_batch_size", "num_microbatches")
_CODED: Final = ("zero_stage", "recompute", "sequence_parallel")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StressedEstimates:
    """The simulated measurements of some layouts for one seed."""

    step_times_s: Floats
    """Of each layout, without noise."""
    peaks: Floats
    """Bytes of the fullest device of each layout."""
    noise: float
    """Relative standard deviation of a measured step time."""

    @classmethod
    def draw(
        cls, columns: LayoutColumns, model: ModelShape, cluster: Cluster, rng: np.random.Generator
    ) -> Self:
        """The estimates of these layouts with a random error in each part."""
        off = 1 + _signed(rng, *TERM_ERROR, len(PRIOR))
        distortion = np.exp(DISTORTION * smooth_field(columns, rng))
        memory = peak_memory_bytes(columns, model) * (1 + _signed(rng, *MEMORY_ERROR, 1))
        return cls(
            step_times_s=time_terms(columns, model, cluster).step_time_s(PRIOR * off) * distortion,
            peaks=memory * (1 + _FRAGMENTATION * rng.random(memory.size)),
            noise=rng.uniform(0.01, 0.03),
        )


def smooth_field(columns: LayoutColumns, rng: np.random.Generator) -> Floats:
    """A random smooth function of the knobs, of mean 0 and standard deviation 1 over the layouts.

    Random Fourier features of a Gaussian kernel (Rahimi and Recht 2007) over the knobs' logarithms
    to base 2, and over the codes of those that are words.
    """
    doubling = [np.log2(np.asarray(getattr(columns, name), dtype=np.float64)) for name in _DOUBLING]
    coded = [np.asarray(getattr(columns, name), dtype=np.float64) for name in _CODED]
    knobs_NK = np.stack(np.broadcast_arrays(*doubling, *coded), axis=-1)
    frequencies_KF = rng.normal(0, 1 / _LENGTH_SCALE, (knobs_NK.shape[1], _NUM_FEATURES))
    phases = rng.uniform(0, 2 * np.pi, _NUM_FEATURES)
    field = np.cos(knobs_NK @ frequencies_KF + phases) @ rng.standard_normal(_NUM_FEATURES)
    return np.asarray((field - field.mean()) / field.std())


def _signed(rng: np.random.Generator, low: float, high: float, count: int) -> Floats:
    """Errors of a size between the bounds, up or down."""
    return np.asarray(rng.uniform(low, high, count) * rng.choice([-1.0, 1.0], count))
