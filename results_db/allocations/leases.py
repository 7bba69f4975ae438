"""Leases: a trial is leased to one worker at a time, for as long as the worker sends heartbeats.

Requests that arrive at the same time are served in one transaction. Requests for the same kind of
trial share the queries for waiting trials, which are distributed in turns. The trials are chosen in
turns of the campaigns' owners by their fair shares; of each owner, those of campaigns with the
highest priority come first, and of these the oldest. None is leased beyond a quota.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import islice
from threading import Event
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, select, update
from sqlalchemy.orm import Session

from layout_tuner.protocol.worker_messages import HeartbeatReply, LeaseRequest, RoomBody
from layout_tuner.results_db.access.quotas import QuotaBook
from layout_tuner.results_db.access.shares import by_place, longest_s, probe_cost
from layout_tuner.results_db.actor import QUOTA_PERIODS
from layout_tuner.results_db.allocations.workers import Beat, fits, open_session, take_beats
from layout_tuner.results_db.database.database import Database
from layout_tuner.results_db.database.events import tell
from layout_tuner.results_db.database.locks import FOR_CHANGE, lock_rows
from layout_tuner.results_db.database.retry import one_by_one_if_refused, retried
from layout_tuner.results_db.database.store_base import Clock, StoreSection
from layout_tuner.results_db.errors import ResultsDbError
from layout_tuner.results_db.models.service_tables import SweepRow, WorkerRow
from layout_tuner.results_db.models.table_base import insert_many
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.owner_turns import OwnerTurns
from layout_tuner.results_db.records import LeaseRecord
from layout_tuner.results_db.rows import record_of, trial_layout
from layout_tuner.results_db.trials.lifecycle import lose_attempt, running_attempt
from layout_tuner.search_spaces.probe_defaults import DEFAULT_DEADLINE_S
from layout_tuner.trainers.simulator import is_simulator, trainers_run

HEARTBEAT_INTERVAL_S: Final = 2.0
"""Seconds between heartbeats of a worker, and between renewals of the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAsk:
    """A request for trials and the worker that sent it."""

    worker_id: str
    """The worker's session."""
    request: LeaseRequest


Kind = tuple[str, int, int, frozenset[str], RoomBody | None, float | None]
"""The kind of trials that fit: cluster, nodes, devices per node, trainers, free room, longest
duration."""


class LeaseBatch:
    """Requests of workers for trials, within one transaction of the caller."""

    def __init__(
        self,
        session: Session,
        asks: Sequence[LeaseAsk],
        now: datetime,
        turns: OwnerTurns,
        *,
        lock: bool,
    ) -> None:
        """Loads the workers; locks them if trials are to be leased."""
        ids = {ask.worker_id for ask in asks}
        which = WorkerRow.id.in_(ids)
        found = (
            lock_rows(session, WorkerRow, which)
            if lock
            else session.scalars(select(WorkerRow).where(which))
        )
        workers = {worker.id: worker for worker in found}
        self._session = session
        self._now = now
        self._turns = turns
        self._locks = lock
        self._quotas: QuotaBook | None = None
        self._campaigns: dict[int, Campaign] = {}
        """Campaigns of the leased trials; a session keeps only weak references to rows."""
        self.answers: list[list[LeaseRecord] | ResultsDbError] = []
        """For each request, its leases or the refusal."""
        self._asking: list[tuple[LeaseAsk, WorkerRow, list[LeaseRecord]]] = []
        for ask in asks:
            worker = open_session(session, ask.worker_id, workers.get(ask.worker_id))
            if isinstance(worker, ResultsDbError):
                self.answers.append(worker)
                continue
            leases: list[LeaseRecord] = []
            self.answers.append(leases)
            self._asking.append((ask, worker, leases))

    @property
    def _without_news(self) -> list[WorkerRow]:
        """Workers of which no heartbeat came lately: the request is recorded as a sign of life."""
        silent = timedelta(seconds=HEARTBEAT_INTERVAL_S)
        return [worker for _, worker, _ in self._asking if self._now - worker.seen_at >= silent]

    def has_work(self) -> bool:
        """Whether there is anything to write: a sign of life, or a trial to hand out."""
        return bool(self._without_news) or any(
            self._session.scalar(_suitable_trials(self._suits(kind)).limit(1)) is not None
            for kind in self._by_kind()
        )

    def hand_out(self, until: datetime) -> bool:
        """Leases trials that fit, in turns of owners; returns whether there were any."""
        for worker in self._without_news:
            worker.seen_at = self._now
        dealt = []
        for kind, asking in self._by_kind().items():
            num_asked = sum(ask.request.max_trials for ask, _, _ in asking)
            dealt += self._deal(self._lock_next(kind, num_asked)[::-1], asking, until)
        self._session.flush()
        _write_attempts(self._session, dealt, self._campaigns, self._now)
        _note_start(self._session, self._campaigns, self._now)
        return bool(dealt)

    def _lock_next(self, kind: Kind, num_asked: int) -> list[Trial]:
        """Locks the next trials of a kind, in turns of owners; of each owner the next ones."""
        suits, place = self._suits(kind), (kind[0], _is_simulated(kind))
        levels: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        costs: dict[str, float] = {}
        for owner, priority, node_seconds, ended in self._session.execute(_waiting_owners(suits)):
            levels[owner].append((priority, 0))
            costs[owner] = max(costs.get(owner, 0.0), probe_cost(node_seconds, ended))
        held, weights = dict.fromkeys(levels, 0.0), dict.fromkeys(levels, 1.0)
        if len(levels) > 1:
            waiting = [(place, owner, 1) for owner in levels]
            uses = by_place(self._session, self._now, kind[0], waiting=waiting)[place]
            held = {owner: use.total for owner, use in uses.items()}
            weights = {owner: use.weight for owner, use in uses.items()}
        found: dict[str, list[Trial]] = {owner: [] for owner in levels}
        while levels and (missing := num_asked - sum(map(len, found.values()))):
            now = {owner: held[owner] + len(found[owner]) * costs[owner] for owner in levels}
            turns = [owner for owner in levels for _ in range(missing)]
            order = self._turns.order(
                turns, str, held=now, weights=weights, cost_of=costs.__getitem__
            )
            for owner, number in Counter(islice(order, missing)).items():
                priority, last_id = levels[owner].pop(0)
                query = _suitable_trials(suits).where(
                    Campaign.created_by == owner, Campaign.priority == priority, Trial.id > last_id
                )
                # A locked trial is being leased, cancelled or returned: skip it, and never wait.
                locked = query.with_for_update(key_share=True, of=Trial, skip_locked=True)
                more = self._session.scalars(locked.limit(number)).all()
                found[owner] += more
                self._turns.note(owner)
                if len(more) == number:
                    levels[owner].insert(0, (priority, more[-1].id))
                elif not levels[owner]:  # It has no more; the others get the rest.
                    del levels[owner]
        every = [(owner, trial) for owner, trials in found.items() for trial in trials]
        in_turn = self._turns.order(
            every,
            lambda each: each[0],
            held=held,
            weights=weights,
            cost_of=lambda each: costs[each[0]],
        )
        return [trial for _, trial in in_turn]

    def _suits(self, kind: Kind) -> list[ColumnElement[bool]]:
        """The conditions on a trial of a kind and its campaign, quotas included."""
        if _is_simulated(kind):
            return _fits(kind)
        self._quotas = self._quotas or QuotaBook(self._session, self._now, lock=self._locks)
        return [*_fits(kind), *self._quotas.conditions()]

    def _may_take(self, campaign: Campaign, trial: Trial) -> bool:
        """Whether a quota leaves room for a trial, which then counts."""
        if self._quotas is None or is_simulator(campaign.trainer):
            return True
        if self._quotas.full(campaign.created_by, campaign.group):
            return False
        so_far, most_s = campaign.node_seconds, longest_s(campaign.probe_deadline_s)
        cost = probe_cost(so_far, campaign.last_ended_seq, trial.num_nodes, most_s)
        self._quotas.take(campaign.created_by, campaign.group, dict.fromkeys(QUOTA_PERIODS, cost))
        return True

    def _deal(
        self,
        waiting: list[Trial],
        asking: Sequence[tuple[LeaseAsk, WorkerRow, list[LeaseRecord]]],
        until: datetime,
    ) -> list[Trial]:
        """Distributes trials to the requests in turns, from the end of the list."""
        ids = {trial.campaign_id for trial in waiting}
        query = select(Campaign).where(Campaign.id.in_(ids))
        if ids:
            self._campaigns |= {row.id: row for row in self._session.scalars(query)}
        dealt = []
        while waiting:
            for ask, worker, leases in asking:
                if waiting and len(leases) < ask.request.max_trials:
                    trial = waiting.pop()
                    campaign = self._campaigns[trial.campaign_id]
                    if not self._may_take(campaign, trial):
                        continue
                    leases.append(_hand_out(worker, campaign, trial, self._now, until))
                    dealt.append(trial)
        return dealt

    def _by_kind(self) -> dict[Kind, list[tuple[LeaseAsk, WorkerRow, list[LeaseRecord]]]]:
        kinds: defaultdict[Kind, list[tuple[LeaseAsk, WorkerRow, list[LeaseRecord]]]]
        kinds = defaultdict(list)
        for ask, worker, leases in self._asking:
            allocation = (worker.cluster, worker.num_nodes, worker.devices_per_node)
            trainers = trainers_run(worker.launcher, worker.trainers)
            kinds[*allocation, trainers, ask.request.room, ask.request.longest_s].append(
                (ask, worker, leases)
            )
        return kinds


def _suitable_trials(suits: Sequence[ColumnElement[bool]]) -> Select[Any]:
    of_campaign = Campaign.id == Trial.campaign_id
    return select(Trial).join(Campaign, of_campaign).where(*suits).order_by(Trial.id)


def _is_simulated(kind: Kind) -> bool:
    return any(map(is_simulator, kind[3]))


def _fits(kind: Kind) -> list[ColumnElement[bool]]:
    """The conditions on a trial of a kind and its campaign."""
    cluster, num_nodes, devices_per_node, trainers, room, longest_s = kind
    suits = [
        Trial.state == "PENDING",
        Campaign.state == "RUNNING",
        Campaign.cluster_name == cluster,
        Campaign.trainer.in_(sorted(trainers)),
        fits(num_nodes, devices_per_node),
    ]
    if room is not None:  # free devices: a part of one node, or whole nodes
        devices = max(room.devices, devices_per_node if room.nodes else 0)
        on_one_node = (Trial.num_nodes == 1) & (Trial.num_devices <= devices)
        on_nodes = (Trial.num_nodes > 1) & (Trial.num_nodes <= room.nodes)
        suits.append(on_one_node | on_nodes)
    if longest_s is not None:
        deadline_s = func.coalesce(Campaign.probe_deadline_s, DEFAULT_DEADLINE_S)
        suits.append(deadline_s <= longest_s)
    return suits


def _waiting_owners(
    suits: Sequence[ColumnElement[bool]],
) -> Select[str, int, float, int]:
    """The owners and priorities of campaigns with trials that suit and wait, with their cost.

    The owner of the oldest campaign comes first, and of an owner the highest priority.
    """
    trials = select(Trial.id).where(Trial.campaign_id == Campaign.id, *suits)
    by = (Campaign.created_by, Campaign.priority)
    oldest = func.min(func.min(Campaign.id)).over(partition_by=Campaign.created_by)
    return (
        select(*by, func.sum(Campaign.node_seconds), func.sum(Campaign.last_ended_seq))
        .where(Campaign.state == "RUNNING", trials.correlate(Campaign).exists())
        .group_by(*by)
        .order_by(oldest, Campaign.priority.desc())
    )


def _write_attempts(
    session: Session, trials: Sequence[Trial], campaigns: Mapping[int, Campaign], now: datetime
) -> None:
    insert_many(
        session,
        Attempt,
        [
            {
                "trial_id": trial.id,
                "attempt": trial.attempt,
                "worker_id": trial.worker_id,
                "started_at": now,
                "seen_at": now,
                "waiting_because": "",
                # No simulated second has passed, however long its first heartbeat takes.
                "held_s": 0.0 if is_simulator(campaigns[trial.campaign_id].trainer) else None,
            }
            for trial in trials
        ],
    )


def _note_start(session: Session, campaigns: Mapping[int, Campaign], now: datetime) -> None:
    """Sets the start of campaigns at the first lease of a trial.

    A locked campaign is skipped, and gets its start at the end of its first attempt: this
    transaction holds trials for which the one that holds the campaign may wait.
    """
    new = {id_ for id_, campaign in campaigns.items() if campaign.started_at is None}
    if new:
        free = (
            select(Campaign.id)
            .where(Campaign.id.in_(new), Campaign.started_at.is_(None))
            .with_for_update(key_share=True, skip_locked=True)
        )
        session.execute(
            update(Campaign).where(Campaign.id.in_(free)).values(started_at=now),
            execution_options={"synchronize_session": False},
        )


def _hand_out(
    worker: WorkerRow, campaign: Campaign, trial: Trial, now: datetime, until: datetime
) -> LeaseRecord:
    if trial.started_at is None:
        trial.started_at = now
    trial.state = "RUNNING"
    trial.attempt += 1
    trial.iterations_done = 0
    trial.worker_id = worker.id
    trial.lease_expires_at = until
    tell(trial, "trial.leased", now)
    return record_of(
        LeaseRecord,
        trial,
        trial_id=trial.id,
        campaign_name=campaign.name,
        stored=campaign.stored,
        layout=trial_layout(trial),
        to_beat=campaign.to_beat,
    )


LEASE_S: Final = 15.0
"""Seconds after which a lease expires unless a heartbeat extends it."""


class Leases(StoreSection):
    """The store's methods for leases."""

    def __init__(self, database: Database, clock: Clock) -> None:
        super().__init__(database, clock)
        self._last_found = Event()
        """Whether the last query for waiting trials of any thread of this process found one."""
        self._turns = OwnerTurns()

    @retried
    def lease_many(self, asks: Sequence[LeaseAsk]) -> list[list[LeaseRecord] | ResultsDbError]:
        """Leases waiting trials to workers, in turns of owners: PENDING -> RUNNING, attempt + 1.

        The owner with the least use of the cluster by its weight comes first.
        Only trials of RUNNING campaigns on the worker's cluster whose layout fits its allocation.
        Requests that find nothing do not wait for the write lock, unless a sign of life must be
        recorded.

        Returns:
            For each request, its leases or the refusal: `WorkerNotFoundError`,
            `WorkerSupersededError`.
        """
        now = self._clock()
        if not self._last_found.is_set():
            with self._db.read() as session:
                batch = LeaseBatch(session, asks, now, self._turns, lock=False)
                if not batch.has_work():
                    return batch.answers
        # If the write below fails, later requests do not wait for the lock either.
        self._last_found.clear()
        with self._db.write() as session:
            batch = LeaseBatch(session, asks, now, self._turns, lock=True)
            if batch.hand_out(now + timedelta(seconds=LEASE_S)):
                self._last_found.set()
            return batch.answers

    def take_beats(self, beats: Sequence[Beat]) -> list[HeartbeatReply | ResultsDbError]:
        """Processes heartbeats of workers in one transaction.

        Returns:
            For each worker, its orders or the refusal: `WorkerNotFoundError`,
            `WorkerSupersededError`.
        """
        return one_by_one_if_refused(self._take_beats, beats)

    @retried
    def _take_beats(self, beats: Sequence[Beat]) -> list[HeartbeatReply | ResultsDbError]:
        now = self._clock()
        with self._db.write() as session:
            return take_beats(session, beats, now, now + timedelta(seconds=LEASE_S))

    def expire(self) -> list[int]:
        """Ends the leases that have expired; each is a lost attempt.

        Returns:
            Ids of the trials.
        """
        now = self._clock()
        expired = (Trial.state == "RUNNING") & (Trial.lease_expires_at < now)
        concerned = select(Trial.campaign_id).where(expired).distinct()
        with self._db.read() as session:
            # Most sweeps find nothing, and do not wait for the write lock.
            campaign_ids = sorted(session.scalars(concerned))
        return [
            trial_id
            for campaign_id in campaign_ids
            for trial_id in self._expire(campaign_id, expired, now)
        ]

    @retried
    def _expire(self, campaign_id: int, expired: ColumnElement[bool], now: datetime) -> list[int]:
        """Ends a campaign's leases that have expired and were not extended meanwhile."""
        with self._db.write() as session:
            campaign = session.get(Campaign, campaign_id, with_for_update=FOR_CHANGE)
            if campaign is None:
                return []
            trials = lock_rows(session, Trial, Trial.campaign_id == campaign_id, expired)
            for trial in trials:
                attempt = running_attempt(session, trial)
                worker = session.get_one(WorkerRow, attempt.worker_id)
                why = f"worker {worker.name} on {worker.host} was not heard of in time"
                lose_attempt(campaign, trial, attempt, now, why, host=worker.host)
            return [trial.id for trial in trials]

    def extend(self) -> None:
        """Extends every lease to its full time from now, after the service was down."""
        until = self._clock() + timedelta(seconds=LEASE_S)
        self._set_leases(until, Trial.lease_expires_at < until)

    def cut(self) -> None:
        """Shortens every lease to its full time from now, after the clock was set back."""
        until = self._clock() + timedelta(seconds=LEASE_S)
        self._set_leases(until, Trial.lease_expires_at > until)

    @retried
    def _set_leases(self, until: datetime, which: ColumnElement[bool]) -> None:
        with self._db.write() as session:
            for trial in lock_rows(session, Trial, Trial.state == "RUNNING", which):
                trial.lease_expires_at = until

    def swept_at(self) -> datetime | None:
        """Time of the last sweep for expired leases, by any process; None: there was none."""
        return self._scalar(select(SweepRow.swept_at))

    def note_sweep(self, now: datetime) -> None:
        """Records a sweep for expired leases, or that leases were extended instead."""
        with self._db.write() as session:
            session.execute(update(SweepRow).values(swept_at=now))
