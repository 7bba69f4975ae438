"""Owners and groups: campaigns belong to owners, and owners to groups.

A token acts for an owner. Administrators put owners into groups; a sign-in may also do so by a
claim. A weight is that of Slurm's fair shares: an owner of weight 2 gets twice what one of weight 1
gets, where both wait.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from sqlalchemy import delete, func, select, union
from sqlalchemy.orm import Session

from layout_tuner.errors import CampaignInvalidError
from layout_tuner.results_db.access.tokens import note_owner, refuse_bad_name
from layout_tuner.results_db.access.visibility import may_see
from layout_tuner.results_db.actor import MemberSource
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import OwnerInvalidError, OwnerNotFoundError
from layout_tuner.results_db.models.service_tables import EventRow, GroupMember, GroupRow, OwnerRow
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.records import Visibility

MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
"""Least and largest weight: with others a share would be too small to see, or all of it."""

MAX_MEMBERS: Final = 10_000
"""Most owners that a group has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerRecord:
    """Somebody to whom campaigns belong."""

    name: str
    weight: float
    created_at: datetime
    created_by: str
    groups: tuple[str, ...]
    """By name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRecord:
    """A group of owners."""

    name: str
    weight: float
    created_at: datetime
    created_by: str
    members: tuple[str, ...]
    """By name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharing:
    """Who sees a campaign, for which group its node-hours count, and its turn among its owner's."""

    visibility: Visibility = "everyone"
    group: str | None = None
    """None: the only group of its owner, or none."""
    priority: int = 0


DEFAULT_SHARING: Final = Sharing()

Audience = Set[tuple[str, int]]
"""Owners with the ids of campaigns that they may see, as of one moment."""


class Owners(StoreSection):
    """The store's methods for owners and groups."""

    def all(self) -> list[OwnerRecord]:
        """Every owner, by name."""
        with self._db.read() as session:
            groups = _by(session, GroupMember.owner, GroupMember.group_name)
            rows = session.scalars(select(OwnerRow).order_by(OwnerRow.name))
            return [
                OwnerRecord(
                    name=row.name,
                    weight=row.weight,
                    created_at=row.created_at,
                    created_by=row.created_by,
                    groups=tuple(groups.get(row.name, ())),
                )
                for row in rows
            ]

    def groups(self) -> list[GroupRecord]:
        """Every group, by name."""
        with self._db.read() as session:
            members = _by(session, GroupMember.group_name, GroupMember.owner)
            rows = session.scalars(select(GroupRow).order_by(GroupRow.name))
            return [
                GroupRecord(
                    name=row.name,
                    weight=row.weight,
                    created_at=row.created_at,
                    created_by=row.created_by,
                    members=tuple(members.get(row.name, ())),
                )
                for row in rows
            ]

    def audience(self, owners: Collection[str], campaign_ids: Collection[int]) -> Audience:
        """Which of these owners may see which of these campaigns, deleted ones too."""
        of = OwnerRow.name
        there = select(of, Campaign.id).where(Campaign.id.in_(campaign_ids), may_see(of))
        is_gone = EventRow.campaign_id.in_(campaign_ids) & may_see(of, EventRow)
        gone = select(of, EventRow.campaign_id).where(is_gone)
        query = union(there.where(of.in_(owners)), gone.where(of.in_(owners)))
        with self._db.read() as session:
            return {(owner, id_) for owner, id_ in session.execute(query)}

    def groups_of(self, owner: str) -> tuple[str, ...]:
        """The groups of an owner, by name; of an owner who does not exist, none."""
        with self._db.read() as session:
            return tuple(_groups_of(session, owner))

    @retried
    def put_owner(self, name: str, *, weight: float) -> bool:
        """Sets an owner's weight, and adds an owner who is new; returns whether so.

        Raises:
            TokenInvalidError: the name is not one.
            OwnerInvalidError: the weight is out of range.
        """
        refuse_bad_name(name, "owner")
        _refuse_weight(weight)
        with self._db.write() as session:
            is_new = session.get(OwnerRow, name) is None
            note_owner(session, name, self._clock(), self._actor.name)
            row = session.get_one(OwnerRow, name)
            if is_new or row.weight != weight:
                self._audit(session, "owner.put", "owner", name, weight=weight, new=is_new)
            row.weight = weight
            return is_new

    @retried
    def put_group(
        self, name: str, *, weight: float | None = None, members: Collection[str] | None = None
    ) -> bool:
        """Sets the weight and the members of a group, and adds one that is new; returns whether so.

        A weight of None stays, and members of None stay; owners who are new are noted.

        Raises:
            TokenInvalidError: the group's name, or that of a member, is not one.
            OwnerInvalidError: the weight is out of range, or there are too many members.
        """
        refuse_bad_name(name, "group")
        for member in members or ():
            refuse_bad_name(member, "members")
        if weight is not None:
            _refuse_weight(weight)
        if members is not None and len(members) > MAX_MEMBERS:
            raise OwnerInvalidError(
                f"members has {len(members)} owners; a group has at most {MAX_MEMBERS}"
            )
        now = self._clock()
        with self._db.write() as session:
            row = session.get(GroupRow, name)
            is_new = row is None
            if row is None:
                row = GroupRow(name=name, weight=1.0, created_at=now, created_by=self._actor.name)
                session.add(row)
                session.flush()
            if weight is not None:
                row.weight = weight
            if members is not None:
                session.execute(delete(GroupMember).where(GroupMember.group_name == name))
                for member in sorted(set(members)):
                    _join(session, name, member, "admin", now, self._actor.name)
            changed = {"weight": row.weight} | (
                {} if members is None else {"members": sorted(set(members))}
            )
            self._audit(session, "group.put", "group", name, new=is_new, **changed)
            return is_new

    @retried
    def delete_group(self, name: str) -> None:
        """Deletes a group; its campaigns are then seen by their owners alone.

        Raises:
            OwnerNotFoundError: there is no group of this name.
        """
        with self._db.write() as session:
            row = session.get(GroupRow, name)
            if row is None:
                raise no_group(name)
            num_campaigns = session.scalar(
                select(func.count()).where(Campaign.group == name, Campaign.visibility == "group")
            )
            session.delete(row)
            self._audit(session, "group.delete", "group", name, campaigns_hidden=num_campaigns)

    @retried
    def note_claimed_groups(self, owner: str, groups: Collection[str]) -> None:
        """Puts an owner into the groups that a sign-in claims, and takes the others of claims away.

        Memberships by an administrator stay. Groups that do not exist are added.

        Raises:
            TokenInvalidError: a name is not one.
        """
        for name in groups:
            refuse_bad_name(name, "group")
        now = self._clock()
        with self._db.write() as session:
            note_owner(session, owner, now, self._actor.name)
            own = (GroupMember.owner == owner, GroupMember.source == "claim")
            before = set(session.scalars(select(GroupMember.group_name).where(*own)))
            session.execute(delete(GroupMember).where(*own, GroupMember.group_name.not_in(groups)))
            for name in sorted(groups):
                if session.get(GroupRow, name) is None:
                    session.add(
                        GroupRow(name=name, weight=1.0, created_at=now, created_by=self._actor.name)
                    )
                    session.flush()
                _join(session, name, owner, "claim", now, self._actor.name)
            if before != set(groups):
                self._audit(session, "owner.groups", "owner", owner, groups=sorted(groups))


def _by(session: Session, key: object, value: object) -> dict[str, Sequence[str]]:
    found: dict[str, list[str]] = {}
    for each, other in session.execute(select(key, value).order_by(value)):  # type: ignore[call-overload]
        found.setdefault(each, []).append(other)
    return dict(found)


def _groups_of(session: Session, owner: str) -> Sequence[str]:
    query = select(GroupMember.group_name).where(GroupMember.owner == owner)
    return session.scalars(query.order_by(GroupMember.group_name)).all()


def _join(
    session: Session, group: str, owner: str, source: MemberSource, now: datetime, by: str
) -> None:
    note_owner(session, owner, now, by)
    if session.get(GroupMember, (group, owner)) is None:
        session.add(GroupMember(group_name=group, owner=owner, source=source))
        session.flush()


def _refuse_weight(weight: float) -> None:
    if not (math.isfinite(weight) and MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise OwnerInvalidError(
            f"weight={weight!r} is not from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}; 1 is an owner's as usual"
        )


def no_group(name: str) -> OwnerNotFoundError:
    return OwnerNotFoundError(
        f"there is no group {name[:80]!r}; `layout-tuner group list` has all of them"
    )


def share(session: Session, campaign: Campaign, sharing: Sharing) -> None:
    """Sets who sees a campaign, its group and its priority.

    Raises:
        CampaignInvalidError: its owner is not in the group; or is in several, and none is named; or
            it is to be for a group, and the owner is in none.
    """
    owner, group = campaign.created_by, sharing.group
    groups = _groups_of(session, owner)
    if group is not None and group not in groups:
        raise CampaignInvalidError(
            f"{owner!r} is not in a group {group[:80]!r}"
            + (f", but in {', '.join(groups)}" if groups else ""),
            field="group",
        )
    if group is None and len(groups) > 1:
        raise CampaignInvalidError(
            f"{owner!r} is in several groups; name the one that its node-hours count for: "
            f"{', '.join(groups)}",
            field="group",
        )
    if group is None and not groups and sharing.visibility == "group":
        raise CampaignInvalidError(
            f"{owner!r} is in no group; ask an administrator for one, or choose private or everyone",
            field="visibility",
        )
    campaign.visibility, campaign.priority = sharing.visibility, sharing.priority
    campaign.group = group or (groups[0] if groups else None)
