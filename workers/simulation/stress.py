"""Errors that stressed scenarios add to simulated steps and peaks, and that no model expects.

Step times are distorted by 20 %, smoothly over the knobs; no constants of a machine can express
this. Memory is off by 10 to 15 %, up or down, for all layouts.
"""

# ruff: noqa: N806 (arrays carry their shape in the name: N layouts, K knobs, F features)

from __future__ import annotations

import math
from typing import Final

import numpy as np

from layout_tuner.array_types import Floats
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

DISTORTION: Final = 0.2 / math.sqrt(2)
"""Standard deviation of the distortion's logarithm over the landscape: that of a wave whose
amplitude is 20 %."""

MEMORY_ERROR: Final = (0.10, 0.15)
"""Relative error of all peaks."""

_NUM_FEATURES: Final = 256
_LENGTH_SCALE: Final = 3.0
"""Doublings of one knob over which the distortion changes; knobs have three to five."""

_DOUBLING: Final = ("tp", "pp", "dp", "vpp", "micro_batch_size", "num_microbatches")
_CODED: Final = ("zero_stage", "recompute", "sequence_parallel")


def distortion(columns: LayoutColumns, rng: np.random.Generator) -> Floats:
    """A factor on the step time of each layout."""
    return np.asarray(np.exp(DISTORTION * smooth_field(columns, rng)))


def memory_error(rng: np.random.Generator) -> float:
    """A factor on all peaks."""
    return float(1 + rng.uniform(*MEMORY_ERROR) * rng.choice([-1.0, 1.0]))


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
