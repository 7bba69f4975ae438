"""Compares the losses of two probes, iteration by iteration.

The seed determines weights and tokens, so that all layouts of a campaign train the same model on
the same batches. Layouts add numbers in different orders, and such rounding differences grow from
step to step. A larger difference means that one of the two layouts computes wrongly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from search_spaces.protocol.measurement import Iteration
from search_spaces.spec.layout import Precision

LOSS_TOLERANCE: Final[Mapping[Precision, float]] = {
    "fp32": 1e-4,
    "fp16": 5e-3,
    "bf16": 1e-2,
    "fp8": 5e-2,
}
"""Largest relative difference of two losses in the first iterations. Measured over every axis on
the presets for CPUs (docs/explanation/measurement.md): at most 3e-7 in fp32 and 5e-4 in bf16; fp16
has three bits more, and fp8 (other trainers) four bits fewer than bf16, in its products alone."""

STEADY_ITERATIONS: Final = 4
"""Number of first iterations in which the tolerance does not grow."""

GROWTH: Final = 2.0
"""Growth of the tolerance with each later iteration: with a high learning rate, training is chaotic
and a rounding difference doubles about as fast."""

MAX_TOLERANCE: Final = 0.25
"""Largest tolerance: two runs of one model on the same tokens learn about equally well, even when
their weights differ much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossDifference:
    """A difference between the losses of two probes."""

    index: int
    """The iteration."""
    loss: float
    other_loss: float
    tolerance: float
    """The largest allowed relative difference."""


def loss_tolerance(precision: Precision, index: int) -> float:
    """The largest allowed difference of two losses of an iteration, relative to the larger one."""
    # Limited before the power: probes may have thousands of iterations.
    steps = min(max(index - STEADY_ITERATIONS + 1, 0), 64)
    return min(LOSS_TOLERANCE[precision] * GROWTH**steps, MAX_TOLERANCE)


def first_difference(
    iterations: Sequence[Iteration], others: Sequence[Iteration], precision: Precision
) -> LossDifference | None:
    """The first iteration whose losses differ by more than the precision allows, or None.

    The iterations whose loss both probes have are compared, timed or not, up to the first one that
    only one of the two skipped: afterwards their weights differ.
    """
    for own, other in zip(iterations, others, strict=False):
        if own.loss is None or other.loss is None:
            continue
        tolerance = loss_tolerance(precision, own.index)
        # Relative to one nat at least: losses near 0 are noise.
        if abs(own.loss - other.loss) > tolerance * max(own.loss, other.loss, 1.0):
            return LossDifference(
                index=own.index, loss=own.loss, other_loss=other.loss, tolerance=tolerance
            )
        if (own.grad_norm is None) != (other.grad_norm is None):
            return None
    return None
