"""Which cells of a table are meant: `model=GPT-3.6B,num_devices=64`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from search_spaces.tables import TableCell, read_table
from search_spaces.tables.selection import CellFilter as CellFilter
from search_spaces.tables.selection import select as select
from tuner.knowledge import Knowledge, Sample
from tuner.strategies.base import ObservationState

_STATES: Final[dict[str, ObservationState]] = {
    "completed": "completed",
    "out_of_memory": "infeasible",
    "failed": "failed",
}


def read_calibrating_cells(described: str) -> tuple[TableCell, ...]:
    """The cells of `TABLE`, or of `TABLE:KEY=VALUE,...` those that the filter passes.

    Raises:
        TableInvalidError: it cannot be read, or no cell is selected.
    """
    path, colon, text = described.rpartition(":")
    if not colon or "=" not in text or Path(described).exists():
        path, text = described, ""
    return select(read_table(Path(path)), (CellFilter.read(text),))


def knowledge_of(cells: Iterable[TableCell]) -> Knowledge:
    """The rows of some cells as samples, in their order; repeats of a layout count once."""
    return Knowledge(
        samples=tuple(
            Sample(
                model=cell.model,
                cluster=cell.cluster,
                layout=row.layout,
                state=_STATES[row.status],
                step_time_s=row.step_time_s,
                peak_memory_bytes=row.peak_memory_bytes,
                software=cell.key.software,
            )
            for cell in cells
            for row in cell.merged
        )
    )
