"""How the terms of a step come to its time: what goes side by side, and what hides behind what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSums:
    """The terms of each layout's step summed by kind, each times its factor.

    Two things at once take as long as the longer one, a little more where they are about equal: their
    4-norm, 1.19 times either then.
    """

    device: Floats
    """What the slowest stage's devices do, in seconds."""
    host: Floats
    """What its hosts do meanwhile."""
    reduction: Floats
    """The reduction of the gradients."""
    odds: Floats
    """Odds that it is not run beside the backward pass."""
    rest: Floats
    """What is added."""
    backward_share: Floats
    """Share of the stage's work that the backward pass of the last micro-batch is."""

    @property
    def busy(self) -> Floats:
        """Seconds that devices or hosts work."""
        return _longer(self.device, self.host)

    @property
    def waited(self) -> Floats:
        """Seconds that a reduction takes beyond the pass that it may run beside."""
        return self._exposed + self._beside * (self.reduction - self._exposed)

    @property
    def total(self) -> Floats:
        """Seconds of a step."""
        return self.busy + self.waited + self.rest

    @property
    def device_weight(self) -> Floats:
        """Growth of the total with what the devices do; the others are alike."""
        return self._busy_weight * (self.device / self.busy) ** 3

    @property
    def host_weight(self) -> Floats:
        """See `device_weight`."""
        return self._busy_weight * (self.host / self.busy) ** 3

    @property
    def reduction_weight(self) -> Floats:
        """See `device_weight`."""
        exposed = (self.reduction / self._side_by_side) ** 3
        return exposed + self._beside * (1.0 - exposed)

    @property
    def odds_weight(self) -> Floats:
        """Growth of the total with the logarithm of the odds, in seconds."""
        return self._beside * (1.0 - self._beside) * (self.reduction - self._exposed)

    @property
    def _window(self) -> Floats:
        return self.backward_share * self.busy

    @property
    def _side_by_side(self) -> Floats:
        return _longer(self.reduction, self._window)

    @property
    def _exposed(self) -> Floats:
        return self._side_by_side - self._window

    @property
    def _beside(self) -> Floats:
        """Share of the hidden seconds that are not hidden after all."""
        return self.odds / (1.0 + self.odds)

    @property
    def _busy_weight(self) -> Floats:
        """A longer backward pass hides more."""
        gained = (self._window / self._side_by_side) ** 3 - 1.0
        return 1.0 + (1.0 - self._beside) * self.backward_share * gained


def _longer(first: Floats, second: Floats) -> Floats:
    squares = np.square(np.square(first)) + np.square(np.square(second))
    return np.asarray(np.sqrt(np.sqrt(squares)), dtype=np.float64)
