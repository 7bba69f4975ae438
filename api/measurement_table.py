"""The measurement-table format: one row a trial, the same columns as published measurements."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any, Final

from results_db.records import CampaignRecord, TrialRecord
from search_spaces.cluster import GIB

COLUMNS: Final = (
    "source",
    "cluster",
    "device_memory_gb",
    "num_devices",
    "devices_per_node",
    "model",
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_heads",
    "num_kv_heads",
    "seq_length",
    "vocab_size",
    "tied_embeddings",
    "tp",
    "pp",
    "dp",
    "vpp",
    "sequence_parallel",
    "micro_batch_size",
    "num_microbatches",
    "global_batch_size",
    "zero_stage",
    "recompute",
    "precision",
    "status",
    "tokens_per_s",
    "step_time_s",
    "peak_memory_bytes",
)

_MODEL_COLUMNS: Final = COLUMNS[6:14]
_LAYOUT_COLUMNS: Final = tuple(column for column in COLUMNS[14:25] if column != "global_batch_size")
_MEASURED_COLUMNS: Final = COLUMNS[26:]
_STATUS: Final = {"COMPLETED": "completed", "INFEASIBLE": "out_of_memory", "FAILED": "failed"}


def measurement_table(campaign: CampaignRecord, trials: Sequence[TrialRecord]) -> str:
    """Ended trials of a campaign as CSV; the columns a trial has no value for stay empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        row = _machine(campaign) | _model(campaign) | _trial(trial)
        writer.writerow({column: _plain(value) for column, value in row.items()})
    return text.getvalue()


def _machine(campaign: CampaignRecord) -> dict[str, Any]:
    cluster = campaign.spec["cluster"]
    return {
        "source": f"layout-tuner campaign {campaign.name}",
        "cluster": cluster["name"],
        "device_memory_gb": f"{cluster['device_memory_bytes'] / GIB:g}",
        "devices_per_node": cluster["devices_per_node"],
    }


def _model(campaign: CampaignRecord) -> dict[str, Any]:
    model = campaign.spec["model"]
    return {"model": model["name"], **{column: model[column] for column in _MODEL_COLUMNS}}


def _trial(trial: TrialRecord) -> dict[str, Any]:
    row = {column: getattr(trial.layout, column) for column in _LAYOUT_COLUMNS}
    row["num_devices"] = trial.layout.num_devices
    row["global_batch_size"] = trial.layout.global_batch_size
    row["status"] = _STATUS[trial.state]
    if trial.state == "COMPLETED":
        row |= {column: getattr(trial.measurement, column) for column in _MEASURED_COLUMNS}
    return row


def _plain(value: Any) -> Any:
    """Truth as 1 and 0, as the published tables have it."""
    return int(value) if isinstance(value, bool) else value
