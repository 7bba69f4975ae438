"""The legal layouts of a space in tiles: groups of layouts that differ in micro-batches alone.

Most of what is predicted of a layout does not depend on the number of its micro-batches, and is
computed once for the layouts of a group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, codes_of
from layout_tuner.search_spaces.spaces.search_space import LegalSet

_TOGETHER: Final = 1 << 16
"""Layouts of a tile: a value for each takes 512 KiB."""


def layout_tiles(legal: LegalSet) -> Iterator[tuple[slice, LayoutColumns, Ints]]:
    """All layouts of a legal set, in their order.

    Yields positions of some layouts in succession, a tile, and their places in the flattened tile.
    Its columns are of shape [groups, 1]. Where the space chooses numbers of micro-batches, theirs
    are of shape [1, numbers], so that the tile also has combinations that are not legal.
    """
    space, knob = legal.space, "num_microbatches"
    choices, inner = codes_of(knob, space.values(knob)), 1
    if len(choices):
        inner = math.prod(space.shape[space.knobs.index(knob) + 1 :])
    numbers = max(len(choices), 1)
    for start in range(0, len(legal), _TOGETHER):
        rows = slice(start, start + _TOGETHER)
        # Digits of the index: knobs before the number of micro-batches, the number, knobs after it.
        first = int(legal.indices[start]) // (numbers * inner) * inner
        index = (legal.indices[rows] - first * numbers).astype(np.int32)
        upper = index // inner
        outer = upper // numbers
        group = index - (upper - outer) * inner
        occurs = np.zeros(int(group.max()) + 1, dtype=np.bool_)
        occurs[group] = True
        found = np.flatnonzero(occurs)
        rank = np.empty(occurs.size, dtype=np.int64)
        rank[found] = np.arange(len(found))
        outside, inside = np.divmod(found + first, inner)
        each = replace(legal, indices=outside * (numbers * inner) + inside).columns()
        columns = {name: getattr(each, name)[:, None] for name in LAYOUT_FIELDS}
        if len(choices):
            columns[knob] = choices[None, :]
        tile = LayoutColumns(**columns, texts=each.texts)
        yield rows, tile, rank[group] * numbers + (upper - outer * numbers)
