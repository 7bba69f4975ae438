"""A plan of a campaign: its legal layouts, ranked by what is predicted of them; nothing is run."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

import numpy as np

from layout_tuner.predictions.belief.best_chances import BestChances
from layout_tuner.predictions.belief.job import JobEstimate, estimate_job
from layout_tuner.predictions.belief.known_measurements import Knowledge
from layout_tuner.predictions.belief.layout_predictions import LayoutPredictions, RankedLayouts
from layout_tuner.predictions.belief.peaks.trainer_hypotheses import DecidingProperty
from layout_tuner.predictions.estimates.step_shape import idle_slots
from layout_tuner.predictions.estimates.step_time import step_time_s
from layout_tuner.predictions.statistics.job_duration import TrainingJob
from layout_tuner.search_spaces.campaigns.campaign import CampaignSpec
from layout_tuner.search_spaces.campaigns.fidelity import PROBE_START_S, ProbeCosts, fidelities
from layout_tuner.search_spaces.layouts.knobs import auto_choices
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.legality_rules import OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.objectives import Objective, objective_factors
from layout_tuner.search_spaces.spaces.search_space import Exclusion, LegalSet
from layout_tuner.search_spaces.throughput import Throughput
from layout_tuner.units import SECONDS_PER_HOUR

DEFAULT_TOP: Final = 10
MAX_TOP: Final = 1000
"""Most layouts that a plan lists."""
_NEAR_BEST: Final = 10
"""Layouts whose cheap probes are taken to cost as much as all others."""

StepPart = Literal[
    "compute",
    "tensor parallel",
    "context parallel",
    "expert parallel",
    "pipeline bubble",
    "pipeline transfers",
    "data parallel",
    "host",
    "optimizer",
]
"""What the time of a step goes into. The bubble: stages that wait for the first and the last
micro-batch, or for a slower stage."""

_TERMS: Final[Mapping[StepPart, tuple[str, ...]]] = {
    "tensor parallel": ("tensor_inside", "tensor_across", "latency_inside", "latency_across"),
    "context parallel": ("context",),
    "expert parallel": ("exchange_inside", "exchange_across", "exchange_latency"),
    "pipeline bubble": ("imbalance", "equal_layers"),
    "pipeline transfers": ("pipeline_inside", "pipeline_across", "pipeline_latency"),
    "data parallel": (
        *("data_inside", "data_across", "data_congestion", "data_latency"),
        *("data_overlap", "shards_overlap", "weights_gather", "gather_latency"),
    ),
    "host": ("host", "host_tensor", "each_microbatch", "each_step"),
    "optimizer": ("optimizer",),
}
"""The terms of the step time that are not compute, by their part."""

_PARTS: Final = {term: part for part, terms in _TERMS.items() for term in terms}

_NOT_EACH_SLOT: Final = frozenset({"accumulation", "each_step"})
"""Terms of compute and host that do not repeat in the slots of the pipeline's bubble."""

_SLOTTED: Final = frozenset(
    {
        "compute",
        *("tensor parallel", "context parallel", "expert parallel"),
        *("host", "pipeline transfers"),
    }
)
"""Parts whose terms take m + `idle_slots` slots, of which the latter are the bubble."""


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
    fits: float
    """Probability that it fits into a device and keeps the campaign's memory headroom."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepShare:
    """A part of a predicted step."""

    part: StepPart
    share: float
    """Share of the step time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout:
    """A layout of a plan."""

    rank: int
    """1 is the best."""
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
    job: JobEstimate | None = None
    """The training job with it; None: no job was described."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BoughtProbes:
    """What the budget of a campaign pays for, if its probes are the plan's layouts in order.

    Probes that stop early and repeats of the best layouts are not predicted.
    """

    num_probes: int
    """Probes of the best layouts."""
    expected_fitting: float
    """How many of them are expected to fit into memory."""
    node_hours: float
    """Node-hours that they hold."""
    wall_time_s: float
    """Seconds that they take one after another."""
    ended_by: Literal["trials", "node_hours", "wall_time_s", "layouts"]
    """The bound that allows no further probe; layouts: every legal one is probed."""
    probe_start_s: float
    """Assumed seconds of a probe outside of its iterations."""
    iterations: int
    """Iterations of a probe, warm-up included."""
    cheap_probes: int | None = None
    """Cheap probes of layouts near the best, with all layers and the fewest micro-batches, that the
    node-hours of the budget pay for beside one probe of the best in full; below 0: they do not pay
    for that one; None: the campaign uses none."""


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
    cluster: str
    objective: Objective
    """What the layouts are ranked by, times their probability of fitting."""
    num_combinations: int
    """Combinations of the space."""
    num_legal: int
    """Layouts that the campaign may probe."""
    illegal: tuple[Exclusion, ...]
    """Combinations that each rule excludes, the most first; one may break several rules."""
    expected_fitting: float
    """Legal layouts that are expected to fit into memory: the sum of their probabilities."""
    layouts: tuple[PlannedLayout, ...]
    """The best layouts."""
    probes_needed: int | None = None
    """How many of the layouts with the largest `best_chance` to probe for a 90 % chance of one
    within 5 % of the best; None: more than are compared."""
    fits_depend_on: DecidingProperty | None = None
    """What about the trainer decides most whether the listed layouts fit; None: it is known."""
    budget: BoughtProbes
    knowledge: KnowledgeUsed
    job: TrainingJob | None
    """The training job that was described."""
    warnings: tuple[str, ...]
    auto: Mapping[str, Any] = field(default_factory=dict)
    """Choices of the knobs that the document left out, by knob."""


def make_plan(
    spec: CampaignSpec,
    *,
    legal: LegalSet | None = None,
    knowledge: Knowledge | None = None,
    software: str = "",
    top: int = DEFAULT_TOP,
    probe_start_s: float = PROBE_START_S,
    job: TrainingJob | None = None,
) -> Plan:
    """Ranks the layouts of a campaign by the predicted objective times the probability of fitting.

    `legal` is its legal set, if the caller has it already; `software` what will run it, as a
    table's source says it, empty for this project's trainer; `probe_start_s` the assumed seconds of
    a probe outside of its iterations; `job` the training job to be predicted with each listed
    layout.

    Raises:
        NoLegalLayoutError: there is no legal layout.
        SpaceInvalidError: the campaign lists a layout that is not legal.
        ModelTooLargeError: every layout would certainly run out of memory.
    """
    legal = legal or spec.legal_set(OTHER_TRAINER_SCOPES if software else None)
    spec.refuse_if_too_large(legal)
    spec = spec.warned_of_few(legal)
    predictions = LayoutPredictions(
        spec=spec, software=software, knowledge=knowledge or Knowledge()
    )
    ranked = predictions.rank(legal)
    best = [legal.layout(int(position)) for position in ranked.order[:top]]
    chances = predictions.chances(legal, ranked)
    needed = chances.probes_needed
    return Plan(
        campaign=spec.name,
        model=spec.model.name,
        cluster=spec.cluster.name,
        objective=spec.objective,
        num_combinations=legal.num_combinations,
        num_legal=len(legal),
        illegal=legal.exclusions,
        expected_fitting=float(ranked.fits.sum()),
        layouts=tuple(
            _planned(rank, layout, predictions, chances, job)
            for rank, layout in enumerate(best, start=1)
        ),
        probes_needed=needed if needed <= len(chances.best) else None,
        fits_depend_on=predictions.deciding(legal, ranked, top),
        budget=_bought(spec, legal, ranked, probe_start_s),
        knowledge=_used(predictions),
        job=job,
        warnings=(
            *spec.warnings,
            *_warnings(predictions, best, float(ranked.step_time_s[0]), probe_start_s),
        ),
        auto=auto_choices(spec.space.to_mapping()),
    )


def _planned(
    rank: int,
    layout: Layout,
    predictions: LayoutPredictions,
    chances: BestChances,
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
        best_chance=float(chances.best[rank - 1]) if rank <= len(chances.best) else None,
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
        fits=float(fits),
    )


def step_shares(layout: Layout, predictions: LayoutPredictions) -> tuple[StepShare, ...]:
    """The parts of a layout's predicted step, the largest first; parts of 0 are left out."""
    seconds: dict[StepPart, float] = defaultdict(float)
    idle = float(idle_slots(LayoutColumns.of(layout)))
    bubble = idle / (layout.num_microbatches + idle)
    for term in predictions.parts(layout):
        part = _PARTS.get(term.name, "compute")
        waiting = 0.0
        if part in _SLOTTED and term.name not in _NOT_EACH_SLOT:
            waiting = bubble * term.seconds
        seconds["pipeline bubble"] += waiting
        seconds[part] += term.seconds - waiting
    total = sum(seconds.values())
    shares = [
        StepShare(part=part, share=seconds[part] / total)
        for part in get_args(StepPart)
        if seconds[part] > 0
    ]
    return tuple(sorted(shares, key=lambda each: -each.share))


def _bought(
    spec: CampaignSpec, legal: LegalSet, ranked: RankedLayouts, probe_start_s: float
) -> BoughtProbes:
    """How many of the ranked layouts the budget pays for, one probe each."""
    probe, budget, costs = spec.probe, spec.budget, spec.probe_costs(probe_start_s)
    seconds = np.minimum(costs.seconds(ranked.step_time_s), probe.deadline_s)
    node_s = np.cumsum(seconds * legal.column("num_nodes")[ranked.order])
    seconds = np.cumsum(seconds)
    bounds = {"layouts": len(legal)}
    if budget.trials is not None:
        bounds["trials"] = budget.trials
    if budget.node_hours is not None:
        bounds["node_hours"] = int(
            np.searchsorted(node_s, budget.node_hours * SECONDS_PER_HOUR, "right")
        )
    if budget.wall_time_s is not None:
        bounds["wall_time_s"] = int(np.searchsorted(seconds, budget.wall_time_s, "right"))
    ended_by, count = min(bounds.items(), key=lambda bound: bound[1])
    return BoughtProbes(
        num_probes=count,
        expected_fitting=float(ranked.fits[:count].sum()),
        node_hours=float(node_s[count - 1]) / SECONDS_PER_HOUR if count else 0.0,
        wall_time_s=float(seconds[count - 1]) if count else 0.0,
        ended_by=ended_by,  # type: ignore[arg-type]
        probe_start_s=probe_start_s,
        iterations=probe.warmup + probe.iterations,
        cheap_probes=_bought_cheap(spec, legal, ranked, costs),
    )


def _bought_cheap(
    spec: CampaignSpec, legal: LegalSet, ranked: RankedLayouts, costs: ProbeCosts
) -> int | None:
    """See `BoughtProbes.cheap_probes`: by the mean cost of those of the best ten layouts."""
    if not spec.uses_cheap_probes or spec.budget.node_hours is None:
        return None
    node_s = []
    for position, step_s in zip(ranked.order[:_NEAR_BEST], ranked.step_time_s, strict=False):
        layout = legal.layout(int(position))
        parts = fidelities(layout, spec.model, spec.cluster)
        kept = [each for each in parts if each.keeps_memory(spec.model)]
        if not kept:  # it is cheap already
            node_s.append(costs.node_s(layout.num_nodes, float(step_s)))
            continue
        part = min(kept, key=lambda each: (each.num_microbatches, each.dp))
        ran = part.reduced(layout)
        whole_s, part_s = step_time_s(
            LayoutColumns.of_each([layout, ran]), spec.model, spec.cluster
        )
        cheap_s = float(step_s * part_s / whole_s)
        node_s.append(costs.node_s(ran.num_nodes, cheap_s, is_cheap=True))
    best = legal.layout(int(ranked.order[0]))
    full_s = min(costs.seconds(float(ranked.step_time_s[0])), spec.probe.deadline_s)
    left_node_s = spec.budget.node_hours * SECONDS_PER_HOUR - best.num_nodes * full_s
    return math.floor(left_node_s / float(np.mean(node_s)))


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
