"""Quotas: most measured node-hours of an owner or a group in a day, week, month or year.

Running trials finish; none starts once what was used and what is held reach a quota.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from datetime import datetime
from typing import Final, cast

from sqlalchemy import ColumnElement, delete, event, insert, or_, select
from sqlalchemy.orm import Session

from layout_tuner.results_db.access.owners import no_group
from layout_tuner.results_db.access.shares import book, end_of, uses
from layout_tuner.results_db.access.webhooks import notify
from layout_tuner.results_db.actor import SYSTEM, QuotaAction, QuotaKind, QuotaPeriod
from layout_tuner.results_db.database.database import rows_deleted
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import (
    OwnerNotFoundError,
    QuotaExceededError,
    QuotaInvalidError,
)
from layout_tuner.results_db.models.service_tables import (
    AuditRow,
    GroupMember,
    GroupRow,
    OwnerRow,
    QuotaRow,
)
from layout_tuner.results_db.models.table_base import insert_missing
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.service_records import QuotaRead
from layout_tuner.trainers.simulator import is_simulator

EVERYONE: Final = "*"
"""As the name of an owner: each that has no quota of its own."""

MAX_NODE_HOURS: Final = 1e8
"""Most node-hours of a quota: those of 11,000 nodes in a year."""

NEARLY: Final = 0.8
"""The part of a quota at which it is nearly used."""


class QuotaBook:
    """The quotas that are in force, and what has been used of them, in one transaction."""

    def __init__(self, session: Session, now: datetime, *, with_held: bool = True) -> None:
        in_force = or_(QuotaRow.until.is_(None), QuotaRow.until > now)
        self._now = now
        self.quotas = session.scalars(select(QuotaRow).where(in_force).order_by(QuotaRow.id)).all()
        self._used: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        if not self.quotas:
            return
        for (owner, group, _, is_simulated), use in uses(session, now).items():
            if not is_simulated:
                in_use = use.held if with_held else 0.0
                self.take(owner, group, {at: each + in_use for at, each in use.in_period.items()})

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

    def conditions(self) -> list[ColumnElement[bool]]:
        """That no quota keeps trials of a campaign from being leased."""
        if not self.quotas:
            return []
        names = {name for kind, name, _ in self._used if kind == "owner"}
        owners = sorted(name for name in names if self.full(name, None))
        groups = [q.name for q in self.quotas if q.kind == "group" and self.left(q, "") <= 0]
        is_free = or_(Campaign.group.is_(None), Campaign.group.not_in(groups))
        return [Campaign.created_by.not_in(owners), is_free]

    def words(self, quota: QuotaRow, owner: str) -> str:
        """What is left of a quota, and until when, in a sentence."""
        whose = f"the group {quota.name!r}" if quota.kind == "group" else repr(owner)
        left = max(self.left(quota, owner), 0.0) / 3600
        ends = end_of(cast("QuotaPeriod", quota.period), self._now)
        return (
            f"{whose} has {left:.4g} of {quota.node_hours:g} node-hours left in this {quota.period}, "
            f"which ends at {ends:%Y-%m-%d %H:%M} UTC"
        )


def refuse_beyond(session: Session, campaign: Campaign, now: datetime) -> None:
    """Raises QuotaExceededError for a new campaign that may use more than a quota leaves.

    Without a budget in node-hours it may use whatever is left.
    """
    if is_simulator(campaign.trainer):
        return
    owner, most = campaign.created_by, (campaign.stored.budget.node_hours or 0.0) * 3600
    quotas = QuotaBook(session, now)
    for quota in quotas.of(owner, campaign.group):
        if quota.beyond == "refuse" and quotas.left(quota, owner) <= max(most * (1 - 1e-9), 0.0):
            wants = f"may use {most / 3600:g}" if most else "needs some"
            raise QuotaExceededError(
                f"{quotas.words(quota, owner)}, and this campaign {wants}: lower its budget's "
                "node_hours, wait, or ask an administrator for more"
            )


@event.listens_for(Session, "before_commit")
def _book(session: Session) -> None:
    booked = None if session.in_nested_transaction() else book(session)
    if booked is None:
        return
    charged, now = booked
    quotas = QuotaBook(session, now, with_held=False)
    more: defaultdict[tuple[QuotaRow, str], float] = defaultdict(float)
    for (owner, group, _, simulated), node_seconds in charged.items():
        for quota in () if simulated else quotas.of(owner, group):
            more[quota, owner if quota.name == EVERYONE else quota.name] += node_seconds
    for (quota, name), node_seconds in more.items():
        used, nearly = quotas.used(quota, name), NEARLY * quota.node_hours * 3600
        if used - node_seconds < nearly <= used:
            note_nearly_used(session, quota, name, quotas.words(quota, name), now)


def note_nearly_used(
    session: Session, quota: QuotaRow, name: str, words: str, now: datetime
) -> None:
    """Notes in the audit, in the transaction that ends a trial, that 80 % of a quota are used.

    `name` is that of the owner or the group, also where the quota is everyone's.
    """
    session.execute(
        insert(AuditRow).values(
            at=now,
            actor=SYSTEM.name,
            role=SYSTEM.role,
            action="quota.nearly_used",
            target_kind=quota.kind,
            target=name,
            details={"said": words},
        )
    )
    members = select(GroupMember.owner).where(GroupMember.group_name == name)
    owners = [name] if quota.kind == "owner" else session.scalars(members).all()
    for owner in owners:
        data = {"text": words, "kind": quota.kind, "name": name, "period": quota.period}
        notify(session, "quota.at_80_percent", now=now, owner=owner, data=data)


class Quotas(StoreSection):
    """The store's methods for quotas."""

    def find(self, *, owner: str | None = None) -> list[QuotaRead]:
        """Every quota; or those that are in force for an owner and the owner's groups."""
        now = self._clock()
        with self._db.seen_by(None).read() as session:
            book = QuotaBook(session, now)
            found = session.scalars(select(QuotaRow).order_by(QuotaRow.id)).all()
            if owner is not None:
                of_owner = GroupMember.owner == owner
                groups = set(session.scalars(select(GroupMember.group_name).where(of_owner)))
                found = book.of(owner, None) + [
                    each for each in book.quotas if each.kind == "group" and each.name in groups
                ]
            return [
                record_of(
                    QuotaRead,
                    row,
                    used_node_hours=None
                    if row.name == EVERYONE and owner is None
                    else book.used(row, owner or "") / 3600,
                    period_ends_at=end_of(cast("QuotaPeriod", row.period), now),
                )
                for row in found
            ]

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
            QuotaInvalidError: the node-hours are out of range, or the end is past.
            OwnerNotFoundError: there is no owner, or no group, of this name.
        """
        now = self._clock()
        if not (math.isfinite(node_hours) and 0 < node_hours <= MAX_NODE_HOURS):
            raise QuotaInvalidError(
                f"node_hours={node_hours:g} is not above 0 and at most {MAX_NODE_HOURS:g}; "
                "`layout-tuner quota remove` takes a quota away"
            )
        if until is not None and until <= now:
            raise QuotaInvalidError(
                f"until={until.isoformat()} is past; leave it out for a quota without an end"
            )
        with self._db.write() as session:
            is_known = session.get(OwnerRow if kind == "owner" else GroupRow, name) is not None
            if not (is_known or (kind, name) == ("owner", EVERYONE)):
                if kind == "group":
                    raise no_group(name)
                raise OwnerNotFoundError(
                    f"there is no owner {name[:80]!r}; `layout-tuner owner list` has all of them, "
                    f"and {EVERYONE} is everyone without a quota of their own"
                )
            new = {"kind": kind, "name": name, "period": period, "node_hours": node_hours}
            new |= {"beyond": beyond, "created_at": now, "created_by": self._actor.name}
            insert_missing(session, QuotaRow, [new])
            row = session.scalars(select(QuotaRow).where(*_named(kind, name, period))).one()
            row.node_hours, row.beyond, row.until = node_hours, beyond, until
            given = {"node_hours": node_hours, "beyond": beyond, "until": until and str(until)}
            self._audit(session, "quota.put", kind, name, period=period, **given)
        return next(q for q in self.find() if (q.kind, q.name, q.period) == (kind, name, period))

    @retried
    def remove(self, kind: QuotaKind, name: str, period: QuotaPeriod) -> None:
        """Takes a quota away; OwnerNotFoundError where there is none."""
        with self._db.write() as session:
            if not rows_deleted(session, delete(QuotaRow).where(*_named(kind, name, period))):
                raise OwnerNotFoundError(
                    f"the {kind} {name[:80]!r} has no quota for a {period}; `layout-tuner quota list` "
                    "has all of them"
                )
            self._audit(session, "quota.remove", kind, name, period=period)

    def why_waits(self, campaign: CampaignRecord) -> str | None:
        """The quota because of which no trial of a campaign starts, in words; None: none does."""
        if campaign.is_simulated:
            return None
        with self._db.seen_by(None).read() as session:
            book = QuotaBook(session, self._clock())
            full = book.full(campaign.created_by, campaign.group)
            return None if full is None else f"{book.words(full, campaign.created_by)}; it waits"


def _named(kind: str, name: str, period: str) -> list[ColumnElement[bool]]:
    return [QuotaRow.kind == kind, QuotaRow.name == name, QuotaRow.period == period]
