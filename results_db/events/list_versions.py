"""Versions of lists: texts that change whenever a list of campaigns or of nodes would change."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import Select, func, select, true
from sqlalchemy.orm import Session

from results_db.database.events import COUNTER_ID
from results_db.database.store_base import StoreSection
from results_db.models.service_tables import (
    AllocationNode,
    EventCounter,
    EventRow,
    NodeQuarantine,
    WorkerRow,
    is_there,
)
from results_db.models.tables import Attempt, Campaign, Trial
from results_db.rows import COST_COLUMNS

_NEWEST: Final = (
    select(EventRow.seq, EventRow.at)
    .where(EventRow.seq.is_not(None))
    .order_by(EventRow.seq.desc())
    .limit(1)
)
_COUNTER: Final = select(EventCounter.last_seq).where(EventCounter.id == COUNTER_ID)
_UNNUMBERED: Final = select(EventRow.id).where(EventRow.seq.is_(None)).order_by(EventRow.id)

_SUMS: Final = ("wall_time_s", "allocation_idle_node_seconds", *COST_COLUMNS.values())
_CLOCKS: Final = (
    select(Campaign.id, *(getattr(Campaign, name) for name in _SUMS))
    .where(Campaign.ended_at.is_(None))
    .order_by(Campaign.id)
)
"""What the driver changes without an event."""

_BEATS: Final = ("seen_at", "status_at", "idle_node_seconds", "idle_shared_node_seconds")
"""Columns of a worker that nearly every heartbeat changes."""
_WORKER: Final = [column for column in WorkerRow.__table__.columns if column.name not in _BEATS]
_LEASED: Final = (Attempt.trial_id, Attempt.phase, Attempt.nodes_held, Attempt.waiting_because)
_PROGRESS: Final = (Attempt.seen_at, Attempt.held_s, Trial.iterations_done)


class ListVersions(StoreSection):
    """The store's methods for versions of lists."""

    def campaigns_version(self, *, beats: bool = False) -> str:
        """A text that changes whenever a list of campaigns would change, whatever its filter.

        It follows from the numbers of events: two campaigns that change within a microsecond give
        two versions. A campaign that is deleted has an event, too.

        Args:
            beats: whether the list also shows wall times and costs of open campaigns, which the
                driver changes without an event.
        """
        with self._db.read() as session:
            parts = _events(session)
            if beats:
                parts.append(_rows(session, _CLOCKS))
        return _digest(parts)

    def nodes_version(self, cluster: str | None = None, *, beats: bool = False) -> str:
        """A text that changes whenever a list of allocations or of nodes would change.

        Workers and nodes have no event for each change: the version follows from the values in
        their rows, and from which workers are live by the store's clock.

        Args:
            cluster: whose allocations and nodes are listed; None: of all clusters.
            beats: whether the list also shows what nearly every heartbeat changes: its time, idle
                node-seconds, and the progress of running trials.
        """
        of_cluster = true() if cluster is None else WorkerRow.cluster == cluster
        live = select(WorkerRow.id).where(is_there(self._clock()), of_cluster)
        columns = WorkerRow.__table__.columns if beats else _WORKER
        workers = select(*columns).where(WorkerRow.id.in_(live)).order_by(WorkerRow.id)
        # A session that has ended does not change.
        sessions = select(func.count(), func.count(WorkerRow.ended_at)).where(of_cluster)
        nodes = select(*AllocationNode.__table__.columns).where(AllocationNode.worker_id.in_(live))
        quarantines = select(*NodeQuarantine.__table__.columns)
        if cluster is not None:
            quarantines = quarantines.where(NodeQuarantine.cluster == cluster)
        leased = (
            select(*_LEASED, *(_PROGRESS if beats else ()))
            .join(Trial, Trial.id == Attempt.trial_id)
            .where(Attempt.worker_id.in_(live), Attempt.ending.is_(None))
            .order_by(Attempt.trial_id)
        )
        queries = (
            workers,
            sessions,
            nodes.order_by(AllocationNode.worker_id, AllocationNode.name),
            quarantines.order_by(NodeQuarantine.cluster, NodeQuarantine.node),
            leased,
        )
        with self._db.read() as session:
            # Attempts that begin and end between two calls have events.
            return _digest([*_events(session), *(_rows(session, query) for query in queries)])


def _events(session: Session) -> list[Any]:
    """The newest event of all campaigns, and those that have no number yet."""
    # With the time: after a restore of the database, a number may be assigned again.
    queries = (_NEWEST, _COUNTER, _UNNUMBERED)
    return [_rows(session, query) for query in queries]


def _rows(session: Session, query: Select[*tuple[Any, ...]]) -> Sequence[Any]:
    return session.connection().execute(query).all()


def _digest(parts: Sequence[Any]) -> str:
    text = "\n".join(repr(part) for part in parts)
    return hashlib.sha256(text.encode()).hexdigest()
