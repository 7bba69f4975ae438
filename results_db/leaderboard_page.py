"""A page of the leaderboard as plain values, as quickly as the database hands them out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from sqlalchemy import Integer, Select, String, bindparam, func, select
from sqlalchemy.orm import Session

from results_db.campaign_mark import mark_of
from results_db.campaigns import campaign_not_found
from results_db.driver_statement import DriverStatement
from results_db.import_tables import Import
from results_db.layout_documents import LayoutShape, Stages, layouts_query
from results_db.leaderboard import constrained
from results_db.models import Campaign, StageMemory
from results_db.part import StorePart
from results_db.places import (
    REPEATED,
    First,
    Place,
    Ranking,
    count_listed,
    listed,
    rows_of,
)
from results_db.rows import objectives_of
from results_db.standing import WHOLE, Listing
from results_db.standing_tables import StandingRow


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
        look_at_mark: Callable[[str], object] | None = None,
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
            if look_at_mark is not None:
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
                layouts=[]
                if page.first is None or not page.rows
                else statements.shape.documents(
                    page.rows, page.first, page.stages, head.device_memory_bytes
                ),
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Page:
    """What a page is made of."""

    rows: Sequence[Place]
    first: First | None
    """None: there are none."""
    stages: Stages
    total: int
    source: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Statements:
    """What is asked for a page."""

    query: Select[*tuple[Any, ...]]
    """A row a layout, of whatever campaign and in whatever order."""
    shape: LayoutShape
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
    stages = statements.stages.rows(session, campaign=campaign_id, most=limit)
    ((total, source),) = statements.about.rows(session, campaign=campaign_id)
    return _Page(
        rows=rows,
        first=First.of(rows[0], repeats) if rows else None,
        stages=Stages.of(stages),
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
        stages=Stages.of(rows_of(session, stages)),
        total=total,
        source=source_told,
    )


_STAGES: Final = select(
    StageMemory.trial_id, StageMemory.peak_memory_bytes, StageMemory.peak_reserved_bytes
).order_by(StageMemory.trial_id, StageMemory.stage)


@lru_cache(maxsize=1000)
def _statements(by: str, objectives: tuple[str, ...]) -> _Statements:
    """The statements of a page, there are only so many: to build one takes as long as to run it."""
    query, shape = layouts_query(by, objectives)
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
