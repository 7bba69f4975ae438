"""Selects pages of the leaderboard: the order of its rows, their ranks, intervals and ties.

This is the only place that ranks. `results_db.leaderboard.leaderboard` makes records of a page,
`results_db.leaderboard.layout_documents` makes documents of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Self

from sqlalchemy import (
    ColumnElement,
    Integer,
    Row,
    Select,
    bindparam,
    case,
    func,
    select,
    text,
    true,
)
from sqlalchemy.orm import InstrumentedAttribute, Session

from results_db.database.compiled_statement import DriverStatement
from results_db.errors import ObjectiveUnknownError
from results_db.leaderboard.ranked_layout import WHOLE, LeaderboardQuery
from results_db.models.tables import Campaign, LeaderboardRow, MeasurementRow, Trial
from results_db.trials.filter_sql import conditions
from search_spaces.spec.objectives import OBJECTIVES
from search_spaces.statistics.confidence import Estimate, can_be_told_apart
from search_spaces.statistics.pooling import PooledRuns, Spread, spread_of_squares

_FULL: Final = LeaderboardRow.shortened.is_(False)
_REPEATED: Final = text("num_runs > 1")  # as in the partial index
_MOST_ROWS: Final = 2**31 - 1
_MOST_IDS: Final = 1000
"""Trial ids in one statement; for more, the ranks of the whole campaign are read."""


class RankedRow(NamedTuple):
    """The columns with which every selected row begins."""

    value: float
    """The column that ranks."""
    trial_id: int
    num_runs: int
    shortened: bool
    step_time_s: float
    log_step_time_s: float
    iterations_variance: float | None
    iterations_dof: int

    def estimate(self, spread: Spread | None) -> Estimate | None:
        """The step time with its error; None where a single iteration was timed in all."""
        return PooledRuns(
            num_runs=self.num_runs,
            log_s=self.log_step_time_s,
            variance=self.iterations_variance,
            dof=self.iterations_dof,
        ).estimate(spread)


_WINNER: Final = (
    select(LeaderboardRow.trial_id)
    .where(LeaderboardRow.campaign_id == Campaign.id, LeaderboardRow.shortened.is_(False))
    .order_by(LeaderboardRow.value.desc(), LeaderboardRow.trial_id)
    .limit(1)
    .correlate(Campaign)
    .scalar_subquery()
)
"""The trial that wins a campaign by its own objective."""

_NUM_RANKED: Final = len(RankedRow._fields)


def ranked_columns(by: ColumnElement[Any] | InstrumentedAttribute[float]) -> list[Any]:
    """The columns of `RankedRow`, ranked by one of the table."""
    return [by.label("by"), *(getattr(LeaderboardRow, name) for name in RankedRow._fields[1:])]


def best_first(by: ColumnElement[Any] | InstrumentedAttribute[float]) -> tuple[Any, ...]:
    """The order of every leaderboard: the largest value first; of equal ones, the earlier trial."""
    return by.desc(), LeaderboardRow.trial_id


def wins_one_of(campaign_ids: Collection[int]) -> ColumnElement[bool]:
    """Selects the rows of the winners of campaigns, by their own objectives."""
    return LeaderboardRow.trial_id.in_(select(_WINNER).where(Campaign.id.in_(campaign_ids)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranking:
    """A leaderboard: the campaign, the column that ranks, and which of the layouts are listed."""

    campaign_id: int
    by: InstrumentedAttribute[float]
    """The column of `LeaderboardRow` that ranks."""
    listing: LeaderboardQuery = WHOLE

    @classmethod
    def of(
        cls, campaign_id: int, objective: str, *, own: str | None, listing: LeaderboardQuery = WHOLE
    ) -> Self:
        """The leaderboard by an objective.

        Args:
            campaign_id: the campaign.
            objective: the objective that ranks.
            own: the campaign's own objective, which has an index; None: there is no such campaign.
            listing: which layouts are listed.

        Raises:
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        if objective not in OBJECTIVES:
            raise ObjectiveUnknownError(
                f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}"
            )
        by = getattr(LeaderboardRow, "value" if objective == own else objective)
        return cls(campaign_id=campaign_id, by=by, listing=listing)

    @property
    def in_campaign(self) -> ColumnElement[bool]:
        """Selects the campaign's rows."""
        return LeaderboardRow.campaign_id == self.campaign_id

    def order(self, first_trial_id: int) -> tuple[Any, ...]:
        """The order of the ranks: the first layout, then the others, the best first.

        The first layout is named since a shortened one may have a larger value.
        """
        return _before_all([first_trial_id]), *best_first(self.by)


@dataclass(frozen=True, kw_only=True, slots=True)
class First:
    """The first layout of a leaderboard, with which all others are compared."""

    row: RankedRow
    estimate: Estimate | None
    spread: Spread | None
    """The spread of runs of one layout, over the campaign; None where no layout was repeated."""

    def compare(self, row: RankedRow) -> tuple[float | None, bool]:
        """The confidence of a layout's value, and whether the layout is tied with the first.

        Returns:
            The 95 % interval as a factor: from the value divided by it to the value times it; None
            where a single iteration was timed in all. And whether the layout is the first, or
            cannot be told apart from it with 95 % confidence.
        """
        estimate = row.estimate(self.spread)
        if estimate is None:
            return None, row.value == self.row.value
        if self.estimate is None:
            return estimate.factor, row.value == self.row.value
        # The difference of the values, as a difference of step times.
        scaled = Estimate(
            log_s=self.estimate.log_s + math.log(row.value / self.row.value),
            error=estimate.error,
            dof=estimate.dof,
        )
        return estimate.factor, not can_be_told_apart(self.estimate, scaled)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageStatements:
    """The statements that select pages ranked by one column; build them once."""

    query: Select[*tuple[Any, ...]]
    """One row for each layout, of any campaign and in any order."""
    top: DriverStatement
    """The first rows of a campaign."""
    repeats: DriverStatement
    """The layouts of a campaign that were measured more than once."""

    @classmethod
    def of(cls, by: str, query: Select[*tuple[Any, ...]]) -> Self:
        """The statements of a query.

        Args:
            by: the name of the column of `LeaderboardRow` that ranks.
            query: selects `ranked_columns(by)` first, from `LeaderboardRow` joined with `Trial` and
                `MeasurementRow`.
        """
        column = getattr(LeaderboardRow, by)
        in_campaign, most = in_campaign_of_parameter(), bindparam("most", type_=Integer)
        # Without ORDER BY: for the order, SQLite would read all rows of the campaign.
        repeats = select(
            LeaderboardRow.runs_squares, LeaderboardRow.num_runs, column, LeaderboardRow.trial_id
        ).where(in_campaign, _REPEATED)
        return cls(
            query=query,
            top=DriverStatement(query.where(in_campaign).order_by(*best_first(column)).limit(most)),
            repeats=DriverStatement(repeats),
        )


def in_campaign_of_parameter() -> ColumnElement[bool]:
    """Selects the rows of the campaign that a statement's parameter names."""
    return LeaderboardRow.campaign_id == bindparam("campaign", type_=Integer)


@dataclass(frozen=True, kw_only=True, slots=True)
class RankedPage:
    """A page of the leaderboard: rows, and for each row its rank, confidence and tie."""

    selected: Sequence[Sequence[Any]] = ()
    """The rows with all columns of the query."""
    rows: Sequence[RankedRow] = ()
    ranks: Sequence[int] = ()
    """Ranks on the whole leaderboard, from 1."""
    factors: Sequence[float | None] = ()
    """The confidence of each value, as `First.compare` returns it."""
    ties: Sequence[bool] = ()
    """Whether each layout is the first, or cannot be told apart from it."""
    first: First | None = None
    """None: the leaderboard is empty."""
    is_top: bool = False
    """Whether these are the first rows of the whole leaderboard."""


def select_page(
    session: Session,
    statements: PageStatements,
    ranking: Ranking,
    *,
    limit: int | None = None,
    offset: int = 0,
) -> RankedPage:
    """Selects a page of the leaderboard.

    The first layout is the best one that was measured in full, or the best of all where none was: a
    shortened run was slower than the best of its time, and remains so if that best is later
    rejected for its losses.

    Args:
        session: a transaction.
        statements: for the column that ranks.
        ranking: the leaderboard.
        limit: most layouts; None: all.
        offset: number of listed layouts to skip.
    """
    is_top = ranking.listing.is_whole and not offset
    if is_top:
        most = _MOST_ROWS if limit is None else limit
        top = statements.top.rows(session, campaign=ranking.campaign_id, most=most)
        if not top:
            return RankedPage()
        best = RankedRow._make(top[0][:_NUM_RANKED])
        if not best.shortened:
            first = _first(session, statements, ranking, best)
            return _page(top, range(1, len(top) + 1), first, is_top=True)
    found = _best_in_full(session, ranking)
    if found is None:
        return RankedPage()
    first = _first(session, statements, ranking, found)
    page = statements.query.where(*listed(ranking, first)).order_by(*_order(ranking, first))
    selected = rows_of(session, page.limit(limit).offset(offset or None))
    ranks = _ranks(session, ranking, first, [row[1] for row in selected], offset)
    return _page(selected, ranks, first, is_top=False)


def _page(
    selected: Sequence[Sequence[Any]], ranks: Sequence[int], first: First, *, is_top: bool
) -> RankedPage:
    rows = [RankedRow._make(row[:_NUM_RANKED]) for row in selected]
    compared = [first.compare(row) for row in rows]
    return RankedPage(
        selected=selected,
        rows=rows,
        ranks=ranks,
        factors=[factor for factor, _ in compared],
        ties=[is_tied for _, is_tied in compared],
        first=first,
        is_top=is_top,
    )


def _first(session: Session, statements: PageStatements, ranking: Ranking, row: RankedRow) -> First:
    found = statements.repeats.rows(session, campaign=ranking.campaign_id)
    # In the order of `Ranking.order`: the last digits of a sum depend on the order.
    repeats = sorted(found, key=lambda each: (each[3] != row.trial_id, -each[2], each[3]))
    spread = spread_of_squares((squares, num_runs) for squares, num_runs, *_ in repeats)
    return First(row=row, estimate=row.estimate(spread), spread=spread)


def _best_in_full(session: Session, ranking: Ranking) -> RankedRow | None:
    query = select(*ranked_columns(ranking.by)).where(ranking.in_campaign).limit(1)
    best = session.execute(query.order_by(*best_first(ranking.by))).first()
    if best is not None and best.shortened:
        best = session.execute(query.where(_FULL).order_by(*best_first(ranking.by))).first() or best
    return None if best is None else RankedRow._make(best)


def _ranks(
    session: Session, ranking: Ranking, first: First, trial_ids: Sequence[int], offset: int
) -> list[int]:
    """The ranks of listed trials on the whole leaderboard, from 1; `offset` were skipped."""
    if ranking.listing.is_whole:
        return [offset + 1 + place for place in range(len(trial_ids))]
    rank = func.row_number().over(order_by=ranking.order(first.row.trial_id))
    whole = (
        select(LeaderboardRow.trial_id, rank.label("rank")).where(ranking.in_campaign).subquery()
    )
    query = select(whole.c.trial_id, whole.c.rank)
    if len(trial_ids) <= _MOST_IDS:
        query = query.where(whole.c.trial_id.in_(trial_ids))
    ranks: dict[int, int] = dict(tuple(row) for row in rows_of(session, query))
    return [ranks[trial_id] for trial_id in trial_ids]


def listed(ranking: Ranking, first: First | None) -> list[ColumnElement[bool]]:
    """The conditions that the listed rows of a leaderboard meet."""
    listing = ranking.listing
    found = [ranking.in_campaign, *conditions(listing.wanted)]
    if listing.front:
        found.append(LeaderboardRow.on_front == true())
    if listing.within_percent is not None and first is not None:
        found.append(ranking.by >= first.row.value * (1.0 - listing.within_percent / 100.0))
        if not first.row.shortened:
            found.append(_FULL)
    return found


def count_listed(ranking: Ranking, first: First | None) -> Select[int]:
    """Counts the layouts that are listed in all."""
    query = select(func.count()).select_from(LeaderboardRow).where(*listed(ranking, first))
    if not ranking.listing.is_unfiltered:
        query = query.join(Trial, Trial.id == LeaderboardRow.trial_id).join(
            MeasurementRow, MeasurementRow.trial_id == LeaderboardRow.trial_id
        )
    return query


def _order(ranking: Ranking, first: First) -> tuple[Any, ...]:
    if ranking.listing.within_percent is not None:
        return LeaderboardRow.tokens_per_node_hour.desc(), *best_first(ranking.by)
    return ranking.order(first.row.trial_id)


def spreads_of(session: Session, winners: Mapping[int, int]) -> dict[int, Spread | None]:
    """The spread of runs in each campaign that repeated layouts; one statement for all.

    Args:
        session: a transaction.
        winners: by campaign, the trial that leads it; it is summed first, as in `select_page`.
    """
    squares: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
    if winners:
        query = (
            select(LeaderboardRow.campaign_id, LeaderboardRow.runs_squares, LeaderboardRow.num_runs)
            .where(LeaderboardRow.campaign_id.in_(winners), _REPEATED)
            .order_by(_before_all(winners.values()), *best_first(LeaderboardRow.value))
        )
        for row in rows_of(session, query):
            squares[row.campaign_id].append((row.runs_squares, row.num_runs))
    return {campaign_id: spread_of_squares(runs) for campaign_id, runs in squares.items()}


def _before_all(trial_ids: Collection[int]) -> ColumnElement[int]:
    """Sorts some trials before all others."""
    return case((LeaderboardRow.trial_id.in_(trial_ids), 0), else_=1)


def rows_of(session: Session, query: Select[*tuple[Any, ...]]) -> Sequence[Row[*tuple[Any, ...]]]:
    """Runs a statement without the ORM, which would take half as long again."""
    return session.connection().execute(query).all()
