"""The state that live events are computed from: running trials, costs, workers, nodes, plans.

Live events are not stored. A process that has watchers reads this state once a second, and compares
it with the one before (decision 34). Heartbeats write it in any case, so every process sees what
arrived at another one, and no writer has more to do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Select, Text, cast, or_, select
from sqlalchemy.orm import Session

from layout_tuner.protocol.states import AllocationState, AttemptPhase, NodeState
from layout_tuner.results_db.database.store_base import StoreSection
from layout_tuner.results_db.models.service_tables import (
    WORKER_ALIVE_S,
    AllocationNode,
    NodeQuarantine,
    PlanRow,
    WorkerRow,
)
from layout_tuner.results_db.models.tables import Attempt, Campaign, Trial
from layout_tuner.results_db.records import PlanState

WorkerState = Literal[AllocationState, "lost", "ended"]
"""lost: its heartbeats have stopped. ended: its session is over."""


class RunningTrial(NamedTuple):
    """The progress of a leased trial, as its worker reported it last; see `LeasedTrialRead`."""

    id: int
    number: int
    attempt: int
    phase: AttemptPhase | None
    iterations_done: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningCampaign:
    """A campaign that is open, or whose trials still run."""

    is_open: bool
    """Whether it has not ended."""
    node_seconds: float
    """Nodes times seconds of its ended attempts; a budget in node-hours counts these."""
    trials: tuple[RunningTrial, ...]
    """Its leased trials by number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSession:
    """An open session of a worker."""

    name: str
    cluster: str
    state: WorkerState


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStatus:
    """What is known of a node of a live allocation, or of a node in quarantine."""

    state: NodeState | None
    """None: no live allocation has it."""
    quarantine: str | None
    """The reason; None: it is not in quarantine."""
    details: tuple[object, ...]
    """Everything else that pages show of it; only compared."""


NodeKey = tuple[str, str]
"""Its cluster and its name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveState:
    """The state at one moment."""

    campaigns: Mapping[int, RunningCampaign] = field(default_factory=dict)
    workers: Mapping[str, WorkerSession] = field(default_factory=dict)
    """By the id of the session."""
    nodes: Mapping[NodeKey, NodeStatus] = field(default_factory=dict)
    plans: Mapping[int, tuple[PlanState, str]] = field(default_factory=dict)
    """The states and the owners of the plans that the driver makes, by id."""


_PLANS: Final = select(PlanRow.id, PlanRow.state, PlanRow.created_by).order_by(PlanRow.id)

_CAMPAIGN_COLUMNS: Final = (Campaign.id, Campaign.ended_at.is_(None), Campaign.node_seconds)

_OPEN_CAMPAIGNS: Final = select(*_CAMPAIGN_COLUMNS).where(
    or_(Campaign.state == "RUNNING", Campaign.state == "PAUSED")
)

_RUNNING_TRIALS: Final = (
    select(
        Trial.campaign_id,
        Trial.id,
        Trial.number,
        Trial.attempt,
        Attempt.phase,
        Trial.iterations_done,
    )
    .join(Attempt, (Attempt.trial_id == Trial.id) & (Attempt.attempt == Trial.attempt))
    .where(Trial.state == "RUNNING")
    .order_by(Trial.campaign_id, Trial.number)
)

_SESSIONS: Final = (
    select(WorkerRow.id, WorkerRow.name, WorkerRow.cluster, WorkerRow.state, WorkerRow.seen_at)
    .where(WorkerRow.ended_at.is_(None))
    .order_by(WorkerRow.registered_at, WorkerRow.id)
)

_NODES: Final = (
    select(
        WorkerRow.id,
        WorkerRow.cluster,
        AllocationNode.name,
        AllocationNode.state,
        AllocationNode.doing,
        AllocationNode.reason,
        AllocationNode.free_devices,
        # As text: it is compared, and parsing it for a thousand nodes would take longer.
        cast(AllocationNode.health, Text),
    )
    .join(WorkerRow, WorkerRow.id == AllocationNode.worker_id)
    .where(WorkerRow.ended_at.is_(None))
    .order_by(WorkerRow.registered_at, WorkerRow.id)
)

_QUARANTINES: Final = (
    select(NodeQuarantine.cluster, NodeQuarantine.node, NodeQuarantine.reason)
    .where(NodeQuarantine.released_at.is_(None))
    # Of several, the one that a user requested.
    .order_by(NodeQuarantine.scope.desc())
)


class LiveStates(StoreSection):
    """The store's method for live events."""

    def state(self, before: LiveState | None = None) -> LiveState:
        """The state now, in one view of the database.

        A campaign that has ended since `before` is included once more, so that its last change is
        seen.
        """
        now = self._clock()
        campaigns = {} if before is None else before.campaigns
        known = {id_ for id_, then in campaigns.items() if then.is_open or then.trials}
        with self._db.read() as session:
            workers = _workers(session, now)
            return LiveState(
                campaigns=_campaigns(session, known),
                workers=workers,
                nodes=_nodes(session, workers),
                plans={id_: (state, owner) for id_, state, owner in _rows(session, _PLANS)},
            )


def _rows(session: Session, query: Select[*tuple[Any, ...]]) -> Sequence[Any]:
    return session.execute(query).all()


def _campaigns(session: Session, known: Set[int]) -> dict[int, RunningCampaign]:
    running: defaultdict[int, list[RunningTrial]] = defaultdict(list)
    for campaign_id, *trial in _rows(session, _RUNNING_TRIALS):
        running[campaign_id].append(RunningTrial._make(trial))
    rows = list(_rows(session, _OPEN_CAMPAIGNS))
    if others := (running.keys() | known) - {id_ for id_, _, _ in rows}:
        query = select(*_CAMPAIGN_COLUMNS).where(Campaign.id.in_(others))
        rows += _rows(session, query)
    return {
        id_: RunningCampaign(
            is_open=bool(is_open), node_seconds=node_seconds, trials=tuple(running[id_])
        )
        for id_, is_open, node_seconds in rows
    }


def _workers(session: Session, now: datetime) -> dict[str, WorkerSession]:
    lately = timedelta(seconds=WORKER_ALIVE_S)
    return {
        id_: WorkerSession(
            name=name, cluster=cluster, state=state if abs(now - seen_at) < lately else "lost"
        )
        for id_, name, cluster, state, seen_at in _rows(session, _SESSIONS)
    }


def _nodes(session: Session, workers: Mapping[str, WorkerSession]) -> dict[NodeKey, NodeStatus]:
    quarantines = {
        (cluster, node): reason for cluster, node, reason in _rows(session, _QUARANTINES)
    }
    nodes = {
        key: NodeStatus(state=None, quarantine=reason, details=())
        for key, reason in quarantines.items()
    }
    for worker_id, cluster, name, state, *details in _rows(session, _NODES):
        worker = workers.get(worker_id)
        if worker is not None and worker.state != "lost":
            key = (cluster, name)
            nodes[key] = NodeStatus(
                state=state, quarantine=quarantines.get(key), details=(worker_id, *details)
            )
    return nodes
