"""A campaign's history: the best so far, failures, and the timeline of its attempts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, NamedTuple, TypeVar

from sqlalchemy import and_, func, or_, select, union_all
from sqlalchemy.orm import Session

from layout_tuner.results_db.campaigns.campaigns import by_id
from layout_tuner.results_db.leaderboard.leaderboard_memo import LeaderboardSection
from layout_tuner.results_db.leaderboard.rank_layouts import Leader, leaders
from layout_tuner.results_db.models.service_tables import WorkerRow
from layout_tuner.results_db.models.tables import Attempt, Campaign, MeasurementRow, Trial
from layout_tuner.results_db.trials.filter_sql import metric_column

MAX_HISTORY: Final = 2000

MAX_TIMELINE: Final = 2000

Found = TypeVar("Found")


class HistoryPoint(NamedTuple):
    """A trial that has ended, in the history of a campaign; see also `TrialRecord`."""

    ended_seq: int
    trial_id: int
    number: int
    value: float | None
    """The objective of this trial alone; None: not measured."""
    state: str
    reason: str | None
    is_repeat: bool = False
    """Whether its layout was tried before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BestSoFar:
    """The history of a campaign's best: all ended trials of whole layouts, or a sample."""

    points: Sequence[HistoryPoint]
    """In the order of the ends."""
    leaders: Sequence[Leader]
    """The best layout of the leaderboard at each time; the last one is its winner."""
    num_ended: int
    """Number of trials that have ended, without cheap probes."""

    @property
    def num_left_out(self) -> int:
        return self.num_ended - len(self.points)


class FailureCount(NamedTuple):
    """The trials that failed for one reason on one node."""

    state: str
    reason: str
    node: str
    """Where the problem occurred first; empty: unknown."""
    num_trials: int
    last_number: int
    """The number of the newest of these trials in its campaign."""


class TimelineAttempt(NamedTuple):
    """An attempt as a bar of a timeline: fields of an `AttemptRecord` and of its `TrialRecord`."""

    trial_id: int
    number: int
    attempt: int
    worker_id: str
    worker_name: str
    num_nodes: int
    """Nodes of the trial's layout."""
    started_at: datetime
    ended_at: datetime | None
    """None: it runs."""
    ending: str | None
    state: str
    reason: str | None
    phase: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignTimeline:
    """The newest attempts of a campaign."""

    attempts: Sequence[TimelineAttempt]
    """The newest first by their starts."""
    num_attempts: int

    @property
    def num_left_out(self) -> int:
        return self.num_attempts - len(self.attempts)


class CampaignHistory(LeaderboardSection):
    """The store's methods for the history of a campaign."""

    def best_so_far(self, campaign_id: int, *, limit: int = MAX_HISTORY) -> BestSoFar:
        """The campaign's objective of trials in the order of their ends, with the best so far.

        The best is that of the leaderboard: the value of a layout is at the median of its runs.
        Cheap probes are left out: their figures do not compare. Over the limit, trials are thinned
        evenly; those that changed the best are kept before all others.
        """
        with self._db.read() as session:
            led = leaders(self._board(session, campaign_id))
            return _best_so_far(session, by_id(session, campaign_id), _spread(led, limit), limit)

    def failures(self, campaign_id: int) -> list[FailureCount]:
        """Trials that are INFEASIBLE or FAILED, counted by reason and node; the most first."""
        count, newest = func.count(), func.max(Trial.number)
        groups = (Trial.state, Trial.reason, Trial.node)
        query = (
            select(*groups, count, newest)
            .where(Trial.campaign_id == campaign_id, Trial.state.in_(("INFEASIBLE", "FAILED")))
            .group_by(*groups)
            .order_by(count.desc(), newest.desc())
        )
        with self._db.read() as session:
            return [FailureCount._make(row) for row in session.execute(query)]

    def timeline(self, campaign_id: int, *, limit: int = MAX_TIMELINE) -> CampaignTimeline:
        """The newest attempts of a campaign's trials, with those that run.

        They are attempts of the trials that are open, and of as many as `limit` trials that ended
        last: an attempt that is older than those is left out.
        """
        of_campaign = Trial.campaign_id == campaign_id
        ended_last = (
            select(Trial.id)
            .where(of_campaign, Trial.ended_seq.is_not(None))
            .order_by(Trial.ended_seq.desc())
            .limit(limit)
        )
        is_open = Trial.state.in_(("PENDING", "RUNNING")) & (Trial.attempt > 0)
        newest = union_all(
            select(ended_last.subquery().c.id), select(Trial.id).where(of_campaign, is_open)
        )
        query = (
            select(*_TIMELINE)
            .join(Trial, Trial.id == Attempt.trial_id)
            .join(WorkerRow, WorkerRow.id == Attempt.worker_id)
            .where(Attempt.trial_id.in_(newest))
            .order_by(Attempt.started_at.desc(), Attempt.trial_id.desc(), Attempt.attempt.desc())
            .limit(limit)
        )
        # Attempts are numbered from 1: a trial has as many as its number says.
        in_all = select(func.sum(Trial.attempt)).where(of_campaign)
        with self._db.read() as session:
            return CampaignTimeline(
                attempts=[TimelineAttempt._make(row) for row in session.execute(query)],
                num_attempts=session.scalar(in_all) or 0,
            )


_TIMELINE: Final = (
    Trial.id,
    Trial.number,
    Attempt.attempt,
    Attempt.worker_id,
    WorkerRow.name,
    Trial.num_nodes,
    Attempt.started_at,
    Attempt.ended_at,
    Attempt.ending,
    Trial.state,
    Trial.reason,
    Attempt.phase,
)


def _best_so_far(
    session: Session, campaign: Campaign, led: Sequence[Leader], limit: int
) -> BestSoFar:
    has_ended = and_(
        Trial.campaign_id == campaign.id, Trial.ended_seq.is_not(None), Trial.num_layers.is_(None)
    )
    ended = (
        select(
            Trial.ended_seq,
            Trial.id,
            Trial.number,
            metric_column(campaign.objective).label("value"),
            Trial.state,
            Trial.reason,
            Trial.repeat_of.is_not(None).label("is_repeat"),
            func.row_number().over(order_by=Trial.ended_seq).label("place"),
        )
        .outerjoin(MeasurementRow, MeasurementRow.trial_id == Trial.id)
        .where(has_ended)
        .cte("ended")
    )
    num_ended = session.scalar(select(func.count()).where(has_ended))
    every = -(-(num_ended or 0) // limit) or 1
    is_sampled = (ended.c.place - 1) % every == 0
    kept = {each.ended_seq for each in led}
    query = (
        select(ended).where(or_(ended.c.ended_seq.in_(kept), is_sampled)).order_by(ended.c.place)
    )
    points = [HistoryPoint._make((*row[:6], bool(row.is_repeat))) for row in session.execute(query)]
    return BestSoFar(points=_thinned(points, kept, limit), leaders=led, num_ended=num_ended or 0)


def _thinned(
    points: Sequence[HistoryPoint], kept: Collection[int], limit: int
) -> Sequence[HistoryPoint]:
    """At most so many points in their order, those whose end is `kept` before others."""
    if len(points) <= limit:
        return points
    first = [point for point in points if point.ended_seq in kept]
    others = [point for point in points if point.ended_seq not in kept]
    return sorted([*first, *_spread(others, limit - len(first))])


def _spread(found: Sequence[Found], most: int) -> Sequence[Found]:
    """At most so many of them, evenly, with both ends."""
    if len(found) <= most:
        return found
    if most < 2:
        return found[len(found) - most :]
    return [found[round(index * (len(found) - 1) / (most - 1))] for index in range(most)]
