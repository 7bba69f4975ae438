"""The documents of campaigns, trials, the leaderboard, exports, health and errors."""

from __future__ import annotations

from datetime import datetime
from functools import cached_property
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from layout_tuner.api.schemas.text_types import Notes
from layout_tuner.documents.duration import MAX_DURATION_S
from layout_tuner.documents.reading import MAX_COUNT
from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.protocol.measurement import Environment, Iteration
from layout_tuner.protocol.states import TrialState
from layout_tuner.results_db.leaderboard.leaderboard_records import BaselineRead
from layout_tuner.results_db.records import (
    MAX_PRIORITY,
    AttemptRecord,
    CampaignState,
    KnobStepRead,
    MeasurementRecord,
    RepeatReason,
    Visibility,
)
from layout_tuner.search_spaces.campaigns.campaign_settings import NODE_HOURS, SimulationSettings
from layout_tuner.search_spaces.campaigns.stored_campaign import StoredCampaign
from layout_tuner.search_spaces.layouts.layout import Layout


class Document(BaseModel):
    """Base of documents; the strings under the fields are their descriptions in OpenAPI."""

    # The command line reads one or two kinds of documents and need not build all.
    model_config = ConfigDict(defer_build=True, frozen=True)

    @classmethod
    def of(cls, *records: object, **others: Any) -> Self:
        """Copies the fields that are not in `others` from records, nested records included.

        Each comes from the first record that has an attribute of its name.
        """
        copied = {
            name: next(getattr(each, name) for each in records if hasattr(each, name))
            for name in cls.model_fields
            if name not in others
        }
        return cls.model_validate(copied | others, from_attributes=True)


class Request(Document):
    """Base of request bodies; unknown fields and values of another type are refused."""

    model_config = ConfigDict(defer_build=False, frozen=True, extra="forbid", strict=True)


class CostRead(Document):
    """Node-seconds by use."""

    iterations: float
    """Devices in iterations, with warm-up."""
    start: float
    """The rest of the time of probes whose outcome counts: start, build, end."""
    idle: float
    """Devices that were held and not used."""
    lost: float
    """Attempts without a result: lost, returned, or too late."""
    total: float
    """The sum of all parts."""


class Progress(Document):
    """The progress of a campaign."""

    trials: dict[TrialState, int]
    """Trials in each state."""
    trials_ended: int
    """Trials that are COMPLETED, FAILED or INFEASIBLE."""
    trials_planned: int | None
    """Most trials that will end; null if only time or node-hours limit the campaign."""
    best: float | None
    """The objective of the best completed trial; null: there is none yet."""
    best_trial: int | None
    """The number of that trial."""
    best_layout: str | None
    """The canonical key of its layout."""
    best_disturbed: bool
    """Whether others took its devices during all runs of this layout that count."""
    seconds_left: float | None
    """Estimated seconds to the end; null: unknown."""
    waiting_reason: str | None
    """Why no trial is running and what to do; null: trials are running, or none is needed."""


class CampaignRead(Document):
    """The state of a campaign."""

    id: int
    name: str
    state: CampaignState
    reason: str | None
    """Why it ended; null while it is open."""
    message: str
    """The reason as a sentence; where the service paused it, why."""
    model: str
    cluster: str
    trainer: str
    """What trains its probes; "imported" where a table was measured elsewhere."""
    simulated: SimulationSettings | None
    """By what it is simulated, its trials, costs and figures included; null: it is measured."""
    objective: str
    """The objective that ranks."""
    objectives: list[str]
    """The objectives of the Pareto front; the first one ranks."""
    strategy: str
    num_legal_layouts: int
    """Number of legal layouts; with job knobs, of jobs: layouts with each of their settings."""
    created_at: datetime
    started_at: datetime | None
    """When its first trial was leased."""
    ended_at: datetime | None
    node_seconds: float
    """Nodes times seconds held by its probes, including lost attempts; a budget in node-hours
    counts these."""
    cost: CostRead
    """The same by use. The idle part, and so the total, also has the campaign's share of idle
    allocations."""
    wall_time_s: float
    """Seconds in state RUNNING with an active driver."""
    created_by: str
    """Its owner."""
    visibility: Visibility
    """Who sees it: private, its owner alone; group, the members of its group too; or everyone."""
    group: str | None
    """The group that its node-hours count for; null: none."""
    priority: int
    """Of an owner's campaigns, those of a higher priority get devices first."""
    notes: str
    """Notes of its users."""
    progress: Progress
    baseline: BaselineRead | None
    """The layout that its users run today, and what the winner gains over it; null: the campaign
    names none."""
    warnings: list[str]
    """Warnings for the submitter, for example constants that were assumed."""


class CampaignDetail(CampaignRead):
    """A campaign with its description."""

    starts_from: int
    """Number of trials of other campaigns that calibrate its search from the start."""
    cheap_probes: int
    """Ended trials that were cheap probes: they run a part of a layout, and are not ranked."""
    cheap_probe_node_seconds: float
    """The part of `node_seconds` that these took."""
    spec: dict[str, Any]
    """The description without names of presets; it can be submitted again under another name."""

    @cached_property
    def stored(self) -> StoredCampaign:
        """The description, of which each part is read once."""
        return StoredCampaign(document=self.spec)


class CampaignPage(Document):
    """Campaigns, the newest first."""

    campaigns: list[CampaignRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""


class BudgetChange(Request):
    """New bounds of a budget: a missing field stays as it is, null removes the bound."""

    trials: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Most trials, counted when they end with any outcome."""
    node_hours: float | None = Field(default=None, ge=NODE_HOURS.low, le=NODE_HOURS.high)
    """Most node-hours of probes."""
    wall_time: str | float | None = None
    """As `90s`, `10m`, `2h`, `1d`, or in seconds; instead of wall_time_s."""
    wall_time_s: float | None = Field(default=None, gt=0, le=MAX_DURATION_S)
    """Most seconds in state RUNNING."""


class CampaignChange(Request):
    """The fields of a campaign that can be changed; a missing field stays as it is."""

    budget: BudgetChange = BudgetChange()
    """Only for a campaign that has not ended."""
    notes: Notes = ""
    """Notes of its users; may have several lines."""
    visibility: Visibility = "everyone"
    """Who sees it."""
    group: str | None = Field(default=None, max_length=64)
    """The group that its node-hours count for; null: the only group of its owner, or none."""
    priority: int = Field(default=0, ge=-MAX_PRIORITY, le=MAX_PRIORITY)


class ImportRead(Document):
    """The result of importing a measurement table."""

    campaigns: list[CampaignRead]
    """One for each cell, in the order of the table; all have ended with the reason `imported`."""
    notes: list[str]
    """Values that the table lacks and that were assumed."""


class TrialOfLayout(Document):
    """The state of a trial."""

    id: int
    number: int
    """Position in its campaign, from 1."""
    campaign_id: int
    layout: Layout
    """The layout that it runs; its figures are of this one."""
    layout_key: str
    """The canonical key of the layout; of a cheap probe, of the one that it stands for, and what of
    it is run; of an imported row that others of its layout differ from, that difference in
    brackets."""
    simulated: bool
    """Whether it is simulated, and not measured."""
    num_devices: int
    global_batch_size: int
    state: TrialState
    reason: str | None
    """Why it does not count; null unless INFEASIBLE, FAILED or CANCELLED."""
    message: str
    """The problem, in a sentence."""
    node: str
    """The node where the problem occurred first."""
    attempt: int
    """Number of the latest attempt; 0 before the first."""
    lost_attempts: int
    iterations_done: int
    """Finished iterations of the running attempt, including warm-up."""
    repeat_of: int | None
    """Id of the trial that this one deliberately repeats; null: it repeats none."""
    repeat_reason: RepeatReason | None
    """Why it repeats that trial; null: it repeats none, or an earlier version added it."""
    is_baseline: bool
    """Whether its layout is the campaign's baseline."""
    node_seconds: float
    cost: CostRead
    """The same by use."""
    measurement: MeasurementRecord | None
    """Present if COMPLETED; also if FAILED as diverged, but then it does not count."""
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None


class TrialRead(TrialOfLayout):
    """The state of a trial."""

    cheap_probe: CheapProbe | None
    """What of a layout it runs, and the layout's extrapolated step time; null: it runs all of its
    layout."""


class TrialDetailRead(TrialRead):
    """A trial with everything that is stored about it."""

    iterations: list[Iteration]
    """Every iteration of the measurement, including warm-up."""
    environment: Environment | None
    """The hardware and software that it ran on."""
    log_tail: str
    """The last lines of output of its ranks."""
    attempts: list[AttemptRecord]
    prediction: Prediction | None
    """What the search predicted when it proposed the layout; null: it predicts nothing, or the
    trial was not proposed by a search."""


class TrialRepeat(Request):
    """How often to measure a trial again."""

    times: int = Field(default=1, ge=1, le=20)
    """Number of new trials."""


class TrialsAdded(Document):
    """New trials of a layout that was measured before."""

    trials: list[TrialRead]


class TrialPage(Document):
    """Trials in the requested order."""

    trials: list[TrialRead]
    next_cursor: str | None
    """Pass it as `cursor` for the next page; null on the last."""
    previous_cursor: str | None
    """Pass it as `before` for the previous page; null on the first."""
    total: int
    """Number of trials that pass the filters, counted up to 10,000."""
    is_total_exact: bool
    """Whether `total` is all of them; false: there are more."""


class RankedTrial(TrialOfLayout):
    """A layout on the leaderboard, with the first of its trials and that trial's measurement.

    It was measured in full: cheap probes are not ranked. Where the peaks of the campaign's runs
    differ, mfu and hfu are by the largest, as those of all rows.
    """

    rank: int
    """Rank on the unfiltered leaderboard of the campaign; 1 is the best."""
    objectives: dict[str, float | None]
    """The campaign's objectives and the one that ranks here, at the median step time of all runs of
    the layout; null: not measured."""
    on_front: bool
    """Whether no other ranked trial is at least as good in all of the campaign's objectives and
    better in one."""
    value: float
    """The value that ranks, at the median step time of all runs of the layout."""
    value_low: float
    """Lower end of the 95 % interval of the value."""
    value_high: float
    """Upper end of the interval; that of the first layout is lowered, but not below the value,
    since the best of many is flattered."""
    step_time_s: float
    """Median of the step times of all runs of the layout."""
    num_runs: int
    """Number of measurements of the layout; all count."""
    disturbed: bool
    """Whether others took its devices during all of them; beside quiet runs, disturbed ones do not
    count."""
    shortened: bool
    """Whether it was stopped early because it was slower than the best; it never wins."""
    tied_with_first: bool
    """Whether it is the first, or does not differ from the first with 95 % confidence."""


class LeaderboardPage(Document):
    """Measured layouts, the best first. Oversubscribed trials are never ranked."""

    objective: str
    """The objective that ranks; more is better."""
    objectives: list[str]
    """The campaign's objectives; the Pareto front is over all of them."""
    source: str | None
    """Source of the measurements of an imported campaign; null: it ran here."""
    simulated: SimulationSettings | None
    """By what the layouts were simulated; null: they were measured."""
    total: int
    """Number of ranked layouts; with `front`, of those on the front."""
    constrained: int
    """Completed trials that are not ranked because they break the campaign's constraints."""
    trials: list[RankedTrial]
    next_offset: int | None
    """Pass it as `offset` for the next page; null on the last."""


class PlotRead(Document):
    """A plot of a campaign in plotly's form."""

    data: list[dict[str, Any]]
    """Plotly's traces; empty: there is nothing to draw."""
    layout: dict[str, Any]
    """Plotly's layout: the axes, each with its range."""
    says: list[str]
    """The sentences of the caption, or why there is nothing to draw."""


class KnobImportance(Document):
    """The importance of a knob over the whole campaign."""

    knob: str
    importance: float
    """Share of the variation of the objective that the knob alone explains."""


class AnalysisRead(Document):
    """The importance of knobs in a campaign, and the sensitivity of its winner."""

    campaign: str
    objective: str
    winner: int
    """Number of the winner's first trial, from which the steps start."""
    winner_layout: str
    """The canonical key of its layout."""
    num_layouts: int
    """Measured layouts behind the importances."""
    method: str
    """The method for the importances; empty: too few measurements."""
    importances: list[KnobImportance]
    """The largest first."""
    steps: list[KnobStepRead]
    """By knob; a knob at the end of its values has one step."""
    computed_at: datetime


class ExportFormatRead(Document):
    """A format of exports: the trainer that it is for."""

    name: str
    target_version: str
    """Version of the trainer that the files are written for."""
    needs: str
    """What is needed to run an export."""


class ExportFormatPage(Document):
    """All formats of exports."""

    formats: list[ExportFormatRead]


class Health(Document):
    status: str
    """"ok", or "degraded" if the database does not answer."""
    version: str
    database: bool
    """Whether the database answers."""
    driver_seen_at: datetime | None
    driver_alive: bool
    """Whether a driver was active in the last 15 seconds."""
    workers: int
    """Workers with a heartbeat in the last 30 seconds."""


class Readiness(Document):
    is_ready: bool
    reasons: list[str]
    """Why it is not ready; empty if it is."""


class Problem(Document):
    """An error in the format of RFC 9457 (`application/problem+json`)."""

    type: str
    """The kind of problem as a URN, for programs."""
    title: str
    """The kind in words."""
    status: int
    """The HTTP status."""
    detail: str
    """The problem with this request, and what to do."""
    errors: list[FieldError] | None = None
    """The refused fields; null if the problem is not about fields."""


class FieldError(Document):
    field: str
    """Path of the field in the request, for example "body.outcome.state"."""
    message: str
