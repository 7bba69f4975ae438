"""Runs that were slower than their layout is: on a sick node, in a storm of the network.

A measured step time is a mixture: mostly normal about the prediction, on the logarithm, and with a
small probability slower by an exponentially distributed excess. A run that is probably of the
second kind hardly counts when factors and residuals are fitted, and one that would be near the best
is worth a repetition.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from layout_tuner.array_types import Floats

SLOW_SHARE: Final = 0.1
"""Share of slow runs, before any is known."""
MEAN_EXCESS: Final = 0.7
"""Mean of the excess of slow runs, in logarithms: they take twice as long."""
_ROOT_2_PI: Final = float(np.sqrt(2.0 * np.pi))
_TAIL: Final = 4.0
"""Degrees of freedom of Student's t (Lange et al. 1989): sound runs have heavy tails too."""
_LEAST: Final = 1e-4
"""Least probability: a weight of 0 would leave a measurement without a finite noise."""


def run_weights(residual: Floats, deviation: Floats | float) -> Floats:
    """How much each run counts, from 0 to about 1: its precision over that of a sound one.

    `residual` is the logarithm of measured over predicted seconds, and `deviation` the standard
    deviation of that, of sound runs.
    """
    tails = (_TAIL + 1.0) / (_TAIL + np.square(residual / deviation))
    return np.asarray(np.maximum(sound_probability(residual, deviation) * tails, _LEAST))


def sound_probability(residual: Floats, deviation: Floats | float) -> Floats:
    """Probability that each run was not slowed down; see `run_weights`."""
    log_sound = -0.5 * np.square(residual / deviation) - np.log(_ROOT_2_PI * deviation)
    log_slow = -residual / MEAN_EXCESS - np.log(MEAN_EXCESS)
    log_odds = np.log(SLOW_SHARE / (1.0 - SLOW_SHARE)) + log_slow - log_sound
    # A run that is faster than predicted was not slowed down, however unlikely it is.
    return np.asarray(np.where(residual > 0, 1.0 / (1.0 + np.exp(np.minimum(log_odds, 50))), 1.0))
