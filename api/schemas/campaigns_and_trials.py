"""The documents of the HTTP API, beyond those that `search_spaces` and `results_db` define."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from results_db.events import EventKind
from results_db.records import (
    AttemptRecord,
    CampaignState,
    MeasurementRecord,
    StepDirection,
    StepSource,
    StepState,
    TrialState,
)
from search_spaces.layout import Layout
from search_spaces.outcome import Environment, Iteration

MAX_ID = 2**31 - 1
"""Largest id that a database can hold."""

TrialId = Annotated[int, Field(ge=1, le=MAX_ID)]


class Document(BaseModel):
    """Base of the service's documents: immutable, described by the strings under its fields."""

    model_config = ConfigDict(frozen=True)


class Request(Document):
    """Base of what clients send: unknown fields are refused, and so are values of another type."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class CostRead(Document):
    """Node-seconds by what they were spent on."""

    iterations: float
    """Devices in iterations, warm-up included."""
    start: float
    """The rest of the time of probes whose outcome counts: starting, building, ending."""
    idle: float
    """Devices that were held and not used."""
    lost: float
    """Attempts that taught nothing: lost, given back, or too late."""
    total: float
    """The sum of the four."""


class Progress(Document):
    """How far a campaign is."""

    trials: dict[TrialState, int]
    """Trials in each state."""
    trials_ended: int
    """Trials that completed, failed, or proved infeasible."""
    trials_planned: int | None
    """How many there will be at most; null when only time or node-hours bound the campaign."""
    best: float | None
    """The best completed trial's objective; null while there is none."""
    best_trial: int | None
    """That trial's number."""
    best_layout: str | None
    """That trial's layout, by its canonical key."""
    seconds_left: float | None
    """Estimate of the seconds to the end; null when nothing is known yet."""
    waiting_reason: str | None
    """Why nothing moves, if nothing does, and what to do."""


class CampaignRead(Document):
    """A campaign as it stands."""

    id: int
    name: str
    state: CampaignState
    reason: str | None
    """Why it ended; null while it has not."""
    message: str
    """A sentence that goes with the reason."""
    model: str
    cluster: str
    objective: str
    """What ranks."""
    objectives: list[str]
    """What the Pareto front is over, the one that ranks first."""
    strategy: str
    num_legal_layouts: int
    """Size of the legal set: the layouts to choose from."""
    created_at: datetime
    started_at: datetime | None
    """When its first trial was leased."""
    ended_at: datetime | None
    node_seconds: float
    """Nodes times seconds that its probes held, those of lost attempts included; what a budget in
    node-hours counts."""
    cost: CostRead
    """What they were spent on. Its idle part, and so the total, has the campaign's share of what
    allocations held for no probe besides."""
    wall_time_s: float
    """Seconds RUNNING while a driver was at work."""
    created_by: str
    """Name of the token that submitted it; empty: it was made before there were any."""
    notes: str
    """What its users wrote beside it."""
    progress: Progress
    warnings: list[str]
    """What the submitter should know: constants that had to be guessed."""


class CampaignDetail(CampaignRead):
    """A campaign with the description that its layouts are judged against."""

    starts_from: int
    """Trials of other campaigns that calibrate its search from the start."""
    spec: dict[str, Any]
    """The description, presets written out; it can be submitted again under another name."""


class CampaignPage(Document):
    """Campaigns, the youngest first."""

    campaigns: list[CampaignRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""


class ImportRead(Document):
    """What became of a measurement table."""

    campaigns: list[CampaignRead]
    """One a cell, in the order of the table; ended, with the reason `imported`."""
    notes: list[str]
    """What the table does not say and was assumed."""


class TrialRead(Document):
    """A trial as it stands."""

    id: int
    number: int
    """Position in its campaign, from 1."""
    campaign_id: int
    layout: Layout
    layout_key: str
    """The layout's canonical name."""
    num_devices: int
    global_batch_size: int
    state: TrialState
    reason: str | None
    """Why it does not count; null unless it ended without a measurement that does."""
    message: str
    """What went wrong, in a sentence."""
    node: str
    """Node where it went wrong first."""
    attempt: int
    """Number of the latest attempt; 0 before the first."""
    lost_attempts: int
    iterations_done: int
    """Iterations that the running attempt has finished, warm-up included."""
    repeat_of: int | None
    """Id of the trial that this one deliberately repeats."""
    node_seconds: float
    cost: CostRead
    """What they were spent on."""
    measurement: MeasurementRecord | None
    """There where COMPLETED; where FAILED as diverged for its losses, for inspection alone."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class TrialDetailRead(TrialRead):
    """A trial with everything that is kept about it."""

    iterations: list[Iteration]
    """Every iteration of the measurement, warm-up included."""
    environment: Environment | None
    """What it ran on."""
    log_tail: str
    """The last lines that its ranks printed."""
    attempts: list[AttemptRecord]


class TrialRepeat(Request):
    """How a trial is measured again."""

    times: int = Field(default=1, ge=1, le=20)
    """How often."""


class TrialsAdded(Document):
    """New trials of a layout that was tried before."""

    trials: list[TrialRead]


class TrialPage(Document):
    """Trials in the order that was asked for."""

    trials: list[TrialRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""


class RankedTrial(TrialRead):
    """A layout on the leaderboard, by its first trial, whose own measurement it shows."""

    rank: int
    """1 is the best of those that are listed."""
    objectives: dict[str, float | None]
    """The campaign's objectives, and the one that ranks here, at the median step time of all runs of its
    layout; null: not measured."""
    on_front: bool
    """Whether no other ranked trial is at least as good in all of the campaign's objectives, and better
    in one."""
    value: float
    """What it is ranked by, at the median step time of all runs of its layout."""
    value_low: float | None
    """Where the 95 % interval of the value begins; null where a single iteration was timed."""
    value_high: float | None
    """Where it ends."""
    step_time_s: float
    """Median of the step times of all runs of its layout."""
    num_runs: int
    """How often the layout was measured; all runs count."""
    shortened: bool
    """Whether it was stopped early, since it was slower than the best: it is not the winner."""
    tied_with_first: bool
    """Whether it cannot be told apart from the first with 95 % confidence, or is the first."""


class LeaderboardPage(Document):
    """Measured layouts, the best first. Oversubscribed trials are never ranked."""

    objective: str
    """What they are ranked by; more is better."""
    objectives: list[str]
    """The campaign's objectives, which the front is over."""
    source: str | None
    """Where the measurements of an imported campaign come from; null: it ran here."""
    total: int
    """How many layouts are ranked; with front, how many are on it."""
    constrained: int
    """Completed trials that are not ranked since they break the campaign's constraints."""
    trials: list[RankedTrial]
    next_offset: int | None
    """Pass it as `offset` for the next page; null on the last."""


class KnobImportance(Document):
    """How much a knob matters over the whole campaign."""

    knob: str
    importance: float
    """Share of the objective's variation that the knob accounts for by itself."""


class KnobStepRead(Document):
    """What one step in a knob, away from the winner, does."""

    knob: str
    direction: StepDirection
    value: str
    """The winner's value of the knob."""
    stepped_value: str
    also: list[str]
    """Knobs that had to follow."""
    layout_key: str
    """The stepped layout."""
    source: StepSource
    """Whether the campaign measured that layout, or the closed form predicts it."""
    state: StepState
    """Whether the layout runs."""
    effect: float | None
    """Relative change of the objective, under 0 for worse; null where the layout does not run."""
    is_apart: bool | None
    """Whether it can be told apart from the winner with 95 % confidence; null if not measured."""
    trial_id: int | None
    """The trial that measured it."""


class AnalysisRead(Document):
    """Which knobs matter in a campaign, and how far its winner is from its neighbours."""

    campaign: str
    objective: str
    winner: int
    """Number of the winner's first trial, around which the steps are taken."""
    winner_layout: str
    """Its layout, by its canonical key."""
    num_layouts: int
    """Measured layouts that the importances were found from."""
    method: str
    """How the importances were found; empty where too little was measured."""
    importances: list[KnobImportance]
    """The largest first."""
    steps: list[KnobStepRead]
    """By knob; a knob at the end of its values has one."""
    computed_at: datetime


class ExportFileRead(Document):
    """One file of a training job."""

    name: str
    content: str
    executable: bool


class ExportRead(Document):
    """The files of a training job, and what their format could not say."""

    format: str
    trial: int
    """Number of the trial whose layout it is."""
    target_version: str
    """Version of the framework that the files were written for."""
    files: list[ExportFileRead]
    notes: list[str]


class EventRead(Document):
    """Something that happened to a campaign."""

    seq: int
    """Its number, which the stream gives as `id` too; numbers grow, and some are left out."""
    kind: EventKind
    at: datetime
    campaign_id: int
    trial_id: int | None
    """Null where it concerns the campaign as a whole."""
    data: dict[str, Any]
    """What is known at once: of a trial its number, state, reason and attempt."""


class Health(Document):
    status: str
    """"ok", or "degraded" when the database does not answer."""
    version: str
    database: bool
    """Whether the database answers."""
    driver_seen_at: datetime | None
    driver_alive: bool
    """Whether a driver was at work in the last 15 seconds."""
    workers: int
    """Workers heard of in the last 30 seconds."""


class Readiness(Document):
    is_ready: bool
    reasons: list[str]
    """Why not; empty where it is."""


class Problem(Document):
    """An error, as RFC 9457 has it (`application/problem+json`)."""

    type: str
    """What kind of problem it is, as a URN; programs look at this."""
    title: str
    """The kind in words."""
    status: int
    """The HTTP status."""
    detail: str
    """What was wrong with this request, and what to do."""
    errors: list[FieldError] | None = None
    """The fields that were refused, where there are several."""


class FieldError(Document):
    field: str
    """Where in the request, as "body.outcome.state"."""
    message: str
