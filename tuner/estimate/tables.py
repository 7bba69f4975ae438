"""Predicted columns for a measurement table."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from search_spaces.columns import LayoutColumns
from search_spaces.tables import MeasurementTable, TableCell
from tuner.estimate.estimator import Calibration, Estimator

PREDICTED_COLUMNS: Final = (
    "predicted_step_time_s",
    "predicted_peak_memory_bytes",
    "predicted_fits",
)
"""Seconds a step, bytes of the fullest device's peak, and the probability that it fits."""


def with_predictions(table: MeasurementTable, calibration: Calibration) -> MeasurementTable:
    """The table with `PREDICTED_COLUMNS` beside what was measured, of which nothing is used."""
    aside = tuple(name for name in table.aside_columns if name not in PREDICTED_COLUMNS)
    return replace(
        table,
        cells=tuple(_predicted(cell, calibration) for cell in table.cells),
        aside_columns=(*aside, *PREDICTED_COLUMNS),
    )


def estimator_of(cell: TableCell, calibration: Calibration) -> Estimator:
    """The estimates for a cell's model, on its machine, under its software."""
    return Estimator(
        model=cell.model, cluster=cell.cluster, software=cell.key.software, calibration=calibration
    )


def table_warnings(table: MeasurementTable, calibration: Calibration) -> list[str]:
    """Where the table lies outside of what the estimates were calibrated on, each said once."""
    return list(
        dict.fromkeys(
            warning
            for cell in table.cells
            for warning in estimator_of(cell, calibration).warnings(_columns(cell))
        )
    )


def _columns(cell: TableCell) -> LayoutColumns:
    return LayoutColumns.of_each(row.layout for row in cell.rows)


def _predicted(cell: TableCell, calibration: Calibration) -> TableCell:
    columns = _columns(cell)
    estimator = estimator_of(cell, calibration)
    peaks, _, fits = estimator.peaks(columns)
    times = np.exp(estimator.step_times(columns)[0])
    rows = []
    for row, *predicted in zip(cell.rows, times, peaks, fits, strict=True):
        texts = (f"{predicted[0]:.6g}", f"{predicted[1]:.0f}", f"{predicted[2]:.4f}")
        aside = {**row.aside, **dict(zip(PREDICTED_COLUMNS, texts, strict=True))}
        rows.append(replace(row, aside=aside))
    return replace(cell, rows=tuple(rows))
