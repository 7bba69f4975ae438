"""The records that the store returns: frozen values, never rows of the database.

The API answers with some of them as they are. The names of those classes are the names of the
schemas in the OpenAPI document, and the strings under the fields are their descriptions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, Self, get_args

from layout_tuner.documents.limits import document_problem
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.protocol.measurement import (
    Breakdown,  # noqa: F401 - pydantic looks it up for a field of MeasurementRecord
    Environment,
    Iteration,
    MeasuredFigures,
    with_figures,
)
from layout_tuner.protocol.states import AllocationState, AttemptPhase, Scheduler, TrialState
from layout_tuner.search_spaces.campaigns.campaign_settings import SimulationSettings
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.objectives import measured_objective
from layout_tuner.trainers.simulator import SIMULATED_LAUNCHER, is_simulator, trainers_run

if TYPE_CHECKING:  # it imports numpy, and clients need some of the records
    from layout_tuner.predictions.belief.step_time_to_beat import ToBeat


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Node-seconds by use; no part is negative."""

    iterations: float = 0.0
    """Devices in iterations, with warm-up."""
    start: float = 0.0
    """The rest of the time of probes whose outcome counts: start, build, end."""
    idle: float = 0.0
    """Devices that were held and not used, because a layout is smaller than its nodes; for a
    campaign, also its share of idle allocations of its cluster."""
    lost: float = 0.0
    """Attempts without a result: lost, returned, or too late."""

    @property
    def total(self) -> float:
        return self.iterations + self.start + self.idle + self.lost

    def __add__(self, other: Cost) -> Cost:
        names = (part.name for part in fields(self))
        return Cost(**{name: getattr(self, name) + getattr(other, name) for name in names})

    @classmethod
    def of_probe(
        cls, *, held_s: float, nodes: float, used_nodes: float, iterations_s: float
    ) -> Self:
        """The cost of an attempt whose outcome counts.

        Args:
            held_s: seconds that it held its nodes.
            nodes: number of nodes; may be a fraction.
            used_nodes: devices of its ranks, counted in nodes.
            iterations_s: seconds of its iterations, capped at `held_s`.
        """
        used = min(used_nodes, nodes)
        iterating_s = min(iterations_s, held_s)
        return cls(
            iterations=iterating_s * used,
            start=(held_s - iterating_s) * used,
            idle=held_s * (nodes - used),
        )


Visibility = Literal["private", "group", "everyone"]
"""Who sees a campaign: its owner alone, the members of its group too, or everyone."""
VISIBILITIES: Final[tuple[Visibility, ...]] = get_args(Visibility)
MAX_PRIORITY: Final = 1000
"""Largest priority of a campaign; the least is its negative."""

CampaignState = Literal["RUNNING", "PAUSED", "COMPLETED", "CANCELLED", "FAILED"]

AttemptEnding = Literal["reported", "lost", "returned", "superseded"]
"""reported: its outcome arrived. lost: its worker's heartbeats stopped. returned: its worker
returned the lease. superseded: a late outcome of an earlier attempt ended the trial."""

RepeatReason = Literal["best", "tie", "doubted", "disturbed", "request"]
"""Why a trial repeats another; the words are `REPEAT_WORDS` in `api.formatting`."""
REPEAT_REASONS: Final[tuple[RepeatReason, ...]] = get_args(RepeatReason)

EventKind = Literal[
    "campaign.created",
    "campaign.changed",
    "campaign.paused",
    "campaign.resumed",
    "campaign.ended",
    "campaign.deleted",
    "trial.added",
    "trial.leased",
    "trial.returned",
    "trial.ended",
    "trial.judged",
    "campaign.analysed",
]

LiveEventKind = Literal["campaign.progress", "worker.changed", "nodes.changed", "plan.ended"]
"""Kinds of events that only those get who watch at the moment; they are not stored."""

EVENT_KINDS: Final[tuple[EventKind | LiveEventKind, ...]] = (
    *get_args(EventKind),
    *get_args(LiveEventKind),
)
"""All kinds of events that watchers get."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EventRead:
    """An event of a campaign, or of workers and nodes."""

    seq: int | None
    """Its number, also the `id` in the stream; numbers increase, with gaps. null: a live event,
    which is not stored and not sent again."""
    kind: EventKind | LiveEventKind
    at: datetime
    campaign_id: int | None
    """null: the event concerns a worker or nodes."""
    trial_id: int | None
    """null: the event concerns the whole campaign."""
    data: Mapping[str, Any]
    """Details; for a trial its number, state, reason and attempt."""


PlanState = Literal["WAITING", "DONE", "FAILED"]
"""Of a plan that the driver makes."""

PLAN_STATES: Final[tuple[PlanState, ...]] = get_args(PlanState)

CAMPAIGN_STATES: Final[tuple[CampaignState, ...]] = get_args(CampaignState)

ATTEMPT_ENDINGS: Final[tuple[AttemptEnding, ...]] = get_args(AttemptEnding)

StepDirection = Literal["down", "up"]
"""Direction of a step in a knob, among the values of legal layouts."""

StepSource = Literal["measured", "predicted"]
"""Whether the stepped layout was measured in the campaign, or only estimated."""

StepState = Literal["completed", "out_of_memory", "failed"]
"""The result of the stepped layout, measured or predicted."""

STEP_DIRECTIONS: Final[tuple[StepDirection, ...]] = get_args(StepDirection)

STEP_SOURCES: Final[tuple[StepSource, ...]] = get_args(StepSource)

STEP_STATES: Final[tuple[StepState, ...]] = get_args(StepState)

ENDED_CAMPAIGN_STATES: Final = frozenset({"COMPLETED", "CANCELLED", "FAILED"})

ENDED_TRIAL_STATES: Final = frozenset({"COMPLETED", "INFEASIBLE", "FAILED", "CANCELLED"})


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRecord:
    """The state of a campaign."""

    id: int
    name: str
    state: CampaignState
    reason: str | None
    """Why it ended: budget, exhausted, cancelled, ...; None while it is open."""
    message: str
    """The reason as a sentence; where the service paused it, why."""
    stored: StoredCampaign
    """The campaign's description, with all names and defaults resolved."""
    model_name: str
    cluster_name: str
    trainer: str
    """What trains its probes; "imported" where a table was measured elsewhere."""
    objective: str
    """The objective that ranks: the first of `objectives`."""
    objectives: tuple[str, ...]
    """The objectives of the Pareto front; with a single one, the front is the best layout."""
    strategy: str
    num_legal_layouts: int
    """Number of legal layouts at submission; with job knobs, of jobs (`JobSet`)."""
    max_peak_memory_bytes: int | None
    """The largest peak of a device that is ranked; None: no limit."""
    created_at: datetime
    started_at: datetime | None
    """When the first of its trials was leased."""
    ended_at: datetime | None
    node_seconds: float
    """Nodes times seconds held by its attempts, including lost ones as far as known."""
    cost: Cost
    """The same by use, with its share of idle allocations."""
    wall_time_s: float
    """Seconds in state RUNNING with an active driver, and a worker that could serve it."""
    created_by: str = ""
    """Its owner."""
    visibility: Visibility = "everyone"
    """Who sees it beside its owner and administrators."""
    group: str | None = None
    """The group that its node-hours count for, and that sees it if `visibility` is group."""
    priority: int = 0
    """Of an owner's campaigns, those of a higher priority get devices first."""
    notes: str = ""
    """Notes of its users."""
    waiting_because: str = ""
    """Why the driver has not opened its search; empty: it has, or need not."""

    @property
    def is_simulated(self) -> bool:
        """Whether it is simulated, and not measured."""
        return is_simulator(self.trainer)

    @property
    def simulated(self) -> SimulationSettings | None:
        """Its simulator; None: it is measured."""
        return self.stored.simulated if self.is_simulated else None

    @property
    def model_title(self) -> str:
        """The name of its model, and what that states of attention and dropout."""
        return self.model_name if self.stored.model is None else self.stored.model.title

    @property
    def spec(self) -> Mapping[str, Any]:
        """The document of its description, for display; empty where it cannot be shown."""
        fields = self.stored.fields
        return {} if document_problem(fields) else fields


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRecord:
    """A plan that the driver makes, or has made."""

    id: int
    state: PlanState
    created_by: str
    """The owner for whom it was requested."""
    created_at: datetime
    ended_at: datetime | None
    spec: Mapping[str, Any]
    options: Mapping[str, Any]
    answer: Mapping[str, Any]
    """The plan as JSON values; empty unless DONE."""
    problem: str
    """Why it could not be made; empty unless FAILED."""


@dataclass(frozen=True, kw_only=True, slots=True)
@with_figures(lacking=" | None")
class MeasurementRecord(MeasuredFigures[None]):
    """The measurement of a completed trial; the iterations are in `TrialDetail`.

    A figure is None only if an imported table lacks it, or where its description says so.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRecord:
    """The state of a trial."""

    id: int
    number: int
    """Position in its campaign, from 1."""
    campaign_id: int
    layout: Layout
    layout_key: str
    """`layout.key`; unique in the campaign except for deliberate repeats."""
    state: TrialState
    reason: str | None
    """Why it does not count; None unless INFEASIBLE, FAILED or CANCELLED."""
    message: str
    """The problem, in a sentence."""
    node: str
    """The node where the problem occurred first."""
    attempt: int
    """Number of the latest attempt; 0 before the first."""
    lost_attempts: int
    iterations_done: int
    """Finished iterations of the running attempt, including warm-up."""
    worker_id: str | None
    """The worker session that runs it."""
    repeat_of: int | None
    """The trial that this one deliberately repeats."""
    repeat_index: int
    """0 for a layout's first trial in the campaign."""
    repeat_reason: RepeatReason | None
    """Why it repeats that trial; None: it repeats none, or an earlier version added it."""
    node_seconds: float
    cost: Cost
    """The same by use."""
    measurement: MeasurementRecord | None
    """Present if COMPLETED; also if FAILED as diverged, but then it does not count."""
    created_at: datetime
    started_at: datetime | None
    """When its first attempt was leased."""
    ended_at: datetime | None
    ended_seq: int | None
    """Position in the order in which the campaign's trials ended, from 1; a later verdict on the
    losses moves a trial to the end."""
    is_baseline: bool = False
    """Whether its layout is the campaign's baseline."""
    full_layout: Layout | None = None
    """Of a cheap probe, the layout that it stands for; `layout` is the part that runs. None: the
    trial runs its layout in full."""
    num_layers: int | None = None
    """Of a cheap probe, the layers of the model that it runs."""

    @property
    def is_cheap(self) -> bool:
        return self.full_layout is not None

    @property
    def stands_for(self) -> Layout:
        """The layout that it measures: that of which a cheap probe runs a part, else its own."""
        return self.layout if self.full_layout is None else self.full_layout

    def objective(self, name: str, *, device_memory_bytes: int | None = None) -> float | None:
        """The value of an objective; None if it was not measured.

        `device_memory_bytes` is needed for memory_headroom only. ObjectiveInvalidError for an
        objective that does not exist.
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
class ProbeCount:
    """Some ended trials of a campaign."""

    number: int
    node_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AttemptRecord:
    """One lease of a trial, and how it ended."""

    attempt: int
    worker_id: str
    worker_name: str
    host: str
    started_at: datetime
    seen_at: datetime
    """Time of the last heartbeat."""
    ended_at: datetime | None
    ending: AttemptEnding | None
    """None while it runs."""
    node_seconds: float
    cost: Cost
    """The same by use; 0 while it runs."""
    phase: AttemptPhase | None = None
    """The phase that its worker reported last; None: it reported none."""
    held_s: float | None = None
    """Seconds that it has held its nodes, as reported last."""
    nodes_held: float | None = None
    """Nodes that it holds, may be a fraction; None: those of its layout."""
    iterations_s: float | None = None
    """Seconds of its iterations; None: not reported."""
    waiting_because: str = ""
    """Why it waits for devices, as its worker reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialDetail:
    """A trial with everything that is stored about it."""

    trial: TrialRecord
    iterations: tuple[Iteration, ...]
    """Every iteration of the measurement, including warm-up."""
    environment: Environment | None
    log_tail: str
    attempts: tuple[AttemptRecord, ...]
    prediction: Prediction | None
    """What the search predicted when it proposed the layout; None: nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedTrial:
    """What a search predicted of a trial, beside what the trial measured."""

    trial_id: int
    number: int
    """Position in its campaign, from 1."""
    layout_key: str
    state: TrialState
    is_baseline: bool
    prediction: Prediction
    step_time_s: float | None
    """Measured median, in seconds; None: the trial has no measurement."""
    peak_memory_bytes: int | None
    """Measured peak of the fullest rank; None: not measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobStepRead:
    """The effect on the objective of one step in a knob, away from the winner."""

    knob: str
    direction: StepDirection
    value: str
    """The winner's value of the knob."""
    stepped_value: str
    also: tuple[str, ...]
    """Knobs that had to change too: with a fixed batch, a larger micro-batch needs fewer of
    them."""
    layout_key: str
    """The stepped layout: among those with the fewest other changes, a measured one if there is
    any."""
    source: StepSource
    """Whether the campaign measured that layout, or the estimates predict it."""
    state: StepState
    """Whether the layout runs."""
    effect: float | None
    """Relative change of the objective, negative if worse; null: the layout does not run."""
    is_apart: bool | None
    """Whether it differs from the winner with 95 % confidence; null: not measured."""
    trial_id: int | None
    """The trial that measured it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Analysis:
    """The importance of knobs in a campaign, and the sensitivity of its winner."""

    winner_id: int
    """The trial from which the steps start."""
    objective: str
    num_trials: int
    """Completed trials behind the importances."""
    last_ended_seq: int
    """`ended_seq` of the last trial that was included."""
    method: str
    """The method for the importances; empty: too few measurements."""
    importances: Mapping[str, float]
    """By knob, the largest first: its share of the variation of the objective."""
    steps: tuple[KnobStepRead, ...]
    """By knob, down before up; a knob at the end of its values has one step."""
    computed_at: datetime | None = None
    """When it was stored; None before."""


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
    trainers: Mapping[str, str]
    """Versions of the trainers that it runs besides the embedded one, by name."""
    registered_at: datetime
    seen_at: datetime
    ended_at: datetime | None
    scheduler: Scheduler = "none"
    job_id: str | None = None
    """The scheduler's id of the allocation."""
    launcher: str = ""
    """The launcher of its ranks; empty: not reported."""
    ends_at: datetime | None = None
    """When the allocation ends; None: unknown, or never."""
    shares_nodes: bool = False
    """Whether several probes may run on one node."""
    state: AllocationState = "working"
    idle_node_seconds: float = 0.0
    """Node-seconds that the allocation was idle."""
    status_at: datetime | None = None
    """Time of its last status; None: there was none."""
    num_unusable: int = 0
    """Nodes that are lost or in quarantine, by its last status."""

    def runs(self, trainer: str) -> bool:
        return trainer in trainers_run(self.launcher, self.trainers)

    @property
    def is_simulated(self) -> bool:
        """Whether it simulates its nodes."""
        return self.launcher == SIMULATED_LAUNCHER

    @property
    def num_usable(self) -> int:
        """Nodes that are neither lost nor in quarantine."""
        return self.num_nodes - self.num_unusable

    def holds(self, num_nodes: int, num_devices: int) -> bool:
        """Whether a trial of so many nodes and devices fits on its usable nodes."""
        return num_nodes <= self.num_usable and num_devices <= num_nodes * self.devices_per_node


@dataclass(frozen=True, kw_only=True, slots=True)
class LeasedTrialRead:
    """A trial that a worker has leased, and its progress."""

    trial_id: int
    campaign: str
    number: int
    """The trial's number in its campaign."""
    attempt: int
    num_nodes: int
    num_devices: int
    leased_at: datetime
    phase: AttemptPhase | None
    """The phase that the worker reported last; null: not reported."""
    iterations_done: int
    """Finished iterations, including warm-up."""
    held_s: float | None
    """Seconds that it has held its nodes; null: not reported."""
    nodes_held: float | None
    """Nodes that it holds, may be a fraction; null: those of its layout."""
    waiting_because: str
    """Why it waits for devices, as the worker reports it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QuarantineRead:
    """Why no probe runs on a node, or ran until the node was released."""

    reason: str
    since: datetime
    requested_by_user: bool
    """Whether a user requested it; otherwise a worker found the node faulty."""
    released_at: datetime | None
    """When the node was released; null: it is in quarantine."""
    reported_by: str
    """The name of the token that set it aside; empty: unknown."""
    scope: str
    """Whose workers it counts for: the name of a token, or the session id of a simulated worker;
    empty: all workers of the cluster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSize:
    """The resources that an open trial needs."""

    num_nodes: int
    num_devices: int
    is_waiting: bool
    """Whether no worker has leased it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaseRecord:
    """A trial that is leased to a worker until the lease expires."""

    trial_id: int
    number: int
    attempt: int
    campaign_id: int
    campaign_name: str
    stored: StoredCampaign
    layout: Layout
    repeat_of: int | None
    """The trial that this one deliberately repeats."""
    lease_expires_at: datetime
    num_layers: int | None = None
    """Of a cheap probe, the layers of the model that it runs; None: the layout runs in full."""
    to_beat: ToBeat | None = None
    """What the probes of its campaign must beat to run in full; None: nothing."""
