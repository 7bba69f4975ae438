"""Loss scaling for fp16.

The loss is multiplied by a scale before the backward pass, so that small gradients do not underflow
in fp16 (arXiv:1710.03740, section 3.2). The update divides the gradients by the scale. A step whose
gradients overflow is skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from layout_tuner.workers.trainer.errors import LossDivergedError


@dataclass(kw_only=True, slots=True)
class LossScaler:
    """Dynamic loss scale. It is the same on every rank, since all ranks see the same gradient norm.

    The initial scale is one at which a short probe neither overflows in most steps nor loses small
    gradients. It is a power of two, so that scaling changes no digit. It doubles after a thousand
    good steps in a row, as in Megatron-LM and DeepSpeed, and halves at every overflow.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    """Steps without an overflow since the scale last changed."""
    growth_interval: int = 1000
    """Number of good steps in a row after which the scale doubles."""
    smallest_scale: float = 1.0
    """At this scale an overflow is an error: scaling did not cause it."""

    def update(self, grad_norm: float) -> bool:
        """Adapts the scale to a step's gradient norm; returns whether the step must be skipped.

        Raises:
            LossDivergedError: gradients are not finite even at the smallest scale.
        """
        if math.isfinite(grad_norm):
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.scale, self.good_steps = 2.0 * self.scale, 0
            return False
        if self.scale <= self.smallest_scale:
            raise LossDivergedError(
                f"gradient norm is {grad_norm} at loss scale {self.scale:g}, the smallest there is; "
                "lower the learning rate, or train in bf16"
            )
        self.scale, self.good_steps = max(0.5 * self.scale, self.smallest_scale), 0
        return True
