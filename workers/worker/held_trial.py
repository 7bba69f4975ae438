"""A trial that the worker holds a lease of, from the lease to its outcome."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace

from search_spaces.outcome import Outcome, ProbeRequest
from workers.json_lines import Document
from workers.packing.shares import Placement
from workers.protocol import Beat, Lease, OutcomeReport, Phase


class Progress:
    """How far a probe is: written by its thread alone, read by any."""

    def __init__(self) -> None:
        self.iterations_done = 0
        self.iterations_s = 0.0

    def note(self, event: Document) -> None:
        """Takes what a rank reports."""
        if event["event"] == "iteration":
            self.iterations_done = event["index"] + 1
            self.iterations_s += event.get("step_time_s", 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRun:
    """One run of a trial's probe that is over."""

    outcome: Outcome
    held_s: float
    nodes_held: float
    iterations_s: float


@dataclass(kw_only=True, eq=False)
class HeldTrial:
    """A leased trial. The thread that owns the worker's state writes it, but for the progress."""

    lease: Lease
    worker_id: str
    """The session that it was leased in."""
    request: ProbeRequest
    hopeless_since: float | None = None
    """Since when there has been no prospect of devices for it; None: there is one."""
    placement: Placement = ()
    """What it holds; nothing while it waits."""
    holds_whole_nodes: bool = True
    """Whether nobody else can have what it leaves of its nodes."""
    nodes_held: float = 0.0
    """Nodes that it holds, or a fraction of one."""
    started_at: float = 0.0
    """When its probe was started last."""
    waiting_because: str = ""
    runs: tuple[ProbeRun, ...] = ()
    """What came of it so far: a second run is a second opinion on the first."""
    is_returned: bool = False
    """Whether somebody else has the lease, or gets it with the session's end: a probe that is
    cancelled then has no outcome."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: the probe shall end."""
    progress: Progress = field(default_factory=Progress)

    @property
    def key(self) -> str:
        """Its name among those that this worker holds; a campaign may be deleted, and named again."""
        return f"{self.title} (id {self.lease.trial_id}), attempt {self.lease.attempt}"

    @property
    def title(self) -> str:
        """For people."""
        return f"trial {self.lease.number} of {self.lease.campaign}"

    @property
    def is_running(self) -> bool:
        """Whether it holds devices."""
        return bool(self.placement)

    def begin(self, placement: Placement, *, whole: bool, nodes_held: float) -> None:
        """Its devices are there."""
        self.started_at = time.monotonic()  # first: a heartbeat may look at any moment
        self.progress = Progress()
        self.waiting_because = ""
        self.hopeless_since = None
        self.holds_whole_nodes, self.nodes_held = whole, nodes_held
        self.placement = placement

    def finish(self, outcome: Outcome) -> None:
        """Its probe has ended, and its devices are free."""
        run = ProbeRun(
            outcome=outcome,
            held_s=time.monotonic() - self.started_at,
            nodes_held=self.nodes_held,
            iterations_s=self.progress.iterations_s,
        )
        self.runs = (*self.runs, run)
        self.placement, self.nodes_held = (), 0.0

    def report(self, outcome: Outcome | None = None) -> OutcomeReport:
        """What came of it, for the service: the last run's outcome, which took as long as all did.

        Args:
            outcome: instead of the last run's.
        """
        duration_s = sum(run.outcome.duration_s for run in self.runs)
        node_s = sum(run.outcome.duration_s * run.nodes_held for run in self.runs)
        iterations_s = sum(run.iterations_s for run in self.runs)
        told = replace(outcome or self.runs[-1].outcome, duration_s=duration_s)
        return OutcomeReport(
            trial_id=self.lease.trial_id,
            attempt=self.lease.attempt,
            worker_id=self.worker_id,
            outcome=told.to_mapping(),
            nodes_held=node_s / duration_s if duration_s else None,
            iterations_s=min(iterations_s, duration_s),
        )

    def beat(self) -> Beat:
        """How far it is, for the service."""
        held_s = sum(run.held_s for run in self.runs)
        if self.is_running:
            held_s += time.monotonic() - self.started_at
        return Beat(
            trial_id=self.lease.trial_id,
            attempt=self.lease.attempt,
            iterations_done=self.progress.iterations_done,
            phase=self._phase(),
            held_s=held_s,
            nodes_held=self.nodes_held,
            waiting_because=self.waiting_because or None,
        )

    def _phase(self) -> Phase:
        if not self.is_running:
            return "waiting"
        if self.stop.is_set():
            return "ending"
        return "iterating" if self.progress.iterations_done else "starting"
