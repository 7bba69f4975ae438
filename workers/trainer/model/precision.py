"""Dynamic loss scaling, so that small gradients survive fp16 (arXiv:1710.03740, section 3.2).

The loss is scaled before the backward pass, its gradients are divided by the scale before anything
else is made of them. A step whose gradients overflowed is skipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from workers.trainer.errors import LossDivergedError


@dataclass(kw_only=True, slots=True)
class LossScaler:
    """The scale, and how it follows overflows: the same on every rank, which all see the same norm.

    It starts where a short probe neither overflows in most of its steps nor loses gradients, at a
    power of two, which changes no digit of what it scales. It doubles after a thousand good steps
    in a row, as in Megatron-LM and DeepSpeed, and halves at every overflow: three in a row cost
    three steps, and say that the scale was eight times too large.
    """

    scale: float = 2.0**16
    good_steps: int = 0
    """Steps without an overflow since the scale last changed."""
    growth_interval: int = 1000
    """So many good steps in a row double the scale."""
    smallest_scale: float = 1.0
    """Where an overflow is not the scale's doing."""

    def update(self, grad_norm: float) -> bool:
        """Takes note of a step's gradient norm; says whether the step must be skipped.

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
