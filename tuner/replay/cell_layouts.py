"""The cell of a table as the legal set: nothing else can be asked for, whatever our rules say."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.columns import LayoutColumns, code_of, codes_of
from search_spaces.layout import LAYOUT_FIELDS, Layout
from search_spaces.space import EVERY_ROW
from search_spaces.tables import TableCell, TableRow


class CellLayouts:
    """A `LayoutSet` of the layouts of one cell.

    In the order of their knobs: published tables are often sorted by speed, and an order that
    knows the truth would be found out by every strategy that breaks ties by position.
    """

    def __init__(self, cell: TableCell) -> None:
        rows = sorted(cell.merged, key=lambda row: _order(row.layout))
        self.truth: tuple[TableRow, ...] = tuple(rows)
        """What a probe of each layout would find."""
        self._index = {row.layout: index for index, row in enumerate(rows)}
        self._columns = {
            name: codes_of(name, (getattr(row.layout, name) for row in rows))
            for name in LAYOUT_FIELDS
        }

    def __len__(self) -> int:
        return len(self.truth)

    def column(self, knob: str, rows: slice = EVERY_ROW, /) -> NDArray[np.int64]:
        """See `LayoutSet`."""
        return self._columns[knob][rows]

    def columns(self, rows: slice = EVERY_ROW, /) -> LayoutColumns:
        """See `LayoutSet`."""
        return LayoutColumns(**{name: self.column(name, rows) for name in LAYOUT_FIELDS})

    def layout(self, index: int, /) -> Layout:
        """See `LayoutSet`."""
        return self.truth[index].layout

    def index_of(self, layout: Layout, /) -> int | None:
        """See `LayoutSet`."""
        return self._index.get(layout)


def _order(layout: Layout) -> tuple[Any, ...]:
    return tuple(code_of(name, getattr(layout, name)) for name in LAYOUT_FIELDS)
