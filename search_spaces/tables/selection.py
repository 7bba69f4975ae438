"""Filters for the cells of a table, such as `model=GPT-3.6B,num_devices=64`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, Self

from layout_tuner.documents.reading import shown
from layout_tuner.errors import TableInvalidError
from layout_tuner.search_spaces.tables.table import CellKey, MeasurementTable, TableCell

KEYS: Final = tuple(field.name for field in fields(CellKey))


@dataclass(frozen=True, slots=True)
class CellFilter:
    """The allowed values of a cell's key; `a|b` allows both."""

    wanted: tuple[tuple[str, tuple[str, ...]], ...] = ()

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads `key=value[|value...][,key=value...]`; an empty text selects every cell.

        Raises:
            TableInvalidError: a cell has no such key.
        """
        wanted = []
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, values = part.partition("=")
            if not equals or key.strip() not in KEYS:
                raise TableInvalidError(
                    f"{part!r} selects no cells; write KEY=VALUE with KEY one of {', '.join(KEYS)}"
                )
            wanted.append((key.strip(), tuple(value.strip() for value in values.split("|"))))
        return cls(tuple(wanted))

    def __call__(self, cell: TableCell) -> bool:
        return all(str(getattr(cell.key, key)) in values for key, values in self.wanted)


def select(table: MeasurementTable, filters: Sequence[CellFilter]) -> tuple[TableCell, ...]:
    """The cells that pass a filter, or all without filters; TableInvalidError if none passes."""
    cells = tuple(c for c in table.cells if not filters or any(passes(c) for passes in filters))
    if not cells:
        known = "; ".join(str(cell.key) for cell in table.cells[:5])
        more = ", ..." if len(table.cells) > 5 else ""
        raise TableInvalidError(f"no cell is selected; the table has {known}{more}")
    return cells


def refuse_simulated(cells: Sequence[TableCell]) -> None:
    """Raises TableInvalidError for simulated cells, where measurements are asked for."""
    for cell in cells:
        if cell.key.is_simulated:
            raise TableInvalidError(
                f"the rows of {shown(cell.key.source)} are simulated, and would stand for "
                "measurements; select cells that were measured"
            )
