"""A measurement table as Parquet: the same columns as in CSV, with types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

PARQUET_TYPE: Final = "application/vnd.apache.parquet"

_TEXTS: Final = frozenset(
    {"source", "cluster", "model", "recompute", "precision", "status", "family"}
)
_FLOATS: Final = frozenset(
    {"device_memory_gb", "tokens_per_s", "step_time_s", "step_time_low_s", "step_time_high_s"}
)
_FLAGS: Final = frozenset({"tied_embeddings", "sequence_parallel", "shortened", "tied_with_first"})


def parquet(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """The rows as a Parquet file; what a row has no value for is null.

    A column's type is its own, whatever is in it, so that the files of several campaigns fit together.
    """
    # Imported where it is needed: it takes half as much memory as all of the service.
    import pyarrow as arrow
    from pyarrow import parquet as files

    types = {
        **dict.fromkeys(_TEXTS, arrow.string()),
        **dict.fromkeys(_FLOATS, arrow.float64()),
        **dict.fromkeys(_FLAGS, arrow.bool_()),
    }
    schema = arrow.schema([(name, types.get(name, arrow.int64())) for name in columns])
    values = {name: [_typed(name, row.get(name)) for row in rows] for name in columns}
    written = BytesIO()
    files.write_table(arrow.Table.from_pydict(values, schema=schema), written)
    return written.getvalue()


def _typed(column: str, value: Any) -> Any:
    if value is None:
        return None
    if column in _FLAGS:
        return bool(value)
    return float(value) if column in _FLOATS else value
