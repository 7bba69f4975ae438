"""The rows of the table of standings in the order of a leaderboard, and how sure each of them is."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import ColumnElement, Row, Select, case, func, select, text, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from results_db.errors import ObjectiveUnknownError
from results_db.models import Campaign, MeasurementRow, Trial
from results_db.standing import WHOLE, Listing
from results_db.standing_tables import StandingRow
from results_db.trial_conditions import conditions
from search_spaces.confidence import Estimate, can_be_told_apart
from search_spaces.objectives import OBJECTIVES
from search_spaces.pooling import PooledRuns, Spread, spread_of_squares

_FULL: Final = StandingRow.shortened.is_(False)
Place = Sequence[Any]
"""A row that begins with the column that ranks and those of `PLACE`."""

REPEATED: Final = text("num_runs > 1")  # as the partial index spells it


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """A leaderboard: of which campaign, by what, and what of it is listed."""

    campaign_id: int
    by: InstrumentedAttribute[float]
    """The column of `StandingRow` that ranks."""
    listing: Listing = WHOLE

    @classmethod
    def of(
        cls, campaign_id: int, objective: str, *, own: str | None = None, listing: Listing = WHOLE
    ) -> Ranking:
        """The leaderboard by an objective.

        Args:
            campaign_id: of the campaign.
            objective: what ranks.
            own: the campaign's own objective, which an index serves; None: not known.
            listing: what of it is listed.

        Raises:
            ObjectiveUnknownError: nothing is ranked by this name.
        """
        if objective not in OBJECTIVES:
            raise ObjectiveUnknownError(
                f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}"
            )
        by = getattr(StandingRow, "value" if objective == own else objective)
        return cls(campaign_id=campaign_id, by=by, listing=listing)

    @property
    def in_campaign(self) -> ColumnElement[bool]:
        """Its ranked layouts."""
        return StandingRow.campaign_id == self.campaign_id

    @property
    def order(self) -> tuple[Any, ...]:
        """The best first; of equals, the one measured earlier."""
        return self.by.desc(), StandingRow.trial_id


@dataclass(frozen=True, kw_only=True, slots=True)
class First:
    """The first of a leaderboard, with which all others are compared, and how far runs lie apart."""

    trial_id: int
    value: float
    shortened: bool
    estimate: Estimate | None
    spread: Spread | None

    @classmethod
    def of(cls, best: Place, repeated: Sequence[Place]) -> First:
        """The first from its own row, and from the squares and runs of the repeated layouts in order."""
        spread = spread_of_squares((squares, num_runs) for squares, num_runs in repeated)
        return cls(
            trial_id=best[1],
            value=best[0],
            shortened=best[3],
            estimate=estimate_of(best, spread),
            spread=spread,
        )


PLACE: Final = (
    StandingRow.trial_id,
    StandingRow.num_runs,
    StandingRow.shortened,
    StandingRow.step_time_s,
    StandingRow.log_step_time_s,
    StandingRow.iterations_variance,
    StandingRow.iterations_dof,
)
"""What a place is made of, after the column that ranks."""


def first_place(session: Session, ranking: Ranking) -> First | None:
    """The best layout that was measured in full, or the best of all where none was.

    What was stopped early was slower than the best of its day; should that one fall (its losses are
    off), a shortened one is still not the winner.
    """
    query = select(ranking.by.label("by"), *PLACE).where(ranking.in_campaign).limit(1)
    best = session.execute(query.order_by(*ranking.order)).first()
    if best is not None and best.shortened:
        best = session.execute(query.where(_FULL).order_by(*ranking.order)).first() or best
    return None if best is None else first_of(session, ranking, best)


def first_of(session: Session, ranking: Ranking, best: Row[*tuple[Any, ...]]) -> First:
    """The first place's row with what the whole campaign says of it."""
    repeated = (
        select(StandingRow.runs_squares, StandingRow.num_runs)
        .where(ranking.in_campaign, REPEATED)
        .order_by(case((StandingRow.trial_id == best.trial_id, 0), else_=1), *ranking.order)
    )
    return First.of(best, rows_of(session, repeated))


def spreads_of(session: Session, winners: Mapping[int, int]) -> dict[int, Spread | None]:
    """How far runs lie apart in campaigns that repeated any; one statement for all.

    Args:
        session: a transaction.
        winners: of each campaign, the trial that leads it: it is summed first, as in `first_of`.
    """
    squares: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    if winners:
        query = (
            select(StandingRow.campaign_id, StandingRow.runs_squares, StandingRow.num_runs)
            .where(StandingRow.campaign_id.in_(winners), REPEATED)
            .order_by(
                case((StandingRow.trial_id.in_(winners.values()), 0), else_=1),
                StandingRow.value.desc(),
                StandingRow.trial_id,
            )
        )
        for row in rows_of(session, query):
            squares[row.campaign_id].append((row.runs_squares, row.num_runs))
    return {campaign_id: spread_of_squares(runs) for campaign_id, runs in squares.items()}


def estimate_of(place: Place, spread: Spread | None) -> Estimate | None:
    """A layout's step time and how sure it is; None where a single iteration is all there is."""
    return PooledRuns(num_runs=place[2], log_s=place[5], variance=place[6], dof=place[7]).estimate(
        spread
    )


def is_tied(value: float, estimate: Estimate | None, first: First) -> bool:
    """Whether a layout cannot be told apart from the first with 95 % confidence, or is the first."""
    if estimate is None or first.estimate is None:
        return value == first.value
    # At equal step times they would be as far apart as their objectives are.
    apart = Estimate(
        log_s=first.estimate.log_s + math.log(value / first.value),
        error=estimate.error,
        dof=estimate.dof,
    )
    return not can_be_told_apart(first.estimate, apart)


def listed(
    session: Session,
    ranking: Ranking,
    columns: Select[*tuple[Any, ...]],
    *,
    limit: int | None,
    offset: int,
) -> tuple[Sequence[Row[*tuple[Any, ...]]], First | None]:
    """A page of the leaderboard, and its first place.

    Args:
        session: a transaction.
        ranking: the leaderboard.
        columns: what to select, from `StandingRow` joined with `Trial` and `MeasurementRow`; `PLACE`,
            and the column that ranks as "by", among it.
        limit: most layouts.
        offset: how many of those listed to pass over.
    """
    page = columns.where(ranking.in_campaign).limit(limit).offset(offset or None)
    if ranking.listing.is_whole and not offset:
        rows = rows_of(session, page.order_by(*ranking.order))
        if not rows:
            return rows, None
        if not rows[0].shortened:
            return rows, first_of(session, ranking, rows[0])
    first = first_place(session, ranking)
    if first is None:
        return [], None
    page = page.where(*_listed(ranking, first)).order_by(*_order(ranking, first))
    return rows_of(session, page), first


def rows_of(session: Session, query: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Plain rows: what the ORM adds to a statement without entities takes half as long again."""
    return session.connection().execute(query).all()


def count_listed(ranking: Ranking, first: First | None) -> Select[int]:
    """Counts the layouts that are listed in all."""
    query = select(func.count()).select_from(StandingRow).where(ranking.in_campaign)
    if first is not None and not ranking.listing.is_whole:
        query = query.where(*_listed(ranking, first))
    if not ranking.listing.is_unfiltered:
        query = query.join(Trial, Trial.id == StandingRow.trial_id).join(
            MeasurementRow, MeasurementRow.trial_id == StandingRow.trial_id
        )
    return query


def _listed(ranking: Ranking, first: First) -> list[ColumnElement[bool]]:
    found = conditions(ranking.listing.wanted)
    if ranking.listing.front:
        found.append(StandingRow.on_front == true())
    if ranking.listing.within_percent is not None:
        found.append(ranking.by >= first.value * (1.0 - ranking.listing.within_percent / 100.0))
        if not first.shortened:
            found.append(_FULL)
    return found


def _order(ranking: Ranking, first: First) -> tuple[Any, ...]:
    if ranking.listing.within_percent is not None:
        return StandingRow.tokens_per_node_hour.desc(), *ranking.order
    return case((StandingRow.trial_id == first.trial_id, 0), else_=1), *ranking.order


def own_objective(session: Session, campaign_id: int) -> str | None:
    """What a campaign ranks by; None: there is no such campaign."""
    return session.scalar(select(Campaign.objective).where(Campaign.id == campaign_id))
