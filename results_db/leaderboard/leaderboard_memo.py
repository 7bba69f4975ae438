"""Computes leaderboards of campaigns from the database, and keeps those that were read last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from threading import Lock
from typing import Final

from sqlalchemy import Row, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.store_base import Clock, StoreSection
from layout_tuner.results_db.errors import ObjectiveUnknownError, campaign_not_found
from layout_tuner.results_db.leaderboard.measured_runs import differing_peaks, measured_runs
from layout_tuner.results_db.leaderboard.rank_layouts import Leaderboard, RankingRules, rank_layouts
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.objectives import OBJECTIVES

MAX_LAYOUTS: Final = 150_000
"""Most layouts that a process keeps; 100,000 need about 80 MB."""

_Key = tuple[int, str]
"""The campaign, and the objective that ranks."""


class LeaderboardMemo:
    """The leaderboards that were read last; safe between threads.

    A leaderboard changes only when a trial of its campaign ends, or is judged again: each is kept
    with the campaign's `last_ended_seq`, and returned for no other.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._kept: OrderedDict[_Key, tuple[int, Leaderboard]] = OrderedDict()

    def get(self, key: _Key, last_ended_seq: int) -> Leaderboard | None:
        """The leaderboard as of an end of a trial; None: it is not kept."""
        with self._lock:
            seq, board = self._kept.get(key, (None, None))
            if seq != last_ended_seq:
                return None
            self._kept.move_to_end(key)
            return board

    def keep(self, key: _Key, last_ended_seq: int, board: Leaderboard) -> None:
        """Keeps a leaderboard in place of an earlier one, and drops those not read for longest."""
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = (last_ended_seq, board)
            while sum(len(each.layouts) for _, each in self._kept.values()) > MAX_LAYOUTS:
                self._kept.popitem(last=False)


class LeaderboardSection(StoreSection):
    """The base of sections of the store that read leaderboards.

    Their methods raise `CampaignNotFoundError` for a campaign that does not exist, and
    `ObjectiveUnknownError` for an objective by which no layout is ranked.
    """

    def __init__(self, database: Database, clock: Clock, memo: LeaderboardMemo) -> None:
        super().__init__(database, clock)
        self._memo = memo

    def _board(
        self, session: Session, campaign_id: int, objective: str | None = None
    ) -> Leaderboard:
        """The leaderboard of a campaign by an objective; None: by its own."""
        if objective is not None and objective not in OBJECTIVES:
            raise ObjectiveUnknownError(
                f"objective {objective!r} is not one of {', '.join(OBJECTIVES)}"
            )
        found = self._boards(session, [campaign_id], objective)
        if not found:
            raise campaign_not_found(campaign_id)
        return found[campaign_id]

    def _boards(
        self, session: Session, campaign_ids: Collection[int], objective: str | None = None
    ) -> dict[int, Leaderboard]:
        """The leaderboards of those campaigns that exist, each by an objective or by its own."""
        if not campaign_ids:
            return {}
        query = select(
            Campaign.id, Campaign.objective, Campaign.max_peak_memory_bytes, Campaign.last_ended_seq
        )
        found = {}
        for campaign in session.execute(query.where(Campaign.id.in_(campaign_ids))):
            key = campaign.id, objective or campaign.objective
            board = self._memo.get(key, campaign.last_ended_seq)
            if board is None:
                board = ranked(session, campaign, objective)
                self._memo.keep(key, campaign.last_ended_seq, board)
            found[campaign.id] = board
        return found


def ranked(
    session: Session,
    campaign: Campaign | Row[int, str, int | None, int],
    objective: str | None = None,
) -> Leaderboard:
    """The leaderboard of a campaign by an objective, or by its own, as the session sees it."""
    document = session.scalars(select(Campaign.spec).where(Campaign.id == campaign.id)).one()
    stored = StoredCampaign(document=document)
    rules = RankingRules(
        objective=objective or campaign.objective,
        objectives=stored.objectives or (campaign.objective,),
        max_peak_memory_bytes=campaign.max_peak_memory_bytes,
        device_memory_bytes=stored.device_memory_bytes,
        peaks=differing_peaks(session, campaign.id),
    )
    return rank_layouts(measured_runs(session, campaign.id), rules)
