"""The states that worker, service and database have in common."""

from __future__ import annotations

from typing import Final, Literal, get_args

AllocationState = Literal["starting", "working", "draining"]
"""starting: no node is ready yet. draining: it takes no more trials, because it ends soon."""
NodeState = Literal["starting", "checking", "idle", "busy", "recovering", "lost", "quarantined"]
"""recovering: its node agent is being restarted. quarantined: no probe runs there until a user
releases it."""
AttemptPhase = Literal["waiting", "starting", "iterating", "ending"]
"""waiting: it is leased and has no devices yet."""
Scheduler = Literal["slurm", "none"]
TrialState = Literal["PENDING", "RUNNING", "COMPLETED", "INFEASIBLE", "FAILED", "CANCELLED"]

ALLOCATION_STATES: Final[tuple[AllocationState, ...]] = get_args(AllocationState)
NODE_STATES: Final[tuple[NodeState, ...]] = get_args(NodeState)
UNUSABLE_NODE_STATES: Final[tuple[NodeState, ...]] = ("lost", "quarantined")
ATTEMPT_PHASES: Final[tuple[AttemptPhase, ...]] = get_args(AttemptPhase)
SCHEDULERS: Final[tuple[Scheduler, ...]] = get_args(Scheduler)
TRIAL_STATES: Final[tuple[TrialState, ...]] = get_args(TrialState)
