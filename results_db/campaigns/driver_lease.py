"""The driver's lease: of all drivers that run on a database, one is active.

Each tenure has a number, the fence, which grows with every takeover. A driver's writing transactions begin
by locking the lease's row and comparing its fence: once another has taken over, nothing of it is
written any more, however long it slept. Taking over waits for what the one before is just writing.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final, Self

from sqlalchemy import Select, func, select, update
from sqlalchemy.orm import Session

from results_db.errors import DriverLeaseLostError
from results_db.locks import lock_campaigns
from results_db.models import Campaign
from results_db.part import StorePart
from results_db.retry import retried
from results_db.rows import clock_seconds
from results_db.service_tables import DriverLeaseRow

DRIVER_LEASE_S: Final = 5.0
"""Seconds after which a driver that was not heard of is succeeded."""

LEASE_ID: Final = 1
"""There is one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverLease:
    """A tenure of a driver, as it stands in the database."""

    fence: int
    """Grows with every takeover; 0: there was none yet."""
    host: str
    pid: int
    since: datetime | None
    seen_at: datetime | None
    """When it was renewed last; None: never."""
    released_at: datetime | None
    """When its holder gave it back; None: it did not."""

    def is_free(self, now: datetime) -> bool:
        """Whether another driver may take over, going by the clock."""
        if self.seen_at is None or self.released_at is not None:
            return True
        return now - self.seen_at > timedelta(seconds=DRIVER_LEASE_S)


class DriverLeases(StorePart):
    """The part of the store that knows of drivers."""

    def driver_lease(self) -> DriverLease:
        """The tenure that goes on, or went on last."""
        with self._db.read() as session:
            return _record(session.scalars(_row()).one())

    def driver_seen_at(self) -> datetime | None:
        """When a driver was last at work; None if never."""
        return self.driver_lease().seen_at

    @retried
    def acquire_driver_lease(self, *, unchanged: DriverLease | None = None) -> DriverLease | None:
        """Makes this process the active driver; None while another is.

        Args:
            unchanged: the lease as it has been for `DRIVER_LEASE_S` by the caller's own count: it is
                taken though its last renewal is not that old by the clock, which may have been set back.
        """
        now = self._clock()
        with self._db.write() as session:
            # The strongest lock: it waits for transactions that hold the fence, and they for it.
            row = session.scalars(_row().with_for_update()).one()
            if not _record(row).is_free(now) and _record(row) != unchanged:
                return None
            row.fence += 1
            row.host = socket.gethostname()[:255]
            row.pid = os.getpid()
            row.since = row.seen_at = now
            row.released_at = None
            session.flush()
            return _record(row)

    def renew_driver_lease(self, fence: int) -> None:
        """Says that the active driver is at work.

        Raises:
            DriverLeaseLostError: another has taken over.
        """
        self._change_lease(fence, seen_at=self._clock())

    def release_driver_lease(self, fence: int) -> None:
        """Ends a tenure in order: another driver takes over at once.

        Raises:
            DriverLeaseLostError: another has taken over already.
        """
        self._change_lease(fence, released_at=self._clock())

    def as_driver(self, fence: int) -> Self:
        """The same store, which writes as the active driver, and nothing once it no longer is.

        What it is asked to write then raises `DriverLeaseLostError`.
        """
        other = self.by(self._actor)
        other._db = self._db.beginning_with(_Fence(fence))
        return other

    @retried
    def move_clocks(self) -> None:
        """Brings the wall time of the running campaigns up to date: a driver is at work."""
        now = self._clock()
        with self._db.write() as session:
            for campaign in lock_campaigns(session, Campaign.state == "RUNNING"):
                campaign.wall_time_s += clock_seconds(campaign, now)
                campaign.clock_at = now

    def _change_lease(self, fence: int, **changes: Any) -> None:
        with self._db.write() as session:
            changed = session.execute(
                update(DriverLeaseRow)
                .where(DriverLeaseRow.id == LEASE_ID, DriverLeaseRow.fence == fence)
                .values(**changes)
                .returning(DriverLeaseRow.fence)
            )
            if changed.scalar() is None:
                raise _lost(fence)


class _Fence:
    """What each writing transaction of a driver begins with."""

    def __init__(self, fence: int) -> None:
        self._fence = fence

    def __call__(self, session: Session) -> None:
        # KEY SHARE: renewals go on meanwhile, a takeover waits.
        query = select(DriverLeaseRow.fence).where(DriverLeaseRow.id == LEASE_ID)
        locked = query.with_for_update(read=True, key_share=True)
        if session.get_bind().dialect.name != "sqlite":
            # A driver that is stopped in the middle of a transaction holds up its successor no longer.
            patience = f"{DRIVER_LEASE_S:.0f}s"
            limit = func.set_config("idle_in_transaction_session_timeout", patience, True)
            session.execute(select(limit))
        if session.scalar(locked) != self._fence:
            raise _lost(self._fence)


def _row() -> Select[DriverLeaseRow]:
    return select(DriverLeaseRow).where(DriverLeaseRow.id == LEASE_ID)


def _record(row: DriverLeaseRow) -> DriverLease:
    return DriverLease(
        fence=row.fence,
        host=row.host,
        pid=row.pid,
        since=row.since,
        seen_at=row.seen_at,
        released_at=row.released_at,
    )


def _lost(fence: int) -> DriverLeaseLostError:
    return DriverLeaseLostError(
        f"another driver has taken over since tenure {fence} began; this one writes nothing any more"
    )
