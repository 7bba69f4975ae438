"""A page of the leaderboard as plain values, as quickly as the database hands them out.

A page has some 7,000 figures. One statement selects them all, in the order of the documents that they
end in; neither rows of the ORM nor records are made of them on the way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Integer, Select, String, bindparam, func, select
from sqlalchemy.orm import Session

from results_db.campaign_mark import mark_of
from results_db.campaigns import campaign_not_found
from results_db.driver_statement import DriverStatement
from results_db.import_tables import Import
from results_db.leaderboard import constrained
from results_db.models import BreakdownRow, Campaign, MeasurementRow, StageMemory, Trial
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
from results_db.rows import COST_COLUMNS, PLAIN_MEASUREMENT_FIELDS, objectives_of
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
_MEASUREMENT: Final = (
    *PLAIN_MEASUREMENT_FIELDS,
    "peak_memory_bytes_by_stage",
    "peak_reserved_bytes_by_stage",
    "breakdown",
)
_DOCUMENT: Final = (
    *_TRIAL,
    "layout",
    "cost",
    "measurement",
    "objectives",
    "on_front",
    "value",
    "value_low",
    "value_high",
    "step_time_s",
    "num_runs",
    "shortened",
    "tied_with_first",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOfLayouts:
    """A page of the leaderboard."""

    objective: str
    """What ranks."""
    objectives: Sequence[str]
    """The campaign's, which its front is over."""
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
        campaign: int | str,
        objective: str | None = None,
        *,
        look_at_mark: Callable[[str], object] = len,
        listing: Listing = WHOLE,
        limit: int,
        offset: int = 0,
    ) -> PageOfLayouts:
        """The same as `Leaderboard.standings`, as plain values, with what is said above them.

        Args:
            campaign: id or name of the campaign.
            objective: what to rank by; None: the campaign's own.
            look_at_mark: is given the campaign's mark before anything else is read; what it raises ends
                the reading.
            listing: which layouts are listed.
            limit: most layouts to return.
            offset: how many of those listed to pass over.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        with self._db.read() as session:
            head = _head(session, campaign)
            look_at_mark(mark_of(session, head.campaign_id))
            by = objective or head.objective
            ranking = Ranking.of(head.campaign_id, by, own=head.objective, listing=listing)
            statements = _statements(ranking.by.key, head.weighed(by, listing))
            page = None
            if listing.is_whole and not offset:
                page = _first_page(session, statements, head.campaign_id, limit)
            if page is None:
                page = _any_page(session, statements.query, ranking, limit, offset)
            return PageOfLayouts(
                objective=by,
                objectives=head.objectives,
                total=page.total,
                constrained=constrained(session, head.campaign_id, head.max_peak_memory_bytes),
                source=page.source,
                layouts=statements.shape.documents(page, head.device_memory_bytes),
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Head:
    """What a page needs to know of its campaign."""

    campaign_id: int
    objective: str
    max_peak_memory_bytes: int | None
    objectives: tuple[str, ...]
    device_memory_bytes: int | None

    def weighed(self, by: str, listing: Listing) -> tuple[str, ...]:
        """The objectives that each layout shows: the campaign's, and what it is listed by."""
        cheapest = () if listing.within_percent is None else ("tokens_per_node_hour",)
        return tuple(dict.fromkeys((*self.objectives, by, *cheapest)))


_HEAD: Final = select(
    Campaign.id, Campaign.objective, Campaign.max_peak_memory_bytes, Campaign.spec
)
_HEAD_BY_ID: Final = DriverStatement(
    _HEAD.where(Campaign.id == bindparam("campaign", type_=Integer))
)
_HEAD_BY_NAME: Final = DriverStatement(
    _HEAD.where(Campaign.name == bindparam("campaign", type_=String))
)


def _head(session: Session, campaign: int | str) -> _Head:
    statement = _HEAD_BY_ID if isinstance(campaign, int) else _HEAD_BY_NAME
    for id_, objective, max_peak_memory_bytes, spec in statement.rows(session, campaign=campaign):
        return _Head(
            campaign_id=id_,
            objective=objective,
            max_peak_memory_bytes=max_peak_memory_bytes,
            objectives=objectives_of(spec),
            device_memory_bytes=spec["cluster"].get("device_memory_bytes"),
        )
    raise campaign_not_found(campaign)


Stages = Mapping[int, list[int]]
"""Of each trial, a figure of each of its stages that has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Shape:
    """Which columns of a row make which part of a document."""

    weighed: tuple[str, ...]
    """Objectives that are rates."""
    parts: Mapping[str, slice]

    def documents(self, page: _Page, device_memory_bytes: int | None) -> list[dict[str, Any]]:
        """The layouts of a page, put together by columns: it has some 7,000 figures."""
        if page.first is None or not page.rows:
            return []
        columns = list(zip(*page.rows, strict=True))
        parts = {name: columns[where] for name, where in self.parts.items()}
        values, _, num_runs, shortened, step_times_s, *_, on_front = parts["place"]
        lows, highs, ties = _sureness(page.rows, page.first)
        made = zip(
            *parts["trial"],
            _dicts(LAYOUT_FIELDS, parts["layout"]),
            _dicts((*_COST, "total"), [*parts["cost"], map(_sum_of_four, *parts["cost"])]),
            _measurements(page, parts),
            self._objectives(parts, device_memory_bytes),
            on_front,
            values,
            lows,
            highs,
            step_times_s,
            num_runs,
            shortened,
            ties,
            strict=True,
        )
        return [dict(zip(_DOCUMENT, each, strict=True)) for each in made]

    def _objectives(
        self, parts: Mapping[str, Sequence[Column]], device_memory_bytes: int | None
    ) -> Iterator[dict[str, Any]]:
        columns: list[Iterable[Any]] = list(parts["objectives"])
        if MEMORY_HEADROOM in self.weighed:
            peaks = parts["measurement"][_PEAK]
            columns[self.weighed.index(MEMORY_HEADROOM)] = [
                memory_headroom(peak, device_memory_bytes) for peak in peaks
            ]
        return _dicts(self.weighed, columns)


Column = Sequence[Any]
_PEAK: Final = PLAIN_MEASUREMENT_FIELDS.index("peak_memory_bytes")


def _dicts(names: Sequence[str], columns: Iterable[Iterable[Any]]) -> Iterator[dict[str, Any]]:
    return (dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))


def _sum_of_four(one: float, two: float, three: float, four: float) -> float:
    return one + two + three + four


def _measurements(page: _Page, parts: Mapping[str, Sequence[Column]]) -> Iterator[dict[str, Any]]:
    trial_ids = parts["trial"][0]
    breakdowns = (
        None if each["compute_s"] is None else each
        for each in _dicts(_BREAKDOWN, parts["breakdown"])
    )
    peaks = (page.peaks[id_] for id_ in trial_ids)
    held = (page.held[id_] for id_ in trial_ids)
    return _dicts(_MEASUREMENT, [*parts["measurement"], peaks, held, breakdowns])


def _sureness(
    rows: Sequence[Place], first: First
) -> tuple[list[float | None], list[float | None], list[bool]]:
    """Both ends of the interval of each layout, and whether it may be as good as the first."""
    lows: list[float | None] = []
    highs: list[float | None] = []
    ties = []
    for row in rows:
        value, estimate = row[0], estimate_of(row, first.spread)
        factor = None if estimate is None else estimate.factor
        lows.append(None if factor is None else value / factor)
        highs.append(None if factor is None else value * factor)
        ties.append(is_tied(value, estimate, first))
    return lows, highs, ties


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """What a page is made of."""

    rows: Sequence[Place]
    first: First | None
    """None: there are none."""
    peaks: Stages
    """Largest peaks of their ranks."""
    held: Stages
    """What their allocators held, of those that have any."""
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
    peaks, held = _by_trial(statements.stages.rows(session, campaign=campaign_id, most=limit))
    ((total, source),) = statements.about.rows(session, campaign=campaign_id)
    return _Page(
        rows=rows,
        first=First.of(rows[0], repeats) if rows else None,
        peaks=peaks,
        held=held,
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
    peaks, held = _by_trial(rows_of(session, stages))
    ((total, source_told),) = rows_of(session, about)
    return _Page(
        rows=rows,
        first=first,
        peaks=peaks,
        held=held,
        total=total,
        source=source_told,
    )


_STAGES: Final = select(
    StageMemory.trial_id, StageMemory.peak_memory_bytes, StageMemory.peak_reserved_bytes
).order_by(StageMemory.trial_id, StageMemory.stage)


def _by_trial(rows: Iterable[Place]) -> tuple[Stages, Stages]:
    """Peaks of stages, and what was held in them."""
    peaks: defaultdict[int, list[int]] = defaultdict(list)
    held: defaultdict[int, list[int]] = defaultdict(list)
    for trial_id, peak, held_there in rows:
        peaks[trial_id].append(peak)
        if held_there is not None:
            held[trial_id].append(held_there)
    return peaks, held


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
