"""How the service stands, in a few numbers: for those who watch over it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import Select, func, select, text
from sqlalchemy.orm import Session

from results_db import migrate
from results_db.driver_lease import DriverLeases
from results_db.event_tables import EventRow
from results_db.models import Campaign, Trial
from results_db.part import StorePart
from results_db.records import CAMPAIGN_STATES
from results_db.rows import COST_COLUMNS
from results_db.worker_tables import NodeQuarantine, Worker
from results_db.workers import is_there


@dataclass(frozen=True, kw_only=True, slots=True)
class VitalSigns:
    """What a look at the database tells."""

    campaigns: Mapping[str, int]
    """By state, zeros included."""
    open_trials: Mapping[str, int]
    """PENDING and RUNNING; those that ended are counted as they end."""
    workers: Mapping[str, int]
    """Workers that are there, by cluster."""
    quarantined_nodes: int
    node_seconds: Mapping[str, float]
    """What all campaigns cost, by part."""
    unnumbered_events: int
    """Events that watchers do not see yet, where they are numbered after the commit."""
    num_bytes: int
    """Size of the database."""
    driver_seen_at: datetime | None


class Vitals(StorePart):
    """The part of the store that tells how all of it stands."""

    def vital_signs(self) -> VitalSigns:
        """A look that takes milliseconds, however much there is."""
        now = self._clock()
        driver_seen_at = DriverLeases(self._db, self._clock).driver_seen_at()
        with self._db.read() as session:
            return VitalSigns(
                campaigns=dict.fromkeys(CAMPAIGN_STATES, 0) | _campaigns(session),
                open_trials={state: _trials(session, state) for state in ("PENDING", "RUNNING")},
                workers=_workers(session, now),
                quarantined_nodes=session.scalar(_quarantined()) or 0,
                node_seconds=_costs(session),
                unnumbered_events=session.scalar(_unnumbered()) or 0,
                num_bytes=_size(session),
                driver_seen_at=driver_seen_at,
            )

    def why_not_usable(self) -> list[str]:
        """Why the database cannot be worked on as it is; empty: it can.

        Raises:
            DatabaseUnavailableError: it does not answer.
        """
        with self._db.read() as session:
            return [*_wrong_schema(session), *_read_only(session)]


def _wrong_schema(session: Session) -> list[str]:
    found = session.scalar(text("SELECT version_num FROM alembic_version"))
    wanted = migrate.head()
    return [] if found == wanted else [f"its schema is {found}, and this version's is {wanted}"]


def _read_only(session: Session) -> list[str]:
    if session.get_bind().dialect.name == "sqlite":
        return []
    stands_by = session.scalar(select(func.pg_is_in_recovery()))
    return ["it is a standby, which takes no writes"] if stands_by else []


def _campaigns(session: Session) -> dict[str, int]:
    query = select(Campaign.state, func.count()).group_by(Campaign.state)
    return {row[0]: row[1] for row in session.execute(query)}


def _trials(session: Session, state: str) -> int:
    return session.scalar(select(func.count()).where(Trial.state == state)) or 0


def _workers(session: Session, now: datetime) -> dict[str, int]:
    query = select(Worker.cluster, func.count()).where(is_there(now)).group_by(Worker.cluster)
    return {row[0]: row[1] for row in session.execute(query)}


def _quarantined() -> Select[int]:
    return select(func.count()).where(NodeQuarantine.released_at.is_(None))


def _unnumbered() -> Select[int]:
    return select(func.count()).where(EventRow.seq.is_(None))


def _costs(session: Session) -> dict[str, float]:
    sums = [func.sum(getattr(Campaign, column)) for column in COST_COLUMNS.values()]
    row = session.execute(select(*sums)).one()
    return {part: float(value or 0.0) for part, value in zip(COST_COLUMNS, row, strict=True)}


def _size(session: Session) -> int:
    if session.get_bind().dialect.name == "sqlite":
        query = "SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"
    else:
        query = "SELECT pg_database_size(current_database())"
    return int(session.scalar(text(query)) or 0)
