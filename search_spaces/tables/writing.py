"""Writes measurement tables: the published columns in their order, then all other columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables.columns import (
    COLUMNS,
    EXTRA_COLUMNS,
    EXTRA_MODEL_COLUMNS,
    LATER_MODEL_COLUMNS,
    MEASURED_COLUMNS,
    MODEL_COLUMNS,
)
from layout_tuner.search_spaces.tables.rows import inferred_family
from layout_tuner.search_spaces.tables.table import MeasurementTable, TableCell, TableRow
from layout_tuner.units import GIB


def table_text(rows: Iterable[Mapping[str, Any]], aside_columns: Sequence[str] = ()) -> str:
    """Rows of values by column as CSV; a column without a value is empty."""
    listed = list(rows)
    columns = columns_of(listed, aside_columns)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for row in listed:
        writer.writerow([_plain(row.get(column)) for column in columns])
    return text.getvalue()


def columns_of(
    rows: Sequence[Mapping[str, Any]], aside_columns: Sequence[str] = ()
) -> tuple[str, ...]:
    """The columns of a table; an extra column is included if some row has a value for it.

    So is the column of a job knob that some row sets.
    """
    extra = [name for name in EXTRA_COLUMNS if any(row.get(name) is not None for row in rows)]
    knobs = {name for row in rows for name in row if name.startswith(JOB_PREFIX)}
    return (*COLUMNS, *extra, *sorted(knobs), *aside_columns)


def write_table(table: MeasurementTable) -> str:
    """The table as CSV, in the order of its rows; empty fields stay empty."""
    rows = [
        (row.number, cell_values(cell) | row_values(row))
        for cell in table.cells
        for row in cell.rows
    ]
    ordered = sorted(rows, key=lambda numbered: numbered[0])
    return table_text((row for _, row in ordered), table.aside_columns)


def cell_values(cell: TableCell) -> dict[str, Any]:
    """The values that all rows of a cell share, by column."""
    return {
        "source": cell.key.source,
        **machine_values(cell.cluster),
        **model_values(cell.model),
        "num_devices": cell.key.num_devices,
        "global_batch_size": cell.key.global_batch_size,
    }


def machine_values(cluster: Cluster) -> dict[str, Any]:
    return {
        "cluster": cluster.name,
        "device_memory_gb": f"{cluster.device_memory_bytes / GIB:g}",
        "devices_per_node": cluster.devices_per_node,
    }


def model_values(model: ModelShape) -> dict[str, Any]:
    """A model's shape, by column; its family only where readers would take it for another."""
    inferred = inferred_family(hidden_size=model.hidden_size, ffn_hidden_size=model.ffn_hidden_size)
    values = {"model": model.name, **{name: getattr(model, name) for name in MODEL_COLUMNS}}
    stated = model.to_mapping()
    values |= {name: stated[name] for name in EXTRA_MODEL_COLUMNS if name in stated}
    runs = (each if isinstance(each, dict) else {each: 1} for each in stated.get("layer_kinds", ()))
    words = [f"{kind}*{n}" if n > 1 else kind for run in runs for kind, n in run.items()]
    stated["layer_kinds"] = " ".join(words) or None
    values |= {column: stated.get(name) for column, name in LATER_MODEL_COLUMNS.items()}
    return values | {"family": None if model.family == inferred else model.family}


def layout_values(layout: Layout) -> dict[str, Any]:
    values: dict[str, Any] = {
        "num_devices": layout.num_devices,
        "global_batch_size": layout.global_batch_size,
    }
    for name, knob in KNOBS.items():
        value = getattr(layout, name)
        if knob.table_column == "if_not_default" and value == knob.default:
            values[name] = None
        elif knob.table_column != "derived":
            values[name] = value
    # Switches as words: 1 and 0 would be read as numbers where the knob is not known.
    job = {
        name: str(value).lower() if value is True or value is False else value
        for name, value in layout.job.items()
    }
    return values | {f"{JOB_PREFIX}{name}": value for name, value in job.items()}


def row_values(row: TableRow) -> dict[str, Any]:
    """A row less what all rows of its cell say, by column."""
    return {
        **layout_values(row.layout),
        **dict.fromkeys(row.unstated),
        "status": row.status,
        **{name: getattr(row, name) for name in MEASURED_COLUMNS},
        **row.aside,
    }


def _plain(value: Any) -> Any:
    """Truth as 1 and 0, as the published tables have it; nothing as nothing."""
    if value is None:
        return ""
    return int(value) if isinstance(value, bool) else value
