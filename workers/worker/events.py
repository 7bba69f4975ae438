"""Events that the worker's threads send to the thread that owns its state."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from layout_tuner.protocol.outcome import Outcome
from layout_tuner.protocol.worker_messages import HeartbeatReply, LeaseRead, WorkerCreated
from layout_tuner.workers.worker.held_trial import HeldTrial
from layout_tuner.workers.worker.node_health import HealthReport


@dataclass(frozen=True, kw_only=True, slots=True)
class DrainAsked:
    """The worker has been signalled to end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerBroken:
    """The worker can't go on."""

    error: Exception


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLost:
    """The service no longer knows a session."""

    worker_id: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionBegan:
    """The worker has registered again."""

    registration: WorkerCreated


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseAnswered:
    """A request for a lease has ended."""

    worker_id: str
    """The session of the request."""
    lease: LeaseRead | None = None
    """None: there was no trial, or no answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HeartbeatAnswered:
    """The service has answered a heartbeat."""

    worker_id: str
    trials: Sequence[HeldTrial]
    """The trials of the heartbeat; those to stop are among them."""
    answer: HeartbeatReply


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeEnded:
    """A probe's thread has ended."""

    trial: HeldTrial
    outcome: Outcome
    unclean: str = ""
    """Why its nodes must not be used again; empty: they are clean."""
    unclean_nodes: tuple[int, ...] = ()
    """Positions of those nodes."""
    lost_its_agent: bool = False
    """Whether an agent of its nodes, or what runs the agent, ended while it ran."""


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
    """An attempt to recover a lost node has ended."""

    node: int
    error: str = ""
    """Why the node was not recovered; empty: it was."""
    ranks_are_left: bool = False
    """Whether processes are left on it that can't be ended."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndMoved:
    """The end of the allocation has been looked up."""

    ends_at: float | None
    """On the monotonic clock; None: it is unknown, or there is none."""


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


class Events(Protocol):
    """Where all threads and signal handlers put events: a SimpleQueue, which allows the latter.

    The thread that owns the worker's state takes them out.
    """

    def put(self, event: WorkerEvent, /) -> None: ...


def in_background(
    events: Events,
    work: Callable[[], WorkerEvent],
    *,
    name: str,
    failed: Callable[[Exception], WorkerEvent],
) -> None:
    """Runs a function on a thread; its end is the event that it returns, or `failed` makes."""

    def run() -> None:
        try:
            event = work()
        except Exception as error:  # the thread ends here: every failure becomes an event
            event = failed(error)
        events.put(event)

    threading.Thread(target=run, name=name, daemon=True).start()
