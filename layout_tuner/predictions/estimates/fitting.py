"""How many legal layouts are likely to fit into the memory of a device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.spaces.search_space import LegalSet
from layout_tuner.units import NORMAL_95

MOST_ESTIMATED: Final = 50_000
"""Of a larger set an evenly spaced sample is estimated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FittingCount:
    """The number of layouts whose estimated peak is at most the memory of a device."""

    num_fitting: int
    """Of all layouts; projected from the sample if there is one."""
    num_estimated: int
    """Layouts whose peak was estimated."""
    half_interval: int
    """Half of the 95 % interval of `num_fitting` because of the sample; 0: all were estimated."""


def count_fitting(
    legal: LegalSet, model: ModelShape, memory_bytes: float, *, most: int = MOST_ESTIMATED
) -> FittingCount:
    """Counts the layouts of a legal set whose estimated peak memory fits."""
    length = len(legal)
    if not length:
        return FittingCount(num_fitting=0, num_estimated=0, half_interval=0)
    peaks = peak_memory_bytes(legal.columns(slice(0, None, _step(legal, most))), model)
    num_estimated = peaks.size
    share = float((peaks <= memory_bytes).mean())
    deviation = 0.0
    if num_estimated < length:
        # Sampling without replacement from a finite set.
        left_out = (length - num_estimated) / (length - 1)
        deviation = math.sqrt(share * (1 - share) / num_estimated * left_out)
    return FittingCount(
        num_fitting=round(share * length),
        num_estimated=num_estimated,
        half_interval=math.ceil(NORMAL_95 * deviation * length),
    )


def _step(legal: LegalSet, most: int) -> int:
    """The distance between sampled layouts.

    It has no divisor in common with the number of choices of any knob: a step of 2 would only see
    every second value of a knob with two values.
    """
    step = -(-len(legal) // most)
    while step > 1 and math.gcd(step, legal.num_combinations) > 1:
        step += 1
    return step
