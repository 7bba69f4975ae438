"""What the pages of a trial and of a comparison show, and the report of its winner."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

from layout_tuner.api.campaigns.trials import cheap_probes
from layout_tuner.api.formatting import measured_words, memory_of, moment, step_words, trainer_words
from layout_tuner.api.plot_data.estimates import memory_by_stage
from layout_tuner.api.plots.bars import PlotPart, step_parts
from layout_tuner.api.plots.schedule_plot import schedule_plot
from layout_tuner.api.plots.static_plot import static_plot
from layout_tuner.api.plots.svg import Plot
from layout_tuner.api.ranked_columns import COLUMNS, device_peak_words
from layout_tuner.predictions.belief.cheap_probe_step_time import CheapProbe
from layout_tuner.predictions.estimates.peak_memory import StageMemory, stage_memory
from layout_tuner.predictions.estimates.trainer_storage import storage_hypotheses
from layout_tuner.results_db.leaderboard.leaderboard_records import RankedLayout
from layout_tuner.results_db.records import CampaignRecord, TrialDetail, TrialRecord
from layout_tuner.results_db.store import Store
from layout_tuner.search_spaces.campaigns.fidelity import with_layers
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.layout import KNOBS, Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import counted
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER

Pairs = Sequence[tuple[str, str]]
"""Names and values, for a table of two columns."""

_MAX_ESTIMATED: Final = 1 << 10
"""Pipeline stages up to which memory is estimated for a page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialFacts:
    """A trial, its campaign, and its layout's place on the leaderboard."""

    detail: TrialDetail
    campaign: CampaignRecord
    ranked: RankedLayout | None
    """Its layout on the leaderboard, pooled over its runs; None: it is not ranked."""
    before: RankedLayout | None
    after: RankedLayout | None
    cheap: CheapProbe | None
    """What of a layout it runs; None: it runs all of its layout."""
    in_full: RankedLayout | None
    """The layout of a cheap probe on the leaderboard; None: it was not measured in full."""

    @classmethod
    def of(cls, store: Store, trial_id: int) -> Self:
        """Reads a trial. Raises TrialNotFoundError if there is no such trial."""
        detail = store.trials.detail(trial_id)
        campaign = store.campaigns.get(detail.trial.campaign_id)
        trial = detail.trial
        cheap = cheap_probes(store, [trial]).get(trial.id)
        found = store.leaderboard.ranked_layout(campaign, trial.stands_for)
        ranked = None if cheap else found
        around = {}
        if ranked is not None:
            near = store.leaderboard.ranked_layouts(
                campaign.id, campaign.objective, limit=3, offset=max(ranked.rank - 2, 0)
            )
            around = {each.rank - ranked.rank: each for each in near}
        return cls(
            detail=detail,
            campaign=campaign,
            ranked=ranked,
            before=around.get(-1),
            after=around.get(1),
            cheap=cheap,
            in_full=found if cheap else None,
        )

    @property
    def trial(self) -> TrialRecord:
        return self.detail.trial

    @property
    def parts(self) -> list[PlotPart]:
        """The parts of its step; empty: not measured."""
        measured = self.trial.measurement
        if measured is None or measured.breakdown is None:
            return []
        return step_parts(measured.breakdown, measured.step_time_s)

    @property
    def compute_s(self) -> float | None:
        """Time of a step in which it computes; None: not measured."""
        measured = self.trial.measurement
        return None if measured is None or not measured.breakdown else measured.breakdown.compute_s

    @property
    def figures(self) -> Pairs:
        """Its measurement; of a cheap probe also the part that ran, and the extrapolated step."""
        found = list(figure_pairs(self.campaign, self.trial, self.ranked))
        if self.cheap is not None:
            if (step := self.cheap.full_step) is not None:
                found.insert(0, ("step time in full, extrapolated", step_words(step)))
            found.insert(0, ("cheap probe", self.cheap.runs))
        return found

    @property
    def most_bytes(self) -> float:
        """The largest number in the plot of its memory."""
        stages = _estimated_stages(self.campaign, self.trial)
        peaks = (*_measured_bytes(self.trial), *(stage.total_bytes for stage in stages))
        return max((*peaks, self.campaign.stored.device_memory_bytes or 0))

    def schedule(self) -> Plot | None:
        """The pipeline schedule; None: it has too many stages to be drawn."""
        trial, model = self.trial, _model_that_ran(self.campaign, self.trial)
        layers = trial.num_layers if model is None else model.num_layers
        return schedule_plot(trial.layout, num_layers=layers, compute_s=self.compute_s, model=model)

    def memory(self, *, top_bytes: float | None = None) -> Plot | None:
        """Memory by stage, measured and estimated, below the capacity; None: neither is known."""
        measured = _measured_bytes(self.trial)
        estimated = _estimated_stages(self.campaign, self.trial)
        if not measured and not estimated:
            return None
        capacity = self.campaign.stored.device_memory_bytes
        data = memory_by_stage(measured, estimated, capacity_bytes=capacity, top_bytes=top_bytes)
        return static_plot(data, "Peak memory by pipeline stage")


def _model_that_ran(campaign: CampaignRecord, trial: TrialRecord) -> ModelShape | None:
    """The campaign's model, with the layers of a cheap probe; None: it is not described whole."""
    model, layers = campaign.stored.model, trial.num_layers
    return model if model is None or layers is None else with_layers(model, layers)


def _measured_bytes(trial: TrialRecord) -> tuple[int, ...]:
    """The measured peak of each pipeline stage; empty: not measured."""
    measured = trial.measurement
    return () if measured is None else measured.peak_memory_bytes_by_stage


def _estimated_stages(campaign: CampaignRecord, trial: TrialRecord) -> list[StageMemory]:
    """The estimated memory of each stage; empty where it is not known what the trainer stores."""
    layout, stored = trial.layout, campaign.stored
    model = _model_that_ran(campaign, trial)
    if model is None or layout.pp > _MAX_ESTIMATED:
        return []
    if campaign.trainer == EMBEDDED_TRAINER:
        return stage_memory(layout, model)
    if stored.cluster is None or campaign.trainer != stored.software:  # imported or simulated
        return []
    storages = storage_hypotheses(stored.software, stored.cluster)
    return stage_memory(layout, model, storages[0].storage) if len(storages) == 1 else []


def knob_pairs(layout: Layout, knobs: Mapping[str, JobKnob]) -> Iterator[tuple[str, str]]:
    """The knobs of a layout; new ones and counts without a column only if not at their default.

    Then those of its job: `knobs`, and others that it sets.
    """
    for knob in KNOBS.values():
        is_default = getattr(layout, knob.name) == knob.default
        is_optional = knob.is_new or (knob.is_count and not knob.heading)
        if knob.is_shown and not (is_optional and is_default):
            yield knob.label, knob_text(layout, knob.name)
        if knob.name == "num_microbatches":
            yield "global batch", str(layout.global_batch_size)
    for name in dict.fromkeys((*knobs, *layout.job)):
        yield name, job_text(layout, name, knobs)


def job_text(layout: Layout, name: str, knobs: Mapping[str, JobKnob]) -> str:
    """The value of a job knob; "-": the job does not state it, and no default is known."""
    knob, settings = knobs.get(name), layout.job
    value = settings.get(name) if knob is None else knob.value_of(settings)
    return "-" if value is None else _text(value)


def knob_text(layout: Layout, name: str) -> str:
    chosen = getattr(layout, name)
    if name == "num_nodes":
        return f"{chosen} ({counted(layout.num_devices, 'device')})"
    if name == "zero_stage" and layout.zero_replicas > 1:
        return f"{chosen}, {layout.zero_replicas} copies"
    return _text(chosen)


def _text(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def figure_pairs(
    campaign: CampaignRecord, trial: TrialRecord, ranked: RankedLayout | None
) -> Iterator[tuple[str, str]]:
    """The measurement of a trial; of a ranked layout, at the median of the layout's runs."""
    measured, objective = trial.measurement, campaign.objective
    if measured is None:
        return
    stored = campaign.stored
    figures = ("tokens_per_s", "mfu", "hfu", "model_tflops_per_device")
    pooled = ("interval", "step_time_s", "step_time_interval", "runs")
    names = (objective, *(pooled if ranked else ("step_time_s",)), *figures)
    for column in (COLUMNS[name] for name in dict.fromkeys(names)):
        yield column.label, column.cell(ranked or trial)
    if words := device_peak_words([ranked or trial]):
        yield "peak of a device", words
    peak = COLUMNS["peak_memory_bytes"]
    yield peak.label, memory_of(peak.value(trial), stored.device_memory_bytes)
    yield from measured_words(measured)
    if stored.model is not None and stored.model.lacks:
        yield "the model lacks", stored.model.lacks
    if words := trainer_words(measured):
        yield "trainer", words
        yield "memory is", measured.memory_kind or "not known"
    yield "trial", f"{trial.number} (id {trial.id})"
    yield "measured", moment(trial.ended_at)
