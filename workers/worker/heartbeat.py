"""Heartbeats: every few seconds the worker reports its trials and nodes to the service."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from layout_tuner.documents.limits import visible_line
from layout_tuner.protocol.connection.outage_log import OutageLog
from layout_tuner.protocol.states import AllocationState
from layout_tuner.protocol.worker_messages import (
    MAX_WORDS,
    HeartbeatBody,
    HeartbeatReply,
    NodeStatusBody,
    StatusBody,
)
from layout_tuner.timing_mark import ranks_time_here
from layout_tuner.workers.errors import (
    AnswerUnreadableError,
    RequestRefusedError,
    ServiceUnreachableError,
    TokenRefusedError,
    WorkerError,
    WorkerReplacedError,
    WorkerUnknownError,
)
from layout_tuner.workers.service.lease_client import LeaseClient
from layout_tuner.workers.worker.events import Events, HeartbeatAnswered, SessionLost, WorkerBroken
from layout_tuner.workers.worker.held_trial import HeldTrial
from layout_tuner.workers.worker.node_health import HealthReport
from layout_tuner.workers.worker.roster import RosterNode

_LOG = logging.getLogger(__name__)

_NOT_FINITE: Final = re.compile("NaN|Infinity")

_MOST_OF_HEALTH: Final = 500

_SHORTEST_BEAT_S: Final = 1.0

_LEFT_OUT_WHILE_TIMING: Final = 2
"""Heartbeats in a row; three intervals and a call that hangs are less than a lease."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IdleTime:
    """Node-seconds without a probe, up to a moment and from there on."""

    node_s: float = 0.0
    at: float = 0.0
    nodes: float = 0.0
    """Nodes without a probe since then, which may be a fraction."""

    def until(self, now: float) -> float:
        """Node-seconds up to now."""
        return self.node_s + self.nodes * max(0.0, now - self.at)

    def then(self, now: float, nodes: float) -> IdleTime:
        """The idle time, with another number of idle nodes from now on."""
        return IdleTime(node_s=self.until(now), at=now, nodes=nodes)


@dataclass(frozen=True, kw_only=True, slots=True)
class News:
    """The content of a heartbeat; the thread that owns the worker's state replaces it."""

    worker_id: str | None
    """The session; None: there is none at the moment."""
    state: AllocationState = "starting"
    trials: Sequence[HeldTrial] = ()
    nodes: Sequence[RosterNode] = ()
    idle: IdleTime = IdleTime()
    ends_at: float | None = None
    """When the allocation ends, on the worker's clock."""
    clock: Callable[[], float] = time.monotonic
    """The worker's clock, in seconds."""

    def status(self, known: Mapping[str, HealthReport] | None = None) -> StatusBody:
        """The status of the allocation now; `known` health reports are not sent again."""
        now = self.clock()
        return StatusBody(
            state=self.state,
            ends_in_s=None if self.ends_at is None else max(0.0, self.ends_at - now),
            idle_node_s=self.idle.until(now),
            nodes=_statuses(self.nodes, self.trials, known or {}),
        )


def _statuses(
    nodes: Sequence[RosterNode], trials: Sequence[HeldTrial], known: Mapping[str, HealthReport]
) -> list[NodeStatusBody]:
    doing: dict[int, list[str]] = {}
    free = [node.num_devices for node in nodes]
    for trial in trials:
        for share in trial.placement:
            if share.node >= len(nodes):
                continue  # it joined after this was made, and the trial has started there
            what = f"{trial.title} ({trial.spans})" if trial.spans else trial.title
            doing.setdefault(share.node, []).append(what)
            size = nodes[share.node].num_devices
            free[share.node] -= size if trial.holds_whole_nodes else len(share.devices)
    return [
        NodeStatusBody(
            name=node.name,
            state="busy" if index in doing and node.state == "idle" else node.state,
            doing=visible_line(", ".join(doing.get(index, ())), MAX_WORDS),
            reason=visible_line(node.reason, MAX_WORDS),
            free_devices=max(0, free[index]),
            health=_health(node, known),
        )
        for index, node in enumerate(nodes)
    ]


def _health(node: RosterNode, known: Mapping[str, HealthReport]) -> dict[str, Any] | None:
    """The report of a node without values that JSON can't hold, and with its texts cut."""
    if node.report is None or node.report is known.get(node.name):
        return None
    short = {
        name: visible_line(value, _MOST_OF_HEALTH) if isinstance(value, str) else value
        for name, value in asdict(node.report).items()
    }
    return {n: v for n, v in short.items() if not _NOT_FINITE.search(json.dumps(v))}


@dataclass
class Heartbeat:
    """Sends the newest `news` every few seconds, from a thread of its own.

    While the worker is idle and its news is as before, every second heartbeat is left out: each
    costs the service a transaction. What changes is sent at the next interval as ever. While ranks
    time iterations on the cores of the service, two of three are left out.
    """

    client: LeaseClient
    interval_s: float
    news: News
    """The newest content."""
    events: Events
    """Where the answers are put."""

    def __post_init__(self) -> None:
        # The next heartbeat must be sent before the leases expire, even if this connection hangs.
        self._within_s = max(2 * self.interval_s, _SHORTEST_BEAT_S)
        self._ended = threading.Event()
        self._failures = OutageLog(_LOG, "the heartbeat")
        self._is_refused = False
        self._session = ""
        self._known: dict[str, HealthReport] = {}
        """Reports by node that were sent in this session; they are long, so they are sent once."""
        self._num_to_leave_out = 0
        """Heartbeats that can be left out for timed iterations: none after one that failed."""
        self._idle_since: News | None = None
        """What an idle worker has just sent; None: the next heartbeat is sent in any case."""
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Ends the heartbeats; returns when the thread has ended."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.interval_s):
            news = self.news
            if self._leaves_out(news):
                continue
            try:
                if news.worker_id is not None and not self._beat(news.worker_id, news):
                    return
            except Exception as error:
                # Without heartbeats all leases expire, so the worker must end.
                self.events.put(WorkerBroken(error=error))
                return

    def _leaves_out(self, news: News) -> bool:
        """Whether this heartbeat is not sent; one of the next is."""
        if self._num_to_leave_out > 0 and ranks_time_here():
            self._num_to_leave_out -= 1
            return True
        self._num_to_leave_out = 0
        if self._is_as_before(news):
            self._idle_since = None
            return True
        return False

    def _is_as_before(self, news: News) -> bool:
        """Whether the worker is idle, and all but its idle time is as in the last heartbeat."""
        last = self._idle_since
        return last is not None and replace(news, idle=last.idle, ends_at=last.ends_at) == last

    def _beat(self, worker_id: str, news: News) -> bool:
        """Sends one heartbeat; returns whether to go on."""
        self._idle_since = None
        if worker_id != self._session:
            self._session, self._known = worker_id, {}
        try:
            # An attempt whose trial is leased here again is being ended. The service would have its
            # trial stopped, which it names by its number: that would be the new attempt too.
            newest = {trial.lease.trial_id: trial for trial in news.trials}
            body = HeartbeatBody(
                trials=[trial.beat() for trial in newest.values()], status=news.status(self._known)
            )
            answer = self._send(worker_id, body)
        except (ServiceUnreachableError, TokenRefusedError):
            return True
        except WorkerUnknownError:
            self.events.put(SessionLost(worker_id=worker_id))
        except WorkerReplacedError as error:
            self.events.put(WorkerBroken(error=error))
            return False
        except WorkerError as error:
            self._failures.failed("the heartbeat was refused, and the probes go on", error)
        else:
            self.events.put(
                HeartbeatAnswered(worker_id=worker_id, trials=news.trials, answer=answer)
            )
            self._failures.worked()
            self._num_to_leave_out = _LEFT_OUT_WHILE_TIMING
            has_orders = bool(answer.stop or answer.release or answer.quarantine)
            self._idle_since = None if news.trials or has_orders else news
            reports = ((node.name, node.report) for node in news.nodes)
            self._known = {name: report for name, report in reports if report is not None}
        return True

    def _send(self, worker_id: str, body: HeartbeatBody) -> HeartbeatReply:
        """Sends a heartbeat; without the status where the service refuses that."""
        try:
            return self.client.heartbeat(worker_id, body, within_s=self._within_s)
        except (WorkerUnknownError, WorkerReplacedError, AnswerUnreadableError):
            raise
        except RequestRefusedError as error:
            if not self._is_refused:
                _LOG.error("the service refuses the status of the nodes: %s", error)
            self._is_refused = True
            without_status = replace(body, status=None)
            return self.client.heartbeat(worker_id, without_status, within_s=self._within_s)
