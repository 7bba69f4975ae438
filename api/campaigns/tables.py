"""Campaigns as measurement tables, CSV and Parquet: a row per layout or per trial."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import Any, Final

from layout_tuner.api.errors import TableFormatUnavailableError
from layout_tuner.api.ranked_columns import COLUMNS, variant
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import CampaignRecord, TrialRecord
from layout_tuner.search_spaces.campaigns.fidelity import with_layers
from layout_tuner.search_spaces.layouts.job_settings import JOB_PREFIX
from layout_tuner.search_spaces.layouts.layout import KNOBS
from layout_tuner.search_spaces.models.model_fields import MODEL_RANGES, SWITCHES
from layout_tuner.search_spaces.tables.columns import (
    EXTRA_MODEL_COLUMNS,
    INTERVAL_COLUMNS,
    LATER_MODEL_COLUMNS,
    MEASURED_COLUMNS,
    TRIAL_COLUMNS,
)
from layout_tuner.search_spaces.tables.table import own_source
from layout_tuner.search_spaces.tables.writing import (
    layout_values,
    machine_values,
    model_values,
    table_text,
)
from layout_tuner.version import missing_packages

_STATUS: Final = {"COMPLETED": "completed", "INFEASIBLE": "out_of_memory", "FAILED": "failed"}

PARQUET_TYPE: Final = "application/vnd.apache.parquet"

_SWITCHES: Final = frozenset(name for name, knob in KNOBS.items() if knob.is_switch)
_WORDS: Final = frozenset(
    name for name, knob in KNOBS.items() if not knob.is_number and not knob.is_switch
)
_OF_MODELS: Final = {name: MODEL_RANGES.get(name) for name in EXTRA_MODEL_COLUMNS} | {
    column: MODEL_RANGES.get(name) for column, name in LATER_MODEL_COLUMNS.items()
}
_FLOATS: Final = frozenset(
    {"device_memory_gb", "tokens_per_s", "step_time_s", "step_time_low_s", "step_time_high_s"}
) | {column for column, each in _OF_MODELS.items() if each and not each.is_whole}
_FLAGS: Final = frozenset(
    (*("tied_embeddings", "shortened", "tied_with_first", "disturbed"), *_SWITCHES)
) | {column for column, name in LATER_MODEL_COLUMNS.items() if name in SWITCHES}
_TEXTS: Final = (
    frozenset({"source", "cluster", "model", "status", "family", "variant"})
    | _WORDS
    | {column for column, each in _OF_MODELS.items() if each is None and column not in _FLAGS}
)


def measurement_rows(
    campaign: CampaignRecord, layouts: Sequence[RankedLayout], *, source: str | None = None
) -> list[dict[str, Any]]:
    """Ranked layouts of a campaign, each with the median of its runs: values by column.

    An imported campaign has a source.
    """
    common = _common(campaign)
    if source is not None:
        common["source"] = source  # the measurements were not made here
    return [common | _row(ranked) for ranked in layouts]


def trial_table(campaign: CampaignRecord, trials: Sequence[TrialRecord]) -> str:
    """Ended trials of a campaign as CSV, one row each; failed trials are included.

    The row of a cheap probe has the layout and the layers that ran.
    """
    common = _common(campaign)
    return table_text((common | _trial(campaign, trial) for trial in trials), TRIAL_COLUMNS)


def _common(campaign: CampaignRecord) -> dict[str, Any]:
    return {
        "source": own_source(
            campaign.name,
            campaign.trainer,
            seed=simulated.seed if (simulated := campaign.simulated) else 0,
        ),
        **machine_values(campaign.stored.spec.cluster),
        **model_values(campaign.stored.spec.model),
    }


def _trial(campaign: CampaignRecord, trial: TrialRecord) -> dict[str, Any]:
    row = layout_values(trial.layout) | {"status": _STATUS[trial.state]}
    if trial.num_layers is not None:
        row |= model_values(with_layers(campaign.stored.spec.model, trial.num_layers))
    if trial.state == "COMPLETED":
        row |= {
            column: getattr(trial.measurement, column)
            for column in (*MEASURED_COLUMNS, *TRIAL_COLUMNS)
        }
    return row


def _row(ranked: RankedLayout) -> dict[str, Any]:
    figures = {
        name: COLUMNS["number" if name == "trial" else name].value(ranked)
        for name in (*MEASURED_COLUMNS, *INTERVAL_COLUMNS)
    }
    # Without it a reader of the table would take the rows of a layout for repeats.
    parted = {"variant": variant(ranked) or None}
    return layout_values(ranked.layout) | {"status": "completed"} | figures | parted


def aside_columns(rows: Sequence[Mapping[str, Any]], *, intervals: bool) -> tuple[str, ...]:
    """The columns outside the format that ranked layouts are written with."""
    parted = any(row["variant"] for row in rows)
    return (*(("variant",) if parted else ()), *(INTERVAL_COLUMNS if intervals else ()))


def parquet(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> bytes:
    """The rows as a Parquet file; missing values are null.

    The type of a column does not depend on its values, so that files of several campaigns can be
    concatenated.

    Raises:
        TableFormatUnavailableError: pyarrow is not installed.
    """
    if lacks := missing_packages("format=parquet", ["pyarrow"], extra="service"):
        raise TableFormatUnavailableError(f"{lacks} where the service runs; or take format=csv")
    # Imported here because it takes half as much memory as the rest of the service.
    import pyarrow as arrow
    from pyarrow import parquet as files

    types = {
        **dict.fromkeys(_TEXTS, arrow.string()),
        **dict.fromkeys(_FLOATS, arrow.float64()),
        **dict.fromkeys(_FLAGS, arrow.bool_()),
        **{name: arrow.string() for name in columns if name.startswith(JOB_PREFIX)},
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
    if column in _TEXTS or column.startswith(JOB_PREFIX):
        return str(int(value) if value is True else value)
    return float(value) if column in _FLOATS else value
