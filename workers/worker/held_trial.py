"""A trial that the worker holds a lease of, from the lease to its outcome."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from layout_tuner.protocol.outcome import Outcome, ProbeRequest
from layout_tuner.protocol.states import AttemptPhase
from layout_tuner.protocol.worker_messages import BeatBody, LeaseRead, OutcomeReport
from layout_tuner.workers.packing.request import Placement
from layout_tuner.workers.ranks.json_lines import Document


class ProbeProgress:
    """The progress of a probe. Only its thread writes it; any thread reads it."""

    def __init__(self) -> None:
        self._iterations_done = 0
        self._iterations_s = 0.0

    @property
    def iterations_done(self) -> int:
        """Finished iterations, warm-up included."""
        return self._iterations_done

    @property
    def iterations_s(self) -> float:
        """Their seconds."""
        return self._iterations_s

    def note(self, event: Document) -> None:
        """Notes a report of a rank."""
        if event["event"] == "iteration":
            self._iterations_done = event["index"] + 1
            self._iterations_s += event.get("step_time_s", 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRun:
    """A run of a trial's probe that has ended."""

    outcome: Outcome
    held_s: float
    nodes_held: float
    iterations_s: float


@dataclass(kw_only=True, eq=False)
class HeldTrial:
    """A leased trial. Only the thread that owns the worker's state writes it, except `progress`."""

    lease: LeaseRead
    worker_id: str
    """The session of the lease."""
    request: ProbeRequest
    clock: Callable[[], float] = time.monotonic
    """The worker's clock, in seconds."""
    unplaceable_since: float | None = None
    """Since when no devices are expected to get free for it; None: some are."""
    placement: Placement = ()
    """The devices that it holds; none while it waits."""
    holds_whole_nodes: bool = True
    """Whether other probes can't use the remaining devices of its nodes."""
    nodes_held: float = 0.0
    """Nodes that it holds, or a fraction of one."""
    started_at: float = 0.0
    """When its probe was started last."""
    waiting_because: str = ""
    spans: str = ""
    """The groups of the network that its nodes lie in, for messages; empty: not known."""
    runs: tuple[ProbeRun, ...] = ()
    """Its ended runs. A second run checks whether the node or the layout made the first one
    fail."""
    is_returned: bool = False
    """Whether the lease is lost, or will be at the end of the session; then the outcome of a
    cancelled probe is not posted."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: the probe must end."""
    progress: ProbeProgress = field(default_factory=ProbeProgress)

    @property
    def key(self) -> str:
        """Its unique name in this worker. It has the id, since a new campaign may reuse a name."""
        return f"{self.title} (id {self.lease.trial_id}), attempt {self.lease.attempt}"

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"trial {self.lease.number} of {self.lease.campaign}"

    @property
    def is_running(self) -> bool:
        return bool(self.placement)

    def begin(self, placement: Placement, *, whole: bool, nodes_held: float) -> None:
        """Notes that its probe starts on these devices."""
        self.started_at = self.clock()  # first: a heartbeat may read this at any moment
        self.progress = ProbeProgress()
        self.waiting_because = ""
        self.unplaceable_since = None
        self.holds_whole_nodes, self.nodes_held = whole, nodes_held
        self.placement = placement

    def finish(self, outcome: Outcome) -> None:
        """Notes that its probe has ended and its devices are free."""
        run = ProbeRun(
            outcome=outcome,
            held_s=self.clock() - self.started_at,
            nodes_held=self.nodes_held,
            iterations_s=self.progress.iterations_s,
        )
        self.runs = (*self.runs, run)
        self.placement, self.nodes_held = (), 0.0

    def report(self, outcome: Outcome | None = None) -> OutcomeReport:
        """The report of the last run's outcome, or another one, with the duration of all runs."""
        duration_s = sum(run.outcome.duration_s for run in self.runs)
        node_s = sum(run.outcome.duration_s * run.nodes_held for run in self.runs)
        iterations_s = sum(run.iterations_s for run in self.runs)
        reported = outcome or self.runs[-1].outcome
        if reported.duration_s != duration_s:
            reported = replace(reported, duration_s=duration_s)
        return OutcomeReport(
            trial_id=self.lease.trial_id,
            attempt=self.lease.attempt,
            worker_id=self.worker_id,
            outcome=reported,
            nodes_held=node_s / duration_s if duration_s else None,
            iterations_s=min(iterations_s, duration_s),
        )

    def beat(self) -> BeatBody:
        """Its part of a heartbeat."""
        held_s = sum(run.held_s for run in self.runs)
        if self.is_running:
            held_s += self.clock() - self.started_at
        return BeatBody(
            trial_id=self.lease.trial_id,
            attempt=self.lease.attempt,
            iterations_done=self.progress.iterations_done,
            phase=self._phase(),
            held_s=held_s,
            nodes_held=self.nodes_held,
            waiting_because=self.waiting_because,
        )

    def _phase(self) -> AttemptPhase:
        if not self.is_running:
            return "waiting"
        if self.stop.is_set():
            return "ending"
        return "iterating" if self.progress.iterations_done else "starting"
