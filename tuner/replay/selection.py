"""Which cells of a table are meant: `model=GPT-3.6B,num_devices=64`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final, Self

from search_spaces.tables import CellKey, MeasurementTable, TableCell, read_table
from tuner.knowledge import Knowledge, Sample
from tuner.replay.errors import ReplayFailedError
from tuner.strategies.base import ObservationState

KEYS: Final = tuple(field.name for field in fields(CellKey))
_STATES: Final[dict[str, ObservationState]] = {
    "completed": "completed",
    "out_of_memory": "infeasible",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class CellFilter:
    """What the key of a cell must be; `a|b` is either."""

    wanted: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads `key=value[|value...][,key=value...]`; empty is every cell.

        Raises:
            ReplayFailedError: a key is none of a cell's.
        """
        wanted = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, values = part.partition("=")
            if not equals or key.strip() not in KEYS:
                raise ReplayFailedError(
                    f"{part!r} selects no cells; write KEY=VALUE with KEY one of {', '.join(KEYS)}"
                )
            wanted.append((key.strip(), tuple(value.strip() for value in values.split("|"))))
        return cls(tuple(wanted))

    def __call__(self, cell: TableCell) -> bool:
        return all(str(getattr(cell.key, key)) in values for key, values in self.wanted)


def select(table: MeasurementTable, filters: tuple[CellFilter, ...]) -> tuple[TableCell, ...]:
    """The cells that pass one of the filters; without filters every cell.

    Raises:
        ReplayFailedError: there is none.
    """
    cells = tuple(c for c in table.cells if not filters or any(passes(c) for passes in filters))
    if not cells:
        known = "; ".join(str(cell.key) for cell in table.cells[:5])
        more = ", ..." if len(table.cells) > 5 else ""
        raise ReplayFailedError(f"no cell is selected; the table has {known}{more}")
    return cells


def read_calibrating_cells(described: str) -> tuple[TableCell, ...]:
    """The cells of `TABLE`, or of `TABLE:KEY=VALUE,...` those that the filter passes.

    Raises:
        TableInvalidError: the table cannot be read.
        ReplayFailedError: no cell is selected.
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
