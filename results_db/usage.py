"""Usage: node-hours by owner, group, campaign or cluster, in whole days of UTC.

An attempt counts on the day on which it ended, since its cost is booked then, and a share of idle
allocations on the day on which it was charged. `PastUse` keeps the usage of deleted campaigns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import UTC, date, datetime, time
from typing import Any, Final

from sqlalchemy import ColumnElement, String, and_, case, func, select, true
from sqlalchemy import cast as sql_cast
from sqlalchemy.orm import Session

from layout_tuner.errors import TrainingJobInvalidError
from layout_tuner.predictions.statistics.job_duration import StepInterval, TrainingJob
from layout_tuner.protocol.measurement import IMPORTED_TRAINER
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardSection
from layout_tuner.results_db.leaderboard.rank_layouts import MeasuredLayout
from layout_tuner.results_db.models.service_tables import PastUse
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.rows import in_parts
from layout_tuner.results_db.service_records import USAGE_PARTS, UsageBy, UsageRead, UsageRow
from layout_tuner.search_spaces.clusters.cluster import read_price
from layout_tuner.trainers.simulator import is_simulator
from layout_tuner.units import SECONDS_PER_HOUR

TOKENS: Final = 10**12
"""Tokens of a training job whose savings are counted, where nobody says how many it has."""

_WORK: Final = Attempt.iterations_node_seconds + Attempt.start_node_seconds
_ENDS_ITS_TRIAL: Final = (Attempt.attempt == Trial.attempt) & Trial.ended_at.is_not(None)
_SUMS: Final = {
    "probes": func.sum(case((Trial.repeat_of.is_(None), _WORK), else_=0.0)),
    "repeats": func.sum(case((Trial.repeat_of.is_(None), 0.0), else_=_WORK)),
    "idle": func.sum(Attempt.idle_node_seconds),
    "lost": func.sum(Attempt.lost_node_seconds),
    "trials": func.sum(case((_ENDS_ITS_TRIAL, 1), else_=0)),
}


def note_idle(session: Session, campaign: Campaign, node_seconds: float, now: datetime) -> None:
    """Charges a campaign, whose row is locked, with a share of idle allocations."""
    campaign.allocation_idle_node_seconds += node_seconds
    day = f"{now.astimezone(UTC):%Y-%m-%d}"
    use = session.get(PastUse, (campaign.id, day)) or _no_use(campaign.id, day)
    use.idle_allocations += node_seconds
    session.add(use)


class Usage(LeaderboardSection):
    """The store's methods for usage."""

    def read(
        self,
        by: UsageBy,
        since: date,
        until: date,
        *,
        simulated: bool = False,
        tokens: int = TOKENS,
    ) -> UsageRead:
        """The usage from a day to another, both included, of simulated campaigns or the others.

        A campaign's savings count on the day on which it ended, for a job of so many tokens.
        """
        with self._db.read() as session:
            found = self._uses(session, since, until)
        uses = [use for use in found if is_simulator(use.trainer or "") == simulated]
        key, name = ("campaign_id", "name") if by == "campaign" else (by, by)
        rows = [_row(some, tokens, name) for some in _grouped(uses, key)]
        return UsageRead(
            by=by,
            since=since,
            until=until,
            simulated=simulated,
            tokens=tokens,
            rows=sorted(rows, key=lambda row: (-row.node_hours, row.name or "")),
            total=_row(uses, tokens),
            days=[_row(some, tokens, "day") for some in _grouped(uses, "day")],
        )

    def keep(self, session: Session, campaign: Campaign) -> None:
        """Keeps the usage of a campaign that is about to be deleted."""
        for use in self._uses(session, date.min, date.max, campaign.id):
            use.visibility = campaign.visibility
            session.merge(use)

    def _uses(
        self, session: Session, since: date, until: date, campaign_id: int | None = None
    ) -> list[PastUse]:
        """What each campaign, or one, used on each day; those that are there have no visibility."""
        times = datetime.combine(since, time.min, UTC), datetime.combine(until, time.max, UTC)
        found: dict[tuple[int, str], PastUse] = {}

        def use_of(id_: int, day: str) -> PastUse:
            return found.setdefault((id_, day), _no_use(id_, day))

        def chosen(id_: Any, at: Any, between: tuple[Any, Any] = times) -> ColumnElement[bool]:
            is_it = true() if campaign_id is None else id_ == campaign_id
            return and_(at.between(*between), is_it)

        day = sql_cast(func.date(Attempt.ended_at), String)
        query = select(Trial.campaign_id, day, *_SUMS.values())
        query = query.join(Trial, Trial.id == Attempt.trial_id).group_by(Trial.campaign_id, day)
        query = query.where(chosen(Trial.campaign_id, Attempt.ended_at))
        for id_, on, *sums in session.execute(query):
            for name, value in zip(_SUMS, sums, strict=True):
                setattr(use_of(id_, on), name, value)
        days = chosen(PastUse.campaign_id, PastUse.day, (f"{since}", f"{until}"))
        for past in session.scalars(select(PastUse).where(days)):
            if past.owner is None:
                use_of(past.campaign_id, past.day).idle_allocations = past.idle_allocations
            else:
                found[past.campaign_id, past.day] = past
        ended = select(Campaign).where(chosen(Campaign.id, Campaign.ended_at))
        for campaign in session.scalars(ended.where(Campaign.trainer != IMPORTED_TRAINER)).all():
            use = use_of(campaign.id, f"{campaign.ended_at:%Y-%m-%d}")
            use.saved_node_hours = self._saved(session, campaign)
        ids = sorted({use.campaign_id for use in found.values() if use.owner is None})
        there = {
            row.id: row
            for some in in_parts(ids)
            for row in session.scalars(select(Campaign).where(Campaign.id.in_(some)))
        }
        for use in found.values():
            if (of := there.get(use.campaign_id)) is not None:
                use.owner, use.group, use.name = of.created_by, of.group, of.name
                use.cluster, use.trainer = of.cluster_name, of.trainer
                use.node_hour_price = of.stored.node_hour_price[:32]
        return list(found.values())

    def _saved(self, session: Session, campaign: Campaign) -> float | None:
        """The node-hours that a job of `TOKENS` saves with the winner; None: it is not known."""
        baseline = campaign.stored.baseline
        if baseline is None:
            return None
        board = self._board(session, campaign.id)
        before, after = board.find(baseline.key), board.winner
        if before is None or after is None:
            return None
        try:
            return _job_node_hours(before) - _job_node_hours(after)
        except TrainingJobInvalidError:  # on so many nodes it would never end
            return None


def _job_node_hours(layout: MeasuredLayout) -> float:
    """Those of a training job of `TOKENS`, as `plan --tokens` counts them."""
    step_s, run = layout.step_time_s, layout.figures
    step = StepInterval(expected_s=step_s, low_s=step_s, high_s=step_s)
    tokens_per_step = round(run.tokens_per_s * step_s)
    job = TrainingJob(tokens=TOKENS)
    return job.duration(step, tokens_per_step=tokens_per_step, num_nodes=run.num_nodes).node_hours


def _no_use(campaign_id: int, day: str) -> PastUse:
    zeros = dict.fromkeys((*USAGE_PARTS, "trials"), 0)
    return PastUse(campaign_id=campaign_id, day=day, **zeros)


def _grouped(uses: Sequence[PastUse], by: str) -> list[list[PastUse]]:
    """In the order of the values."""
    groups: dict[Any, list[PastUse]] = {}
    for use in uses:
        groups.setdefault(getattr(use, by), []).append(use)
    return [groups[key] for key in sorted(groups, key=lambda key: (key is not None, key))]


def _row(uses: Sequence[PastUse], tokens: int, name: str = "") -> UsageRow:
    """The sum of uses with a common name; it is in a column of each."""
    parts = {
        part: sum(getattr(use, part) for use in uses) / SECONDS_PER_HOUR for part in USAGE_PARTS
    }
    money: Counter[str] = Counter()
    for use in uses:
        if price := read_price(use.node_hour_price):
            node_seconds = sum(getattr(use, part) for part in USAGE_PARTS)
            money[price[1]] += price[0] * node_seconds / SECONDS_PER_HOUR
    saved = [use.saved_node_hours for use in uses if use.saved_node_hours is not None]
    return UsageRow(
        name=getattr(uses[0], name) if name else None,
        campaign_id=uses[0].campaign_id if name == "name" and not uses[0].visibility else None,
        campaigns=len({use.campaign_id for use in uses}),
        trials=sum(use.trials for use in uses),
        **parts,
        node_hours=sum(parts.values()),
        money=dict(money),
        saved_node_hours=sum(saved) * tokens / TOKENS if saved else None,
    )
