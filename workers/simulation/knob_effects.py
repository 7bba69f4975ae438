"""What job knobs do on a simulated machine: effects that searches do not know.

The seed of the simulation, the trainer, the knob and its value decide an effect, and nothing else:
not the order of trials, nor the other knobs. The ranges are those in which knobs of real trainers
are published to act: 0.6 to 1.3 of one or two parts of a step (docs/simulator.md).
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Final, Literal, Self, get_args

import numpy as np

from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.search_spaces.layouts.layout import Layout

Part = Literal["compute", "tp", "cp", "ep", "dp", "pp", "host", "optimizer"]
"""Parts of a step that a knob may scale, as far as they are exposed."""
PARTS: Final[tuple[Part, ...]] = get_args(Part)

FACTORS: Final = (0.6, 1.3)
"""The range of factors on a part of the step; their logarithms are uniform in it."""
MEMORY_FACTORS: Final = (0.95, 1.1)
"""The range of factors on what passes hold; weights and optimizer states stay as they are."""
_OTHER_WITH_TP: Final = 1 / 3
"""Share of the values whose factors are other ones where tp is above 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenEffect:
    """The factors of a job's settings on the parts of its step, and on what its passes hold."""

    factors: tuple[float, ...] = (1.0,) * len(PARTS)
    """By part, in the order of `PARTS`."""
    memory: float = 1.0

    def of(self, part: Part) -> float:
        return self.factors[PARTS.index(part)]

    def and_of(self, other: Self) -> HiddenEffect:
        """Both effects together."""
        pairs = zip(self.factors, other.factors, strict=True)
        return HiddenEffect(
            factors=tuple(math.prod(pair) for pair in pairs), memory=self.memory * other.memory
        )


NO_EFFECT: Final = HiddenEffect()


@dataclass(frozen=True, kw_only=True, slots=True)
class HiddenEffects:
    """The effects of all knobs of a trainer in one simulation."""

    seed: int = 0
    trainer: str = ""

    def of(self, layout: Layout) -> HiddenEffect:
        """What the settings of a layout's job do; those at the trainer's defaults do nothing."""
        effect = NO_EFFECT
        for name, value in layout.job.items():
            effect = effect.and_of(self.of_value(name, value, has_tp=layout.tp > 1))
        return effect

    def of_value(self, name: str, value: JobValue, *, has_tp: bool) -> HiddenEffect:
        """The effect of one value of a knob."""
        said = repr((self.seed, self.trainer, name, value))
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(said.encode()).digest()[:8]))
        touched = rng.choice(len(PARTS), size=rng.integers(1, 3), replace=False)
        low, high = map(math.log, FACTORS)
        usual, with_tp = np.exp(rng.uniform(low, high, size=(2, len(PARTS))))
        differs = rng.random() < _OTHER_WITH_TP
        drawn = with_tp if has_tp and differs else usual
        factors = np.ones(len(PARTS))
        factors[touched] = drawn[touched]
        return HiddenEffect(
            factors=tuple(factors.tolist()), memory=float(rng.uniform(*MEMORY_FACTORS))
        )


NO_EFFECTS: Final = HiddenEffects()
