"""Which ranked layouts a leaderboard lists, and in which order, as arrays of trial ids.

The ids are selected from the leaderboard table alone, whose index has every column that filters and
orders read. Lists and ranks of a campaign are cached until its pages change.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sqlalchemy import ColumnElement, Select, func, select, true
from sqlalchemy.orm import Session

from results_db.events.event_log import CampaignResults
from results_db.leaderboard.ranked_layout import LeaderboardQuery
from results_db.leaderboard.ranking import FULL, First, RankedRow, Ranking, best_first, rows_of
from results_db.models.standings import LeaderboardRow
from results_db.trials.filter_sql import knob_number, ranked_conditions, ranked_metric_column
from search_spaces.protocol.metrics import METRICS

Ids = NDArray[np.int64]
"""Ids of trials, each the first of its layout."""


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
        query = select(LeaderboardRow.trial_id).where(*listed(ranking, first))
        ids = _ids(results.session, query.order_by(*_order(ranking)))
        return _with_first_in_front(ids, first) if _is_by_rank(ranking.listing) else ids

    return results.get(("listed", ranking.by.key, ranking.listing), select_ids)


def natural_ids(session: Session, ranking: Ranking, *, limit: int | None, offset: int) -> list[int]:
    """A part of the whole leaderboard whose first layout has the largest value, without a cache."""
    query = select(LeaderboardRow.trial_id).where(ranking.in_campaign)
    part = query.order_by(*best_first(ranking.by)).limit(limit).offset(offset or None)
    return [trial_id for (trial_id,) in rows_of(session, part)]


def ranks_of(
    results: CampaignResults, ranking: Ranking, first: First, trial_ids: Sequence[int]
) -> list[int]:
    """The ranks of layouts on the whole leaderboard, from 1, by the trials of their rows."""

    def rank_all() -> NDArray[np.int64]:
        ids = listed_ids(results, ranking.whole, first)
        order = np.argsort(ids)
        return np.stack([ids[order], order + 1])

    ids, ranks = results.get(("ranks", ranking.by.key), rank_all)
    found: list[int] = ranks[np.searchsorted(ids, trial_ids)].tolist()
    return found


def rank_of_row(session: Session, ranking: Ranking, first: RankedRow, row: RankedRow) -> int:
    """The rank of one layout on the whole leaderboard, from 1; counts the better layouts."""
    if row.trial_id == first.trial_id:
        return 1
    better = ranking.by > row.value
    earlier = (ranking.by == row.value) & (LeaderboardRow.trial_id < row.trial_id)
    count = select(func.count()).select_from(LeaderboardRow).where(ranking.in_campaign)
    before = sum(session.scalar(count.where(each)) or 0 for each in (better, earlier))
    is_first_before = (-first.value, first.trial_id) < (-row.value, row.trial_id)
    return before + (1 if is_first_before else 2)


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
    # From the driver's tuples: objects of SQLAlchemy for each row would take twice as long.
    cursor = session.connection().execute(query).cursor
    assert cursor is not None  # it is a SELECT
    rows = cursor.fetchall()
    return np.fromiter(chain.from_iterable(rows), dtype=np.int64, count=len(rows))
