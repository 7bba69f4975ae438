"""The trials that the worker holds, from their leases to their outcomes.

    take          A lease becomes a trial, which waits for devices.
    start         The packer has devices for it: its probe runs on a thread.
    note_end      The probe has ended and its devices are free. The outcome is posted; or the trial
                  waits again, for other nodes, where a node may be at fault (a second run).

A trial leaves the book early where the service asks (`stop`), where no devices are expected for it
(`give_back_unplaceable`), and at the end of the session (`lose_leases`) or worker (`end_all`). A
running probe is then stopped, and the trial leaves the book when it has ended; at the end of
a session it runs on, since its measurement may still count.

At the end of a Slurm job all processes are signalled, and ranks may be killed a moment before the
worker learns of it. Such a failure says nothing of the trial, whose lease returns with the session.
So the end of a probe that may have been killed in this way is only noted after a delay.
"""

from __future__ import annotations

import logging
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Final

from layout_tuner.documents.limits import visible_line
from layout_tuner.errors import SearchSpaceError
from layout_tuner.protocol.outcome import MAX_MESSAGE_LENGTH, Outcome, ProbeRequest
from layout_tuner.protocol.worker_messages import MAX_WORDS, LeaseRead, OutcomeReport
from layout_tuner.workers.errors import RanksLeftError
from layout_tuner.workers.launchers.group_launcher import GroupLauncher
from layout_tuner.workers.packing.request import PackRequest, Placement
from layout_tuner.workers.worker.events import Events, ProbeEnded, in_background
from layout_tuner.workers.worker.held_trial import HeldTrial
from layout_tuner.workers.worker.leasing import END_WITHIN_S
from layout_tuner.workers.worker.outcome_posting import Posting
from layout_tuner.workers.worker.quarantine import SecondOpinions
from layout_tuner.workers.worker.roster import NodeRoster

_LOG = logging.getLogger(__name__)

_GIVE_BACK_AFTER_S: Final = 60.0
"""How long a trial for which no devices are expected is held: lost nodes may recover meanwhile."""

MAX_FORGIVEN: Final = 10
"""Runs of a trial that may end with the agent of a node, or with Ray, and are not counted as lost:
usually neither its layout nor its node is to blame. A layout that takes the host's memory may have
the kernel kill Ray each time, so further ones count."""

_SIGNAL_WITHIN_S: Final = 1.5

_RECENT: Final = 51
"""Probes whose median duration is the expected duration of the next."""


@dataclass(kw_only=True)
class TrialBook:
    """The trials that the worker holds. Only the thread that owns the worker's state uses it."""

    start_probe: Callable[[HeldTrial], None]
    """Starts the probe of a trial that has devices; its end is the event `ProbeEnded`."""
    roster: NodeRoster
    """The nodes, which of them can be used, and the packer of their devices."""
    posting: Posting
    clock: Callable[[], float] = time.monotonic
    """The worker's clock, in seconds."""
    is_simulated: bool = False
    """Whether the nodes are simulated."""
    signal_within_s: float = _SIGNAL_WITHIN_S
    """How much later than ranks and agents the worker may be signalled that the whole job ends."""

    def __post_init__(self) -> None:
        self.packer = self.roster.packer
        self._held: dict[str, HeldTrial] = {}
        self._delayed_ends: list[tuple[float, ProbeEnded]] = []
        """Ends of probes that the end of the job may have killed, and when to note them."""
        self._recent_s: deque[float] = deque(maxlen=_RECENT)
        """How long the latest probes held their devices."""
        self._agent_losses = Counter[int]()
        """By the id of a trial that has no result yet, its runs that ended with an agent."""
        self.second_opinions = SecondOpinions(roster=self.roster)

    @property
    def held(self) -> tuple[HeldTrial, ...]:
        """All trials, in the order of their leases."""
        return tuple(self._held.values())

    @property
    def waiting(self) -> list[HeldTrial]:
        return [trial for trial in self._held.values() if not trial.is_running]

    @property
    def nodes_held(self) -> float:
        """Nodes that probes hold, which may be a fraction."""
        return sum(trial.nodes_held for trial in self._held.values())

    # From the lease to the running probe.

    def take(self, worker_id: str, lease: LeaseRead) -> None:
        """Takes a lease; posts at once that it failed where it can't be run here."""
        for older in [t for t in self.held if t.lease.trial_id == lease.trial_id]:
            _LOG.warning("%s is cancelled: its lease was lost", older.key)
            self._end_without_lease(older)
        try:
            request = ProbeRequest.from_mapping(lease.request)
            self._refuse_other_kind(request)
            self._refuse_too_large(request)
            trial = HeldTrial(lease=lease, worker_id=worker_id, request=request, clock=self.clock)
            self._wait_for_devices(trial)
        except (SearchSpaceError, ValueError) as error:
            self._post_unsupported(worker_id, lease, str(error))
        else:
            _LOG.info("%s is leased", trial.key)

    def start(self, now: float, until: float | None) -> None:
        """Starts the probes for which there are devices; they must have ended at `until`."""
        for key, placement in self.packer.place(now, until):
            self._start(self._held[str(key)], placement)

    def _refuse_other_kind(self, request: ProbeRequest) -> None:
        """Refuses a probe of a simulated campaign on real nodes, and the other way round."""
        if (request.simulation_seed is not None) != self.is_simulated:
            its, here = (
                ("measures", "simulates") if self.is_simulated else ("simulates", "measures")
            )
            raise ValueError(f"its campaign {its}, and this worker {here}")

    def _refuse_too_large(self, request: ProbeRequest) -> None:
        layout = request.layout
        per_node = -(-layout.num_devices // layout.num_nodes)
        large_enough = sum(size >= per_node for size in self.roster.sizes())
        if large_enough < layout.num_nodes:
            raise ValueError(
                f"{layout.num_devices} ranks on num_nodes={layout.num_nodes} are {per_node} a node, "
                f"and this allocation has {large_enough} nodes of so many devices"
            )

    def _post_unsupported(self, worker_id: str, lease: LeaseRead, why: str) -> None:
        message = visible_line(f"this worker can't run the request: {why}", MAX_MESSAGE_LENGTH)
        outcome = Outcome(state="failed", reason="unsupported", message=message)
        _LOG.warning("trial %d of %s %s", lease.number, lease.campaign, _summary(outcome))
        self.posting.take(
            OutcomeReport(
                trial_id=lease.trial_id, attempt=lease.attempt, worker_id=worker_id, outcome=outcome
            )
        )

    def _wait_for_devices(self, trial: HeldTrial, avoid: frozenset[int] = frozenset()) -> None:
        """Puts a trial without devices at the end of the packer's queue; it avoids some nodes."""
        layout, at_most_s = trial.request.layout, _at_most_s(trial.request)
        self.packer.submit(
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

    def _start(self, trial: HeldTrial, placement: Placement) -> None:
        (size,) = self.roster.sizes([placement[0].node])
        whole = not self.packer.share_nodes or len(placement) > 1
        nodes_held = len(placement) if whole else len(placement[0].devices) / size
        trial.begin(placement, whole=whole, nodes_held=nodes_held)
        again = " again, elsewhere" if trial.runs else ""
        where = ", ".join(self.roster.name(share.node) for share in placement)
        trial.spans = self.packer.spans(placement)
        _LOG.info(
            "%s starts%s on %s", trial.key, again, "; ".join(filter(None, (where, trial.spans)))
        )
        self.start_probe(trial)

    # From the end of the probe to the outcome.

    def note_end(self, event: ProbeEnded, until: float | None) -> None:
        """Notes the end of a probe; after a delay where the end of the job may have killed it."""
        if _is_perhaps_end_of_job(event.outcome) and not event.trial.is_returned:
            self._delayed_ends.append((self.clock() + self.signal_within_s, event))
        else:
            self._note_end(event, until)

    def note_delayed_ends(self, now: float, until: float | None) -> None:
        """Notes the delayed ends of probes that are due: the job goes on."""
        due = [event for at, event in self._delayed_ends if now >= at]
        self._delayed_ends = [(at, event) for at, event in self._delayed_ends if now < at]
        for event in due:
            self._note_end(event, until)

    def _note_end(self, event: ProbeEnded, until: float | None) -> None:
        trial, outcome = event.trial, event.outcome
        self.packer.release(trial.key)
        for node in event.unclean_nodes:
            self.roster.quarantine(node, event.unclean)
        if outcome.reason == "node_lost":
            self.roster.look(self.clock())  # before other probes are placed there
        suspects = self.second_opinions.suspects_after(trial, outcome)
        trial.finish(self._forgiven(event))
        self._recent_s.append(trial.runs[-1].held_s)
        if suspects and self._may_run_again(trial, until):
            _LOG.info("%s %s; it is run again on other nodes", trial.key, _summary(outcome))
            self._wait_for_devices(trial, avoid=suspects)
        else:
            self._finish(trial)

    def _forgiven(self, event: ProbeEnded) -> Outcome:
        """The outcome to report: one that ended with the agent of a node returns the lease."""
        outcome, losses, trial_id = event.outcome, self._agent_losses, event.trial.lease.trial_id
        if not event.lost_its_agent:
            del losses[trial_id]
            return outcome
        losses[trial_id] += 1
        if losses[trial_id] <= MAX_FORGIVEN:
            return replace(outcome, state="cancelled", reason="cancelled")
        why = (
            f"{outcome.message}; Ray or the node's agent ended in {losses[trial_id]} runs of this "
            "trial: see in the node's kernel log whether the layout takes the host's memory"
        )
        return replace(outcome, message=visible_line(why, MAX_MESSAGE_LENGTH))

    def _may_run_again(self, trial: HeldTrial, until: float | None) -> bool:
        in_time = until is None or self.clock() + _at_most_s(trial.request) <= until
        return in_time and not trial.is_returned and not trial.stop.is_set()

    def _finish(self, trial: HeldTrial) -> None:
        """Posts the outcome of the last run; without a lease, only one that is worth keeping."""
        del self._held[trial.key]
        self.second_opinions.forget(trial.key)
        outcome = trial.runs[-1].outcome
        _LOG.info("%s %s", trial.key, _summary(outcome))
        if not trial.is_returned or outcome.state not in ("cancelled", "failed"):
            self.posting.take(trial.report())

    # Trials that leave the book early.

    def give_back_unplaceable(self, now: float, until: float | None) -> None:
        """Gives trials back that can't get devices here, so that another worker can lease them.

        A trial that has run gets the outcome of its last run instead.
        """
        if not self.waiting:
            return
        whys = self.packer.why_waiting(now, until)
        for trial in self.waiting:
            trial.waiting_because = visible_line(whys.get(trial.key, ""), MAX_WORDS)
            if self.packer.has_prospect(trial.key, now, until):
                trial.unplaceable_since = None
                continue
            trial.unplaceable_since = trial.unplaceable_since or now
            too_late = until is not None and now + _at_most_s(trial.request) > until
            if trial.runs or too_late or now >= trial.unplaceable_since + _GIVE_BACK_AFTER_S:
                why = f"given back: {trial.waiting_because}"
                _LOG.info("%s is %s", trial.key, why)
                self._drop_waiting(trial)
                self.posting.take(trial.report(None if trial.runs else _cancelled(why)))

    def stop(self, trials: Sequence[HeldTrial], trial_ids: Sequence[int]) -> None:
        """Stops those of the trials that the service names."""
        for trial in trials:
            if trial.lease.trial_id not in trial_ids or self._held.get(trial.key) is not trial:
                continue
            if trial.is_running:
                trial.stop.set()
            else:
                self._drop_waiting(trial)
                again = " again" if trial.runs else ""
                self.posting.take(
                    trial.report(_cancelled(f"stopped before its probe began{again}"))
                )

    def lose_leases(self) -> None:
        """Notes the end of the session: drops the trials that wait and lets the others run.

        The service accepts a measurement as long as no other worker runs the trial.
        """
        for trial in self.waiting:
            self._drop_waiting(trial)
        for trial in self.held:
            trial.is_returned = True

    def end_all(self) -> None:
        """Cancels all probes; the end of the session returns the leases."""
        for trial in self.held:
            trial.is_returned = True
        self.note_delayed_ends(math.inf, None)
        for trial in self.held:
            self._end_without_lease(trial)

    def _end_without_lease(self, trial: HeldTrial) -> None:
        """Ends a trial whose lease is lost, or will be at the end of the session."""
        trial.is_returned = True
        if trial.is_running:
            trial.stop.set()
        else:
            self._drop_waiting(trial)

    def _drop_waiting(self, trial: HeldTrial) -> None:
        self.packer.withdraw(trial.key)
        self.second_opinions.forget(trial.key)
        del self._held[trial.key]


def _at_most_s(request: ProbeRequest) -> float:
    """Seconds after which the devices of a probe are free in every case."""
    return request.deadline_s + END_WITHIN_S


def _is_perhaps_end_of_job(outcome: Outcome) -> bool:
    """Whether a probe may have failed because Slurm ends the job, which the worker learns soon."""
    return outcome.reason == "node_lost" or "(SIGTERM)" in outcome.message


def _cancelled(why: str) -> Outcome:
    return Outcome(state="cancelled", reason="cancelled", message=why)


def _summary(outcome: Outcome) -> str:
    reason = "" if outcome.reason is None else f" ({outcome.reason}: {outcome.message})"
    return f"{outcome.state}{reason}"


def start_probe(launcher: GroupLauncher, events: Events, trial: HeldTrial) -> None:
    """Runs the probe of a trial that has devices; the end of the probe is the event `ProbeEnded`.

    A failure of the launcher is no fault of the layout, so its reason is a lost node.
    """
    # Copied now: the owner of the trial may change it while the thread runs.
    request, placement = trial.request, trial.placement
    stop, progress = trial.stop, trial.progress
    started = time.monotonic()

    def agent_ends() -> int:
        return sum(launcher.agent_ends(share.node) for share in placement)

    agent_ends_before = agent_ends()

    def node_lost(message: str, node: str = "") -> Outcome:
        return Outcome(
            state="failed",
            reason="node_lost",
            message=visible_line(message, MAX_MESSAGE_LENGTH),
            node=node,
            duration_s=time.monotonic() - started,
        )

    def run() -> ProbeEnded:
        try:
            outcome = launcher.run(
                request, shares=placement, on_event=progress.note, cancelled=stop.is_set
            )
        except RanksLeftError as error:
            held = tuple(share.node for share in placement)
            unclean = held if error.node is None else (error.node,)
            outcome = node_lost(str(error), launcher.nodes[unclean[0]].name)
            return ProbeEnded(
                trial=trial, outcome=outcome, unclean=str(error), unclean_nodes=unclean
            )
        lost_its_agent = outcome.reason == "node_lost" and agent_ends() > agent_ends_before
        return ProbeEnded(trial=trial, outcome=outcome, lost_its_agent=lost_its_agent)

    def failed(error: Exception) -> ProbeEnded:
        _LOG.error("the launcher failed with the probe of %s", trial.title, exc_info=error)
        (last_line,) = traceback.format_exception_only(error)[-1:]
        return ProbeEnded(
            trial=trial, outcome=node_lost(f"the launcher failed: {last_line.strip()}")
        )

    in_background(events, run, name=f"probe-{trial.key}", failed=failed)
