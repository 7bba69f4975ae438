"""Usage: node-hours by owner, group, campaign or cluster, in whole days of UTC.

`note_use` books what an attempt costs on the day on which it ends, and a share of idle allocations
on the day on which it is charged. The rows stay when a campaign is deleted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from datetime import date, datetime
from typing import Any, Final

from sqlalchemy import func, select, update
from sqlalchemy.orm import Session

from layout_tuner.errors import TrainingJobInvalidError
from layout_tuner.predictions.statistics.job_duration import StepInterval, TrainingJob
from layout_tuner.results_db.access.shares import note_use
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.leaderboard.leaderboard_memo import ranked
from layout_tuner.results_db.leaderboard.rank_layouts import MeasuredLayout
from layout_tuner.results_db.models.service_tables import PastUse
from layout_tuner.results_db.models.tables import Campaign
from layout_tuner.results_db.service_records import USAGE_PARTS, UsageBy, UsageRead, UsageRow
from layout_tuner.search_spaces.clusters.cluster import read_price
from layout_tuner.trainers.simulator import SIMULATOR_PREFIX
from layout_tuner.units import SECONDS_PER_HOUR

TOKENS: Final = 10**12
"""Tokens of a training job whose savings are counted, where nobody says how many it has."""

_SUMS: Final = (
    func.count(PastUse.campaign_id.distinct()).label("campaigns"),
    *(
        func.sum(getattr(PastUse, name)).label(name)
        for name in (*USAGE_PARTS, "trials", "saved_node_hours")
    ),
)


class Usage(StoreSection):
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
        is_simulated = PastUse.trainer.startswith(SIMULATOR_PREFIX, autoescape=True)
        chosen = is_simulated if simulated else ~is_simulated
        query = select(PastUse.node_hour_price, *_SUMS).group_by(PastUse.node_hour_price)
        query = query.where(chosen, PastUse.day.between(f"{since}", f"{until}"))
        name = "name" if by == "campaign" else by
        names = ("campaign_id", "name", "visibility") if by == "campaign" else (by,)
        columns = [getattr(PastUse, each) for each in names]
        with self._db.read() as session:
            uses = session.execute(query.add_columns(*columns).group_by(*columns)).all()
            days = session.execute(query.add_columns(PastUse.day).group_by(PastUse.day)).all()
        rows = [_row(some, tokens, name) for some in _grouped(uses, names[0])]
        return UsageRead(
            by=by,
            since=since,
            until=until,
            simulated=simulated,
            tokens=tokens,
            rows=sorted(rows, key=lambda row: (-row.node_hours, row.name or "")),
            total=_row(uses, tokens),
            days=[_row(some, tokens, "day") for some in _grouped(days, "day")],
        )


def note_saved(session: Session, campaign: Campaign, now: datetime) -> None:
    """Books what a job of `TOKENS` saves with the winner of a campaign that ends, if known."""
    if (baseline := campaign.stored.baseline) is None:
        return
    board = ranked(session, campaign)
    before, after = board.find(baseline.key), board.winner
    if before is None or after is None:
        return
    try:
        saved = _job_node_hours(before) - _job_node_hours(after)
    except TrainingJobInvalidError:  # on so many nodes it would never end
        return
    note_use(campaign, now).saved_node_hours = saved


def set_use(session: Session, campaign: Campaign, **columns: str | None) -> None:
    """Sets columns on all days of a campaign: its group, or who sees what it used once deleted."""
    of_it = PastUse.campaign_id == campaign.id
    session.execute(update(PastUse).where(of_it).values(**columns))


def _job_node_hours(layout: MeasuredLayout) -> float:
    """Those of a training job of `TOKENS`, as `plan --tokens` counts them."""
    step_s, run = layout.step_time_s, layout.figures
    step = StepInterval(expected_s=step_s, low_s=step_s, high_s=step_s)
    tokens_per_step = round(run.tokens_per_s * step_s)
    job = TrainingJob(tokens=TOKENS)
    return job.duration(step, tokens_per_step=tokens_per_step, num_nodes=run.num_nodes).node_hours


def _grouped(uses: Sequence[Any], by: str) -> list[list[Any]]:
    """In the order of the values."""
    groups: dict[Any, list[Any]] = {}
    for use in uses:
        groups.setdefault(getattr(use, by), []).append(use)
    return [groups[key] for key in sorted(groups, key=lambda key: (key is not None, key))]


def _row(uses: Sequence[Any], tokens: int, name: str = "") -> UsageRow:
    """The total of sums with a common name; it is in a column of each. A campaign has one price."""
    parts = {
        part: sum(getattr(use, part) for use in uses) / SECONDS_PER_HOUR for part in USAGE_PARTS
    }
    priced: defaultdict[str, float] = defaultdict(float)
    money: defaultdict[str, float] = defaultdict(float)
    for use in uses:
        priced[use.node_hour_price] += sum(getattr(use, part) for part in USAGE_PARTS)
    for text, node_seconds in priced.items():
        if price := read_price(text):
            money[price[1]] += price[0] * node_seconds / SECONDS_PER_HOUR
    saved = [use.saved_node_hours for use in uses if use.saved_node_hours is not None]
    return UsageRow(
        name=getattr(uses[0], name) if name else None,
        campaign_id=uses[0].campaign_id if name == "name" and not uses[0].visibility else None,
        campaigns=sum(use.campaigns for use in uses),
        trials=sum(use.trials for use in uses),
        **parts,
        node_hours=sum(parts.values()),
        money=dict(money),
        saved_node_hours=sum(saved) * tokens / TOKENS if saved else None,
    )
