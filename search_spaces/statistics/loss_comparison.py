"""Whether two probes trained the same: their losses, iteration by iteration.

Weights and tokens follow from the seed, so that every layout of a campaign trains the same model on
the same batches. Layouts add up in different orders, and a difference in the last bit grows from
step to step; a difference that is larger is an error of one of the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from search_spaces.layout import Precision
from search_spaces.measurement import Iteration

LOSS_TOLERANCE: Final[Mapping[Precision, float]] = MappingProxyType(
    {"fp32": 1e-4, "fp16": 5e-3, "bf16": 1e-2}
)
"""How far two losses of the first iterations may be apart, relative. Measured over every axis on the
presets for CPUs (decision 13): at most 3e-7 in fp32 and 5e-4 in bf16; fp16 has three bits more."""

STEADY_ITERATIONS: Final = 4
"""First iterations, over which the tolerance stays as it is."""

GROWTH: Final = 2.0
"""By how much the tolerance grows with each iteration afterwards: training is chaotic where its
learning rate is high, and there a difference in the last bit doubles about as fast."""

MAX_TOLERANCE: Final = 0.25
"""Where it stops to grow: two runs of one model on the same tokens learn about equally well, however
far their weights have come apart."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifference:
    """Where one probe's loss is off another's."""

    index: int
    """The iteration."""
    loss: float
    other_loss: float
    tolerance: float
    """How far apart the two might have been, relative."""


def loss_tolerance(precision: Precision, index: int) -> float:
    """How far two losses of iteration `index` may be apart, relative to the larger one."""
    # Capped before it is raised to the power: probes may have thousands of iterations.
    steps = min(max(index - STEADY_ITERATIONS + 1, 0), 64)
    return min(LOSS_TOLERANCE[precision] * GROWTH**steps, MAX_TOLERANCE)


def first_difference(
    iterations: Sequence[Iteration], others: Sequence[Iteration], precision: Precision
) -> LossDifference | None:
    """The first iteration whose losses are apart by more than the precision allows, or None.

    Compared are the iterations that both have (a warm-up that settled later only shifts which of
    them were timed), up to the first that one of the two skipped: from then on their weights differ.
    """
    for own, other in zip(iterations, others, strict=False):
        tolerance = loss_tolerance(precision, own.index)
        # Relative to one nat at least: losses near 0 are noise.
        if abs(own.loss - other.loss) > tolerance * max(own.loss, other.loss, 1.0):
            return LossDifference(
                index=own.index, loss=own.loss, other_loss=other.loss, tolerance=tolerance
            )
        if (own.grad_norm is None) != (other.grad_norm is None):
            return None
    return None
