"""Fair shares: what owners have had of a cluster lately, and so whose turn it is for its devices.

The next lease goes to the owner with the least (recent use + held) / weight, in node-seconds.
Recent use halves in each half-life. The order is that of Slurm's multifactor priority, which takes
the largest 2^-(usage / shares); a fair tree is not needed, since owners have one level. An owner's
weight is its own times the largest of those of its groups. Each cluster counts for itself, and
simulated node-seconds do not count beside measured ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Float, case, cast, extract, func, select, tuple_
from sqlalchemy.exc import IntegrityError
from sqlalchemy.orm import Session, object_session

from layout_tuner.results_db.actor import QUOTA_PERIODS, QuotaPeriod
from layout_tuner.results_db.database.database import HALF_LIFE
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.service_tables import GroupMember, GroupRow, OwnerRow, RecentUse
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.service_records import ShareRead
from layout_tuner.trainers.simulator import is_simulator

UNKNOWN_PROBE_S: Final = 60.0
"""Seconds that a probe is expected to take while none of its campaign has ended."""

_CHARGED: Final = "charged"
"""In the `info` of a session, what its attempts cost beyond what was known, and the time."""

_NAMES: Final = ("owner", "group_name", "cluster", "is_simulated")
_KEY: Final = tuple(getattr(RecentUse, name) for name in _NAMES)
UseKey = tuple[str, str, str, bool]
Place = tuple[str, bool]
"""A cluster, and whether it is simulated."""


def start_of(period: QuotaPeriod, now: datetime) -> datetime:
    """When the period in which `now` is began, in UTC; weeks begin on Monday."""
    day = now.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    if period == "week":
        return day - timedelta(days=day.weekday())
    month = 1 if period == "year" else day.month
    return day.replace(month=month, day=day.day if period == "day" else 1)


def end_of(period: QuotaPeriod, now: datetime) -> datetime:
    later = timedelta(days={"day": 1, "week": 7, "month": 31, "year": 366}[period])
    return start_of(period, start_of(period, now) + later)


def note_use(campaign: Campaign, node_seconds: float, now: datetime) -> None:
    """Notes that an attempt cost so much more; it is booked at the end of the transaction."""
    session, group = object_session(campaign), campaign.group or ""
    assert session is not None
    charged, _ = session.info.setdefault(_CHARGED, (defaultdict(float), now))
    place = (campaign.cluster_name, is_simulator(campaign.trainer))
    charged[campaign.created_by, group, *place] += node_seconds


def book(session: Session) -> tuple[Mapping[UseKey, float], datetime] | None:
    """Adds what was noted to the sums of owners; returns it, and the time. None: nothing was.

    A transaction locks these rows last, and in order, so that transactions cannot deadlock.
    """
    noted: tuple[dict[UseKey, float], datetime] | None = session.info.pop(_CHARGED, None)
    if noted is None:
        return None
    charged, now = noted
    which = tuple_(*_KEY).in_(charged)
    known = {tuple(key) for key in session.execute(select(*_KEY).where(which))}
    for key in sorted(charged.keys() - known):
        try:
            with session.begin_nested():
                session.add(RecentUse(**dict(zip(_NAMES, key, strict=True)), at=now))
        except IntegrityError:  # another transaction was first
            continue
    rows = select(RecentUse).where(which).order_by(*_KEY).with_for_update()
    for row in session.scalars(rows, execution_options={"populate_existing": True}):
        more, use = charged[row.owner, row.group_name, row.cluster, row.is_simulated], Use()
        use.add(session, row, now)
        # An outcome may correct a larger cost that was known before.
        row.node_seconds, row.at = max(use.recent + more, 0.0), now
        for period in QUOTA_PERIODS:
            setattr(row, period, max(use.in_period[period] + more, 0.0))
    return charged, now


@dataclass(kw_only=True, slots=True)
class Use:
    """What an owner has of a cluster, in node-seconds."""

    recent: float = 0.0
    """Of ended attempts, the earlier the less."""
    in_period: dict[str, float] = field(default_factory=lambda: dict.fromkeys(QUOTA_PERIODS, 0.0))
    """Of ended attempts in the current day, week, month and year."""
    held: float = 0.0
    """Nodes of running attempts times the seconds since their leases; or what as many probes of
    the campaign cost on average if that is more: devices leased a moment ago count too."""
    running: int = 0
    waiting: int = 0
    weight: float = 1.0

    @property
    def total(self) -> float:
        return self.recent + self.held

    def add(self, session: Session, row: RecentUse, now: datetime) -> None:
        """Adds what is kept, as of now; while the clock is set back it stays."""
        passed_s = max((now - row.at).total_seconds(), 0.0)
        self.recent += row.node_seconds * 0.5 ** (passed_s / float(session.info[HALF_LIFE]))
        for period in QUOTA_PERIODS:
            if row.at >= start_of(period, now):
                self.in_period[period] += getattr(row, period)


def probe_cost(node_seconds: float, ended: int, nodes: float = 1.0) -> float:
    """Node-seconds that a probe is expected to cost, by what the ended ones did together."""
    return node_seconds / ended if node_seconds and ended else nodes * UNKNOWN_PROBE_S


def uses(session: Session, now: datetime, cluster: str | None = None) -> dict[UseKey, Use]:
    """What owners have of a cluster, or of all; simulated probes hold in simulated time."""
    found: defaultdict[UseKey, Use] = defaultdict(Use)
    here: list[ColumnElement[bool]] = [] if cluster is None else [RecentUse.cluster == cluster]
    for row in session.scalars(select(RecentUse).where(*here)):
        found[row.owner, row.group_name, row.cluster, row.is_simulated].add(session, row, now)
    since = now.timestamp() - cast(extract("epoch", Attempt.started_at), Float)
    held_s = func.coalesce(Attempt.held_s, case((Attempt.phase == "waiting", 0.0), else_=since))
    so_far: Any = func.sum(func.coalesce(Attempt.nodes_held, Trial.num_nodes) * held_s)
    whose = (Campaign.created_by, Campaign.group, Campaign.cluster_name, Campaign.trainer)
    query = (
        select(*whose, Campaign.node_seconds, Campaign.last_ended_seq)
        .add_columns(func.count(), func.sum(Trial.num_nodes), so_far)
        .join(Trial, Trial.campaign_id == Campaign.id)
        # The attempts of leases of this transaction are not written yet.
        .outerjoin(Attempt, (Attempt.trial_id == Trial.id) & (Attempt.attempt == Trial.attempt))
        .where(Trial.state == "RUNNING", *([Campaign.cluster_name == cluster] if here else ()))
        .group_by(Campaign.id)
    )
    for owner, group, on, trainer, cost, ended, running, nodes, held in session.execute(query):
        use = found[owner, group or "", on, is_simulator(trainer)]
        use.running += running
        use.held += max(held or 0.0, running * probe_cost(cost, ended, nodes / running))
    return found


def by_place(
    session: Session,
    now: datetime,
    cluster: str | None = None,
    *,
    waiting: Iterable[tuple[Place, str, int]],
) -> dict[Place, dict[str, Use]]:
    """The same by place and owner, with weights and the trials of owners that wait."""
    found: defaultdict[Place, defaultdict[str, Use]] = defaultdict(lambda: defaultdict(Use))
    for place, owner, number in waiting:
        found[place][owner].waiting += number
    for (owner, _, on, is_simulated), use in uses(session, now, cluster).items():
        mine = found[on, is_simulated][owner]
        mine.recent, mine.held = mine.recent + use.recent, mine.held + use.held
        mine.running += use.running
    query = (
        select(OwnerRow.name, OwnerRow.weight * func.coalesce(func.max(GroupRow.weight), 1.0))
        .outerjoin(GroupMember, GroupMember.owner == OwnerRow.name)
        .outerjoin(GroupRow, GroupRow.name == GroupMember.group_name)
        .where(OwnerRow.name.in_({owner for owners in found.values() for owner in owners}))
        .group_by(OwnerRow.name, OwnerRow.weight)
    )
    weights = dict(session.execute(query).all())
    for owner, use in (each for owners in found.values() for each in owners.items()):
        use.weight = weights.get(owner, 1.0)
    return {place: dict(owners) for place, owners in found.items()}


class Shares(StoreSection):
    """The store's methods for fair shares."""

    def use_half_life(self, seconds: float) -> None:
        """Sets the half-life of recent use, for this process."""
        self._db.half_life_s = seconds

    def find(self, *, owner: str | None = None, cluster: str | None = None) -> list[ShareRead]:
        """Shares of owners who have used, use or wait for a cluster, by cluster and owner.

        Campaigns that the actor may not see count too: only sums of owners are shown.
        """
        by = (Campaign.created_by, Campaign.cluster_name, Campaign.trainer)
        pending = (
            select(*by, func.count())
            .join(Trial, Trial.campaign_id == Campaign.id)
            .where(Trial.state == "PENDING", Campaign.state == "RUNNING")
            .group_by(*by)
        )
        if cluster is not None:
            pending = pending.where(Campaign.cluster_name == cluster)
        with self._db.seen_by(None).read() as session:
            waiting = [
                ((on, is_simulator(trainer)), name, number)
                for name, on, trainer, number in session.execute(pending)
            ]
            found = by_place(session, self._clock(), cluster, waiting=waiting)
        shares = (each for place, uses in sorted(found.items()) for each in _shares(place, uses))
        return [each for each in shares if owner in (None, each.owner)]

    def why_waits(self, campaign: CampaignRecord) -> str | None:
        """What share its owner has had, if a campaign waits for others; None: it does not."""
        place, owner = (campaign.cluster_name, campaign.is_simulated), campaign.created_by
        found = self.find(cluster=campaign.cluster_name)
        here = [each for each in found if (each.cluster, each.is_simulated) == place]
        own = next((each for each in here if each.owner == owner), None)
        others = [each for each in here if each.owner != owner and (each.running or each.waiting)]
        if own is None or not others:
            return None
        is_before = any(x.waiting and x.had / x.weight < own.had / own.weight for x in others)
        why = "other owners are before" if is_before else f"the devices are taken, {owner} is next"
        return (
            f"{why}: {owner} has had {own.had:.0%} of the recent node-hours on {place[0]}, and is "
            f"entitled to {own.entitled:.0%}"
        )


def _shares(place: Place, owners: Mapping[str, Use]) -> Iterator[ShareRead]:
    # An owner counts until its use has all but decayed.
    counted = {o: x for o, x in owners.items() if x.running or x.waiting or x.recent >= 1.0}
    weights, total = (
        sum(x.weight for x in counted.values()),
        sum(x.total for x in counted.values()),
    )
    for owner, use in sorted(counted.items()):
        yield ShareRead(
            cluster=place[0],
            is_simulated=place[1],
            owner=owner,
            weight=use.weight,
            entitled=use.weight / weights,
            had=use.total / total if total else 0.0,
            node_hours=use.total / 3600,
            total_node_hours=total / 3600,
            running=use.running,
            waiting=use.waiting,
        )
