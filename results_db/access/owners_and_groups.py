"""Owners and groups: campaigns belong to owners, and owners to groups.

A token acts for an owner. Administrators put owners into groups; a sign-in may also do so by a
claim. A weight is that of Slurm's fair shares: an owner of weight 2 gets twice what one of weight 1
gets, where both wait.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

from sqlalchemy import delete, select, union, update
from sqlalchemy.orm import Session

from layout_tuner.errors import CampaignInvalidError
from layout_tuner.results_db.access.browser_sessions import end_sign_ins
from layout_tuner.results_db.access.tokens import note_owner, refuse_bad_name
from layout_tuner.results_db.access.visibility import may_see
from layout_tuner.results_db.actor import MAX_SUBJECT
from layout_tuner.results_db.database.database import refused_unless_unique
from layout_tuner.results_db.database.retry import retried
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.errors import OwnerInvalidError, OwnerNotFoundError
from layout_tuner.results_db.models.service_tables import (
    EventRow,
    GroupMember,
    GroupRow,
    OwnerRow,
    PastUse,
)
from layout_tuner.results_db.models.table_base import insert_many, insert_missing
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.records import Visibility
from layout_tuner.results_db.rows import record_of
from layout_tuner.results_db.service_records import GroupRead, OwnerRead

MIN_WEIGHT: Final = 0.001
MAX_WEIGHT: Final = 1000.0
"""Least and largest weight: with others a share would be too small to see, or all of it."""

_SUBJECT: Final = re.compile(r"https?://[!-~]+#[ -~]+")

MAX_MEMBERS: Final = 10_000
"""Most owners that a group has."""


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

    def all(self) -> list[OwnerRead]:
        """Every owner, by name."""
        with self._db.read() as session:
            groups = _by(session, GroupMember.owner, GroupMember.group_name)
            rows = session.scalars(select(OwnerRow).order_by(OwnerRow.name))
            return [record_of(OwnerRead, row, groups=tuple(groups[row.name])) for row in rows]

    def groups(self, *, of: str | None = None) -> list[GroupRead]:
        """Every group, by name; or those of an owner."""
        with self._db.read() as session:
            members = _by(session, GroupMember.group_name, GroupMember.owner)
            rows = session.scalars(select(GroupRow).order_by(GroupRow.name))
            found = [record_of(GroupRead, row, members=tuple(members[row.name])) for row in rows]
        return [group for group in found if of is None or of in group.members]

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
    def put_owner(
        self, name: str, *, weight: float | None = None, subject: str | None = None
    ) -> OwnerRead:
        """Sets an owner's weight and subject, which stay if None, and adds an owner who is new.

        Sign-ins of the subject before end. With an empty one no provider signs the owner in.

        Raises:
            TokenInvalidError: the name is not one.
            OwnerInvalidError: the weight is out of range, the subject is none, or another owner's.
        """
        refuse_bad_name(name, "owner")
        if weight is not None:
            _refuse_weight(weight)
        if subject and not (_SUBJECT.fullmatch(subject) and len(subject) <= MAX_SUBJECT):
            raise OwnerInvalidError(
                f"subject={subject[:80]!r} is not the issuer's address, a #, and the `sub` of its ID tokens"
            )
        with self._db.write() as session:
            is_new = note_owner(session, name, self._clock(), self._actor.name)
            row = session.get_one(OwnerRow, name, with_for_update={"key_share": True})
            before = (row.weight, row.subject)
            row.weight = row.weight if weight is None else weight
            row.subject = row.subject if subject is None else subject or None
            taken = OwnerInvalidError(f"the subject {subject!r} is bound to another owner")
            with refused_unless_unique(taken, "owners", "subject"):
                session.flush()
            if before[1] != row.subject:
                end_sign_ins(session, name, self._clock())
            if is_new or before != (row.weight, row.subject):
                changed = {"weight": row.weight, "subject": row.subject, "new": is_new}
                self._audit(session, "owner.put", "owner", name, **changed)
            return record_of(OwnerRead, row, groups=tuple(_groups_of(session, name)))

    @retried
    def put_group(
        self,
        name: str,
        *,
        weight: float | None = None,
        members: Collection[str] | None = None,
        join: Collection[str] = (),
        leave: Collection[str] = (),
        known_members: bool = True,
    ) -> GroupRead:
        """Sets a group's weight and all its members, or lets owners join and leave; None stays.

        A group that is new is added, unless owners are to join or leave it. With `known_members`
        members have to be owners already; otherwise owners who are new are noted.

        Raises:
            TokenInvalidError: the group's name, or that of a member, is not one.
            OwnerInvalidError: the weight is out of range, or there are too many members.
            OwnerNotFoundError: one who joins is no owner, and has to be one; one who leaves is no
                member; or there is no such group.
        """
        refuse_bad_name(name, "group")
        if weight is not None:
            _refuse_weight(weight)
        now, by = self._clock(), self._actor.name
        with self._db.write() as session:
            is_new = note_owner(session, name, now, by, GroupRow)
            if is_new and (join or leave):
                raise no_group(name)
            row = session.get_one(GroupRow, name, with_for_update={"key_share": True})
            row.weight = row.weight if weight is None else weight
            for member in () if known_members else members or ():
                refuse_bad_name(member, "members")
                note_owner(session, member, now, by)
            before = _members(session, name)
            if members is not None:
                join, leave = {*join, *members}, {*leave, *(before - set(members))}
            after = _move(session, name, before, join, leave)
            moved = {"joined": sorted(after - before), "left": sorted(before - after)}
            self._audit(session, "group.put", "group", name, new=is_new, weight=row.weight, **moved)
            return record_of(GroupRead, row, members=tuple(sorted(after)))

    @retried
    def delete_group(self, name: str) -> None:
        """Deletes a group; campaigns that were for it are then private.

        They keep its name, for which their node-hours were counted. A later group of this name does
        not see them.

        Raises:
            OwnerNotFoundError: there is no group of this name.
        """
        with self._db.write() as session:
            row = session.get(GroupRow, name)
            if row is None:
                raise no_group(name)
            session.delete(row)
            session.flush()  # first: it waits for campaigns that are being made for the group
            for table in (EventRow, PastUse, Campaign):
                hide = update(table).where(table.group == name, table.visibility == "group")
                hidden = session.scalars(
                    hide.values(visibility="private").returning(table.group)
                ).all()
            self._audit(session, "group.delete", "group", name, campaigns_hidden=len(hidden))

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
                note_owner(session, name, now, self._actor.name, GroupRow)
                session.get(GroupRow, name, with_for_update={"key_share": True})
                row = {"group_name": name, "owner": owner, "source": "claim"}
                insert_missing(session, GroupMember, [row])
            if before != set(groups):
                self._audit(session, "owner.groups", "owner", owner, groups=sorted(groups))


def _by(session: Session, key: Any, value: Any) -> defaultdict[str, list[str]]:
    """The values of each key, in order."""
    found = defaultdict(list)
    for each, other in session.execute(select(key, value).order_by(value)):
        found[each].append(other)
    return found


def _groups_of(session: Session, owner: str, *, held: bool = False) -> Sequence[str]:
    query = select(GroupMember.group_name).where(GroupMember.owner == owner)
    if held:
        query = query.with_for_update(read=True, key_share=True)
    return session.scalars(query.order_by(GroupMember.group_name)).all()


def _members(session: Session, group: str) -> set[str]:
    return set(session.scalars(select(GroupMember.owner).where(GroupMember.group_name == group)))


def _move(
    session: Session, group: str, before: Set[str], join: Collection[str], leave: Collection[str]
) -> set[str]:
    """Changes members by an administrator's word; returns all members after it.

    A membership by a claim becomes one by an administrator, which later sign-ins keep.
    """
    if strangers := sorted(set(leave) - before):
        raise OwnerNotFoundError(f"{strangers[0][:80]!r} is not in the group {group!r}")
    after = {*(before - set(leave)), *join}
    if len(after) > MAX_MEMBERS:
        raise OwnerInvalidError(
            f"the group {group!r} would have {len(after)} members; a group has at most {MAX_MEMBERS}"
        )
    known = session.scalars(select(OwnerRow.name).where(OwnerRow.name.in_(join)))
    if unknown := sorted(set(join).difference(known)):
        raise OwnerNotFoundError(
            f"there is no owner {unknown[0][:80]!r}; `layout-tuner owner set` adds one"
        )
    moved = GroupMember.owner.in_({*join, *leave})
    session.execute(delete(GroupMember).where(GroupMember.group_name == group, moved))
    rows = [{"group_name": group, "owner": each, "source": "admin"} for each in set(join)]
    insert_many(session, GroupMember, rows)
    return after


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
    owner = campaign.created_by
    groups = _groups_of(session, owner, held=True)  # the group is not deleted meanwhile
    group = groups[0] if sharing.group is None and len(groups) == 1 else sharing.group
    if group not in groups and (group or groups or sharing.visibility == "group"):
        not_in = f", and not in {group[:80]!r}" if group else ""
        then = "name the one that its node-hours count for"
        if not groups:
            then = "ask an administrator for one, or choose private or everyone"
        is_in = ", ".join(groups) or "no group"
        raise CampaignInvalidError(f"{owner!r} is in {is_in}{not_in}: {then}", field="group")
    campaign.group, campaign.visibility = group, sharing.visibility
    campaign.priority = sharing.priority
