"""What the worker does next: one thread owns its state, and hears of everything by events."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import Final

from workers.launchers.base import Launcher
from workers.lease_policy import next_ask
from workers.leasing import Leasing
from workers.node_roster import NodeRoster
from workers.packing.packer import Packer
from workers.posting import Posting
from workers.protocol import HeartbeatAnswer, Registration, WorkerState
from workers.trial_book import TrialBook
from workers.worker_events import (
    DrainAsked,
    EndMoved,
    Events,
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
from workers.worker_status import IdleTime, News

_LOG = logging.getLogger(__name__)

_TICK_S: Final = 1.0
"""How often it is looked at what nobody tells: the end of the time, nodes that were lost or joined."""

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
    end_when_idle_s: float | None = None
    """Seconds without a trial after which the worker ends; None: never."""


class Scheduler:
    """Leases trials and has their probes started, until it is to end.

    Args:
        launcher: runs probes.
        packer: gives them devices.
        roster: knows which nodes can be used.
        leasing: asks for trials.
        posting: takes outcomes.
        events: what its threads say.
        registration: the session.
        num_nodes: that it was begun with; some may join late.
        options: how trials are run.
    """

    def __init__(
        self,
        *,
        launcher: Launcher,
        packer: Packer,
        roster: NodeRoster,
        leasing: Leasing,
        posting: Posting,
        events: Events,
        registration: Registration,
        num_nodes: int,
        options: SchedulerOptions,
    ) -> None:
        self._packer = packer
        self._roster = roster
        self._leasing = leasing
        self._num_nodes = num_nodes
        self._options = options
        self._trials = TrialBook(
            launcher=launcher,
            packer=packer,
            roster=roster,
            posting=posting,
            events=events,
            share_nodes=options.share_nodes,
        )
        self._worker_id: str | None = None
        self._is_asking = False
        self._ends_at: float | None = None
        self._drains_until: float | None = None
        self._next_look_at = 0.0
        now = time.monotonic()
        self._busy_at = now
        self._idle = IdleTime(at=now)
        self.failure: Exception | None = None
        """Why the worker can't go on."""
        self._roster.look(now)
        self._begin_session(registration)

    @property
    def has_ended(self) -> bool:
        """Whether nothing is left to be done, or to be waited for."""
        if self._drains_until is None:
            return False
        return not self._trials.held or time.monotonic() >= self._drains_until

    @property
    def wait_s(self) -> float:
        """How long nothing needs to be done unless there is an event."""
        return max(0.0, self._next_look_at - time.monotonic())

    def news(self) -> News:
        """What there is to tell the service."""
        return News(
            worker_id=self._worker_id,
            state=self._state(),
            trials=self._trials.held,
            nodes=self._roster.records(),
            idle=self._idle,
            ends_at=self._ends_at,
        )

    def take(self, event: WorkerEvent) -> None:
        """Takes an event; what follows from it is done by `advance`."""
        match event:
            case ProbeEnded():
                self._trials.end(event, self._usable_until())
            case LeaseAnswered():
                self._take_lease(event)
            case HeartbeatAnswered():
                if event.worker_id == self._worker_id:
                    self._trials.stop(event.trials, event.answer.stop)
                    self._take_wishes(event.answer)
            case SessionLost():
                self._take_session_lost(event)
            case SessionBegan(registration=registration):
                self._begin_session(registration)
                _LOG.info("registered again as %s", registration.worker_id)
            case NodesChecked():
                self._roster.take_checked(event)
            case NodeRecovered():
                self._roster.take_recovered(event, time.monotonic())
            case EndMoved(ends_at=ends_at):
                self._ends_at = ends_at
            case WorkerBroken(error=error):
                self.failure = error
                self.drain("it can't go on")
            case DrainAsked():
                self.drain("asked to")

    def advance(self) -> None:
        """Does what is to be done now."""
        now = time.monotonic()
        if now >= self._next_look_at:
            self._next_look_at = now + _TICK_S
            self._roster.look(now)
        if self._trials.held or self._roster.is_starting:
            self._busy_at = now
        self._end_in_time(now)
        if self._drains_until is None:
            until = self._usable_until()
            self._trials.end_doubts(now, until)
            self._trials.start(now, until)
            self._trials.give_back_hopeless(now, until)
            self._ask_for_more(now, until)
        idle = len(self._roster) - self._trials.nodes_held
        self._idle = self._idle.then(now, max(0.0, idle))

    def drain(self, why: str) -> None:
        """Ends: nothing new starts, and what runs is cancelled; the session's end returns it."""
        if self._drains_until is None:
            _LOG.info("ending: %s", why)
            self._drains_until = time.monotonic() + _DRAIN_WITHIN_S
            self._roster.close()
            self._trials.end_all()

    def _state(self) -> WorkerState:
        if self._drains_until is not None:
            return "draining"
        return "starting" if self._roster.is_starting else "working"

    def _usable_until(self) -> float | None:
        return None if self._ends_at is None else self._ends_at - self._options.drain_s

    def _end_in_time(self, now: float) -> None:
        until, idle_s = self._usable_until(), self._options.end_when_idle_s
        if until is not None and now >= until:
            self.drain("the allocation's time is over")
        elif idle_s is not None and now >= self._busy_at + idle_s:
            self.drain(f"there has been no trial for {idle_s:g} s")

    def _ask_for_more(self, now: float, until: float | None) -> None:
        if self._is_asking or self._worker_id is None:
            return
        usable = self._roster.usable()
        ask = next_ask(
            usable=self._roster.sizes(usable),
            all_usable=len(usable) == max(len(self._roster), self._num_nodes),
            num_waiting=len(self._trials.waiting),
            room=self._packer.room(now, until),
            left_s=None if until is None else until - now,
        )
        if ask is not None:
            self._is_asking = True
            self._leasing.ask(self._worker_id, ask)

    def _take_lease(self, event: LeaseAnswered) -> None:
        self._is_asking = False
        if event.worker_id != self._worker_id or self._drains_until is not None:
            return  # a session's end returns what was leased in it
        if event.lease is not None:
            self._trials.take(event.worker_id, event.lease)

    def _take_wishes(self, answer: HeartbeatAnswer) -> None:
        self._roster.take_wishes(answer.quarantine)
        for name in answer.release:
            if self._roster.release(name):
                self._trials.opinions.release(name)

    def _begin_session(self, registration: Registration) -> None:
        self._worker_id = registration.worker_id
        self._idle = IdleTime(at=time.monotonic())  # the service adds up sessions
        self._roster.take_wishes(registration.quarantined)

    def _take_session_lost(self, event: SessionLost) -> None:
        self._is_asking = False
        if event.worker_id != self._worker_id or self._drains_until is not None:
            return
        _LOG.warning("the service does not know this worker any more; registering again")
        self._worker_id = None
        self._trials.lose_leases()
        self._leasing.register()
