"""What the worker's threads tell the one that owns its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

from search_spaces.outcome import Outcome
from workers.health import HealthReport
from workers.held_trial import HeldTrial
from workers.protocol import HeartbeatAnswer, Lease, LeaseAsk, Registration


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainAsked:
    """The worker shall end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBroken:
    """The worker can't go on."""

    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLost:
    """The service does not know a session any more."""

    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionBegan:
    """The worker has registered again."""

    registration: Registration


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAnswered:
    """The service has answered, or could not."""

    worker_id: str
    """The session that was asked for."""
    ask: LeaseAsk
    lease: Lease | None = None
    """None: there was none, or no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswered:
    """The service's wishes."""

    worker_id: str
    trials: Sequence[HeldTrial]
    """Those that it was told of: what it wants stopped is one of these."""
    answer: HeartbeatAnswer


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeEnded:
    """A probe's thread has ended."""

    trial: HeldTrial
    outcome: Outcome
    unclean: str = ""
    """Why its nodes must not be used again; empty: they are clean."""
    unclean_nodes: tuple[int, ...] = ()
    """Positions of those nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodesChecked:
    """A health check has ended."""

    nodes: tuple[int, ...]
    """Those that were to be checked."""
    reports: Mapping[int, HealthReport]
    """What was measured, by position."""
    error: str = ""
    """Why a node has no report."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRecovered:
    """A lost node is back, or could not be brought back."""

    node: int
    error: str = ""
    """Why not; empty: it is back."""
    hopeless: bool = False
    """Whether something is left on it that can't be ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndMoved:
    """When the nodes are taken away has been looked up."""

    ends_at: float | None
    """On the monotonic clock; None: nobody says so."""


WorkerEvent = (
    DrainAsked
    | WorkerBroken
    | SessionLost
    | SessionBegan
    | LeaseAnswered
    | HeartbeatAnswered
    | ProbeEnded
    | NodeRecovered
    | NodesChecked
    | EndMoved
)

Events = SimpleQueue[WorkerEvent]
"""Filled by every thread and by signal handlers, which this kind of queue allows; emptied by the
thread that owns the worker's state."""
