"""The worker's scheduler: one thread owns its state and reacts to events of the other threads."""

from __future__ import annotations

import logging
from dataclasses import InitVar, dataclass, field
from typing import Final

from layout_tuner.protocol.states import AllocationState
from layout_tuner.protocol.worker_messages import HeartbeatReply, RoomBody, WorkerCreated
from layout_tuner.workers.packing.topology import Topology
from layout_tuner.workers.worker.events import (
    DrainAsked,
    EndMoved,
    HeartbeatAnswered,
    LeaseAnswered,
    NodeRecovered,
    NodesChecked,
    ProbeEnded,
    SessionBegan,
    SessionLost,
    WorkerBroken,
    WorkerEvent,
)
from layout_tuner.workers.worker.heartbeat import IdleTime, News
from layout_tuner.workers.worker.leasing import Leasing, next_request, request_within
from layout_tuner.workers.worker.trial_book import TrialBook

_LOG = logging.getLogger(__name__)

_TICK_S: Final = 1.0
"""How often the scheduler polls what no event reports: the end of the allocation, and nodes that
were lost or have joined."""

_DRAIN_WITHIN_S: Final = 60.0
"""How long the probes may take to end before the worker ends without them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerOptions:
    """How trials are run."""

    share_nodes: bool
    """Whether probes smaller than a node run side by side on one."""
    drain_s: float
    """Seconds before the end of the allocation by which no probe may run any more."""
    devices_are_cores: bool = False
    """Whether a device is a core, of which a node may have fewer than it is described with."""
    topology: Topology = field(default_factory=Topology)
    """The groups of nodes that are known before the nodes join."""
    end_when_idle_s: float | None = None
    """Seconds without a trial after which the worker ends; None: never."""
    asks: bool = True
    """Whether it requests trials by itself, one ahead; else its owner calls `ask`."""


@dataclass(kw_only=True)
class Scheduler:
    """Leases trials and starts their probes, until the worker must end."""

    trials: TrialBook
    """The trials, with the packer, the nodes and the clock."""
    leasing: Leasing
    registration: InitVar[WorkerCreated]
    options: SchedulerOptions

    def __post_init__(self, registration: WorkerCreated) -> None:
        book = self.trials
        self.packer, self.roster, self.clock = book.packer, book.roster, book.clock
        self._worker_id: str | None = None
        self._is_requesting = False
        self._ends_at: float | None = None
        self._drains_until: float | None = None
        self._next_look_at = 0.0
        now = self.clock()
        self._busy_at = now
        self._idle = IdleTime(at=now)
        self.failure: Exception | None = None
        """Why the worker can't go on."""
        self.roster.look(now)
        self._begin_session(registration)

    @property
    def has_ended(self) -> bool:
        """Whether the worker has drained, or the time for that is over."""
        if self._drains_until is None:
            return False
        return not self.trials.held or self.clock() >= self._drains_until

    @property
    def is_requesting(self) -> bool:
        """Whether the service has yet to answer a request for a trial."""
        return self._is_requesting and self._drains_until is None

    @property
    def wait_s(self) -> float:
        """Seconds until the next regular step; an event may come before."""
        return max(0.0, self._next_look_at - self.clock())

    def news(self) -> News:
        """The content of the next heartbeat."""
        return News(
            worker_id=self._worker_id,
            state=self._state(),
            trials=self.trials.held,
            nodes=self.roster.records(),
            idle=self._idle,
            ends_at=self._ends_at,
            clock=self.clock,
        )

    def take(self, event: WorkerEvent) -> None:
        """Notes an event; `advance` acts on it."""
        match event:
            case ProbeEnded():
                self.trials.note_end(event, self._usable_until())
            case LeaseAnswered():
                self._take_lease(event)
            case HeartbeatAnswered():
                if event.worker_id == self._worker_id:
                    self.trials.stop(event.trials, event.answer.stop)
                    self._take_wishes(event.answer)
            case SessionLost():
                self._take_session_lost(event)
            case SessionBegan(registration=registration):
                self._begin_session(registration)
                _LOG.info("registered again as %s", registration.worker_id)
            case NodesChecked():
                self.roster.take_checked(event)
            case NodeRecovered():
                self.roster.take_recovered(event, self.clock())
            case EndMoved(ends_at=ends_at):
                self._ends_at = ends_at
            case WorkerBroken(error=error):
                self.failure = error
                self.drain("the worker can't go on")
            case DrainAsked():
                self.drain("asked to")

    def advance(self) -> None:
        """Takes all steps that are due: looks at the nodes, starts probes, leases trials."""
        now = self.clock()
        if now >= self._next_look_at:
            self._next_look_at = now + _TICK_S
            self.roster.look(now)
        if self.trials.held or self.roster.is_starting:
            self._busy_at = now
        self._end_in_time(now)
        if self._drains_until is None:
            until = self._usable_until()
            self.trials.note_delayed_ends(now, until)
            self.trials.start(now, until)
            self.trials.give_back_unplaceable(now, until)
            if self.options.asks:
                self._request_more(now, until)
        self._idle = self._idle.then(now, max(0.0, len(self.roster) - self.trials.nodes_held))

    def ask(self, *, wait_s: float, ahead: bool = False) -> bool:
        """Requests a trial that would start at once; `ahead` any, which may wait for devices.

        Returns:
            Whether it was requested: there are devices for one, and no other request is under way.
        """
        until, usable = self._usable_until(), self.roster.usable()
        if not usable or self._worker_id is None or self._is_requesting or self._drains_until:
            return False
        now = self.clock()
        found = self.packer.room(now, until)
        room = RoomBody(nodes=found.nodes, devices=found.devices)
        left_s = found.longest_s
        if ahead:
            room = RoomBody(nodes=len(usable), devices=max(self.roster.sizes(usable)))
            left_s = None if until is None else until - now
        request = request_within(wait_s, room, left_s) if room.devices or room.nodes else None
        if request is None:
            return False
        self._is_requesting = True
        self.leasing.request(self._worker_id, request)
        return True

    def drain(self, why: str) -> None:
        """Ends the worker: cancels the running probes; the end of the session returns them."""
        if self._drains_until is None:
            _LOG.info("ending: %s", why)
            self._drains_until = self.clock() + _DRAIN_WITHIN_S
            self.roster.close()
            self.trials.end_all()

    def _state(self) -> AllocationState:
        if self._drains_until is not None:
            return "draining"
        return "starting" if self.roster.is_starting else "working"

    def _usable_until(self) -> float | None:
        return None if self._ends_at is None else self._ends_at - self.options.drain_s

    def _end_in_time(self, now: float) -> None:
        until, idle_s = self._usable_until(), self.options.end_when_idle_s
        if until is not None and now >= until:
            self.drain("the allocation's time is over")
        elif idle_s is not None and now >= self._busy_at + idle_s:
            self.drain(f"there has been no trial for {idle_s:g} s")

    def _request_more(self, now: float, until: float | None) -> None:
        if self._is_requesting or self._worker_id is None:
            return
        usable = self.roster.usable()
        request = next_request(
            usable=self.roster.sizes(usable),
            all_usable=len(usable) == max(len(self.roster), self.leasing.identity.num_nodes),
            num_waiting=len(self.trials.waiting),
            room=self.packer.room(now, until),
            left_s=None if until is None else until - now,
        )
        if request is not None:
            self._is_requesting = True
            self.leasing.request(self._worker_id, request)

    def _take_lease(self, event: LeaseAnswered) -> None:
        self._is_requesting = False
        if event.worker_id != self._worker_id or self._drains_until is not None:
            return  # the end of a session returns its leases
        if event.lease is not None:
            self.trials.take(event.worker_id, event.lease)

    def _take_wishes(self, answer: HeartbeatReply) -> None:
        self.roster.take_wishes(answer.quarantine)
        for name in answer.release:
            if self.roster.release(name):
                self.trials.second_opinions.release(name)

    def _begin_session(self, registration: WorkerCreated) -> None:
        self._worker_id = registration.worker_id
        self._idle = IdleTime(at=self.clock())  # the service adds up the sessions
        self.roster.take_wishes(registration.quarantined)

    def _take_session_lost(self, event: SessionLost) -> None:
        self._is_requesting = False
        if event.worker_id != self._worker_id or self._drains_until is not None:
            return
        _LOG.warning("the service no longer knows this session; registering again")
        self._worker_id = None
        self.trials.lose_leases()
        self.leasing.register()
