"""What the store hands out: frozen values, never rows of the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Literal, get_args

from results_db.allocation_records import AllocationState, AttemptPhase, Scheduler
from results_db.cost import Cost
from search_spaces.layout import Layout
from search_spaces.objectives import measured_objective
from search_spaces.outcome import Breakdown, Environment, Iteration

CampaignState = Literal["RUNNING", "PAUSED", "COMPLETED", "CANCELLED", "FAILED"]
TrialState = Literal["PENDING", "RUNNING", "COMPLETED", "INFEASIBLE", "FAILED", "CANCELLED"]
AttemptEnding = Literal["reported", "lost", "returned", "superseded"]
"""reported: its outcome arrived. lost: its worker was not heard of in time. returned: its worker
gave it back. superseded: the trial ended without it (a late outcome of an earlier attempt)."""

CAMPAIGN_STATES: Final[tuple[CampaignState, ...]] = get_args(CampaignState)
TRIAL_STATES: Final[tuple[TrialState, ...]] = get_args(TrialState)
ATTEMPT_ENDINGS: Final[tuple[AttemptEnding, ...]] = get_args(AttemptEnding)
StepDirection = Literal["down", "up"]
"""Which way a knob was stepped, among the values that legal layouts have."""
StepSource = Literal["measured", "predicted"]
"""Whether the stepped layout was measured in the campaign, or only the estimate is known."""
StepState = Literal["completed", "out_of_memory", "failed"]
"""What became of the stepped layout, or is expected to."""

STEP_DIRECTIONS: Final[tuple[StepDirection, ...]] = get_args(StepDirection)
STEP_SOURCES: Final[tuple[StepSource, ...]] = get_args(StepSource)
STEP_STATES: Final[tuple[StepState, ...]] = get_args(StepState)

ENDED_CAMPAIGN_STATES: Final = frozenset({"COMPLETED", "CANCELLED", "FAILED"})
ENDED_TRIAL_STATES: Final = frozenset({"COMPLETED", "INFEASIBLE", "FAILED", "CANCELLED"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRecord:
    """A campaign as it stands."""

    id: int
    name: str
    state: CampaignState
    reason: str | None
    """Why it ended: budget, exhausted, cancelled, ...; None while it has not."""
    message: str
    """A sentence that goes with the reason."""
    spec: Mapping[str, Any]
    """The campaign's description, fully resolved: what its layouts are judged against."""
    model_name: str
    cluster_name: str
    objective: str
    """What ranks: the first of the objectives."""
    objectives: tuple[str, ...]
    """What the Pareto front is over; a single one: the front is the best."""
    strategy: str
    num_legal_layouts: int
    """Size of the legal set at submission."""
    max_peak_memory_bytes: int | None
    """The largest peak of a device that is ranked; None: every one is."""
    created_at: datetime
    started_at: datetime | None
    """When the first of its trials was leased."""
    ended_at: datetime | None
    node_seconds: float
    """Nodes times seconds that its attempts held, the lost ones included as far as known."""
    cost: Cost
    """The same by what they were spent on, with its share of what allocations held for nobody."""
    wall_time_s: float
    """Seconds spent RUNNING while a driver was at work (see `results_db.campaigns`)."""
    created_by: str = ""
    """Name of the token that submitted it; empty: it was made before there were any."""
    notes: str = ""
    """What its users wrote beside it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementRecord:
    """What a completed trial measured; the iterations are in `TrialDetail`.

    A figure is None only where an imported table does not tell it (and where a comment says more).
    """

    step_time_s: float
    """Median of the timed iterations."""
    step_time_q25_s: float | None
    step_time_q75_s: float | None
    tokens_per_step: int
    tokens_per_s: float
    tokens_per_s_per_device: float
    model_tflops_per_device: float
    hardware_tflops_per_device: float
    peak_tflops_per_device: float | None
    peak_source: str | None
    mfu: float | None
    hfu: float | None
    peak_memory_bytes: int | None
    """The largest peak of any rank."""
    peak_memory_bytes_by_stage: tuple[int, ...]
    memory_kind: str | None
    oversubscribed: bool
    """Whether ranks shared devices; such a measurement is never ranked."""
    breakdown: Breakdown | None
    """Where step_time_s goes; None where the worker was too old to look."""
    peak_reserved_bytes_by_stage: tuple[int, ...]
    """What the device's allocator held at most; empty on the CPU."""
    warmup_settled: bool | None
    """Whether step times had settled when timing began; None where the worker was too old to look."""
    skipped_steps: int | None
    """fp16 steps that the loss scaler skipped, warm-up included."""
    shortened: bool
    """Whether the probe was stopped early, since it was slower than the best; never the winner."""
    iterations_asked: int | None
    """Timed iterations that were asked for; None where the worker was too old to say."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """A trial as it stands."""

    id: int
    number: int
    """Position in its campaign, from 1."""
    campaign_id: int
    layout: Layout
    layout_key: str
    """`layout.key`; unique in the campaign but for deliberate repeats."""
    state: TrialState
    reason: str | None
    """Why it does not count; None unless INFEASIBLE, FAILED or CANCELLED."""
    message: str
    """What went wrong, in a sentence."""
    node: str
    """Node where it went wrong first."""
    attempt: int
    """Number of the latest attempt; 0 before the first."""
    lost_attempts: int
    iterations_done: int
    """Iterations that the running attempt has finished, warm-up included."""
    worker_id: str | None
    """The worker session that runs it now."""
    repeat_of: int | None
    """The trial that this one deliberately repeats."""
    repeat_index: int
    """0 for a layout's first trial in the campaign."""
    node_seconds: float
    cost: Cost
    """The same by what they were spent on."""
    measurement: MeasurementRecord | None
    """There where COMPLETED; where FAILED as diverged for its losses, for inspection alone."""
    created_at: datetime
    started_at: datetime | None
    """When its first attempt was leased."""
    ended_at: datetime | None
    ended_seq: int | None
    """Place in the order in which the campaign's trials ended, from 1; a later verdict on its losses
    moves a trial to the end."""

    def objective(self, name: str, *, device_memory_bytes: int | None = None) -> float | None:
        """What was measured of an objective; None without a measurement that tells.

        The device's memory is for memory_headroom alone.

        Raises:
            ObjectiveInvalidError: there is no such objective.
        """
        if self.measurement is None:
            return None
        return measured_objective(
            name,
            self.measurement,
            num_nodes=self.layout.num_nodes,
            device_memory_bytes=device_memory_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One lease of a trial and what became of it."""

    attempt: int
    worker_id: str
    worker_name: str
    host: str
    started_at: datetime
    seen_at: datetime
    """When its worker was last heard of."""
    ended_at: datetime | None
    ending: AttemptEnding | None
    """None while it runs."""
    node_seconds: float
    cost: Cost
    """The same by what they were spent on; nothing while it runs."""
    phase: AttemptPhase | None = None
    """What its worker said last that it does; None: it did not say."""
    held_s: float | None = None
    """Seconds that it has held its nodes, as its worker said last."""
    nodes_held: float | None = None
    """Nodes that it holds, a part of one included; None: those of its layout."""
    iterations_s: float | None = None
    """Seconds of its iterations; None: its worker did not say."""
    waiting_because: str = ""
    """Its worker's words while it waits for devices."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialDetail:
    """A trial with everything that is kept about it."""

    trial: TrialRecord
    iterations: tuple[Iteration, ...]
    """Every iteration of the measurement, warm-up included."""
    environment: Environment | None
    log_tail: str
    attempts: tuple[AttemptRecord, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobStep:
    """What one step in a knob, away from the winner, does to the objective."""

    knob: str
    direction: StepDirection
    value: str
    """The winner's value of the knob."""
    stepped_value: str
    also: tuple[str, ...]
    """Knobs that had to follow: with a fixed batch, a larger micro-batch means fewer of them."""
    layout_key: str
    """The stepped layout: of those that differ in fewest other knobs, one that was measured."""
    source: StepSource
    state: StepState
    effect: float | None
    """Relative change of the objective, under 0 for worse; None where the layout does not run."""
    is_apart: bool | None
    """Whether it can be told apart from the winner with 95 % confidence; None if not measured."""
    trial_id: int | None
    """The trial that measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """Which knobs matter in a campaign, and how far its winner is from its neighbours."""

    winner_id: int
    """The trial around which the steps were taken."""
    objective: str
    num_trials: int
    """Completed trials that the importances were found from."""
    last_ended_seq: int
    """How far the campaign had come."""
    method: str
    """How the importances were found; empty where too little was measured."""
    importances: Mapping[str, float]
    """By knob, the largest first: the share of the objective's variation that it accounts for."""
    steps: tuple[KnobStep, ...]
    """By knob, down before up; a knob at the end of its values has one."""
    computed_at: datetime | None = None
    """When it was kept; None before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerRecord:
    """One session of a worker, from its registration to its end."""

    id: str
    name: str
    host: str
    cluster: str
    num_nodes: int
    devices_per_node: int
    device: str
    versions: Mapping[str, str]
    registered_at: datetime
    seen_at: datetime
    ended_at: datetime | None
    scheduler: Scheduler = "none"
    job_id: str | None = None
    """The scheduler's name for the allocation."""
    launcher: str = ""
    """What starts its ranks; empty: it did not say."""
    ends_at: datetime | None = None
    """When the allocation ends; None: not known, or never."""
    shares_nodes: bool = False
    """Whether several probes may run on one node."""
    state: AllocationState = "working"
    idle_node_seconds: float = 0.0
    """What the allocation has held for no probe."""
    status_at: datetime | None = None
    """When it last said what its nodes do; None: never."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSize:
    """What an open trial needs of an allocation."""

    num_nodes: int
    num_devices: int
    is_waiting: bool
    """Whether no worker has it yet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """A trial handed to a worker until the lease expires."""

    trial_id: int
    number: int
    attempt: int
    campaign_id: int
    campaign_name: str
    spec: Mapping[str, Any]
    layout: Layout
    repeat_of: int | None
    """The trial that this one deliberately repeats."""
    lease_expires_at: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialBeat:
    """What a worker says of a trial that it runs."""

    trial_id: int
    attempt: int
    iterations_done: int
    phase: AttemptPhase | None = None
    """None: the worker does not say."""
    held_s: float | None = None
    """Seconds that it has held its nodes, 0 while it waits; None: the worker does not say."""
    nodes_held: float | None = None
    """Nodes that it holds, a part of one included; None: those of its layout."""
    waiting_because: str = ""
    """In the worker's words."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutcomeReceipt:
    """What became of an outcome."""

    accepted: bool
    """False when it came too late to matter; the worker forgets it either way."""
    state: TrialState
    """The trial's state afterwards."""
