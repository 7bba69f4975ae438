"""By how much a layout may exceed the best: expected and drawn gains, and a front's volume."""

# ruff: noqa: N803 (arrays carry their shape in the name: S draws, N layouts)

from __future__ import annotations

from typing import Final

import numpy as np
from scipy.special import ndtr

from layout_tuner.array_types import Floats, Ints

SMOOTHING: Final = 0.005
"""Width, in logarithms of the objective, over which a gain sets in."""
TRACE: Final = 1e-3
"""Weight of the part of a gain that fades slowly below the best figure."""


def expected_improvement(above: Floats | float, deviation: Floats | float) -> Floats:
    """Mean of the positive part of a normal variable (Jones et al. 1998, equation 15)."""
    over = above / deviation
    density = np.exp(-0.5 * over**2) / np.sqrt(2.0 * np.pi)
    return np.asarray(deviation * (density + over * ndtr(over)))


def best_places(
    figures: Floats, deviation: Floats, best: float, penalty: Floats, count: int
) -> Ints:
    """Positions of the best layouts: half by expected figure, half by expected improvement."""
    if len(figures) <= count:
        return np.arange(len(figures))
    gain = expected_improvement(figures - best, np.maximum(deviation, SMOOTHING))
    hoped = np.log(np.maximum(gain, 1e-12)) + penalty
    return np.union1d(largest(figures + penalty, count // 2), largest(hoped, count // 2))


def largest(values: Floats, count: int) -> Ints:
    """Positions of the `count` largest values, or of all values."""
    if len(values) <= count:
        return np.arange(len(values))
    return np.argpartition(-values, count)[:count]


def mean_gains(above_SN: Floats) -> Floats:
    """The mean, over draws, of how far each figure exceeds the best."""
    return np.asarray(SMOOTHING * soft_gains(above_SN / SMOOTHING).mean(axis=0))


def soft_gains(above: Floats) -> Floats:
    """A smooth positive part: log(1 + exp(x)), plus a small part that fades as -1 / (4 x) below 0.

    The slow part decides where no draw gains anything: with the exponential tail alone, a layout
    that cannot fit would be worth more than one that is 10 % worse.
    """
    rounded = np.logaddexp(0.0, above)
    return np.asarray(rounded + TRACE * 0.5 * (above + np.sqrt(above**2 + 1.0)))


def hypervolume(points: Floats) -> float:
    """The volume between the origin and the points (Zitzler and Thiele 1998), by slices.

    There is one row a point and one column an objective; more is better. Points that are not above
    the origin in every objective add nothing.
    """
    above = points[(points > 0).all(axis=1)]
    if not len(above):
        return 0.0
    if above.shape[1] == 1:
        return float(above.max())
    above = above[np.argsort(-above[:, -1], kind="stable")]
    heights = above[:, -1] - np.append(above[1:, -1], 0.0)
    if above.shape[1] == 2:
        return float(heights @ np.maximum.accumulate(above[:, 0]))
    return float(
        sum(
            height * hypervolume(above[: count + 1, :-1])
            for count, height in enumerate(heights)
            if height > 0
        )
    )
