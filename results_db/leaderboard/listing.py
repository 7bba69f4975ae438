"""Which ranked layouts a leaderboard lists, and in which order, as arrays of trial ids.

The ids are selected from the leaderboard table alone, whose index has every column that filters and
orders read. Lists and ranks of a campaign are cached until its pages change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Double, Integer, Select, bindparam, func, select, true
from sqlalchemy.orm import Session

from results_db.database.compiled_statement import DriverStatement
from results_db.events.event_log import CampaignResults
from results_db.leaderboard.ranked_layout import LeaderboardQuery
from results_db.leaderboard.ranking import (
    FULL,
    First,
    RankedRow,
    Ranking,
    best_first,
    in_campaign_of_parameter,
    tuples_of,
)
from results_db.models.standings import LeaderboardRow
from results_db.trials.filter_sql import knob_number, ranked_conditions, ranked_metric_column
from search_spaces.protocol.metrics import METRICS

Ids = NDArray[np.int64]
"""Ids of trials, each the first of its layout."""

_NEAR: Final = 1000
"""Up to this place, SQL selects a part of a list without sorting all of it."""

_COUNTED_ONE_BY_ONE: Final = 200
"""Most rows whose ranks are counted, each by two short statements."""

_HIGHEST: Final = 1e300
"""More than any value."""


def listed(ranking: Ranking, first: First) -> list[ColumnElement[bool]]:
    """The conditions that the listed rows of a leaderboard meet."""
    listing = ranking.listing
    found = [ranking.in_campaign, *ranked_conditions(ranking.campaign_id, listing.wanted)]
    if listing.front:
        found.append(LeaderboardRow.on_front == true())
    if listing.within_percent is not None:
        found.append(ranking.by >= first.row.value * (1.0 - listing.within_percent / 100.0))
        if not first.row.shortened:
            found.append(FULL)
    return found


def listed_ids(results: CampaignResults, ranking: Ranking, first: First) -> Ids:
    """The listed layouts in their order."""

    def select_ids() -> Ids:
        ids = _ids(results.session, _listed_in_order(ranking, first))
        return _with_first_in_front(ids, first) if _is_by_rank(ranking.listing) else ids

    return results.get(("listed", ranking.by.key, ranking.listing), select_ids)


def part_of_list(
    results: CampaignResults, ranking: Ranking, first: First, *, limit: int | None, offset: int
) -> list[int]:
    """A part of the listed layouts in their order.

    SQL selects a part of the whole leaderboard by its own objective, which an index orders, and a
    part near the beginning: a database keeps the best few hundred rows of a scan without sorting
    all. Further on, the ids of the whole list are sorted once and cached.
    """
    is_ordered = ranking.listing.is_whole and ranking.by.key == "value"
    is_near = limit is not None and offset + limit <= _NEAR
    has_order = first.has_largest_value or not _is_by_rank(ranking.listing)
    if has_order and (is_ordered or is_near):
        query = _listed_in_order(ranking, first).limit(limit).offset(offset or None)
        asked = ("part", ranking.by.key, ranking.listing, limit, offset)
        part = results.get(asked, lambda: _ids(results.session, query))
    else:
        ids = listed_ids(results, ranking, first)
        part = ids[offset : None if limit is None else offset + limit]
    trial_ids: list[int] = part.tolist()
    return trial_ids


def ranks_of(
    results: CampaignResults, ranking: Ranking, first: First, rows: Sequence[RankedRow]
) -> list[int]:
    """The ranks of layouts on the whole leaderboard, from 1."""
    if ranking.by.key == "value" and len(rows) <= _COUNTED_ONE_BY_ONE:
        return counted_ranks(results.session, ranking, first.row, rows)

    def rank_all() -> Ids:
        ids = listed_ids(results, ranking.whole, first)
        order = np.argsort(ids)
        return np.stack([ids[order], order + 1])

    ids, ranks = results.get(("ranks", ranking.by.key), rank_all)
    found: list[int] = ranks[np.searchsorted(ids, [row.trial_id for row in rows])].tolist()
    return found


def counted_ranks(
    session: Session, ranking: Ranking, first: RankedRow, rows: Sequence[RankedRow]
) -> list[int]:
    """The same by counting the layouts before each; none is counted twice."""
    statements = _count_statements(ranking.by.key)
    better, above = 0, _HIGHEST
    ranks = {}
    for row in sorted(rows, key=_place_of):
        given = {"campaign": ranking.campaign_id, "above": above, "own": row.value}
        if row.value < above:
            ((more,),) = statements.between.rows(session, **given)
            better, above = better + more, row.value
        del given["above"]
        ((earlier,),) = statements.equals.rows(session, **given, trial=row.trial_id)
        is_after_first = _place_of(first) < _place_of(row)
        ranks[row.trial_id] = better + earlier + (1 if is_after_first else 2)
    ranks[first.trial_id] = 1
    return [ranks[row.trial_id] for row in rows]


def _place_of(row: RankedRow) -> tuple[float, int]:
    """What `best_first` sorts by."""
    return -row.value, row.trial_id


@dataclass(frozen=True, kw_only=True, slots=True)
class _CountStatements:
    """Statements that count rows by the column that ranks."""

    between: DriverStatement
    """From one value, included, up to another, excluded: `own < value <= above`."""
    equals: DriverStatement
    """Of the same value, and of earlier trials."""


@lru_cache(maxsize=100)
def _count_statements(by: str) -> _CountStatements:
    column = getattr(LeaderboardRow, by)
    count = select(func.count()).select_from(LeaderboardRow).where(in_campaign_of_parameter())
    own = bindparam("own", type_=Double)
    above, trial = bindparam("above", type_=Double), bindparam("trial", type_=Integer)
    return _CountStatements(
        between=DriverStatement(count.where(column > own, column <= above)),
        equals=DriverStatement(count.where(column == own, LeaderboardRow.trial_id < trial)),
    )


def _listed_in_order(ranking: Ranking, first: First) -> Select[int]:
    query = select(LeaderboardRow.trial_id).where(*listed(ranking, first))
    return query.order_by(*_order(ranking))


def count_listed(results: CampaignResults, ranking: Ranking, first: First) -> int:
    """The number of listed layouts."""
    listing = ranking.listing.unsorted

    def count() -> int:
        query = select(func.count()).select_from(LeaderboardRow).where(*listed(ranking, first))
        return results.session.scalar(query) or 0

    return results.get(("number listed", ranking.by.key, listing), count)


def _is_by_rank(listing: LeaderboardQuery) -> bool:
    return listing.sort is None and listing.within_percent is None


def _order(ranking: Ranking) -> tuple[Any, ...]:
    listing = ranking.listing
    if listing.sort is not None:
        key = _sort_column(listing.sort)
        sorted_key = key.desc() if listing.descending else key.asc()
        return sorted_key.nulls_last(), *best_first(ranking.by)
    if listing.within_percent is not None:
        return LeaderboardRow.tokens_per_node_hour.desc(), *best_first(ranking.by)
    if listing.front:
        # A sum has no index: the front is few rows, which an index of its own finds.
        return best_first(ranking.by + 0.0)
    return best_first(ranking.by)


def _sort_column(key: str) -> ColumnElement[Any]:
    if key in METRICS:
        return ranked_metric_column(key)
    return knob_number(key, getattr(LeaderboardRow, key))


def _with_first_in_front(ids: Ids, first: First) -> Ids:
    """Moves the first layout to the front: a shortened one may have a larger value."""
    (places,) = np.nonzero(ids == first.row.trial_id)
    if not places.size or places[0] == 0:
        return ids
    return np.concatenate([ids[places], np.delete(ids, places)])


def _ids(session: Session, query: Select[int]) -> Ids:
    rows = tuples_of(session, query)
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=len(rows))
