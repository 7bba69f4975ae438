"""Standings of layouts that are measured for the first time, many at once and from what is in memory.

Nearly every outcome is of this kind: its layout has no other run, so that its row follows from the outcome
alone, and only the fronts of the campaigns have to be read. What comes out is what
`results_db.standing_upkeep` would make of the database.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from results_db.many_rows import insert_many
from results_db.models import Campaign, Trial
from results_db.standing_tables import StandingRow
from results_db.standing_upkeep import front_of, mark_front, standing_row, weighed
from search_spaces.outcome import Measurement


@dataclass(slots=True)
class FirstRuns:
    """Layouts whose rows are not written yet."""

    _made: defaultdict[int, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    """By campaign."""

    def add(self, campaign: Campaign, trial: Trial, measured: Measurement) -> None:
        """Adds the only run of a layout; one that is not ranked is left out."""
        if not _is_ranked(campaign, measured):
            return
        run = SimpleNamespace(
            id=trial.id,
            layout_key=trial.layout_key,
            num_nodes=trial.num_nodes,
            shortened=measured.shortened,
            step_time_s=measured.step_time_s,
            tokens_per_s=measured.tokens_per_s,
            tokens_per_s_per_device=measured.tokens_per_s_per_device,
            model_tflops_per_device=measured.model_tflops_per_device,
            hardware_tflops_per_device=measured.hardware_tflops_per_device,
            peak_memory_bytes=measured.peak_memory_bytes,
        )
        timed = [i.step_time_s for i in measured.iterations if i.kind == "timed"]
        row = standing_row(campaign, [cast("Row[Any]", run)], {trial.id: timed})
        self._made[campaign.id].append(row)

    def write(self, session: Session) -> None:
        """Writes the rows, and takes those off the fronts that they beat."""
        if not self._made:
            return
        fallen: dict[int, bool] = {}
        fronts = _fronts(session, self._made)
        for campaign_id, made in self._made.items():
            fallen |= _place(fronts[campaign_id], made)
        mark_front(session, fallen)
        rows = [row for made in self._made.values() for row in made]
        insert_many(session, StandingRow, rows)
        self._made.clear()


def _is_ranked(campaign: Campaign, measured: Measurement) -> bool:
    allowed = campaign.max_peak_memory_bytes
    return not measured.oversubscribed and (
        allowed is None or measured.peak_memory_bytes <= allowed
    )


def _fronts(
    session: Session, campaign_ids: Collection[int]
) -> defaultdict[int, list[dict[str, Any]]]:
    found: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    on_front = select(
        StandingRow.campaign_id,
        StandingRow.trial_id,
        StandingRow.shortened,
        StandingRow.weighed_1,
        StandingRow.weighed_2,
        StandingRow.weighed_3,
    ).where(StandingRow.campaign_id.in_(campaign_ids), StandingRow.on_front)
    for row in session.execute(on_front):
        found[row.campaign_id].append(row._asdict())
    return found


def _place(front: list[dict[str, Any]], made: Collection[dict[str, Any]]) -> Mapping[int, bool]:
    """Says of new rows whether they are on the front; of those of before, which are no more."""
    fallen: dict[int, bool] = {}
    for new in made:
        candidates = [*front, new]
        stand = front_of([weighed(row) for row in candidates])
        for row, stays in zip(candidates, stand, strict=True):
            if row is new or "layout_key" in row:
                row["on_front"] = stays
            elif not stays:
                fallen[row["trial_id"]] = False
        front[:] = [row for row, stays in zip(candidates, stand, strict=True) if stays]
    return fallen
