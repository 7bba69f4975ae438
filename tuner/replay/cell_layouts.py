"""The layouts of a table's cell as a legal set."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layout_tuner.documents.reading import shown
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns, code_of
from layout_tuner.search_spaces.spaces.search_space import EVERY_ROW
from layout_tuner.search_spaces.tables import TableCell, TableRow
from layout_tuner.terminal.plurals import listed
from layout_tuner.tuner.errors import ReplayFailedError


class CellLayouts:
    """A `LayoutSet` of the layouts of one cell, with the settings of their jobs.

    They are sorted by their knobs: published tables are often sorted by speed, and strategies that
    break ties by position would profit from such an order.

    Raises:
        ReplayFailedError: rows of one layout differ in a column that the format does not know.
    """

    def __init__(self, cell: TableCell) -> None:
        for (layout, _), differences in cell.differences().items():
            if differences:
                names = listed((shown(name) for name, _ in differences), 3)
                raise ReplayFailedError(
                    f"cell {cell.key}: rows of the layout {layout.key} differ in {names}, and a search "
                    "knows layouts alone; keep the rows with one value there, or drop the column"
                )
        rows = sorted(
            cell.merged,
            key=lambda row: (
                [code_of(name, getattr(row.layout, name)) for name in LAYOUT_FIELDS],
                row.layout.job.key,
            ),
        )
        self.truth: tuple[TableRow, ...] = tuple(rows)
        self._index = {row.layout: index for index, row in enumerate(rows)}
        self._columns = LayoutColumns.of_each(row.layout for row in rows)

    def __len__(self) -> int:
        return len(self.truth)

    def column(self, knob: str, rows: slice = EVERY_ROW, /) -> NDArray[np.int64]:
        column: NDArray[np.int64] = getattr(self._columns, knob)[rows]
        return column

    def columns(self, rows: slice = EVERY_ROW, /) -> LayoutColumns:
        return self._columns.rows(rows)

    def layout(self, index: int, /) -> Layout:
        """See `LayoutSet`."""
        return self.truth[index].layout

    def index_of(self, layout: Layout, /) -> int | None:
        return self._index.get(layout)
