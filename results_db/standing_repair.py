"""Standings made anew, and compared with what the measurements say."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from results_db.lifecycle import locked_campaign
from results_db.models import Campaign
from results_db.part import StorePart
from results_db.session import Database
from results_db.standing_tables import STANDINGS_VERSION, StandingRow
from results_db.standing_upkeep import rebuild_standings, standings_of

_COLUMNS = tuple(StandingRow.__table__.columns.keys())


def bring_standings_up_to_date(database: Database) -> int:
    """Makes the standings of campaigns that another version kept, or none; says of how many.

    One transaction a campaign: what is interrupted goes on where it was.
    """
    with database.read() as session:
        stale = session.scalars(
            select(Campaign.id)
            .where(Campaign.standings_version != STANDINGS_VERSION)
            .order_by(Campaign.id)
        ).all()
    for campaign_id in stale:
        _rebuild(database, campaign_id)
    return len(stale)


class StandingRepair(StorePart):
    """The part of the store that looks its standings over."""

    def wrong_standings(self) -> list[str]:
        """Names of campaigns whose standings are not what their measurements say; none, ever."""
        with self._db.read() as session:
            ids = session.scalars(select(Campaign.id).order_by(Campaign.id)).all()
        wrong = []
        for campaign_id in ids:
            with self._db.read() as session:
                campaign = session.get(Campaign, campaign_id)
                if campaign is not None and not _is_right(session, campaign):
                    wrong.append(campaign.name)
        return wrong

    def rebuild_standings(self, campaign_ids: Iterable[int] | None = None) -> int:
        """Makes the standings of campaigns anew, None: of all; says of how many."""
        if campaign_ids is None:
            with self._db.read() as session:
                campaign_ids = session.scalars(select(Campaign.id).order_by(Campaign.id)).all()
        return sum(_rebuild(self._db, campaign_id) for campaign_id in campaign_ids)


def _rebuild(database: Database, campaign_id: int) -> bool:
    with database.write() as session:
        if session.get(Campaign, campaign_id) is None:
            return False  # it was deleted meanwhile
        rebuild_standings(session, locked_campaign(session, campaign_id))
        return True


def _is_right(session: Session, campaign: Campaign) -> bool:
    kept = {
        row.trial_id: row._asdict()
        for row in session.execute(
            select(*StandingRow.__table__.columns).where(StandingRow.campaign_id == campaign.id)
        )
    }
    made = {row["trial_id"]: row for row in standings_of(session, campaign)}
    return kept.keys() == made.keys() and all(_agree(kept[id_], made[id_]) for id_ in made)


def _agree(kept: Mapping[str, Any], made: Mapping[str, Any]) -> bool:
    # To the last digits only: another machine's logarithm may differ there.
    return all(
        math.isclose(kept[name], made[name], rel_tol=1e-12)
        if isinstance(made[name], float) and isinstance(kept[name], float)
        else kept[name] == made[name]
        for name in _COLUMNS
    )
