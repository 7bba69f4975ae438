"""A page of the leaderboard as plain values, as quickly as the database hands them out.

A page has some 7,000 figures. One statement selects them all, in the order of the documents that they
end in; neither rows of the ORM nor records are made of them on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Row, Select, select
from sqlalchemy.orm import Session

from results_db.import_tables import Import
from results_db.leaderboard import constrained
from results_db.models import BreakdownRow, MeasurementRow, StageMemory, Trial
from results_db.part import StorePart
from results_db.places import (
    PLACE,
    First,
    Ranking,
    count_listed,
    estimate_of,
    is_tied,
    listed,
    rows_of,
)
from results_db.records import CampaignRecord
from results_db.rows import COST_COLUMNS, PLAIN_MEASUREMENT_FIELDS
from results_db.standing import WHOLE, Listing
from results_db.standing_tables import StandingRow
from search_spaces.layout import LAYOUT_FIELDS
from search_spaces.objectives import MEMORY_HEADROOM, memory_headroom
from search_spaces.outcome import Breakdown

_TRIAL: Final = (
    "id",
    "number",
    "campaign_id",
    "layout_key",
    "num_devices",
    "global_batch_size",
    "state",
    "reason",
    "message",
    "node",
    "attempt",
    "lost_attempts",
    "iterations_done",
    "repeat_of",
    "node_seconds",
    "created_at",
    "started_at",
    "ended_at",
)
_COST: Final = tuple(COST_COLUMNS)
_BREAKDOWN: Final = tuple(field.name for field in fields(Breakdown))


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOfLayouts:
    """A page of the leaderboard."""

    total: int
    """How many layouts are listed in all."""
    constrained: int
    """Completed trials that are not ranked since they break the campaign's constraints."""
    source: str | None
    """Where the measurements of an imported campaign come from; None: it ran here."""
    layouts: Sequence[dict[str, Any]]
    """Each as a document: its first trial with the measurement, and how it stands."""


class LeaderboardPages(StorePart):
    """The part of the store that hands out whole pages of a leaderboard."""

    def page_of_layouts(
        self,
        campaign: CampaignRecord,
        objective: str,
        *,
        listing: Listing = WHOLE,
        limit: int,
        offset: int = 0,
    ) -> PageOfLayouts:
        """The same as `Leaderboard.standings`, as plain values.

        Args:
            campaign: whose leaderboard it is.
            objective: what to rank by.
            listing: which layouts are listed.
            limit: most layouts to return.
            offset: how many of those listed to pass over.

        Raises:
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        own = campaign.objective
        ranking = Ranking.of(campaign.id, objective, own=own, listing=listing)
        weighed = tuple(dict.fromkeys((*campaign.objectives, objective)))
        if listing.within_percent is not None:
            weighed = tuple(dict.fromkeys((*weighed, "tokens_per_node_hour")))
        with self._db.read() as session:
            query, shape = _query(ranking.by.key, weighed)
            rows, first = listed(session, ranking, query, limit=limit, offset=offset)
            stages = _stages(session, [row.trial_id for row in rows])
            memory = campaign.spec["cluster"].get("device_memory_bytes")
            layouts = [
                shape.document(row, first, stages[row.trial_id], memory)
                for row in rows
                if first is not None
            ]
            total, source = rows_of(
                session,
                select(
                    count_listed(ranking, first).scalar_subquery(),
                    select(Import.source)
                    .where(Import.campaign_id == campaign.id)
                    .scalar_subquery(),
                ),
            )[0]
            return PageOfLayouts(
                total=total,
                constrained=constrained(session, campaign.id, campaign.max_peak_memory_bytes),
                source=source,
                layouts=layouts,
            )


Stages = list[tuple[int, int | None]]
"""Peaks of a trial's stages, and what their allocators held."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Which columns of a row make which part of a document."""

    weighed: tuple[str, ...]
    """Objectives that are rates."""
    parts: Mapping[str, slice]

    def document(
        self, row: Row[*tuple[Any, ...]], first: First, stages: Stages, memory: int | None
    ) -> dict[str, Any]:
        parts = self.parts
        estimate = estimate_of(row, first.spread)
        factor = None if estimate is None else estimate.factor
        value = row.by
        measurement = dict(
            zip(PLAIN_MEASUREMENT_FIELDS, row[parts["measurement"]], strict=True),
            peak_memory_bytes_by_stage=[peak for peak, _ in stages],
            peak_reserved_bytes_by_stage=[held for _, held in stages if held is not None],
            breakdown=None,
        )
        breakdown = row[parts["breakdown"]]
        if breakdown[0] is not None:
            measurement["breakdown"] = dict(zip(_BREAKDOWN, breakdown, strict=True))
        cost = row[parts["cost"]]
        objectives = dict(zip(self.weighed, row[parts["objectives"]], strict=True))
        if MEMORY_HEADROOM in objectives:
            peak = measurement["peak_memory_bytes"]
            objectives[MEMORY_HEADROOM] = memory_headroom(peak, memory)
        return dict(
            zip(_TRIAL, row[parts["trial"]], strict=True),
            layout=dict(zip(LAYOUT_FIELDS, row[parts["layout"]], strict=True)),
            cost=dict(zip(_COST, cost, strict=True), total=cost[0] + cost[1] + cost[2] + cost[3]),
            measurement=measurement,
            objectives=objectives,
            on_front=row.on_front,
            value=value,
            value_low=None if factor is None else value / factor,
            value_high=None if factor is None else value * factor,
            step_time_s=row.step_time_s,
            num_runs=row.num_runs,
            shortened=row.shortened,
            tied_with_first=is_tied(value, estimate, first),
        )


@lru_cache(maxsize=1000)
def _query(by: str, objectives: Sequence[str]) -> tuple[Select[*tuple[Any, ...]], _Shape]:
    """The statement of a page, and where in its rows everything is.

    There are only so many of them, and to build one takes as long as to run it.
    """
    parts = {
        "place": [getattr(StandingRow, by).label("by"), *PLACE, StandingRow.on_front],
        "objectives": [
            getattr(StandingRow, "value" if name == MEMORY_HEADROOM else name).label(f"of_{name}")
            for name in objectives
        ],
        "trial": [getattr(Trial, name).label(f"of_trial_{name}") for name in _TRIAL],
        "layout": [getattr(Trial, name).label(f"layout_{name}") for name in LAYOUT_FIELDS],
        "cost": [getattr(Trial, COST_COLUMNS[name]).label(f"cost_{name}") for name in _COST],
        "measurement": [
            getattr(MeasurementRow, name).label(f"measured_{name}")
            for name in PLAIN_MEASUREMENT_FIELDS
        ],
        "breakdown": [getattr(BreakdownRow, name).label(f"part_{name}") for name in _BREAKDOWN],
    }
    slices, begin = {}, 0
    for name, columns in parts.items():
        slices[name] = slice(begin, begin + len(columns))
        begin += len(columns)
    query = (
        select(*(column for columns in parts.values() for column in columns))
        .select_from(StandingRow)
        .join(Trial, Trial.id == StandingRow.trial_id)
        .join(MeasurementRow, MeasurementRow.trial_id == StandingRow.trial_id)
        .outerjoin(BreakdownRow, BreakdownRow.trial_id == StandingRow.trial_id)
    )
    return query, _Shape(weighed=tuple(objectives), parts=slices)


def _stages(session: Session, trial_ids: Sequence[int]) -> Mapping[int, Stages]:
    found: defaultdict[int, Stages] = defaultdict(list)
    query = (
        select(StageMemory.trial_id, StageMemory.peak_memory_bytes, StageMemory.peak_reserved_bytes)
        .where(StageMemory.trial_id.in_(trial_ids))
        .order_by(StageMemory.trial_id, StageMemory.stage)
    )
    for trial_id, peak, held in rows_of(session, query):
        found[trial_id].append((peak, held))
    return found
