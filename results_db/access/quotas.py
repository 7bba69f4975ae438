"""Quotas: most measured node-hours of an owner or a group in a day, week, month or year.

Running trials finish; none starts once what was used and what is held reach a quota.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, case, func, or_, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.access.owners_and_groups import no_group
from layout_tuner.results_db.access.shares import OF_ATTEMPTS, running
from layout_tuner.results_db.access.webhooks import notify
from layout_tuner.results_db.actor import QuotaAction, QuotaKind, QuotaPeriod
from layout_tuner.results_db.database.database import EYES_OF, Database
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import Clock, StoreSection
from layout_tuner.results_db.errors import (
    OwnerInvalidError,
    OwnerNotFoundError,
    QuotaExceededError,
)
from layout_tuner.results_db.models.service_tables import (
    GroupMember,
    GroupRow,
    OwnerRow,
    PastUse,
    QuotaRow,
)
from layout_tuner.results_db.models.table_base import insert_missing
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.service_records import QuotaRead
from layout_tuner.trainers.simulator import SIMULATOR_PREFIX, is_simulator

EVERYONE: Final = "*"
"""As the name of an owner: each that has no quota of its own."""

MAX_NODE_HOURS: Final = 1e8
"""Most node-hours of a quota: those of 11,000 nodes in a year."""

NEARLY: Final = 0.8
"""The part of a quota at which it is nearly used."""

_KEY: Final = (QuotaRow.kind, QuotaRow.name, QuotaRow.period)


def start_of(period: str, now: datetime) -> datetime:
    """When the period in which `now` is began, in UTC; weeks begin on Monday."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        return day - timedelta(days=day.weekday())
    month = 1 if period == "year" else day.month
    return day.replace(month=month, day=day.day if period == "day" else 1)


def end_of(period: str, now: datetime) -> datetime:
    later = timedelta(days={"day": 1, "week": 7, "month": 31, "year": 366}[period])
    return start_of(period, start_of(period, now) + later)


class QuotaBook:
    """The quotas that are in force, and what is used and held of them, in one transaction."""

    def __init__(self, session: Session, now: datetime, *, lock: bool = False) -> None:
        """With `lock`, other services that lease wait, and then count these leases too."""
        in_force = or_(QuotaRow.until.is_(None), QuotaRow.until > now)
        query = select(QuotaRow).where(in_force).order_by(*_KEY)
        self._now = now
        self.quotas = session.scalars(query.with_for_update() if lock else query).all()
        self._used: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        if not self.quotas:
            return
        starts = {each.period: f"{start_of(each.period, now):%Y-%m-%d}" for each in self.quotas}
        since = [
            func.sum(case((PastUse.day >= x, OF_ATTEMPTS), else_=0.0)) for x in starts.values()
        ]
        simulated = PastUse.trainer.startswith(SIMULATOR_PREFIX, autoescape=True)
        by = (PastUse.owner, PastUse.group)
        ended = select(*by, *since).where(PastUse.day >= min(starts.values()), ~simulated)
        for owner, group, *sums in session.execute(ended.group_by(*by)):
            self.take(owner, group, dict(zip(starts, sums, strict=True)))
        for owner, group, (_, is_simulated), _, held in running(session, now, at_most=True):
            if not is_simulated:
                self.take(owner, group, dict.fromkeys(starts, held))

    def take(self, owner: str, group: str | None, more: Mapping[str, float]) -> None:
        """Counts node-seconds of periods, such as those of probes that were just leased."""
        for period, node_seconds in more.items():
            self._used["owner", owner, period] += node_seconds
            self._used["group", group or "", period] += node_seconds

    def of(self, owner: str, group: str | None) -> list[QuotaRow]:
        """The quotas on campaigns of an owner in a group."""
        by_name = [each for each in self.quotas if each.kind == "owner"]
        own = [each for each in by_name if each.name == owner]
        own = own or [each for each in by_name if each.name == EVERYONE]
        return own + [each for each in self.quotas if (each.kind, each.name) == ("group", group)]

    def used(self, quota: QuotaRow, owner: str) -> float:
        """Node-seconds of a quota that are used or held; of one for everyone by this owner."""
        name = owner if quota.name == EVERYONE else quota.name
        return self._used[quota.kind, name, quota.period]

    def left(self, quota: QuotaRow, owner: str) -> float:
        return quota.node_hours * 3600 - self.used(quota, owner)

    def full(self, owner: str, group: str | None) -> QuotaRow | None:
        """A quota because of which no trial of an owner's campaigns in a group starts."""
        return next((each for each in self.of(owner, group) if self.left(each, owner) <= 0), None)

    def owners(self) -> list[str]:
        """Owners who have used or hold something, by name."""
        return sorted({name for kind, name, _ in self._used if kind == "owner"})

    def conditions(self) -> list[ColumnElement[bool]]:
        """That no quota keeps trials of a campaign from being leased."""
        if not self.quotas:
            return []
        owners = [name for name in self.owners() if self.full(name, None)]
        groups = [q.name for q in self.quotas if q.kind == "group" and self.left(q, "") <= 0]
        is_free = func.coalesce(Campaign.group, "").not_in(groups)
        return [Campaign.created_by.not_in(owners), is_free]

    def words(self, quota: QuotaRow, owner: str) -> str:
        """What is left of a quota, and until when, in a sentence."""
        whose = f"the group {quota.name!r}" if quota.kind == "group" else repr(owner)
        left = max(self.left(quota, owner), 0.0) / 3600
        return (
            f"{whose} has {left:.4g} of {quota.node_hours:g} node-hours left in this {quota.period}, "
            f"which ends at {end_of(quota.period, self._now):%Y-%m-%d %H:%M} UTC"
        )


def refuse_beyond(session: Session, campaign: Campaign, now: datetime) -> None:
    """Raises QuotaExceededError for a new campaign that may use more than a quota leaves.

    Without a budget in node-hours it may use whatever is left.
    """
    if is_simulator(campaign.trainer):
        return
    owner, most = campaign.created_by, (campaign.stored.budget.node_hours or 0.0) * 3600
    # A quota counts campaigns that the owner may not see, too.
    eyes, session.info[EYES_OF] = session.info[EYES_OF], ()
    book = QuotaBook(session, now)
    session.info[EYES_OF] = eyes
    for quota in book.of(owner, campaign.group):
        if quota.beyond == "refuse" and book.left(quota, owner) <= max(most * (1 - 1e-9), 0.0):
            wants = f"may use {most / 3600:g}" if most else "needs some"
            raise QuotaExceededError(
                f"{book.words(quota, owner)}, and this campaign {wants}: lower its budget's "
                "node_hours, wait, or ask an administrator for more"
            )


class Quotas(StoreSection):
    """The store's methods for quotas."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database, clock)
        self._notified: set[str] = set()
        """Keys of the events that this process has written."""

    def find(self, *, owner: str | None = None) -> list[QuotaRead]:
        """Every quota; or those that are in force for an owner and the owner's groups."""
        with self._db.seen_by(None).read() as session:
            book = QuotaBook(session, self._clock())
            if owner is None:
                found = list(session.scalars(select(QuotaRow).order_by(*_KEY)))
            else:
                of_owner = select(GroupMember.group_name).where(GroupMember.owner == owner)
                groups = session.scalars(of_owner.order_by(GroupMember.group_name))
                found = list(dict.fromkeys(q for g in (None, *groups) for q in book.of(owner, g)))
            return [self._read(book, row, owner) for row in found]

    def _read(self, book: QuotaBook, row: QuotaRow, owner: str | None = None) -> QuotaRead:
        is_sum = row.name == EVERYONE and owner is None
        return record_of(
            QuotaRead,
            row,
            used_node_hours=None if is_sum else book.used(row, owner or "") / 3600,
            period_ends_at=end_of(row.period, self._clock()),
        )

    @retried
    def put(
        self,
        kind: QuotaKind,
        name: str,
        period: QuotaPeriod,
        *,
        node_hours: float,
        beyond: QuotaAction = "refuse",
        until: datetime | None = None,
    ) -> QuotaRead:
        """Sets the quota of an owner or a group in a period.

        Raises:
            OwnerInvalidError: the node-hours are out of range, or the end is past.
            OwnerNotFoundError: there is no owner, or no group, of this name.
        """
        now = self._clock()
        if not (math.isfinite(node_hours) and 0 < node_hours <= MAX_NODE_HOURS):
            raise OwnerInvalidError(
                f"node_hours={node_hours:g} is not above 0 and at most {MAX_NODE_HOURS:g}; "
                "`layout-tuner quota remove` takes a quota away"
            )
        if until is not None and until <= now:
            raise OwnerInvalidError(
                f"until={until.isoformat()} is past; leave it out for a quota without an end"
            )
        with self._db.write() as session:
            if kind == "group" and session.get(GroupRow, name) is None:
                raise no_group(name)
            if kind == "owner" and name != EVERYONE and session.get(OwnerRow, name) is None:
                raise OwnerNotFoundError(
                    f"there is no owner {name[:80]!r}; `layout-tuner owner list` has all of them, "
                    f"and {EVERYONE} is everyone without a quota of their own"
                )
            given = {"period": period, "node_hours": node_hours, "beyond": beyond}
            insert_missing(session, QuotaRow, [{"kind": kind, "name": name, **given}])
            row = session.merge(QuotaRow(kind=kind, name=name, until=until, **given))
            self._audit(session, "quota.put", kind, name, until=until and str(until), **given)
            return self._read(QuotaBook(session, now), row)

    @retried
    def remove(self, kind: QuotaKind, name: str, period: QuotaPeriod) -> None:
        """Takes a quota away; OwnerNotFoundError where there is none."""
        with self._db.write() as session:
            if (row := session.get(QuotaRow, (kind, name, period))) is None:
                raise OwnerNotFoundError(
                    f"the {kind} {name[:80]!r} has no quota for a {period}; `layout-tuner quota list` "
                    "has all of them"
                )
            session.delete(row)
            self._audit(session, "quota.remove", kind, name, period=period)

    def why_waits(self, campaign: CampaignRecord) -> str | None:
        """The quota because of which no trial of a campaign starts, in words; None: none does."""
        if campaign.is_simulated:
            return None
        with self._db.seen_by(None).read() as session:
            book = QuotaBook(session, self._clock())
            full = book.full(campaign.created_by, campaign.group)
            return None if full is None else f"{book.words(full, campaign.created_by)}; it waits"

    @retried
    def notify_nearly_used(self) -> None:
        """Writes an event for each quota of which 80 % are used in its period, once a period."""
        now, found = self._clock(), dict[str, tuple[str, dict[str, Any]]]()
        with self._db.read() as session:
            book = QuotaBook(session, now)
            members = select(GroupMember.owner, GroupMember.group_name)
            pairs = [*((owner, None) for owner in book.owners()), *session.execute(members)]
            for owner, group in pairs:
                for quota in book.of(owner, group):
                    name = owner if quota.kind == "owner" else quota.name
                    since = f"{start_of(quota.period, now)} {quota.period} {quota.node_hours}"
                    if book.used(quota, owner) >= NEARLY * quota.node_hours * 3600:
                        text = book.words(quota, owner)
                        data = {"text": text, "kind": quota.kind, "name": name}
                        key = f"{owner} {quota.kind} {name} {since}"
                        found[key] = owner, data | {"period": quota.period}
        if found.keys() <= self._notified:
            return
        with self._db.write() as session:
            for key, (owner, data) in found.items():
                notify(session, "quota.at_80_percent", now=now, owner=owner, data=data, key=key)
        self._notified = set(found)
