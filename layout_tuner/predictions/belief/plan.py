"""A plan of a campaign: its legal layouts, ranked by what is predicted of them; nothing is run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np

from layout_tuner.documents.reading import shown
from layout_tuner.errors import LayoutInvalidError
from layout_tuner.predictions.belief.job import JobEstimate, estimate_job
from layout_tuner.predictions.belief.job_knobs.job_ranking import rank_jobs
from layout_tuner.predictions.belief.job_knobs.plan_gains import KnobGain, knob_gains
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions, RankedLayouts
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty, quantiles
from layout_tuner.predictions.belief.plan_parts.bought_probes import (
    BoughtProbes,
    NeededProbes,
    ProbePrices,
    bought_probes,
    needed_probes,
)
from layout_tuner.predictions.belief.plan_parts.layout_comparison import (
    LayoutComparison,
    compare_layouts,
)
from layout_tuner.predictions.belief.plan_parts.step_parts import StepPart, StepShare, step_shares
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec, scopes_for
from layout_tuner.search_spaces.campaigns.fidelity import PROBE_START_S
from layout_tuner.search_spaces.clusters.cluster_presets import CLUSTER_PRESETS
from layout_tuner.search_spaces.layouts.knobs import auto_choices
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import violations
from layout_tuner.search_spaces.objectives import Objective, objective_factors
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.search_spaces.spaces.search_space import Exclusion, LegalSet
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.registry import adapter_named

DEFAULT_TOP: Final = 10
MAX_TOP: Final = 1000
"""Most layouts that a plan lists."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedFigures:
    """What is predicted of one layout."""

    step_time_s: float
    """Predicted median of the step time."""
    step_time_low_s: float
    """Lower end of its 95 % interval."""
    step_time_high_s: float
    """Upper end of it."""
    tokens_per_s: float
    """Tokens per second of all devices, at the median."""
    tokens_per_s_per_device: float
    """The same of one device."""
    model_tflops_per_device: float
    """Model TFLOP/s of one device, without recomputation."""
    mfu: float | None
    """Share of the peak that the model's FLOPs use; None: the cluster states no peak."""
    peak_memory_bytes: int
    """Expected peak of the fullest device."""
    peak_memory_median_bytes: int
    """Median of the peak. Where the trainer is not known the mean may be far from it."""
    peak_memory_low_bytes: int
    """Lower end of its 80 % interval."""
    peak_memory_high_bytes: int
    """Upper end of it."""
    fits: float
    """Probability that it fits into a device and keeps the campaign's memory headroom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout:
    """A layout of a plan."""

    rank: int
    """1 is the best; of a layout outside of the space, the rank that it would have."""
    layout_key: str
    layout: Layout
    predicted: PredictedFigures
    objective_value: float
    """The predicted first objective of the campaign."""
    limited_by: StepPart
    """The part with the largest share of the step."""
    shares: tuple[StepShare, ...]
    """All parts of the step, the largest first; they sum to 1."""
    best_chance: float | None = None
    """Probability that it is the best of the plan; None: it ranks behind those that are
    compared (`predictions.belief.best_chances`)."""
    is_baseline: bool = False
    """Whether it is the layout that the campaign's users run today."""
    refused: tuple[str, ...] = ()
    """Why the plan's trainer does not run it, one sentence each; empty: it does, or nothing is
    known of the trainer."""
    job: JobEstimate | None = None
    """The training job with it; None: no job was described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedBaseline:
    """The layout that the campaign's users run today, beside the best of the plan."""

    planned: PlannedLayout
    is_outside: bool
    """Whether it is not among the layouts of the space."""
    to_best: LayoutComparison | None
    """The best layout that the trainer runs compared with it; None: it is that one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnowledgeUsed:
    """What the predictions of a plan rest on."""

    basis: Literal["measurements", "calibration", "data sheets"]
    """measurements: of step times and peaks, on top of the constants. calibration: constants that
    `layout-tuner calibrate` measured. data sheets: constants alone that were not measured."""
    num_measurements: int
    """Measured and failed runs."""
    num_step_times: int
    """Measured step times among them that calibrate."""
    num_peaks: int
    """Measured peaks of memory among them that calibrate."""
    models: tuple[str, ...]
    """Models that were measured."""
    clusters: tuple[str, ...]
    """Clusters on which they were measured."""
    constants: str
    """Where the constants of the cluster come from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of a campaign. All figures of layouts are predicted."""

    campaign: str
    model: str
    """Its name, and what it states of attention and dropout."""
    cluster: str
    trainer: str = EMBEDDED_TRAINER
    """What is taken to run the layouts: the trainer of the campaign's probes, or another software
    that the request names."""
    nodes: str = ""
    """Why the best layout takes fewer nodes than there are, with both numbers; empty: it does not.
    """
    objective: Objective
    """What the layouts are ranked by, times their probability of fitting."""
    num_combinations: int
    """Combinations of the space."""
    num_legal: int
    """Layouts that the campaign may probe."""
    num_jobs: int | None = None
    """Jobs that it may probe: layouts with settings of their job knobs; null: it searches none."""
    illegal: tuple[Exclusion, ...]
    """Combinations that each rule excludes, the most first; one may break several rules."""
    expected_fitting: float
    """Legal layouts that are expected to fit into memory: the sum of their probabilities."""
    layouts: tuple[PlannedLayout, ...]
    """The best layouts."""
    knobs: tuple[KnobGain, ...] = ()
    """What each value of a searched job knob is expected to bring to the best layout."""
    baseline: PlannedBaseline | None = None
    """Null: the campaign names no baseline."""
    comparison: LayoutComparison | None = None
    """The two layouts that the request names; null: it names none."""
    some_fit: float = 1.0
    """Probability that at least one of the layouts that are compared fits into memory."""
    probes_needed: int | None = None
    """How many of the layouts with the largest `best_chance` to probe for a 90 % chance of one
    within 5 % of the best; None: more than are compared, or no number suffices since the layouts
    hardly fit."""
    needed: NeededProbes | None = None
    """What these probes take; None: `probes_needed` is."""
    fits_depend_on: DecidingProperty | None = None
    """What about the trainer decides most whether the listed layouts fit; None: it is known."""
    budget: BoughtProbes
    knowledge: KnowledgeUsed
    job: TrainingJob | None
    """The training job that was described."""
    warnings: tuple[str, ...]
    auto: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the knobs that the document left out, by knob."""

    @property
    def num_ranked(self) -> int:
        """The jobs, or the layouts where no job knob is searched."""
        return self.num_legal if self.num_jobs is None else self.num_jobs

    @property
    def best(self) -> PlannedLayout:
        """The best listed layout that the trainer runs; rank 1 where it refuses all of them."""
        return next((each for each in self.layouts if not each.refused), self.layouts[0])

    @property
    def rows(self) -> tuple[PlannedLayout, ...]:
        """The best layouts, and the baseline where it is none of them."""
        if self.baseline is None or any(each.is_baseline for each in self.layouts):
            return self.layouts
        return (*self.layouts, self.baseline.planned)


def make_plan(
    spec: CampaignSpec,
    *,
    legal: LegalSet | None = None,
    knowledge: Knowledge | None = None,
    software: str | None = None,
    top: int = DEFAULT_TOP,
    probe_start_s: float = PROBE_START_S,
    job: TrainingJob | None = None,
    compare: tuple[str, str] | None = None,
) -> Plan:
    """Ranks the layouts of a campaign by the predicted objective times the probability of fitting.

    `legal` is its legal set, if the caller has it already; `software` what will run it, as a
    table's source says it, empty for this project's trainer, None for the trainer of the campaign's
    probes; `probe_start_s` the assumed seconds of a probe outside of its iterations; `job` the
    training job to be predicted with each listed layout; `compare` two layouts by key or rank.

    Raises:
        NoLegalLayoutError: there is no legal layout.
        SpaceInvalidError: the campaign lists a layout that is not legal.
        ModelTooLargeError: every layout would certainly run out of memory.
        LayoutInvalidError: a layout that is to be compared is not legal, or both are the same.
    """
    software = spec.software if software is None else software
    legal = legal or spec.legal_set(scopes_for(software or EMBEDDED_TRAINER))
    spec.refuse_if_too_large(legal)
    if software != spec.software:
        spec = _without_job_knobs(spec, software)
    jobs = spec.jobs(legal) if software == spec.software else legal
    spec = spec.warned_of_space(legal, jobs)
    predictions = LayoutPredictions(
        spec=spec, software=software, knowledge=knowledge or Knowledge()
    )
    ranked_layouts = ranked = predictions.rank(legal)
    if isinstance(jobs, JobSet):
        ranked = rank_jobs(predictions, jobs, ranked_layouts)
    best = [jobs.layout(int(position)) for position in ranked.order[:top]]
    own_s = None if spec.baseline is None else predictions.step(spec.baseline).expected_s
    prices = ProbePrices.of(spec, jobs, ranked, probe_start_s, baseline_step_s=own_s)
    chances = predictions.chances(jobs, ranked, most_step_s=prices.most_step_s)
    chance_of = dict(enumerate((chances.best * chances.runs).tolist(), start=1))
    needed = needed_probes(prices, chances)
    return Plan(
        campaign=spec.name,
        model=spec.model.title,
        cluster=spec.cluster.name,
        trainer=predictions.trainer,
        nodes=_fewer_nodes(spec, jobs, ranked, best[0]),
        objective=spec.objective,
        num_combinations=legal.num_combinations,
        num_legal=len(legal),
        num_jobs=len(jobs) if isinstance(jobs, JobSet) else None,
        illegal=legal.exclusions,
        expected_fitting=float(ranked_layouts.fits.sum()),
        layouts=tuple(
            _planned(rank, layout, predictions, chance_of.get(rank), job)
            for rank, layout in enumerate(best, start=1)
        ),
        knobs=tuple(knob_gains(predictions, jobs, best[0])) if isinstance(jobs, JobSet) else (),
        baseline=_baseline(predictions, jobs, ranked, chance_of, job),
        comparison=None if compare is None else _comparison(predictions, jobs, ranked, compare),
        some_fit=chances.runs,
        probes_needed=needed.number if needed else None,
        needed=needed,
        fits_depend_on=predictions.deciding(jobs, ranked, top),
        budget=bought_probes(prices, jobs, ranked, chances),
        knowledge=_used(predictions),
        job=job,
        warnings=(
            *spec.warnings,
            *_warnings(predictions, best, float(ranked.step_time_s[0]), probe_start_s),
        ),
        auto=auto_choices(spec.space.to_mapping()),
    )


def _without_job_knobs(spec: CampaignSpec, software: str) -> CampaignSpec:
    """The campaign for another trainer, which has not the job knobs of that of its probes."""
    baseline, warnings = spec.baseline, spec.warnings
    if spec.space.job or (baseline is not None and baseline.job):
        left_out = f"the job knobs are those of {spec.software or EMBEDDED_TRAINER}"
        warnings += (f"{left_out}, and are left out for {software or EMBEDDED_TRAINER}",)
    return replace(spec, baseline=baseline and baseline.without_job, warnings=warnings)


def _planned(
    rank: int,
    layout: Layout,
    predictions: LayoutPredictions,
    best_chance: float | None,
    job: TrainingJob | None,
) -> PlannedLayout:
    spec = predictions.spec
    figures = _figures(layout, predictions)
    factor = objective_factors(spec.objective, LayoutColumns.of(layout), spec.model)
    shares = step_shares(layout, predictions)
    return PlannedLayout(
        rank=rank,
        layout_key=layout.key,
        layout=layout,
        predicted=figures,
        objective_value=float(factor) / figures.step_time_s,
        limited_by=shares[0].part,
        shares=shares,
        best_chance=best_chance,
        is_baseline=layout == spec.baseline,
        refused=_refused(layout, predictions),
        job=None
        if job is None
        else estimate_job(
            job,
            layout,
            spec.model,
            spec.cluster,
            predictions.step,
            allow_tp_across_nodes=spec.space.allow_tp_across_nodes,
        ),
    )


def _refused(layout: Layout, predictions: LayoutPredictions) -> tuple[str, ...]:
    """See `PlannedLayout.refused`."""
    adapter, trained = adapter_named(predictions.trainer), predictions.spec.job_of(layout)
    if adapter is None:
        return ()
    return (*adapter.refusals(trained), *adapter.all_lacking(trained).values())


def _figures(layout: Layout, predictions: LayoutPredictions) -> PredictedFigures:
    spec, step = predictions.spec, predictions.step(layout)
    tokens_per_s = layout.global_batch_size * spec.model.seq_length / step.expected_s
    peak_flops = spec.cluster.peak_flops_per_s.get(layout.precision)
    rate = Throughput(
        model=spec.model,
        layout=layout,
        tokens_per_s=tokens_per_s,
        peak_tflops_per_device=(peak_flops or 0.0) / 1e12,
    )
    columns = LayoutColumns.of_each([layout])
    (peak_bytes,), _ = predictions.memory.peak_bytes(columns, spec.model)
    (low,), (median,), (high,) = quantiles(predictions.memory.each_peak_bytes(columns, spec.model))
    (fits,) = predictions.fits(columns)
    return PredictedFigures(
        step_time_s=step.expected_s,
        step_time_low_s=step.low_s,
        step_time_high_s=step.high_s,
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_device=rate.tokens_per_s_per_device,
        model_tflops_per_device=rate.model_tflops_per_device,
        mfu=rate.mfu if peak_flops else None,
        peak_memory_bytes=round(float(peak_bytes)),
        peak_memory_median_bytes=round(float(median)),
        peak_memory_low_bytes=round(float(low)),
        peak_memory_high_bytes=round(float(high)),
        fits=float(fits),
    )


def _baseline(
    predictions: LayoutPredictions,
    legal: LegalSet | JobSet,
    ranked: RankedLayouts,
    chance_of: Mapping[int, float],
    job: TrainingJob | None,
) -> PlannedBaseline | None:
    """The campaign's baseline, ranked among the legal layouts; None: it names none."""
    layout = predictions.spec.baseline
    if layout is None:
        return None
    position, chance = legal.index_of(layout), None
    places = np.flatnonzero(ranked.order == (-1 if position is None else position))
    if not len(places):  # outside of the space, or none of the jobs that were ranked
        rank = ranked.rank(predictions.score(layout))
    else:
        rank = 1 + int(places[0])
        chance = chance_of.get(rank)
    compared = (legal.layout(int(each)) for each in ranked.order[:MAX_TOP])
    runs = (each for each in compared if not _refused(each, predictions))
    best = next(runs, None) or legal.layout(int(ranked.order[0]))
    return PlannedBaseline(
        planned=_planned(rank, layout, predictions, chance, job),
        is_outside=position is None,
        to_best=None if best == layout else compare_layouts(predictions, layout, best),
    )


def _comparison(
    predictions: LayoutPredictions,
    legal: LegalSet | JobSet,
    ranked: RankedLayouts,
    names: tuple[str, str],
) -> LayoutComparison:
    """Two layouts by rank, or by key also outside of the space; LayoutInvalidError if illegal."""
    spec = predictions.spec

    def named(name: str) -> Layout:
        if not (name.isascii() and name.isdigit()):
            return Layout.of_key(name)
        # int() refuses thousands of digits.
        count = len(ranked.order)
        rank = int(name) if len(name) <= len(str(count)) else 0
        if not 1 <= rank <= count:
            raise LayoutInvalidError(
                f"{shown(name)} is not a rank of the plan: it has 1 to {count}"
            )
        return legal.layout(int(ranked.order[rank - 1]))

    first, second = map(named, names)
    if first == second:
        raise LayoutInvalidError(f"both layouts are {first.key}; name two different ones")
    for layout in (first, second):
        broken = violations(
            layout,
            spec.model,
            spec.cluster,
            global_batch=spec.space.global_batch,
            allow_tp_across_nodes=spec.space.allow_tp_across_nodes,
            scopes=scopes_for(predictions.trainer),
        )
        is_other = predictions.software != spec.software
        if layout.job and (is_other or not spec.space.job.holds(layout, spec.model, spec.cluster)):
            settings = layout.job.words
            broken.append(f"{settings} is not among the settings that the campaign searches there")
        if broken:
            raise LayoutInvalidError(f"{layout.key} is not legal here: {'; '.join(broken)}")
    return compare_layouts(predictions, first, second)


def _fewer_nodes(
    spec: CampaignSpec, legal: LegalSet | JobSet, ranked: RankedLayouts, best: Layout
) -> str:
    """See `Plan.nodes`. The whole machine of a preset is not what a job gets."""
    preset, most = CLUSTER_PRESETS.get(spec.cluster.name), max(spec.space.values("num_nodes"))
    whole, taken = spec.cluster.num_nodes, best.num_nodes
    if whole > most and (preset is None or preset.num_nodes != whole):
        return f"on {taken} of {whole} nodes: the space has num_nodes of {most} at most"
    if taken >= most:
        return ""
    place = ranked.first_with(legal, "num_nodes", most)
    if place is None:
        return f"on {taken} of {most} nodes: no layout on {most} nodes is legal"
    return (
        f"on {taken} of {most} nodes, since {spec.objective} is larger there (the best on {most} is "
        f"rank {place + 1:,}; to plan for {most}, set num_nodes: {most} in the space)"
    )


def _used(predictions: LayoutPredictions) -> KnowledgeUsed:
    knowledge, cluster = predictions.knowledge, predictions.spec.cluster
    basis: Literal["measurements", "calibration", "data sheets"] = "data sheets"
    if len(knowledge):
        basis = "measurements"
    elif cluster.is_measured:
        basis = "calibration"
    return KnowledgeUsed(
        basis=basis,
        num_measurements=len(knowledge),
        num_step_times=predictions.plausible.num_step_times,
        num_peaks=predictions.plausible.num_peaks,
        models=tuple(sorted({each.model.name for each in knowledge})),
        clusters=tuple(sorted({each.cluster.name for each in knowledge})),
        constants=cluster.source,
    )


def _warnings(
    predictions: LayoutPredictions, layouts: list[Layout], step_s: float, probe_start_s: float
) -> Iterator[str]:
    """That probes of the best layout take too long, and what of the layouts was not measured."""
    spec = predictions.spec
    seconds, deadline_s = spec.probe_costs(probe_start_s).seconds(step_s), spec.probe.deadline_s
    if seconds > deadline_s:
        yield (
            f"a probe of the best layout is expected to take {seconds:,.0f} s, longer "
            f"than the campaign's probe.deadline of {deadline_s:,.0f} s, after which it fails "
            "as a timeout; raise the deadline"
        )
    yield from predictions.plausible.warnings
    if predictions.plausible.num_step_times:
        columns, software = LayoutColumns.of_each(layouts), predictions.software
        outside = predictions.time.outside(columns, spec.model, spec.cluster, software=software)
        if outside is not None:
            yield outside
