"""Fair shares: what owners have had of a cluster lately, and so whose turn it is for its devices.

The next lease goes to the owner with the least (recent use + held) / weight, in node-seconds.
Recent use halves in each half-life after the day on which it was booked. The order is that of
Slurm's multifactor priority, which takes the largest 2^-(usage / shares); a fair tree is not
needed, since owners have one level. An owner's weight is its own times the largest of those of its
groups. Each cluster counts for itself, and simulated node-seconds do not count beside measured
ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Float, case, cast, extract, func, select
from sqlalchemy.orm import Session, object_session

from layout_tuner.results_db.database.database import HALF_LIFE
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.service_tables import GroupMember, GroupRow, OwnerRow, PastUse
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import CampaignRecord
from layout_tuner.results_db.service_records import ShareRead
from layout_tuner.search_spaces.probe_defaults import DEFAULT_DEADLINE_S
from layout_tuner.trainers.simulator import is_simulator

UNKNOWN_PROBE_S: Final = 60.0
"""Seconds that a probe is expected to take while none of its campaign has ended."""

MOST_HALF_LIVES: Final = 10
"""Use of more half-lives ago counts no more: less than a thousandth of it would be left."""

OF_ATTEMPTS: Final = PastUse.probes + PastUse.repeats + PastUse.idle + PastUse.lost
"""Shares and quotas count these parts: nobody chose that an allocation stood idle."""

_NOTED: Final = "uses"
"""In the `info` of a session, the rows of `PastUse` that it has changed, by their keys."""

Place = tuple[str, bool]
"""A cluster, and whether it is simulated."""


def note_use(campaign: Campaign, at: datetime, **more: float) -> PastUse:
    """Adds to columns of a campaign, whose row is locked, on the day of `at`; returns their row."""
    session = object_session(campaign)
    assert session is not None
    key = (campaign.id, f"{at.astimezone(UTC):%Y-%m-%d}")
    noted: dict[Any, PastUse] = session.info.setdefault(_NOTED, {})
    use = noted.get(key) or session.get(PastUse, key)
    if use is None:
        use = PastUse(
            campaign_id=campaign.id,
            day=key[1],
            owner=campaign.created_by,
            group=campaign.group,
            name=campaign.name,
            cluster=campaign.cluster_name,
            trainer=campaign.trainer,
            node_hour_price=campaign.stored.node_hour_price[:32],
        )
        session.add(use)
    noted[key] = use
    for column, each in more.items():
        # Rounding may leave a small negative rest.
        setattr(use, column, max((getattr(use, column) or 0) + each, 0))
    return use


@dataclass(kw_only=True, slots=True)
class Use:
    """What an owner has of a cluster, in node-seconds."""

    recent: float = 0.0
    """Of ended attempts, the earlier the less."""
    held: float = 0.0
    """Of running attempts, as `running` counts them."""
    running: int = 0
    waiting: int = 0
    weight: float = 1.0

    @property
    def total(self) -> float:
        return self.recent + self.held


def probe_cost(
    node_seconds: float, ended: int, nodes: float = 1.0, unknown_s: float = UNKNOWN_PROBE_S
) -> float:
    """Node-seconds that a probe is expected to cost, by what the ended ones did together.

    While none has ended, it is expected to take `unknown_s`.
    """
    return node_seconds / ended if node_seconds and ended else nodes * unknown_s


def longest_s(probe_deadline_s: float | None) -> float:
    """Seconds that a probe of a campaign takes at most."""
    return DEFAULT_DEADLINE_S if probe_deadline_s is None else probe_deadline_s


def running(
    session: Session, now: datetime, *conditions: ColumnElement[bool], at_most: bool = False
) -> Iterator[tuple[str, str | None, Place, int, float]]:
    """By campaign its owner, group, place and running trials, and the node-seconds that they hold.

    They hold their nodes since their leases; or what as many probes of the campaign cost on average
    if that is more, since devices leased a moment ago count too. Simulated ones hold in simulated
    time. Before one of a campaign has ended, they count as a minute each; with `at_most`, as their
    deadline.
    """
    since = now.timestamp() - cast(extract("epoch", Attempt.started_at), Float)
    held_s = func.coalesce(Attempt.held_s, case((Attempt.phase == "waiting", 0.0), else_=since))
    so_far: Any = func.sum(func.coalesce(Attempt.nodes_held, Trial.num_nodes) * held_s)
    whose = (Campaign.created_by, Campaign.group, Campaign.cluster_name, Campaign.trainer)
    query = (
        select(*whose, Campaign.node_seconds, Campaign.last_ended_seq)
        .add_columns(Campaign.probe_deadline_s, func.count(), func.sum(Trial.num_nodes), so_far)
        .join(Trial, Trial.campaign_id == Campaign.id)
        # The attempts of leases of this transaction are not written yet.
        .outerjoin(Attempt, (Attempt.trial_id == Trial.id) & (Attempt.attempt == Trial.attempt))
        .where(Trial.state == "RUNNING", *conditions)
        .group_by(Campaign.id)
    )
    for owner, group, on, trainer, cost, ended, deadline_s, *of_trials in session.execute(query):
        number, nodes, held = of_trials
        unknown_s = longest_s(deadline_s) if at_most else UNKNOWN_PROBE_S
        expected = number * probe_cost(cost, ended, nodes / number, unknown_s)
        yield owner, group, (on, is_simulator(trainer)), number, max(held or 0.0, expected)


def by_place(
    session: Session,
    now: datetime,
    cluster: str | None = None,
    *,
    waiting: Iterable[tuple[Place, str, int]],
) -> dict[Place, dict[str, Use]]:
    """The use of a cluster, or of all, by place and owner; with weights and trials that wait."""
    found: defaultdict[Place, defaultdict[str, Use]] = defaultdict(lambda: defaultdict(Use))
    for place, owner, number in waiting:
        found[place][owner].waiting += number
    half_life = timedelta(seconds=session.info[HALF_LIFE])
    by = (PastUse.cluster, PastUse.trainer, PastUse.owner, PastUse.day)
    recent = select(*by, func.sum(OF_ATTEMPTS)).group_by(*by)
    recent = recent.where(PastUse.day >= f"{now - MOST_HALF_LIVES * half_life:%Y-%m-%d}")
    if cluster is not None:
        recent = recent.where(PastUse.cluster == cluster)
    for on, trainer, owner, day, node_seconds in session.execute(recent):
        passed = now - datetime.fromisoformat(f"{day}T00:00Z") - timedelta(days=1)
        left = 0.5 ** max(passed / half_life, 0.0)
        found[on, is_simulator(trainer)][owner].recent += node_seconds * left
    here = () if cluster is None else (Campaign.cluster_name == cluster,)
    for owner, _, place, number, held in running(session, now, *here):
        use = found[place][owner]
        use.running, use.held = use.running + number, use.held + held
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
    weights, total = (sum(getattr(x, n) for x in counted.values()) for n in ("weight", "total"))
    for owner, use in sorted(counted.items()):
        yield ShareRead(
            cluster=place[0],
            is_simulated=place[1],
            owner=owner,
            weight=use.weight,
            entitled=use.weight / weights,
            had=use.total / total if total else 0.0,
            node_hours=use.total / 3600,
            running=use.running,
            waiting=use.waiting,
        )
