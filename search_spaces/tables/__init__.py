"""Measurement tables: the CSV format of measurements (docs/reference/measurement-tables.md)."""

from layout_tuner.errors import TableInvalidError
from layout_tuner.search_spaces.tables.columns import COLUMNS
from layout_tuner.search_spaces.tables.reading import read_table
from layout_tuner.search_spaces.tables.table import CellKey, MeasurementTable, TableCell, TableRow
from layout_tuner.search_spaces.tables.writing import table_text, write_table

__all__ = [
    "COLUMNS",
    "CellKey",
    "MeasurementTable",
    "TableCell",
    "TableInvalidError",
    "TableRow",
    "read_table",
    "table_text",
    "write_table",
]
