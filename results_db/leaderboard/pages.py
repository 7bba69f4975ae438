"""Selects pages of a leaderboard: rows, each with its rank, interval and tie.

`results_db.leaderboard.leaderboard` makes records of a page,
`results_db.leaderboard.layout_documents` makes documents of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from sqlalchemy import Integer, Select, bindparam, select

from results_db.database.compiled_statement import DriverStatement
from results_db.events.event_log import CampaignResults
from results_db.leaderboard.listing import part_of_list, ranks_of
from results_db.leaderboard.ranking import (
    NUM_RANKED,
    First,
    RankedRow,
    Ranking,
    best_first,
    first_layout,
    first_of,
    in_campaign_of_parameter,
    rows_of,
)
from results_db.models.standings import LeaderboardRow

_MOST_ROWS: Final = 2**31 - 1
_IDS_AT_ONCE: Final = 1000
"""Trial ids in one statement: SQLite limits the parameters of one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PageStatements:
    """The statements that select pages ranked by one column; build them once."""

    query: Select[*tuple[Any, ...]]
    """One row for each layout, of any campaign and in any order."""
    top: DriverStatement
    """The first rows of a campaign."""

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
        top = query.where(in_campaign).order_by(*best_first(column))
        if by == "value":
            top = top.limit(most)
        else:
            # No index has this order: joining all rows before sorting them would take long.
            ids = select(LeaderboardRow.trial_id).where(in_campaign).order_by(*best_first(column))
            top = top.where(LeaderboardRow.trial_id.in_(ids.limit(most).correlate(None)))
        return cls(query=query, top=DriverStatement(top))


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
    """The first layout of the whole leaderboard; None: it is empty."""
    is_top: bool = False
    """Whether these are the first rows of the whole leaderboard."""


def select_page(
    results: CampaignResults,
    statements: PageStatements,
    ranking: Ranking,
    *,
    limit: int | None = None,
    offset: int = 0,
) -> RankedPage:
    """Selects a page of the leaderboard.

    Args:
        results: cached results, and a transaction.
        statements: for the column that ranks.
        ranking: the leaderboard.
        limit: most layouts; None: all.
        offset: number of listed layouts to skip.
    """
    session, is_whole = results.session, ranking.listing.is_whole
    if is_whole and not offset:
        most = _MOST_ROWS if limit is None else limit
        top = statements.top.rows(session, campaign=ranking.campaign_id, most=most)
        if not top:
            return RankedPage()
        best = RankedRow._make(top[0][:NUM_RANKED])
        if not best.shortened:
            leader = first_of(session, ranking, best, has_largest_value=True)
            return _page(top, range(1, len(top) + 1), leader, is_top=True)
    first = first_layout(session, ranking)
    if first is None:
        return RankedPage()
    page_ids = part_of_list(results, ranking, first, limit=limit, offset=offset)
    selected = _rows_of_ids(results, statements, page_ids)
    if is_whole:
        ranks: Sequence[int] = range(offset + 1, offset + 1 + len(page_ids))
    else:
        rows = [RankedRow._make(row[:NUM_RANKED]) for row in selected]
        ranks = ranks_of(results, ranking, first, rows)
    return _page(selected, ranks, first)


def _page(
    selected: Sequence[Sequence[Any]],
    ranks: Sequence[int],
    first: First,
    *,
    is_top: bool = False,
) -> RankedPage:
    rows = [RankedRow._make(row[:NUM_RANKED]) for row in selected]
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


def _rows_of_ids(
    results: CampaignResults, statements: PageStatements, trial_ids: Sequence[int]
) -> list[Sequence[Any]]:
    """The rows of trials with all columns of the query, in the order of the ids."""
    found = {}
    for begin in range(0, len(trial_ids), _IDS_AT_ONCE):
        some = trial_ids[begin : begin + _IDS_AT_ONCE]
        query = statements.query.where(LeaderboardRow.trial_id.in_(some))
        found.update({row[1]: row for row in rows_of(results.session, query)})
    return [found[trial_id] for trial_id in trial_ids]
