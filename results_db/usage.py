"""Usage: node-hours by owner, group, campaign or cluster, in whole days of UTC.

An attempt counts on the day on which it ended, since its cost is booked then, and a share of idle
allocations on the day on which it was charged. `PastUse` keeps the usage of deleted campaigns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, String, case, func, select, update
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
from layout_tuner.results_db.service_records import UsageBy, UsageRead, UsageRow
from layout_tuner.search_spaces.clusters.cluster import read_price
from layout_tuner.trainers.simulator import is_simulator
from layout_tuner.units import SECONDS_PER_HOUR

TOKENS: Final = 10**12
"""Tokens of a training job whose savings are counted, where nobody says how many it has."""

PARTS: Final = ("probes", "repeats", "idle", "lost", "idle_allocations")

_COUNTED: Final = (*PARTS, "trials")
_WORK: Final = Attempt.iterations_node_seconds + Attempt.start_node_seconds
_IS_REPEAT: Final = Trial.repeat_of.is_not(None)
_SUMS: Final = (
    func.sum(case((_IS_REPEAT, 0.0), else_=_WORK)),
    func.sum(case((_IS_REPEAT, _WORK), else_=0.0)),
    func.sum(Attempt.idle_node_seconds),
    func.sum(Attempt.lost_node_seconds),
)
"""The node-seconds of attempts, in the order of `PARTS`."""

_Uses = Mapping[tuple[int, str], dict[str, float]]
"""By campaign and day, the node-seconds of each part and the number of trials."""

_Savings = dict[tuple[int, str], float | None]
"""By ended campaign and day of its end, the node-hours that a job of `TOKENS` saves, if known."""


def note_idle(session: Session, campaign: Campaign, node_seconds: float, now: datetime) -> None:
    """Charges a campaign, whose row is locked, with a share of idle allocations."""
    campaign.allocation_idle_node_seconds += node_seconds
    _past(session, campaign, now).idle_allocations += node_seconds


def _past(session: Session, campaign: Campaign, at: datetime | str) -> PastUse:
    key = (campaign.id, at if isinstance(at, str) else f"{at.astimezone(UTC):%Y-%m-%d}")
    row = session.get(PastUse, key)
    if row is None:
        row = PastUse(campaign_id=key[0], day=key[1], **dict.fromkeys(_COUNTED, 0))
        session.add(row)
    return row


class _Sum:
    """The sum of some uses."""

    def __init__(self) -> None:
        self.uses, self.saved = dict.fromkeys(_COUNTED, 0.0), list[float]()
        self.ids, self.money = set[int](), defaultdict[str, float](float)

    def add(
        self, campaign_id: int, uses: Mapping[str, float], price: str | None, saved: float | None
    ) -> None:
        """Adds those of a campaign on a day."""
        self.ids.add(campaign_id)
        for name in _COUNTED:
            self.uses[name] += uses[name]
        if (read := read_price(price)) is not None:
            hours = sum(uses[part] for part in PARTS) / SECONDS_PER_HOUR
            self.money[read[1]] += hours * read[0]
        if saved is not None:
            self.saved.append(saved)

    def row(self, name: str | None, campaign_id: int | None = None) -> UsageRow:
        hours = {part: self.uses[part] / SECONDS_PER_HOUR for part in PARTS}
        return UsageRow(
            name=name,
            campaign_id=campaign_id,
            campaigns=len(self.ids),
            trials=int(self.uses["trials"]),
            **hours,
            node_hours=sum(hours.values()),
            money=dict(sorted(self.money.items())),
            saved_node_hours=sum(self.saved) if self.saved else None,
        )


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
            uses, saved, campaigns = self._found(session, since, until)
        sums, per_day, total = defaultdict[Any, _Sum](_Sum), defaultdict[str, _Sum](_Sum), _Sum()
        for key in sorted(uses.keys() | saved.keys()):
            campaign_id, day = key
            of = campaigns[campaign_id]
            if is_simulator(of.trainer or "") == simulated:
                kept = campaign_id if by == "campaign" else getattr(of, by)
                saving = saved.get(key)
                saving = None if saving is None else saving * tokens / TOKENS
                for each in (sums[kept], per_day[day], total):
                    each.add(campaign_id, uses[key], of.node_hour_price, saving)
        rows = [
            # The rows of deleted campaigns have days.
            each.row(campaigns[group].name, None if campaigns[group].day else group)
            if by == "campaign"
            else each.row(group)
            for group, each in sums.items()
        ]
        return UsageRead(
            by=by,
            since=since,
            until=until,
            simulated=simulated,
            tokens=tokens,
            rows=sorted(rows, key=lambda row: (-row.node_hours, row.name or "")),
            total=total.row(None),
            days=[each.row(day) for day, each in sorted(per_day.items())],
        )

    def _found(
        self, session: Session, since: date, until: date
    ) -> tuple[_Uses, _Savings, dict[int, PastUse]]:
        """What was used and saved in a period, and what its campaigns are."""
        begin = datetime.combine(since, time(), UTC)
        end = datetime.combine(until, time(), UTC) + timedelta(days=1)

        def chosen(at: Any) -> ColumnElement[bool]:
            return (at >= begin) & (at < end)  # type: ignore[no-any-return]

        uses, saved, campaigns = _by_day(session, chosen), _Savings(), dict[int, PastUse]()
        days = PastUse.day.between(since.isoformat(), until.isoformat())
        for past in session.scalars(select(PastUse).where(days)):
            key = past.campaign_id, past.day
            for name in _COUNTED:
                uses[key][name] += getattr(past, name)
            if past.owner is not None:
                campaigns[past.campaign_id], saved[key] = past, past.saved_node_hours
        ended = select(Campaign).where(chosen(Campaign.ended_at))
        saved |= self._saved(session, session.scalars(ended).all())
        there = {campaign_id for campaign_id, _ in uses.keys() | saved.keys()}
        for ids in in_parts(sorted(there - campaigns.keys())):
            for row in session.scalars(select(Campaign).where(Campaign.id.in_(ids))):
                campaigns[row.id] = PastUse(**_columns(row))
        return uses, saved, campaigns

    def keep(self, session: Session, campaign: Campaign) -> None:
        """Keeps the usage of a campaign that is about to be deleted."""
        uses = _by_day(session, lambda at: at.is_not(None) & (Trial.campaign_id == campaign.id))
        for (_, day), use in uses.items():
            row = _past(session, campaign, day)
            for name in _COUNTED:
                setattr(row, name, getattr(row, name) + use[name])
        for (_, day), saving in self._saved(session, [campaign]).items():
            _past(session, campaign, day).saved_node_hours = saving
        session.flush()
        of_campaign = update(PastUse).where(PastUse.campaign_id == campaign.id)
        session.execute(of_campaign.values(_columns(campaign)))

    def _saved(self, session: Session, campaigns: Sequence[Campaign]) -> _Savings:
        campaigns = [each for each in campaigns if each.trainer != IMPORTED_TRAINER]
        baselines = {each.id: each.stored.baseline for each in campaigns}
        boards = self._boards(session, [id_ for id_, found in baselines.items() if found])
        saved = _Savings()
        for each in campaigns:
            assert each.ended_at is not None
            key = each.id, f"{each.ended_at:%Y-%m-%d}"
            saved[key], baseline = None, baselines[each.id]
            if baseline is None:
                continue
            layouts = boards[each.id].find(baseline.key), boards[each.id].winner
            if layouts[0] is not None and layouts[1] is not None:
                try:
                    saved[key] = _node_hours(layouts[0]) - _node_hours(layouts[1])
                except TrainingJobInvalidError:
                    continue  # on so many nodes it would never end
        return saved


def _node_hours(layout: MeasuredLayout) -> float:
    """Those of a training job of `TOKENS`, as `plan --tokens` counts them."""
    step_s, run = layout.step_time_s, layout.figures
    job = TrainingJob(tokens=TOKENS).duration(
        StepInterval(expected_s=step_s, low_s=step_s, high_s=step_s),
        tokens_per_step=round(run.tokens_per_s * step_s),
        num_nodes=run.num_nodes,
    )
    return job.node_hours


def _by_day(session: Session, chosen: Callable[[Any], ColumnElement[bool]]) -> _Uses:
    """What the attempts and trials cost whose end is chosen."""
    found: _Uses = defaultdict(lambda: dict.fromkeys(_COUNTED, 0.0))
    day = sql_cast(func.date(Attempt.ended_at), String)
    query = select(Trial.campaign_id, day, *_SUMS).join(Trial, Trial.id == Attempt.trial_id)
    query = query.where(chosen(Attempt.ended_at)).group_by(Trial.campaign_id, day)
    for campaign_id, on, *sums in session.execute(query):
        found[campaign_id, on] |= dict(zip(PARTS, sums, strict=False))
    day = sql_cast(func.date(Trial.ended_at), String)
    counts = select(Trial.campaign_id, day, func.count()).group_by(Trial.campaign_id, day)
    counts = counts.where(chosen(Trial.ended_at), Trial.attempt >= 1)
    for campaign_id, on, number in session.execute(counts):
        found[campaign_id, on]["trials"] = number
    return found


def _columns(campaign: Campaign) -> dict[str, Any]:
    """What usage is by, as columns of `PastUse`."""
    return {
        "owner": campaign.created_by,
        "visibility": campaign.visibility,
        "group": campaign.group,
        "name": campaign.name,
        "cluster": campaign.cluster_name,
        "trainer": campaign.trainer,
        "node_hour_price": campaign.stored.node_hour_price[:32],
    }
