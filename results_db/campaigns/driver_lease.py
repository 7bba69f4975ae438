"""The driver's lease: of all drivers that run on a database, one is active.

Every takeover increases a number, the fence. The writing transactions of a driver lock the row of
the lease and compare the fence first: after a takeover the former driver cannot write, however long
it was suspended. A takeover waits for a transaction that the former driver is in.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final

from sqlalchemy import Select, func, select, update
from sqlalchemy.orm import Session

from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.locks import lock_rows
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import DriverLeaseLostError
from layout_tuner.results_db.models.service_tables import DriverLeaseRow, WorkerRow, is_there
from layout_tuner.results_db.models.tables import Campaign, Trial
from layout_tuner.results_db.records import WorkerRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.wall_time import clock_seconds

DRIVER_LEASE_S: Final = 5.0
"""Seconds without renewal after which another driver may take over."""

LEASE_ID: Final = 1
"""Id of the only row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverLease:
    """The state of the driver's lease."""

    fence: int
    """Grows with every takeover; 0: there was no driver yet."""
    host: str
    pid: int
    since: datetime | None
    seen_at: datetime | None
    """Time of the last renewal; None: never."""
    released_at: datetime | None
    """When its holder released it; None: it did not."""

    def is_free(self, now: datetime) -> bool:
        """Whether another driver may take over at `now`."""
        if self.seen_at is None or self.released_at is not None:
            return True
        return now - self.seen_at > timedelta(seconds=DRIVER_LEASE_S)


class DriverLeases(StoreSection):
    """The store's methods for the driver's lease."""

    def lease(self) -> DriverLease:
        """The current lease, or the last one."""
        with self._db.read() as session:
            return record_of(DriverLease, session.scalars(_row()).one())

    @retried
    def acquire(self, *, unchanged: DriverLease | None = None) -> DriverLease | None:
        """Makes this process the active driver; None while another is.

        A lease that has been `unchanged` for `DRIVER_LEASE_S` by the monotonic clock of the caller
        is taken over even if it is not that old by the clock, which may have been set back.
        """
        now = self._clock()
        with self._db.write() as session:
            # The strongest lock: it and the transactions that hold the fence wait for each other.
            row = session.scalars(_row().with_for_update()).one()
            lease = record_of(DriverLease, row)
            if not lease.is_free(now) and lease != unchanged:
                return None
            row.fence += 1
            row.host = socket.gethostname()[:255]
            row.pid = os.getpid()
            row.since = row.seen_at = now
            row.released_at = None
            session.flush()
            return record_of(DriverLease, row)

    def renew(self, fence: int) -> None:
        """Renews the active driver's lease; DriverLeaseLostError if another has taken over."""
        self._change_lease(fence, seen_at=self._clock())

    def release(self, fence: int) -> None:
        """Releases the lease to other drivers; DriverLeaseLostError if one has it already."""
        self._change_lease(fence, released_at=self._clock())

    @retried
    def move_clocks(self) -> None:
        """Updates the wall time of the running campaigns; called by the active driver.

        The wall time of a campaign stands while no worker could serve it.
        """
        now = self._clock()
        with self._db.write() as session:
            workers = working(session, now)
            for campaign in lock_rows(session, Campaign, Campaign.state == "RUNNING"):
                is_served = could_be_served(session, campaign, workers)
                campaign.wall_time_s += clock_seconds(campaign, now) if is_served else 0.0
                campaign.clock_at = now if is_served else None

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


def fenced(database: Database, fence: int) -> Database:
    """The database of a driver, whose writing transactions check the driver's fence first."""
    return database.beginning_with(partial(_check_fence, fence))


def _check_fence(fence: int, session: Session) -> None:
    # KEY SHARE: renewals can proceed, a takeover waits.
    query = select(DriverLeaseRow.fence).where(DriverLeaseRow.id == LEASE_ID)
    locked = query.with_for_update(read=True, key_share=True)
    if session.get_bind().dialect.name != "sqlite":
        # A driver that is suspended in a transaction must not block its successor for longer.
        timeout = f"{DRIVER_LEASE_S:.0f}s"
        limit = func.set_config("idle_in_transaction_session_timeout", timeout, True)
        session.execute(select(limit))
    if session.scalar(locked) != fence:
        raise _lost(fence)


def _row() -> Select[DriverLeaseRow]:
    return select(DriverLeaseRow).where(DriverLeaseRow.id == LEASE_ID)


def _lost(fence: int) -> DriverLeaseLostError:
    return DriverLeaseLostError(
        f"another driver has taken over since fence {fence}; this driver can no longer write"
    )


def working(session: Session, now: datetime) -> list[WorkerRecord]:
    """The live workers that still lease trials."""
    rows = session.scalars(select(WorkerRow).where(is_there(now), WorkerRow.state != "draining"))
    return [record_of(WorkerRecord, row) for row in rows]


def could_be_served(session: Session, campaign: Campaign, workers: Sequence[WorkerRecord]) -> bool:
    """Whether a trial of the campaign runs, or one of the workers could run one.

    Where trials wait, the worker must be large enough for one of them; where none waits, the driver
    may add one, unless the campaign's search waits for its turn.
    """
    sizes = session.execute(
        select(Trial.state, Trial.num_nodes, Trial.num_devices)
        .where(Trial.campaign_id == campaign.id, Trial.state.in_(("PENDING", "RUNNING")))
        .distinct()
    ).all()
    if any(state == "RUNNING" for state, *_ in sizes):
        return True
    cluster, trainer = campaign.cluster_name, campaign.trainer
    able = [each for each in workers if each.cluster == cluster and each.runs(trainer)]
    if not sizes:
        return bool(able) and not campaign.waiting_because
    return any(each.holds(nodes, devices) for each in able for _, nodes, devices in sizes)
