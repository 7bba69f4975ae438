"""A batch of leases in one transaction: what workers ask for at the same time is handed out together.

Those that ask for the same kind of trial share a look at the waiting ones, and are dealt them in turns.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import ColumnElement, Select, func, select, update
from sqlalchemy.orm import Session

from results_db.allocation_records import Room
from results_db.errors import ResultsDbError
from results_db.events import tell
from results_db.locks import lock_workers
from results_db.many_rows import insert_many
from results_db.models import Attempt, Campaign, Trial
from results_db.records import LeaseRecord
from results_db.rows import trial_layout
from results_db.worker_tables import Worker
from results_db.workers import fits, not_live
from search_spaces.outcome import DEFAULT_DEADLINE_S

HEARTBEAT_INTERVAL_S: Final = 2.0
"""Seconds between the heartbeats of a worker, and of the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAsk:
    """What a worker asks for."""

    worker_id: str
    """The worker's session."""
    max_trials: int
    """Hand out at most so many."""
    room: Room | None = None
    """Only trials that fit there; each by itself, not all together."""
    longest_s: float | None = None
    """Only trials whose probe ends within so many seconds, by its deadline."""


Kind = tuple[str, int, int, Room | None, float | None]
"""Which trials suit: cluster, nodes, devices of each, room, longest."""


class LeaseBatch:
    """Workers that ask, in a transaction that somebody else holds."""

    def __init__(
        self, session: Session, asks: Sequence[LeaseAsk], now: datetime, *, lock: bool
    ) -> None:
        """Loads the workers, and locks them where something is to be handed out."""
        ids = {ask.worker_id for ask in asks}
        which = Worker.id.in_(ids)
        found = (
            lock_workers(session, which) if lock else session.scalars(select(Worker).where(which))
        )
        workers = {worker.id: worker for worker in found}
        self._session = session
        self._now = now
        self._campaigns: dict[int, Campaign] = {}
        """Those of the trials that are dealt; a session forgets rows that nobody holds."""
        self._answers: list[list[LeaseRecord] | ResultsDbError] = []
        self._asking: list[tuple[LeaseAsk, Worker, list[LeaseRecord]]] = []
        for ask in asks:
            worker = workers.get(ask.worker_id)
            refusal = not_live(session, ask.worker_id, worker)
            if worker is None or refusal is not None:
                assert refusal is not None
                self._answers.append(refusal)
                continue
            leases: list[LeaseRecord] = []
            self._answers.append(leases)
            self._asking.append((ask, worker, leases))

    def answers(self) -> list[list[LeaseRecord] | ResultsDbError]:
        """The leases of each that asks, or why it gets none."""
        return self._answers

    def is_news(self) -> bool:
        """Whether one of them was not heard of lately: a worker that asks is there, though it may not beat."""
        return any(self._is_news(worker) for _, worker, _ in self._asking)

    def finds_any(self) -> bool:
        """Whether there is a trial for one of them."""
        return any(
            self._session.scalar(_suitable_trials(kind).limit(1)) is not None
            for kind in self._by_kind()
        )

    def hand_out(self, until: datetime) -> bool:
        """Hands out what suits, the oldest first; whether anything did."""
        for _, worker, _ in self._asking:
            if self._is_news(worker):
                worker.seen_at = self._now
        dealt = []
        for kind, asking in self._by_kind().items():
            query = _suitable_trials(kind).limit(sum(ask.max_trials for ask, _, _ in asking))
            # What somebody holds is being leased, cancelled or returned: never waited for.
            locked = query.with_for_update(key_share=True, of=Trial, skip_locked=True)
            waiting = list(reversed(self._session.scalars(locked).all()))
            dealt += self._deal(waiting, asking, until)
        self._session.flush()
        _write_attempts(self._session, dealt, self._now)
        _note_start(self._session, self._campaigns, self._now)
        return bool(dealt)

    def _deal(
        self,
        waiting: list[Trial],
        asking: Sequence[tuple[LeaseAsk, Worker, list[LeaseRecord]]],
        until: datetime,
    ) -> list[Trial]:
        """Gives each that asks a trial in turns, from the end of the list."""
        ids = {trial.campaign_id for trial in waiting}
        query = select(Campaign).where(Campaign.id.in_(ids))
        if ids:
            self._campaigns |= {row.id: row for row in self._session.scalars(query)}
        dealt = []
        while waiting:
            for ask, worker, leases in asking:
                if waiting and len(leases) < ask.max_trials:
                    trial = waiting.pop()
                    campaign = self._campaigns[trial.campaign_id]
                    leases.append(_hand_out(worker, campaign, trial, self._now, until))
                    dealt.append(trial)
        return dealt

    def _is_news(self, worker: Worker) -> bool:
        return self._now - worker.seen_at >= timedelta(seconds=HEARTBEAT_INTERVAL_S)

    def _by_kind(self) -> dict[Kind, list[tuple[LeaseAsk, Worker, list[LeaseRecord]]]]:
        kinds: defaultdict[Kind, list[tuple[LeaseAsk, Worker, list[LeaseRecord]]]]
        kinds = defaultdict(list)
        for ask, worker, leases in self._asking:
            allocation = (worker.cluster, worker.num_nodes, worker.devices_per_node)
            kinds[*allocation, ask.room, ask.longest_s].append((ask, worker, leases))
        return kinds


def _suitable_trials(kind: Kind) -> Select[Any]:
    cluster, num_nodes, devices_per_node, room, longest_s = kind
    query = (
        select(Trial)
        .join(Campaign, Campaign.id == Trial.campaign_id)
        .where(
            Trial.state == "PENDING",
            Campaign.state == "RUNNING",
            Campaign.cluster_name == cluster,
            fits(num_nodes, devices_per_node),
        )
        .order_by(Trial.id)
    )
    if room is not None:
        query = query.where(_fits_in(room, devices_per_node))
    if longest_s is not None:
        deadline_s = func.coalesce(Campaign.probe_deadline_s, DEFAULT_DEADLINE_S)
        query = query.where(deadline_s <= longest_s)
    return query


def _fits_in(room: Room, devices_per_node: int) -> ColumnElement[bool]:
    """Whether a trial fits what is free: on a part of a node, or on whole ones."""
    devices = max(room.devices, devices_per_node if room.nodes else 0)
    on_one_node = (Trial.num_nodes == 1) & (Trial.num_devices <= devices)
    return on_one_node | ((Trial.num_nodes > 1) & (Trial.num_nodes <= room.nodes))


def _write_attempts(session: Session, trials: Sequence[Trial], now: datetime) -> None:
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
            }
            for trial in trials
        ],
    )


def _note_start(session: Session, campaigns: Mapping[int, Campaign], now: datetime) -> None:
    """Campaigns of which a trial is leased for the first time have begun.

    A campaign's row that somebody holds is left to the end of its first attempt: a lease holds trials,
    and whoever holds the campaign may be about to wait for one of them.
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
    worker: Worker, campaign: Campaign, trial: Trial, now: datetime, until: datetime
) -> LeaseRecord:
    if trial.started_at is None:
        trial.started_at = now
    trial.state = "RUNNING"
    trial.attempt += 1
    trial.iterations_done = 0
    trial.worker_id = worker.id
    trial.lease_expires_at = until
    tell(trial, "trial.leased", now)
    return LeaseRecord(
        trial_id=trial.id,
        number=trial.number,
        attempt=trial.attempt,
        campaign_id=campaign.id,
        campaign_name=campaign.name,
        spec=campaign.spec,
        layout=trial_layout(trial),
        repeat_of=trial.repeat_of,
        lease_expires_at=until,
    )
