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

from sqlalchemy import Integer, Select, bindparam, func, select
from sqlalchemy.orm import Session

from results_db.driver_statement import DriverStatement
from results_db.import_tables import Import
from results_db.leaderboard import constrained
from results_db.models import BreakdownRow, MeasurementRow, StageMemory, Trial
from results_db.part import StorePart
from results_db.places import (
    PLACE,
    REPEATED,
    First,
    Place,
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
_ON_FRONT: Final = 1 + len(PLACE)
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
        statements = _statements(ranking.by.key, weighed)
        with self._db.read() as session:
            page = None
            if listing.is_whole and not offset:
                page = _first_page(session, statements, campaign.id, limit)
            if page is None:
                page = _any_page(session, statements.query, ranking, limit, offset)
            memory = campaign.spec["cluster"].get("device_memory_bytes")
            return PageOfLayouts(
                total=page.total,
                constrained=constrained(session, campaign.id, campaign.max_peak_memory_bytes),
                source=page.source,
                layouts=[
                    statements.shape.document(row, page.first, page.stages[row[1]], memory)
                    for row in page.rows
                    if page.first is not None
                ],
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
        self, row: Place, first: First, stages: Stages, memory: int | None
    ) -> dict[str, Any]:
        parts = self.parts
        estimate = estimate_of(row, first.spread)
        factor = None if estimate is None else estimate.factor
        value, _, num_runs, shortened, step_time_s = row[:5]
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
            on_front=row[_ON_FRONT],
            value=value,
            value_low=None if factor is None else value / factor,
            value_high=None if factor is None else value * factor,
            step_time_s=step_time_s,
            num_runs=num_runs,
            shortened=shortened,
            tied_with_first=is_tied(value, estimate, first),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """What a page is made of."""

    rows: Sequence[Place]
    first: First | None
    stages: Mapping[int, Stages]
    total: int
    source: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Statements:
    """What is asked for a page."""

    query: Select[*tuple[Any, ...]]
    """A row a layout, of whatever campaign and in whatever order."""
    shape: _Shape
    rows: DriverStatement
    """The first of a campaign's layouts, the best first."""
    stages: DriverStatement
    """The stages of their first trials."""
    repeats: DriverStatement
    """The layouts that were measured more than once, with what ranks them."""
    about: DriverStatement
    """How many layouts there are, and where an imported campaign comes from."""


def _first_page(
    session: Session, statements: _Statements, campaign_id: int, limit: int
) -> _Page | None:
    """The page that is asked for most: all layouts, from the first on; None: the first is no winner."""
    rows = statements.rows.rows(session, campaign=campaign_id, most=limit)
    if rows and rows[0][3]:
        return None
    found = statements.repeats.rows(session, campaign=campaign_id) if rows else ()
    repeats = [row[:2] for row in sorted(found, key=lambda row: (-row[2], row[3]))]
    ((total, source),) = statements.about.rows(session, campaign=campaign_id)
    return _Page(
        rows=rows,
        first=First.of(rows[0], repeats) if rows else None,
        stages=_by_trial(statements.stages.rows(session, campaign=campaign_id, most=limit)),
        total=total,
        source=source,
    )


def _any_page(
    session: Session,
    query: Select[*tuple[Any, ...]],
    ranking: Ranking,
    limit: int,
    offset: int,
) -> _Page:
    rows, first = listed(session, ranking, query, limit=limit, offset=offset)
    stages = _STAGES.where(StageMemory.trial_id.in_([row.trial_id for row in rows]))
    source = select(Import.source).where(Import.campaign_id == ranking.campaign_id)
    about = select(count_listed(ranking, first).scalar_subquery(), source.scalar_subquery())
    ((total, source_told),) = rows_of(session, about)
    return _Page(
        rows=rows,
        first=first,
        stages=_by_trial(rows_of(session, stages)),
        total=total,
        source=source_told,
    )


_STAGES: Final = select(
    StageMemory.trial_id, StageMemory.peak_memory_bytes, StageMemory.peak_reserved_bytes
).order_by(StageMemory.trial_id, StageMemory.stage)


def _by_trial(rows: Sequence[Place]) -> Mapping[int, Stages]:
    found: defaultdict[int, Stages] = defaultdict(list)
    for trial_id, peak, held in rows:
        found[trial_id].append((peak, held))
    return found


@lru_cache(maxsize=1000)
def _statements(by: str, objectives: tuple[str, ...]) -> _Statements:
    """The statements of a page, there are only so many: to build one takes as long as to run it."""
    query, shape = _query(by, objectives)
    order = getattr(StandingRow, by).desc(), StandingRow.trial_id
    in_campaign = StandingRow.campaign_id == bindparam("campaign", type_=Integer)
    most = bindparam("most", type_=Integer)
    listed_ids = select(StandingRow.trial_id).where(in_campaign).order_by(*order).limit(most)
    # Sorted by us: SQLite would go through all of a campaign's layouts to have them in order.
    repeats = select(
        StandingRow.runs_squares,
        StandingRow.num_runs,
        getattr(StandingRow, by),
        StandingRow.trial_id,
    ).where(in_campaign, REPEATED)
    source = select(Import.source).where(Import.campaign_id == bindparam("campaign", type_=Integer))
    total = select(func.count()).select_from(StandingRow).where(in_campaign)
    return _Statements(
        query=query,
        shape=shape,
        rows=DriverStatement(query.where(in_campaign).order_by(*order).limit(most)),
        stages=DriverStatement(_STAGES.where(StageMemory.trial_id.in_(listed_ids))),
        repeats=DriverStatement(repeats),
        about=DriverStatement(select(total.scalar_subquery(), source.scalar_subquery())),
    )


@lru_cache(maxsize=1000)
def _query(by: str, objectives: Sequence[str]) -> tuple[Select[*tuple[Any, ...]], _Shape]:
    """A row a layout, and where in it everything is."""
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
