"""The trials that the worker holds: what waits, what runs, and what became of each."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from search_spaces.errors import SearchSpaceError
from search_spaces.outcome import Outcome, ProbeRequest
from workers.held_trial import HeldTrial
from workers.launchers.base import Launcher
from workers.lease_policy import END_WITHIN_S
from workers.node_roster import NodeRoster
from workers.packing.packer import Packer
from workers.packing.request import PackRequest
from workers.packing.shares import Placement
from workers.posting import Posting
from workers.probe_thread import start_probe
from workers.protocol import Lease, OutcomeReport
from workers.second_opinion import SecondOpinions
from workers.worker_events import Events, ProbeEnded

_LOG = logging.getLogger(__name__)

_GIVE_BACK_AFTER_S: Final = 60.0
"""How long a trial is held without a prospect of devices: nodes may come back meanwhile."""

_DOUBT_S: Final = 1.5
"""How much later than ranks and agents the worker may hear that the whole job is ended."""

_RECENT: Final = 51
"""Probes by which it is told how long the next will take."""

_MOST_WORDS: Final = 2000
"""Characters of a text that the service takes."""


class TrialBook:
    """Takes trials from their lease to their outcome; of the thread that owns the worker's state.

    Args:
        launcher: runs probes.
        packer: gives them devices.
        roster: knows which nodes can be used.
        posting: takes outcomes.
        events: where probes say how they ended.
        share_nodes: whether probes smaller than a node run side by side on one.
    """

    def __init__(
        self,
        *,
        launcher: Launcher,
        packer: Packer,
        roster: NodeRoster,
        posting: Posting,
        events: Events,
        share_nodes: bool,
    ) -> None:
        self._launcher = launcher
        self._packer = packer
        self._roster = roster
        self._posting = posting
        self._events = events
        self._share_nodes = share_nodes
        self._held: dict[str, HeldTrial] = {}
        self._doubted: list[tuple[float, ProbeEnded]] = []
        """Ends of probes that are believed at a moment: the worker may hear of more until then."""
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        """How long the latest probes held their devices."""
        self.opinions = SecondOpinions(roster)

    @property
    def held(self) -> tuple[HeldTrial, ...]:
        """All, in the order of their leases."""
        return tuple(self._held.values())

    @property
    def waiting(self) -> list[HeldTrial]:
        """Those that have no devices."""
        return [trial for trial in self._held.values() if not trial.is_running]

    @property
    def nodes_held(self) -> float:
        """Nodes that probes hold; fractions count."""
        return sum(trial.nodes_held for trial in self._held.values())

    def take(self, worker_id: str, lease: Lease) -> None:
        """Takes a lease on, or says at once that it can't be run here."""
        for older in [t for t in self.held if t.lease.trial_id == lease.trial_id]:
            _LOG.warning("%s is given up: its lease was lost", older.key)
            self._return(older)
        try:
            request = ProbeRequest.from_mapping(lease.request)
            self._refuse_too_large(request)
            trial = HeldTrial(lease=lease, worker_id=worker_id, request=request)
            self._submit(trial)
        except (SearchSpaceError, ValueError) as error:
            self._refuse(worker_id, lease, str(error))
        else:
            _LOG.info("%s is leased", trial.key)

    def start(self, now: float, until: float | None) -> None:
        """Starts the probes that there are devices for.

        Args:
            now: the time.
            until: when they must have ended; None: any time.
        """
        for key, placement in self._packer.place(now, until):
            self._start(self._held[str(key)], placement)

    def end(self, event: ProbeEnded, until: float | None) -> None:
        """Takes the end of a probe; one that may have come with the end of the job later."""
        if _may_be_the_end_of_all(event.outcome) and not event.trial.is_returned:
            self._doubted.append((time.monotonic() + _DOUBT_S, event))
        else:
            self._end(event, until)

    def end_doubts(self, now: float, until: float | None) -> None:
        """Believes the ends that nothing more was heard of meanwhile."""
        due = [event for at, event in self._doubted if now >= at]
        self._doubted = [(at, event) for at, event in self._doubted if now < at]
        for event in due:
            self._end(event, until)

    def give_back_hopeless(self, now: float, until: float | None) -> None:
        """A trial that can't be run here is another worker's."""
        if not self.waiting:
            return
        whys = self._packer.why_waiting(now, until)
        for trial in self.waiting:
            trial.waiting_because = whys.get(trial.key, "")[:_MOST_WORDS]
            if self._packer.has_prospect(trial.key, now, until):
                trial.hopeless_since = None
                continue
            trial.hopeless_since = trial.hopeless_since or now
            too_late = until is not None and now + _at_most_s(trial.request) > until
            if trial.runs or too_late or now >= trial.hopeless_since + _GIVE_BACK_AFTER_S:
                self._give_back(trial, f"given back: {trial.waiting_because}")

    def stop(self, trials: Sequence[HeldTrial], trial_ids: Sequence[int]) -> None:
        """Stops some trials, as the service wishes."""
        for trial in trials:
            if trial.lease.trial_id not in trial_ids or self._held.get(trial.key) is not trial:
                continue
            if trial.is_running:
                trial.stop.set()
                continue
            self._drop(trial)
            outcome = Outcome(state="cancelled", reason="cancelled", message="stopped in time")
            self._posting.take(trial.report(outcome))

    def lose_leases(self) -> None:
        """The session is over: what waits is dropped, and what runs reports what it measures.

        A measurement is welcome while nobody else runs the trial; the next heartbeat says so.
        """
        for trial in self.waiting:
            self._drop(trial)
        for trial in self.held:
            trial.is_returned = True

    def end_all(self) -> None:
        """Ends everything: the leases go back with the session."""
        for trial in self.held:
            trial.is_returned = True
        self.end_doubts(math.inf, None)
        for trial in self.held:
            self._return(trial)

    def _start(self, trial: HeldTrial, placement: Placement) -> None:
        (size,) = self._roster.sizes([placement[0].node])
        whole = not self._share_nodes or len(placement) > 1
        nodes_held = len(placement) if whole else len(placement[0].devices) / size
        trial.begin(placement, whole=whole, nodes_held=nodes_held)
        again = " again, elsewhere" if trial.runs else ""
        where = ", ".join(self._roster.name(share.node) for share in placement)
        _LOG.info("%s starts%s on %s", trial.key, again, where)
        start_probe(self._launcher, trial, self._events)

    def _end(self, event: ProbeEnded, until: float | None) -> None:
        trial, outcome = event.trial, event.outcome
        self._packer.release(trial.key)
        for node in event.unclean_nodes:
            self._roster.quarantine(node, event.unclean)
        if outcome.reason == "node_lost":
            self._roster.look(time.monotonic())  # before others are placed there
        suspects = self.opinions.judge(trial, outcome)
        trial.finish(outcome)
        self._recent_s.append(trial.runs[-1].held_s)
        if suspects and _may_run_again(trial, until):
            _LOG.info("%s %s: is it the node?", trial.key, _told(outcome))
            self._submit(trial, avoid=suspects)
        else:
            self._finish(trial)

    def _finish(self, trial: HeldTrial) -> None:
        """The trial's last run has ended: it is reported, unless its lease is another's."""
        del self._held[trial.key]
        self.opinions.forget(trial)
        outcome = trial.runs[-1].outcome
        _LOG.info("%s %s", trial.key, _told(outcome))
        if not trial.is_returned or outcome.state not in ("cancelled", "failed"):
            self._posting.take(trial.report())

    def _submit(self, trial: HeldTrial, avoid: frozenset[int] = frozenset()) -> None:
        layout, at_most_s = trial.request.layout, _at_most_s(trial.request)
        self._packer.submit(
            PackRequest(
                key=trial.key,
                num_nodes=layout.num_nodes,
                num_devices=layout.num_devices,
                at_most_s=at_most_s,
                expected_s=min(at_most_s, median(self._recent_s)) if self._recent_s else None,
                avoid=avoid,
            )
        )
        self._held[trial.key] = trial

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

    def _give_back(self, trial: HeldTrial, why: str) -> None:
        """Reports a trial that waits: what it came to so far, or that it is to run elsewhere."""
        _LOG.info("%s is %s", trial.key, why)
        self._drop(trial)
        outcome = Outcome(state="cancelled", reason="cancelled", message=why)
        self._posting.take(trial.report(None if trial.runs else outcome))

    def _return(self, trial: HeldTrial) -> None:
        """The lease is, or will be, somebody else's."""
        trial.is_returned = True
        if trial.is_running:
            trial.stop.set()
        else:
            self._drop(trial)

    def _drop(self, trial: HeldTrial) -> None:
        """A trial that waits is held no longer."""
        self._packer.withdraw(trial.key)
        self.opinions.forget(trial)
        del self._held[trial.key]


def _at_most_s(request: ProbeRequest) -> float:
    return request.deadline_s + END_WITHIN_S


def _may_run_again(trial: HeldTrial, until: float | None) -> bool:
    in_time = until is None or time.monotonic() + _at_most_s(trial.request) <= until
    return in_time and not trial.is_returned and not trial.stop.is_set()


def _may_be_the_end_of_all(outcome: Outcome) -> bool:
    """Whether a probe may have failed because its job is ended: Slurm signals everybody at once.

    Then the worker is about to hear the same, and the trial goes back with the session.
    """
    return outcome.reason == "node_lost" or "(SIGTERM)" in outcome.message


def _told(outcome: Outcome) -> str:
    """An outcome in a few words."""
    reason = "" if outcome.reason is None else f" ({outcome.reason}: {outcome.message})"
    return f"{outcome.state}{reason}"
