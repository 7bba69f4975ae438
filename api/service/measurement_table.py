"""Campaigns as measurement tables: a row a layout of the leaderboard, or a row a trial."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from results_db.records import CampaignRecord, TrialRecord
from results_db.standing import Standing
from search_spaces.cluster import Cluster
from search_spaces.model_shape import ModelShape
from search_spaces.tables.columns import MEASURED_COLUMNS
from search_spaces.tables.table import OWN_SOURCE
from search_spaces.tables.writing import layout_values, machine_values, model_values, table_text

INTERVAL_COLUMNS: Final = (
    "num_runs",
    "step_time_low_s",
    "step_time_high_s",
    "shortened",
    "tied_with_first",
)
"""Columns of our own, which readers of the format keep aside."""

_STATUS: Final = {"COMPLETED": "completed", "INFEASIBLE": "out_of_memory", "FAILED": "failed"}


def measurement_table(
    campaign: CampaignRecord,
    standings: Sequence[Standing],
    *,
    source: str | None = None,
    intervals: bool = False,
) -> str:
    """Ranked layouts of a campaign as CSV, each with the median of its runs.

    Args:
        campaign: whose they are.
        standings: the layouts, in order.
        source: where the measurements of an imported campaign come from; None: it ran here.
        intervals: whether to add how often each was measured and how sure its step time is.
    """
    rows = measurement_rows(campaign, standings, source=source)
    return table_text(rows, INTERVAL_COLUMNS if intervals else ())


def measurement_rows(
    campaign: CampaignRecord, standings: Sequence[Standing], *, source: str | None = None
) -> list[dict[str, Any]]:
    """The rows of `measurement_table`, values by column."""
    common = _common(campaign)
    if source is not None:
        common["source"] = source  # what nobody measured here must not read as if it had been
    return [common | _row(standing) for standing in standings]


def trial_table(campaign: CampaignRecord, trials: Sequence[TrialRecord]) -> str:
    """Ended trials of a campaign as CSV, one row each, those that did not complete included."""
    common = _common(campaign)
    return table_text(common | _trial(trial) for trial in trials)


def _common(campaign: CampaignRecord) -> dict[str, Any]:
    return {
        "source": f"{OWN_SOURCE} {campaign.name}",
        **machine_values(Cluster.from_mapping(campaign.spec["cluster"])),
        **model_values(ModelShape.from_mapping(campaign.spec["model"])),
    }


def _trial(trial: TrialRecord) -> dict[str, Any]:
    row = layout_values(trial.layout) | {"status": _STATUS[trial.state]}
    if trial.state == "COMPLETED":
        row |= {column: getattr(trial.measurement, column) for column in MEASURED_COLUMNS}
    return row


def _row(standing: Standing) -> dict[str, Any]:
    measured = standing.trial.measurement
    assert measured is not None  # it is ranked
    row = layout_values(standing.trial.layout) | {"status": "completed"}
    row |= {column: getattr(measured, column) for column in MEASURED_COLUMNS}
    if standing.num_runs > 1:
        row["step_time_s"] = standing.step_time_s
        row["tokens_per_s"] = measured.tokens_per_step / standing.step_time_s
    return row | {
        "num_runs": standing.num_runs,
        "step_time_low_s": standing.step_time_low_s,
        "step_time_high_s": standing.step_time_high_s,
        "shortened": standing.shortened,
        "tied_with_first": standing.is_tied,
    }
