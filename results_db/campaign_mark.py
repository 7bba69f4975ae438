"""What tells one state of a campaign's pages from another: entity tags are made of it."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import Integer, bindparam, func, select
from sqlalchemy.orm import Session

from results_db.driver_statement import DriverStatement
from results_db.event_tables import EventRow
from results_db.models import Trial
from results_db.part import StorePart

_OF_CAMPAIGN: Final = EventRow.campaign_id == bindparam("campaign", type_=Integer)

_NEWEST: Final = DriverStatement(
    select(EventRow.seq, EventRow.at)
    .where(_OF_CAMPAIGN, EventRow.seq.is_not(None))
    .order_by(EventRow.seq.desc())
    .limit(1)
)
_UNNUMBERED: Final = DriverStatement(
    select(EventRow.id).where(_OF_CAMPAIGN, EventRow.seq.is_(None)).order_by(EventRow.id)
)
_LEASED_UNTIL: Final = DriverStatement(
    select(func.max(Trial.lease_expires_at)).where(
        Trial.campaign_id == bindparam("campaign", type_=Integer), Trial.state == "RUNNING"
    )
)


class CampaignMarks(StorePart):
    """The part of the store that says whether a campaign's pages are still as they were."""

    def campaign_mark(self, campaign_id: int, *, beats: bool = False) -> str:
        """A text that changes whenever something that a page shows of the campaign does.

        Args:
            campaign_id: the campaign.
            beats: whether the page also shows what every heartbeat changes: iterations done, cost.
        """
        with self._db.read() as session:
            mark = mark_of(session, campaign_id)
            return f"{mark} {_last_beat(session, campaign_id)}" if beats else mark


def mark_of(session: Session, campaign_id: int) -> str:
    """The same of a page that shows no running trials, in a transaction that goes on to read it."""
    parts = [str(campaign_id)]
    # Its time too: after a database was restored, a number may come again.
    for seq, at in _NEWEST.rows(session, campaign=campaign_id):
        parts += [str(seq), _microseconds(at)]
    # SQLite numbers events as they are written.
    if session.connection().dialect.name != "sqlite":
        parts += [f"+{id_}" for (id_,) in _UNNUMBERED.rows(session, campaign=campaign_id)]
    return " ".join(parts)


def _last_beat(session: Session, campaign_id: int) -> str:
    """When the lease of a running trial was last extended, by its new end."""
    ((leased_until,),) = _LEASED_UNTIL.rows(session, campaign=campaign_id)
    return "" if leased_until is None else _microseconds(leased_until)


def _microseconds(at: datetime) -> str:
    return f"{at.timestamp():.6f}"
