"""Ended trials as a measurement table: one row a trial, the same columns as published measurements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from results_db.records import CampaignRecord, TrialRecord
from search_spaces.cluster import Cluster
from search_spaces.model_shape import ModelShape
from search_spaces.tables.columns import MEASURED_COLUMNS
from search_spaces.tables.writing import layout_values, machine_values, model_values, table_text

_STATUS: Final = {"COMPLETED": "completed", "INFEASIBLE": "out_of_memory", "FAILED": "failed"}


def measurement_table(campaign: CampaignRecord, trials: Sequence[TrialRecord]) -> str:
    """Ended trials of a campaign as CSV; the columns a trial has no value for stay empty."""
    common = {
        "source": f"layout-tuner campaign {campaign.name}",
        **machine_values(Cluster.from_mapping(campaign.spec["cluster"])),
        **model_values(ModelShape.from_mapping(campaign.spec["model"])),
    }
    return table_text(common | _trial(trial) for trial in trials)


def _trial(trial: TrialRecord) -> dict[str, Any]:
    row = layout_values(trial.layout) | {"status": _STATUS[trial.state]}
    if trial.state == "COMPLETED":
        row |= {column: getattr(trial.measurement, column) for column in MEASURED_COLUMNS}
    return row
