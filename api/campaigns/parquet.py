"""A measurement table as Parquet: the columns of the CSV, with types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

from search_spaces.spec.layout import KNOBS

PARQUET_TYPE: Final = "application/vnd.apache.parquet"

_SWITCHES: Final = frozenset(name for name, knob in KNOBS.items() if knob.is_switch)
_WORDS: Final = frozenset(
    name for name, knob in KNOBS.items() if not knob.is_number and not knob.is_switch
)
_TEXTS: Final = frozenset({"source", "cluster", "model", "status", "family"}) | _WORDS
_FLOATS: Final = frozenset(
    {"device_memory_gb", "tokens_per_s", "step_time_s", "step_time_low_s", "step_time_high_s"}
)
_FLAGS: Final = (
    frozenset({"tied_embeddings", "shortened", "tied_with_first", "disturbed"}) | _SWITCHES
)


def parquet(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """The rows as a Parquet file; missing values are null.

    The type of a column does not depend on its values, so that files of several campaigns can be
    concatenated.
    """
    # Imported here because it takes half as much memory as the rest of the service.
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


def num_rows(content: bytes) -> int:
    from pyarrow import parquet as files

    return int(files.ParquetFile(BytesIO(content)).metadata.num_rows)


def _typed(column: str, value: Any) -> Any:
    if value is None:
        return None
    if column in _FLAGS:
        return bool(value)
    return float(value) if column in _FLOATS else value
