"""The trials that the worker holds, from their leases to their outcomes."""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Final

from search_spaces.documents.limits import visible_line
from search_spaces.errors import SearchSpaceError
from search_spaces.protocol.outcome import MAX_MESSAGE_LENGTH, Outcome, ProbeRequest
from search_spaces.protocol.worker_messages import MAX_WORDS, LeaseRead, OutcomeReport
from workers.errors import RanksLeftError
from workers.launchers.base import Launcher
from workers.packing.packer import Packer
from workers.packing.request import PackRequest, Placement
from workers.worker.events import Events, ProbeEnded, WorkerEvent, in_background
from workers.worker.held_trial import HeldTrial
from workers.worker.leasing import END_WITHIN_S
from workers.worker.outcome_posting import Posting
from workers.worker.quarantine import SecondOpinions
from workers.worker.roster import NodeRoster

_LOG = logging.getLogger(__name__)


_GIVE_BACK_AFTER_S: Final = 60.0
"""How long a trial for which no devices are expected is held: lost nodes may recover meanwhile."""

_DOUBT_S: Final = 1.5
"""How much later than ranks and agents the worker may be signalled that the whole job ends."""

_RECENT: Final = 51
"""Probes whose median duration is the expected duration of the next."""


class TrialBook:
    """The trials that the worker holds. Only the thread that owns the worker's state uses it.

    Args:
        launcher: runs probes.
        packer: assigns devices to them.
        roster: the nodes, and which of them can be used.
        posting: posts outcomes.
        events: where the ends of probes are put.
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
        """Ends of probes, and when they count: until then the worker may learn that the job
        ends."""
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        """How long the latest probes held their devices."""
        self.opinions = SecondOpinions(roster)

    @property
    def held(self) -> tuple[HeldTrial, ...]:
        """All trials, in the order of their leases."""
        return tuple(self._held.values())

    @property
    def waiting(self) -> list[HeldTrial]:
        """The trials that have no devices."""
        return [trial for trial in self._held.values() if not trial.is_running]

    @property
    def nodes_held(self) -> float:
        """Nodes that probes hold, which may be a fraction."""
        return sum(trial.nodes_held for trial in self._held.values())

    def take(self, worker_id: str, lease: LeaseRead) -> None:
        """Takes a lease; posts at once that it failed where it can't be run here."""
        for older in [t for t in self.held if t.lease.trial_id == lease.trial_id]:
            _LOG.warning("%s is cancelled: its lease was lost", older.key)
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
        """Starts the probes for which there are devices.

        Args:
            now: the time.
            until: when they must have ended; None: no limit.
        """
        for key, placement in self._packer.place(now, until):
            self._start(self._held[str(key)], placement)

    def end(self, event: ProbeEnded, until: float | None) -> None:
        """Notes the end of a probe; later where the whole job may be ending."""
        if _may_be_the_end_of_all(event.outcome) and not event.trial.is_returned:
            self._doubted.append((time.monotonic() + _DOUBT_S, event))
        else:
            self._end(event, until)

    def end_doubts(self, now: float, until: float | None) -> None:
        """Notes the delayed ends of probes that are due: the job goes on."""
        due = [event for at, event in self._doubted if now >= at]
        self._doubted = [(at, event) for at, event in self._doubted if now < at]
        for event in due:
            self._end(event, until)

    def give_back_unplaceable(self, now: float, until: float | None) -> None:
        """Gives trials back that can't be run here, so that another worker can lease them."""
        if not self.waiting:
            return
        whys = self._packer.why_waiting(now, until)
        for trial in self.waiting:
            trial.waiting_because = visible_line(whys.get(trial.key, ""), MAX_WORDS)
            if self._packer.has_prospect(trial.key, now, until):
                trial.unplaceable_since = None
                continue
            trial.unplaceable_since = trial.unplaceable_since or now
            too_late = until is not None and now + _at_most_s(trial.request) > until
            if trial.runs or too_late or now >= trial.unplaceable_since + _GIVE_BACK_AFTER_S:
                self._give_back(trial, f"given back: {trial.waiting_because}")

    def stop(self, trials: Sequence[HeldTrial], trial_ids: Sequence[int]) -> None:
        """Stops some trials on request of the service."""
        for trial in trials:
            if trial.lease.trial_id not in trial_ids or self._held.get(trial.key) is not trial:
                continue
            if trial.is_running:
                trial.stop.set()
                continue
            self._drop(trial)
            outcome = Outcome(
                state="cancelled", reason="cancelled", message="stopped before its probe began"
            )
            self._posting.take(trial.report(outcome))

    def lose_leases(self) -> None:
        """Notes the end of the session: drops the trials that wait and lets the others run.

        The service accepts a measurement as long as no other worker runs the trial.
        """
        for trial in self.waiting:
            self._drop(trial)
        for trial in self.held:
            trial.is_returned = True

    def end_all(self) -> None:
        """Cancels all probes; the end of the session returns the leases."""
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
            self._roster.look(time.monotonic())  # before other probes are placed there
        suspects = self.opinions.suspects_after(trial, outcome)
        trial.finish(outcome)
        self._recent_s.append(trial.runs[-1].held_s)
        if suspects and _may_run_again(trial, until):
            _LOG.info("%s %s; it is run again on other nodes", trial.key, _summary(outcome))
            self._submit(trial, avoid=suspects)
        else:
            self._finish(trial)

    def _finish(self, trial: HeldTrial) -> None:
        """Posts the outcome of a trial after its last run, unless its lease is lost."""
        del self._held[trial.key]
        self.opinions.forget(trial)
        outcome = trial.runs[-1].outcome
        _LOG.info("%s %s", trial.key, _summary(outcome))
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

    def _refuse(self, worker_id: str, lease: LeaseRead, why: str) -> None:
        message = visible_line(f"this worker can't run the request: {why}", MAX_MESSAGE_LENGTH)
        outcome = Outcome(state="failed", reason="unsupported", message=message)
        _LOG.warning("trial %d of %s %s", lease.number, lease.campaign, _summary(outcome))
        self._posting.take(
            OutcomeReport(
                trial_id=lease.trial_id,
                attempt=lease.attempt,
                worker_id=worker_id,
                outcome=outcome,
            )
        )

    def _give_back(self, trial: HeldTrial, why: str) -> None:
        """Posts the outcome of a trial that waits: of its last run, or that it was not run here."""
        _LOG.info("%s is %s", trial.key, why)
        self._drop(trial)
        outcome = Outcome(state="cancelled", reason="cancelled", message=why)
        self._posting.take(trial.report(None if trial.runs else outcome))

    def _return(self, trial: HeldTrial) -> None:
        """Gives a lease up that is lost, or will be at the end of the session."""
        trial.is_returned = True
        if trial.is_running:
            trial.stop.set()
        else:
            self._drop(trial)

    def _drop(self, trial: HeldTrial) -> None:
        """Removes a trial that waits."""
        self._packer.withdraw(trial.key)
        self.opinions.forget(trial)
        del self._held[trial.key]


def _at_most_s(request: ProbeRequest) -> float:
    return request.deadline_s + END_WITHIN_S


def _may_run_again(trial: HeldTrial, until: float | None) -> bool:
    in_time = until is None or time.monotonic() + _at_most_s(trial.request) <= until
    return in_time and not trial.is_returned and not trial.stop.is_set()


def _may_be_the_end_of_all(outcome: Outcome) -> bool:
    """Whether a probe may have failed because the job ends: Slurm signals all processes at once.

    Then the worker gets the signal too, and the trial is returned with the session.
    """
    return outcome.reason == "node_lost" or "(SIGTERM)" in outcome.message


def _summary(outcome: Outcome) -> str:
    """An outcome in a few words."""
    reason = "" if outcome.reason is None else f" ({outcome.reason}: {outcome.message})"
    return f"{outcome.state}{reason}"


def start_probe(launcher: Launcher, trial: HeldTrial, events: Events) -> None:
    """Runs the probe of a trial that has devices on a thread; its end is the event `ProbeEnded`."""
    # Copied now: the owner of the trial may change it while the thread runs.
    request, placement = trial.request, trial.placement
    stop, progress = trial.stop, trial.progress
    started = time.monotonic()

    def lost(message: str, node: str = "") -> Outcome:
        """The layout is not to blame, so the reason is a lost node."""
        return Outcome(
            state="failed",
            reason="node_lost",
            message=visible_line(message, MAX_MESSAGE_LENGTH),
            node=node,
            duration_s=time.monotonic() - started,
        )

    def run() -> WorkerEvent:
        try:
            outcome = launcher.run(
                request, shares=placement, on_event=progress.note, cancelled=stop.is_set
            )
        except RanksLeftError as error:
            held = tuple(share.node for share in placement)
            unclean = held if error.node is None else (error.node,)
            outcome = lost(str(error), launcher.nodes[unclean[0]].name)
            return ProbeEnded(
                trial=trial, outcome=outcome, unclean=str(error), unclean_nodes=unclean
            )
        return ProbeEnded(trial=trial, outcome=outcome)

    def failed(error: Exception) -> WorkerEvent:
        _LOG.error("the launcher failed with the probe of %s", trial.title, exc_info=error)
        (last_line,) = traceback.format_exception_only(error)[-1:]
        return ProbeEnded(trial=trial, outcome=lost(f"the launcher failed: {last_line.strip()}"))

    in_background(events, run, name=f"probe-{trial.key}", failed=failed)
