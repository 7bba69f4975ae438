"""Many layouts at once: one array a layout field, of shapes that broadcast against each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from search_spaces.layout import LAYOUT_FIELDS, Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Words = NDArray[np.str_]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LayoutColumns:
    """Layouts as columns; the fields are those of `Layout`, each an array instead of a value.

    The shapes need not be equal, only broadcast: over a grid of knobs each column varies along its
    own axis, so that whatever is computed from two knobs costs the product of those two alone.
    """

    num_nodes: Ints
    tp: Ints
    pp: Ints
    dp: Ints
    vpp: Ints
    micro_batch_size: Ints
    num_microbatches: Ints
    zero_stage: Ints
    recompute: Words
    sequence_parallel: Bools
    precision: Words

    @classmethod
    def of(cls, layouts: Layout | Mapping[str, NDArray[Any]] | Self) -> Self:
        """Columns of one layout (arrays without an axis), or of a mapping with every field."""
        if isinstance(layouts, Layout):
            return cls(**{name: np.asarray(getattr(layouts, name)) for name in LAYOUT_FIELDS})
        if isinstance(layouts, Mapping):
            return cls(**{name: layouts[name] for name in LAYOUT_FIELDS})
        return layouts

    @property
    def num_devices(self) -> Ints:
        """Ranks of the job: tp * pp * dp."""
        return self.tp * self.pp * self.dp

    @property
    def global_batch_size(self) -> Ints:
        """Sequences a step: dp * micro_batch_size * num_microbatches."""
        return self.dp * self.micro_batch_size * self.num_microbatches
