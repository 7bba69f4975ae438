"""The order of a leaderboard, its first layout, and intervals and ties of the others.

`results_db.leaderboard.listing` selects which layouts are listed, and
`results_db.leaderboard.pages` selects pages of them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final, NamedTuple, Self

from sqlalchemy import ColumnElement, Integer, Row, Select, bindparam, case, select, text
from sqlalchemy.orm import InstrumentedAttribute, Session

from results_db.database.compiled_statement import DriverStatement
from results_db.errors import ObjectiveUnknownError, campaign_not_found
from results_db.leaderboard.ranked_layout import WHOLE, LeaderboardQuery
from results_db.models.standings import LeaderboardRow
from results_db.models.tables import Campaign
from search_spaces.spec.objectives import OBJECTIVES
from search_spaces.statistics.confidence import Estimate, can_be_told_apart
from search_spaces.statistics.pooling import PooledRuns, Spread, spread_of_squares

FULL: Final = LeaderboardRow.shortened.is_(False)
_REPEATED: Final = text("num_runs > 1")  # as in the partial index


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

NUM_RANKED: Final = len(RankedRow._fields)


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
    objective: str
    """The objective that ranks."""
    by: InstrumentedAttribute[float]
    """Its column of `LeaderboardRow`."""
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
        return cls(campaign_id=campaign_id, objective=objective, by=by, listing=listing)

    @classmethod
    def read(
        cls,
        session: Session,
        campaign_id: int,
        objective: str | None = None,
        listing: LeaderboardQuery = WHOLE,
    ) -> Self:
        """The leaderboard of a campaign by an objective; None: by its own.

        Raises:
            CampaignNotFoundError: there is no such campaign.
            ObjectiveUnknownError: no layout is ranked by this name.
        """
        own = session.scalar(select(Campaign.objective).where(Campaign.id == campaign_id))
        if own is None:
            raise campaign_not_found(campaign_id)
        return cls.of(campaign_id, objective or own, own=own, listing=listing)

    @property
    def in_campaign(self) -> ColumnElement[bool]:
        """Selects the campaign's rows."""
        return LeaderboardRow.campaign_id == self.campaign_id

    @property
    def whole(self) -> Ranking:
        """The same leaderboard with all layouts listed."""
        return replace(self, listing=WHOLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class First:
    """The first layout of a leaderboard, with which all others are compared."""

    row: RankedRow
    has_largest_value: bool
    """Whether no shortened layout has a larger value."""
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


def in_campaign_of_parameter() -> ColumnElement[bool]:
    """Selects the rows of the campaign that a statement's parameter names."""
    return LeaderboardRow.campaign_id == bindparam("campaign", type_=Integer)


@lru_cache(maxsize=100)
def _repeats_statement(by: str) -> DriverStatement:
    """Selects the layouts of a campaign that were measured more than once."""
    # Without ORDER BY: for the order, SQLite would read all rows of the campaign.
    query = select(
        LeaderboardRow.runs_squares,
        LeaderboardRow.num_runs,
        getattr(LeaderboardRow, by),
        LeaderboardRow.trial_id,
    )
    return DriverStatement(query.where(in_campaign_of_parameter(), _REPEATED))


def first_layout(session: Session, ranking: Ranking) -> First | None:
    """The first layout of a leaderboard; None: it is empty."""
    found = best_in_full(session, ranking)
    return None if found is None else first_of(session, ranking, *found)


def first_of(session: Session, ranking: Ranking, row: RankedRow, has_largest_value: bool) -> First:
    """The first layout of a leaderboard, with the spread of its campaign's repeats.

    Args:
        session: a transaction.
        ranking: the leaderboard.
        row: the first layout.
        has_largest_value: as `best_in_full` returns it.
    """
    found = _repeats_statement(ranking.by.key).rows(session, campaign=ranking.campaign_id)
    # In the order of the ranks: the last digits of a sum depend on the order.
    in_order = sorted(found, key=lambda each: (each[3] != row.trial_id, -each[2], each[3]))
    spread = spread_of_squares((squares, num_runs) for squares, num_runs, *_ in in_order)
    return First(
        row=row,
        has_largest_value=has_largest_value,
        estimate=row.estimate(spread),
        spread=spread,
    )


def best_in_full(session: Session, ranking: Ranking) -> tuple[RankedRow, bool] | None:
    """The first layout of a leaderboard, and whether it has the largest value; None: it is empty.

    It is the best one that was measured in full, or the best of all where none was: a shortened run
    was slower than the best of its time, and remains so if that best is later rejected for its
    losses.
    """
    # Its id first, from columns that an index has; its other columns then.
    query = (
        select(LeaderboardRow.trial_id, LeaderboardRow.shortened)
        .where(ranking.in_campaign)
        .order_by(*best_first(ranking.by))
        .limit(1)
    )
    largest = rows_of(session, query)
    if not largest:
        return None
    in_full = rows_of(session, query.where(FULL)) if largest[0].shortened else largest
    best_id = (in_full or largest)[0].trial_id
    columns = select(*ranked_columns(ranking.by))
    (row,) = rows_of(session, columns.where(LeaderboardRow.trial_id == best_id))
    return RankedRow._make(row), best_id == largest[0].trial_id


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


def tuples_of(session: Session, query: Select[*tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
    """Runs a statement for many rows, as the driver returns them: in half the time of `rows_of`."""
    cursor = session.connection().execute(query).cursor
    assert cursor is not None  # it is a SELECT
    found: Sequence[tuple[Any, ...]] = cursor.fetchall()
    return found
