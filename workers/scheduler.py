"""What the worker does next: one thread owns its state, and hears of everything by events."""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass
from typing import Final

from search_spaces.errors import SearchSpaceError
from search_spaces.outcome import Outcome, ProbeRequest
from workers.held_trial import HeldTrial
from workers.launchers.base import Launcher
from workers.lease_policy import END_WITHIN_S, next_ask
from workers.leasing import Leasing
from workers.node_roster import NodeRoster
from workers.packing.packer import Packer
from workers.packing.request import PackRequest
from workers.packing.shares import Placement
from workers.posting import Posting
from workers.probe_thread import start_probe
from workers.protocol import Lease, OutcomeReport, Registration, WorkerState
from workers.second_opinion import SecondOpinions
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

_GIVE_BACK_AFTER_S: Final = 60.0
"""How long a trial is held without a prospect of devices: nodes may come back meanwhile."""

_MOST_WORDS: Final = 2000
"""Characters of a text that the service takes."""

_DOUBT_S: Final = 1.5
"""How much later than ranks and agents the worker may hear that the whole job is ended."""

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
    """Holds trials from their lease to their outcome, and starts their probes.

    Args:
        launcher: runs probes.
        packer: gives them devices.
        roster: knows which nodes can be used.
        leasing: asks for trials.
        posting: takes outcomes.
        events: what its threads say.
        registration: the session.
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
        options: SchedulerOptions,
    ) -> None:
        self._launcher = launcher
        self._packer = packer
        self._roster = roster
        self._leasing = leasing
        self._posting = posting
        self._events = events
        self._options = options
        self._worker_id: str | None = None
        self._opinions = SecondOpinions(roster)
        self._held: dict[str, HeldTrial] = {}
        self._doubted: list[tuple[float, ProbeEnded]] = []
        """Ends of probes that are believed at a moment: the worker may hear of more until then."""
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
        return not self._held or time.monotonic() >= self._drains_until

    @property
    def wait_s(self) -> float:
        """How long nothing needs to be done unless there is an event."""
        return max(0.0, self._next_look_at - time.monotonic())

    def news(self) -> News:
        """What there is to tell the service."""
        return News(
            worker_id=self._worker_id,
            state=self._state(),
            trials=tuple(self._held.values()),
            nodes=self._roster.records(),
            idle=self._idle,
            ends_at=self._ends_at,
        )

    def take(self, event: WorkerEvent) -> None:
        """Takes an event; what follows from it is done by `advance`."""
        match event:
            case ProbeEnded():
                self._take_probe_ended(event)
            case LeaseAnswered():
                self._take_lease(event)
            case HeartbeatAnswered():
                self._take_wishes(event)
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
        if self._held or self._roster.is_starting:
            self._busy_at = now
        self._end_in_time(now)
        self._end_doubts(now)
        if self._drains_until is None:
            self._start_probes(now)
            self._give_back_hopeless(now)
            self._ask_for_more(now)
        running = sum(trial.nodes_held for trial in self._held.values())
        self._idle = self._idle.then(now, max(0.0, len(self._roster) - running))

    def drain(self, why: str) -> None:
        """Ends: nothing new starts, and what runs is cancelled; the session's end returns it."""
        if self._drains_until is not None:
            return
        _LOG.info("ending: %s", why)
        self._drains_until = time.monotonic() + _DRAIN_WITHIN_S
        self._roster.close()
        for trial in list(self._held.values()):
            trial.is_returned = True
        self._end_doubts(math.inf)
        for trial in list(self._held.values()):
            if trial.is_running:
                trial.stop.set()
            else:
                self._drop(trial)

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

    def _begin_session(self, registration: Registration) -> None:
        self._worker_id = registration.worker_id
        self._idle = IdleTime(at=time.monotonic())  # the service adds up sessions
        self._roster.take_wishes(registration.quarantined)

    # Probes

    def _start_probes(self, now: float) -> None:
        for key, placement in self._packer.place(now, self._usable_until()):
            self._start(self._held[str(key)], placement)

    def _start(self, trial: HeldTrial, placement: Placement) -> None:
        (size,) = self._roster.sizes([placement[0].node])
        whole = not self._options.share_nodes or len(placement) > 1
        nodes_held = len(placement) if whole else len(placement[0].devices) / size
        trial.begin(placement, whole=whole, nodes_held=nodes_held)
        again = " again, elsewhere" if trial.runs else ""
        where = ", ".join(self._roster.name(share.node) for share in placement)
        _LOG.info("%s starts%s on %s", trial.key, again, where)
        start_probe(self._launcher, trial, self._events)

    def _take_probe_ended(self, event: ProbeEnded) -> None:
        if _may_be_the_end_of_all(event.outcome) and self._drains_until is None:
            self._doubted.append((time.monotonic() + _DOUBT_S, event))
        else:
            self._end_probe(event)

    def _end_doubts(self, now: float) -> None:
        due = [event for until, event in self._doubted if now >= until]
        self._doubted = [(until, event) for until, event in self._doubted if now < until]
        for event in due:
            self._end_probe(event)

    def _end_probe(self, event: ProbeEnded) -> None:
        trial, outcome = event.trial, event.outcome
        self._packer.release(trial.key)
        for node in event.unclean_nodes:
            self._roster.quarantine(node, event.unclean)
        if outcome.reason == "node_lost":
            self._roster.look(time.monotonic())  # before others are placed there
        suspects = self._opinions.judge(trial, outcome)
        trial.finish(outcome)
        if suspects and self._may_run_again(trial):
            _LOG.info("%s %s: is it the node?", trial.key, _told(outcome))
            self._submit(trial, avoid=suspects)
        else:
            self._finish(trial)

    def _may_run_again(self, trial: HeldTrial) -> bool:
        until = self._usable_until()
        in_time = until is None or time.monotonic() + _at_most_s(trial.request) <= until
        return in_time and not trial.is_returned and not trial.stop.is_set()

    def _finish(self, trial: HeldTrial) -> None:
        """The trial's last run has ended: it is reported, unless its lease is another's."""
        del self._held[trial.key]
        self._opinions.forget(trial)
        outcome = trial.runs[-1].outcome
        _LOG.info("%s %s", trial.key, _told(outcome))
        if trial.is_returned and outcome.state in ("cancelled", "failed"):
            return
        self._posting.take(trial.report())

    def _drop(self, trial: HeldTrial) -> None:
        """A trial that waits is held no longer."""
        self._packer.withdraw(trial.key)
        self._opinions.forget(trial)
        del self._held[trial.key]

    # Leases

    def _waiting(self) -> list[HeldTrial]:
        return [trial for trial in self._held.values() if not trial.is_running]

    def _ask_for_more(self, now: float) -> None:
        if self._is_asking or self._worker_id is None:
            return
        until, usable = self._usable_until(), self._roster.usable()
        ask = next_ask(
            usable=self._roster.sizes(usable),
            all_usable=len(usable) == len(self._roster),
            num_waiting=len(self._waiting()),
            room=self._packer.room(now, until),
            left_s=None if until is None else until - now,
        )
        if ask is not None:
            self._is_asking = True
            self._leasing.ask(self._worker_id, ask)

    def _take_lease(self, event: LeaseAnswered) -> None:
        self._is_asking = False
        lease = event.lease
        if lease is None or event.worker_id != self._worker_id or self._drains_until is not None:
            return None  # a session's end returns what was leased in it
        for older in [t for t in self._held.values() if t.lease.trial_id == lease.trial_id]:
            self._lose_lease(older)
        try:
            request = ProbeRequest.from_mapping(lease.request)
            self._refuse_too_large(request)
            trial = HeldTrial(lease=lease, worker_id=event.worker_id, request=request)
            self._submit(trial)
        except (SearchSpaceError, ValueError) as error:
            return self._refuse(event.worker_id, lease, str(error))
        _LOG.info("%s is leased", trial.key)
        return None

    def _refuse_too_large(self, request: ProbeRequest) -> None:
        layout = request.layout
        per_node = -(-layout.num_devices // layout.num_nodes)
        large_enough = sum(size >= per_node for size in self._roster.sizes())
        if large_enough < layout.num_nodes:
            raise ValueError(
                f"{layout.num_devices} ranks on num_nodes={layout.num_nodes} are {per_node} a node, "
                f"and this allocation has {large_enough} nodes of so many devices"
            )

    def _refuse(self, worker_id: str, lease: Lease, why: str) -> None:
        message = f"this worker can't run the request: {why}"
        outcome = Outcome(state="failed", reason="unsupported", message=message)
        _LOG.warning("trial %d of %s %s", lease.number, lease.campaign, _told(outcome))
        self._posting.take(
            OutcomeReport(
                trial_id=lease.trial_id,
                attempt=lease.attempt,
                worker_id=worker_id,
                outcome=outcome.to_mapping(),
            )
        )

    def _submit(self, trial: HeldTrial, avoid: frozenset[int] = frozenset()) -> None:
        layout = trial.request.layout
        self._packer.submit(
            PackRequest(
                key=trial.key,
                num_nodes=layout.num_nodes,
                num_devices=layout.num_devices,
                at_most_s=_at_most_s(trial.request),
                avoid=avoid,
            )
        )
        self._held[trial.key] = trial

    def _give_back_hopeless(self, now: float) -> None:
        """A trial that can't be run here is another worker's."""
        until = self._usable_until()
        whys = self._packer.why_waiting(now, until)
        for trial in self._waiting():
            trial.waiting_because = whys.get(trial.key, "")[:_MOST_WORDS]
            if self._packer.has_prospect(trial.key, now, until):
                trial.hopeless_since = None
                continue
            trial.hopeless_since = trial.hopeless_since or now
            too_late = until is not None and now + _at_most_s(trial.request) > until
            if trial.runs or too_late or now >= trial.hopeless_since + _GIVE_BACK_AFTER_S:
                self._give_back(trial, f"given back: {trial.waiting_because}")

    def _give_back(self, trial: HeldTrial, why: str) -> None:
        """Reports a trial that waits: what it came to so far, or that it is to run elsewhere."""
        _LOG.info("%s is %s", trial.key, why)
        self._drop(trial)
        if trial.runs:
            self._posting.take(trial.report())
            return
        outcome = Outcome(state="cancelled", reason="cancelled", message=why)
        self._posting.take(trial.report(outcome))

    def _lose_lease(self, trial: HeldTrial) -> None:
        """Another attempt has begun: this one counts for nothing any more."""
        _LOG.warning("%s is given up: its lease was lost", trial.key)
        trial.is_returned = True
        if trial.is_running:
            trial.stop.set()
        else:
            self._drop(trial)

    # The service

    def _take_wishes(self, event: HeartbeatAnswered) -> None:
        if event.worker_id != self._worker_id:
            return
        stop = set(event.answer.stop)
        for trial in event.trials:
            if trial.lease.trial_id not in stop or self._held.get(trial.key) is not trial:
                continue
            if trial.is_running:
                trial.stop.set()
            else:
                self._drop(trial)
                outcome = Outcome(state="cancelled", reason="cancelled", message="stopped in time")
                self._posting.take(trial.report(outcome))
        self._roster.take_wishes(event.answer.quarantine)
        for name in event.answer.release:
            if self._roster.release(name):
                self._opinions.release(name)

    def _take_session_lost(self, event: SessionLost) -> None:
        self._is_asking = False
        if event.worker_id != self._worker_id or self._drains_until is not None:
            return
        _LOG.warning("the service does not know this worker any more; registering again")
        self._worker_id = None
        for trial in self._waiting():
            self._lose_lease(trial)
        for trial in self._held.values():
            # Its outcome is welcome while nobody else runs it: the next heartbeat says so.
            trial.is_returned = True
        self._leasing.register()


def _at_most_s(request: ProbeRequest) -> float:
    return request.deadline_s + END_WITHIN_S


def _may_be_the_end_of_all(outcome: Outcome) -> bool:
    """Whether a probe may have failed because its job is ended: Slurm signals everybody at once.

    Then the worker is about to hear the same, and the trial goes back with the session.
    """
    return outcome.reason == "node_lost" or "(SIGTERM)" in outcome.message


def _told(outcome: Outcome) -> str:
    """An outcome in a few words."""
    reason = "" if outcome.reason is None else f" ({outcome.reason}: {outcome.message})"
    return f"{outcome.state}{reason}"
