"""The description of a campaign: model, cluster, space, objectives, strategy and limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, Final, Self, cast

from layout_tuner.documents.dataclass_documents import within
from layout_tuner.documents.reading import (
    MAX_TEXT_LENGTH,
    Problems,
    is_line,
    read_choice,
    read_mapping,
    shown,
    unknown_names,
    url_name_problem,
    whole_number_problem,
)
from layout_tuner.errors import CampaignInvalidError, ModelTooLargeError
from layout_tuner.predictions.estimates.peak_memory import peak_memory_bytes
from layout_tuner.predictions.statistics.early_stop import LEAST_TIMED
from layout_tuner.protocol.outcome import ProbeRequest
from layout_tuner.search_spaces.campaigns.baseline import complete_baseline, read_stated_knobs
from layout_tuner.search_spaces.campaigns.campaign_settings import (
    FORECASTING_STRATEGIES,
    KNOWLEDGE_SOURCES,
    MAX_SEED,
    STRATEGIES,
    Budget,
    Constraints,
    KnowledgeSource,
    ProbeSettings,
    SimulationSettings,
    StopSettings,
    StrategyName,
    no_effect_warning,
    read_start_from,
    refuse_unbounded,
    refuse_wall_time,
)
from layout_tuner.search_spaces.campaigns.default_space import DefaultSpace
from layout_tuner.search_spaces.campaigns.fidelity import (
    PROBE_START_S,
    ProbeCosts,
    cheap_iterations,
    with_layers,
)
from layout_tuner.search_spaces.campaigns.stated_jobs import (
    MAX_LISTED,
    read_layouts,
    read_parts,
    read_searched,
    refuse_unsearched,
    with_settings,
)
from layout_tuner.search_spaces.clusters.calibration_file import MEASURED_FIELDS
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.clusters.cluster_presets import resolve_cluster
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.legality_rules import ALL_SCOPES, OTHER_TRAINER_SCOPES
from layout_tuner.search_spaces.models.foreign_model import model_words
from layout_tuner.search_spaces.models.model_presets import resolve_model
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.objectives import (
    DEFAULT_OBJECTIVES,
    AnyObjective,
    Objective,
    read_objectives,
)
from layout_tuner.search_spaces.rule import Scope
from layout_tuner.search_spaces.spaces.job_set import JobSet
from layout_tuner.search_spaces.spaces.search_space import LegalSet, SearchSpace, enumerate_legal
from layout_tuner.search_spaces.spaces.space_presets import resolve_space, space_knobs
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.adapter import TrainerJob
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER, software_named
from layout_tuner.trainers.registry import ADAPTERS
from layout_tuner.units import GIB

MAX_RUNS: Final = 100
MAX_WARNINGS: Final = 16

ESTIMATE_MARGIN: Final = 0.2
"""A campaign is refused only if every estimate, less this share, exceeds the memory. Of 454
published runs none with an estimate below 80 % of the memory ran out of it (arXiv:2411.06465); a
refusal must be at least as sure in the other direction."""

FEW_LAYOUTS: Final = 5
"""A campaign with fewer legal layouts has a warning."""

FEW: Final = "the space has few layouts:"
IMPOSSIBLE: Final = "no legal layout can have "
"""The beginning of a warning about values of job knobs."""

UNKNOWN_TRAINER: Final = "the trainer is none of "
"""The beginning of a warning of a campaign whose trainer has a name of its owner's."""

ROWS_AT_ONCE: Final = 1 << 14
"""Layouts whose memory is estimated together; one column takes 128 KiB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignSpec:
    """A campaign with all presets resolved, so that later changes of presets do not affect it.

    Raises:
        CampaignInvalidError: at construction, when a field is out of range.
    """

    name: str
    """Unique within a service: 1 to 64 of letters, digits, dot, dash, underscore."""
    model: ModelShape
    cluster: Cluster
    space: SearchSpace
    """The layouts to choose from."""
    objectives: tuple[AnyObjective, ...] = DEFAULT_OBJECTIVES
    """The first ranks the completed trials; the Pareto front is over all. The document has them as
    `objective`: one name, or a list."""
    constraints: Constraints = field(default_factory=Constraints)
    """Bounds that a layout must keep to be ranked."""
    strategy: StrategyName = "guided"
    """How layouts are proposed."""
    seed: int = 0
    """Seed of the strategy, and of the weights and tokens of each probe."""
    budget: Budget = field(default_factory=Budget)
    """When the campaign ends; required except for an exhaustive campaign."""
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    stop: StopSettings = field(default_factory=StopSettings)
    """When probes and the campaign stop, and how many layouts are measured again at the end."""
    knowledge: KnowledgeSource = "auto"
    """Whether earlier measurements of the same cluster and software calibrate the search."""
    start_from: tuple[str, ...] = ()
    """Campaigns, on any cluster, whose measurements calibrate the search."""
    baseline: Layout | None = None
    """The layout that the users run today: it is measured first, and the winner is compared with
    it. It is legal, and may lie outside of the space. The document may leave knobs out
    (`search_spaces.campaigns.baseline`)."""
    layouts: tuple[Layout, ...] = ()
    """Only these layouts of the space; empty: all of them."""
    runs: int = 1
    """How often each layout is measured, in turn, once the strategy has none left."""
    simulated: SimulationSettings | None = None
    """That simulated workers run its trials, and no others; None: it is measured. The document may
    say `true` in place of the fields."""
    warnings: tuple[str, ...] = ()
    """Messages for the user, for example about constants that had to be guessed."""

    def __post_init__(self) -> None:
        problems = Problems(CampaignInvalidError)
        problems.note(url_name_problem(self.name), field="name")
        if isinstance(self.model, ModelShape) and isinstance(self.probe, ProbeSettings):
            # Otherwise their readers have refused them.
            routing = self.model.routing_problem(self.probe.balanced_routing)
            problems.note(routing, field="probe.balanced_routing")
            if isinstance(self.space, SearchSpace):
                problem = self.probe.compile_problem(self.space.job.values("compile"))
                problems.note(problem, field="space.job.compile")
        with problems.collecting("objective"):
            object.__setattr__(self, "objectives", read_objectives(self.objectives))
        with problems.collecting():
            read_choice(self.strategy, STRATEGIES, CampaignInvalidError, field="strategy")
            refuse_unbounded(self.budget, self.strategy)
        if self.simulated is not None:
            with problems.collecting():
                refuse_wall_time(self.budget)
        with problems.collecting():
            read_choice(self.knowledge, KNOWLEDGE_SOURCES, CampaignInvalidError, field="knowledge")
        with problems.collecting("start_from"):
            object.__setattr__(self, "start_from", read_start_from(self.start_from))
        problems.note(whole_number_problem(self.runs, high=MAX_RUNS), field="runs")
        if len(self.layouts) > MAX_LISTED:
            problem = (
                f"{len(self.layouts)} layouts are more than {MAX_LISTED}; describe them as a space"
            )
            problems.note(problem, field="layouts")
        problems.note(whole_number_problem(self.seed, low=0, high=MAX_SEED), field="seed")
        with problems.collecting():
            object.__setattr__(self, "warnings", _read_warnings(self.warnings))
        problems.refuse()

    @property
    def objective(self) -> Objective:
        """The objective that ranks completed trials: the first one."""
        return cast("Objective", self.objectives[0])

    @classmethod
    def from_document(
        cls,
        document: Mapping[str, Any],
        largest_allocation: Callable[[str], int | None] = lambda _cluster: None,
    ) -> Self:
        """Reads a campaign as users write it.

        `model`, `cluster` and `space` may be presets' names, or mappings (which may start from a
        preset). Knobs that the space leaves out get every sensible choice
        (`search_spaces.campaigns.default_space`).

        `largest_allocation`: the most nodes that a worker on the cluster of a name ever had.

        Raises:
            SearchSpaceError: a field is unknown, missing or impossible; the message begins with its
                name.
        """
        return cls._read(document, largest_allocation)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads a campaign as `to_mapping` wrote it.

        It raises as `from_document`, and differs in one way: a knob that the space leaves out has
        its default, which it had when the document was stored.
        """
        return cls._read(mapping, None)

    @classmethod
    def _read(
        cls, mapping: Mapping[str, Any], largest_allocation: Callable[[str], int | None] | None
    ) -> Self:
        given = read_mapping(mapping, CampaignInvalidError, "the campaign")
        problems = Problems(CampaignInvalidError)
        of_model = model_words(name for name in given if name not in _DOCUMENT_FIELDS)
        if of_model:
            which = listed(map(shown, of_model), 5)
            problems.note(f"{which} describe the model: write them below `model`", field="model")
        others = [name for name in given if name not in of_model]
        problems.add(
            *unknown_names(others, _DOCUMENT_FIELDS, CampaignInvalidError, "campaign field")
        )
        # A wrong field is skipped here, so that one error can list all problems.
        values = {name: value for name, value in given.items() if name in _DOCUMENT_FIELDS}
        values["objectives"] = values.pop("objective", DEFAULT_OBJECTIVES)
        values["budget"], values["layouts"] = Budget(trials=1), ()
        if given.get("name") is None:
            values["name"] = "unnamed"
        warning = None
        for name in ("name", "model", "cluster", "space"):
            if given.get(name) is None:
                problems.note("the field is missing", field=name)
        if given.get("model") is not None:
            with problems.collecting("model"):
                values["model"] = resolve_model(given["model"])
        if given.get("cluster") is not None:
            with problems.collecting("cluster"):
                values["cluster"], warning = resolve_cluster(given["cluster"])
        for name, read in _SETTINGS.items():
            with problems.collecting(name):
                values[name] = read(given.get(name, _UNSTATED.get(name, {})))
        if given.get("space") is not None:
            with problems.collecting("space"):
                values["space"] = _read_space(given, values, largest_allocation)
        if given.get("baseline") is not None:
            with problems.collecting("baseline"):
                values["baseline"] = _read_baseline(given["baseline"], values)
        with problems.collecting("layouts"):
            values["layouts"] = read_layouts(given.get("layouts", ()), values)
        with problems.collecting():
            spec = cls(**{**dict.fromkeys(("model", "cluster", "space")), **values})
        problems.refuse()
        # What was stored has the warnings that it was submitted with.
        unknown = None if largest_allocation is None else _unknown_trainer(spec.probe.trainer)
        found = (warning, no_effect_warning(spec.stop, spec.strategy), unknown)
        more = [each for each in found if each and each not in spec.warnings]
        return replace(spec, warnings=(*spec.warnings, *more)) if more else spec

    def to_mapping(self) -> dict[str, Any]:
        """Everything as plain JSON values, presets written out; `from_mapping` reads it back.

        `simulated` is only there where it is simulated.
        """
        simulated = {} if self.simulated is None else {"simulated": asdict(self.simulated)}
        return {
            "name": self.name,
            "model": self.model.to_mapping(),
            "cluster": self.cluster.to_mapping(),
            "space": self.space.to_mapping(),
            "objective": self.objective if len(self.objectives) == 1 else list(self.objectives),
            "constraints": asdict(self.constraints),
            "strategy": self.strategy,
            "seed": self.seed,
            "budget": asdict(self.budget),
            "probe": self.probe.to_mapping(),
            "stop": asdict(self.stop),
            "knowledge": self.knowledge,
            "start_from": list(self.start_from),
            "baseline": None if self.baseline is None else self.baseline.to_mapping(),
            "layouts": [layout.to_mapping() for layout in self.layouts],
            "runs": self.runs,
            "warnings": list(self.warnings),
            **simulated,
        }

    def differences(self, other: CampaignSpec) -> list[str]:
        """The fields in which another campaign differs, but for what the service adds itself.

        That is the warnings, and the constants of the cluster that `calibrate` measured.
        """

        def content(spec: CampaignSpec) -> dict[str, Any]:
            cluster = spec.cluster.to_mapping().items()
            kept = {name: v for name, v in cluster if name not in (*MEASURED_FIELDS, "source")}
            return {**spec.to_mapping(), "cluster": kept, "warnings": None}

        mine, others = content(self), content(other)
        return [name for name in mine | others if mine.get(name) != others.get(name)]

    @property
    def trainer(self) -> str:
        """What its measurements name as their trainer: that of its probes, or the simulator."""
        return self.probe.trainer if self.simulated is None else self.simulated.trainer

    @property
    def software(self) -> str:
        """What runs its layouts, as estimates name it: the trainer of its probes."""
        return software_named(self.probe.trainer)

    @property
    def uses_cheap_probes(self) -> bool:
        """Whether trials may run a part of their layouts: see `ProbeSettings.fidelity`."""
        return (
            self.probe.fidelity == "auto"
            and self.budget.node_hours is not None
            and self.strategy in FORECASTING_STRATEGIES
            and len(self.objectives) == 1
            and self.runs == 1
        )

    @property
    def baseline_is_outside(self) -> bool:
        """Whether there is a baseline that is not among the layouts of the space."""
        return self.baseline is not None and not self.has_job(self.baseline)

    def has_job(self, layout: Layout) -> bool:
        """Whether a legal layout is one of the space, and its settings are among those of it."""
        return self.space.holds(layout, self.cluster.devices_per_node) and self.space.job.holds(
            layout, self.model, self.cluster
        )

    @property
    def rule_scopes(self) -> frozenset[Scope]:
        return scopes_for(self.probe.trainer)

    def job_of(self, layout: Layout) -> TrainerJob:
        return TrainerJob(
            model=self.model,
            layout=layout,
            seed=self.seed,
            warmup=self.probe.warmup,
            compile=self.probe.compile,
        )

    def legal_set(self, scopes: Collection[Scope] | None = None) -> LegalSet:
        """Every legal layout, or those that the campaign lists.

        `scopes` are those of the rules; None: for the trainer of its probes.

        Raises:
            NoLegalLayoutError: there is none; the message says which rule excluded how many.
            SpaceInvalidError: a listed layout is not legal, or not in the space.
        """
        scopes = self.rule_scopes if scopes is None else scopes
        legal = enumerate_legal(self.space, self.model, self.cluster, scopes=scopes)
        legal.refuse_if_empty()
        return self.listed(legal)

    def jobs(self, legal: LegalSet) -> LegalSet | JobSet:
        """The legal layouts with the settings that each may have: what a search proposes."""
        if not self.space.job:
            return legal
        return JobSet(legal, self.space.job, self.model, self.cluster, listed=self.layouts)

    def warned_of_space(self, legal: LegalSet, jobs: LegalSet | JobSet | None = None) -> Self:
        """The campaign, with warnings of what its space leaves out, though it asks for it.

        That is nearly every layout, or values of job knobs. `jobs` are its jobs, if the caller has
        them already.

        Raises:
            SpaceInvalidError: no legal layout has any value of a job knob but the default.
        """
        warnings = [each for each in self.warnings if not each.startswith((FEW, IMPOSSIBLE))]
        jobs = self.jobs(legal) if jobs is None and not self.layouts else jobs
        if isinstance(jobs, JobSet) and not self.layouts and len(legal):
            impossible = partial(within, "job", self.space.job.impossible)
            if sentences := within("space", impossible, jobs.settings):
                warnings.append(IMPOSSIBLE + listed(sentences, 2))
        if len(legal) < FEW_LAYOUTS and not self.layouts:
            why = [
                f"{each.rule} excludes {each.count}, as: {each.example}"
                for each in legal.exclusions
            ]
            warnings.append(
                f"{FEW} {len(legal)} of {legal.num_combinations} combinations legal"
                f"{f' ({why[0]})' if why else '; give knobs more values'}"
            )
        return self if tuple(warnings) == self.warnings else replace(self, warnings=tuple(warnings))

    def listed(self, legal: LegalSet) -> LegalSet:
        """The listed layouts, all where none is listed, without settings of jobs.

        Raises:
            SpaceInvalidError: a layout is illegal, or the space does not have a job's settings.
        """
        if not self.layouts:
            return legal
        refuse_unsearched(self.layouts, self.space.job, self.model, self.cluster)
        return within("layouts", legal.only, [each.without_job for each in self.layouts])

    @property
    def allowed_memory_bytes(self) -> float:
        """The largest peak of a device at which a layout is ranked."""
        return self.constraints.allowed_memory_bytes(self.cluster.device_memory_bytes)

    def refuse_if_too_large(
        self, legal: LegalSet | None = None, *, before_each_part: Callable[[], None] = lambda: None
    ) -> None:
        """Refuses a campaign in which every layout would certainly run out of memory.

        `legal` is the legal set, if the caller has it already. `before_each_part` is called before
        some thousand layouts are estimated; an error that it raises ends the check, for example
        after a time limit.

        Raises:
            ModelTooLargeError: the smallest estimate, less a margin, exceeds the memory of a
                device.
        """
        legal = legal or self.legal_set()
        memory = self.allowed_memory_bytes
        smallest, position = math.inf, 0
        # Parts that fit into a cache, each spread evenly over the whole: neighbouring layouts are
        # alike, so that if any layout fits, the first part very likely has one.
        num_parts = -(-len(legal) // ROWS_AT_ONCE)
        for rows in (slice(first, None, num_parts) for first in range(num_parts)):
            before_each_part()
            estimates = peak_memory_bytes(legal.columns(rows), self.model)
            row = int(estimates.argmin())
            smallest, position = min(
                (smallest, position), (float(estimates[row]), rows.start + row * rows.step)
            )
            if smallest * (1 - ESTIMATE_MARGIN) <= memory:
                return
        headroom = self.constraints.memory_headroom
        beside = f" beside the headroom of {headroom:.0%} that was asked for" if headroom else ""
        raise ModelTooLargeError(
            f"{self.model.name} is too large for every one of the {len(legal)} legal layouts: the "
            f"smallest estimate is {smallest / GIB:.2f} GiB a device "
            f"({legal.layout(position).key}), and a device of {self.cluster.name} has "
            f"{memory / GIB:.2f} GiB{beside}; allow more tp, pp or nodes, zero_stage 3, or recompute full"
        )

    def probe_costs(self, start_s: float = PROBE_START_S) -> ProbeCosts:
        """What its probes are taken to cost, with these seconds outside of their steps."""
        return ProbeCosts(
            start_s=start_s, warmup=self.probe.warmup, iterations=self.probe.iterations
        )

    @property
    def stops_some_early(self) -> bool:
        """Whether slow runs of any layouts are stopped early.

        They are not in an exhaustive campaign, which measures every layout.
        """
        is_long = self.probe.iterations > LEAST_TIMED
        return self.stop.early and self.strategy != "exhaustive" and is_long

    def stops_early(self, layout: Layout, is_repeat: bool, num_layers: int | None) -> bool:
        """Whether a slow run of the layout is stopped early.

        Besides `stops_some_early`, it is not in a repeat, which is compared with other runs; in the
        baseline, which the winner is compared with; and in a cheap probe, which does less work than
        the best one did.
        """
        is_compared = is_repeat or layout == self.baseline
        return self.stops_some_early and not is_compared and num_layers is None

    def probe_request(
        self,
        layout: Layout,
        *,
        num_layers: int | None = None,
        stop_above_step_time_s: float | None = None,
    ) -> ProbeRequest:
        """The request to a worker to probe `layout`; a cheap probe states its number of layers."""
        iterations = self.probe.iterations
        return ProbeRequest(
            model=self.model if num_layers is None else with_layers(self.model, num_layers),
            layout=layout,
            seed=self.seed,
            warmup=self.probe.warmup,
            iterations=iterations if num_layers is None else cheap_iterations(iterations),
            deadline_s=self.probe.deadline_s,
            memory_limit_bytes=self.cluster.device_memory_bytes,
            compile=self.probe.compile,
            trainer=self.probe.trainer,
            parameters=self.probe.parameters,
            stop_above_step_time_s=stop_above_step_time_s,
            balanced_routing=self.probe.balanced_routing,
            simulation_seed=None if self.simulated is None else self.simulated.seed,
        )


_DOCUMENT_FIELDS: Final = tuple(
    "objective" if f.name == "objectives" else f.name for f in fields(CampaignSpec)
)

_SETTINGS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "budget": Budget.from_mapping,
    "probe": ProbeSettings.from_mapping,
    "constraints": Constraints.from_mapping,
    "stop": StopSettings.from_mapping,
    "simulated": SimulationSettings.read,
}
"""The readers of the sections, which are optional."""

_UNSTATED: Final[Mapping[str, Any]] = {"simulated": None}
"""What a section is that the document leaves out; others have their defaults."""


def _read_space(
    given: Mapping[str, Any],
    values: Mapping[str, Any],
    largest_allocation: Callable[[str], int | None] | None,
) -> SearchSpace:
    """The space of a document.

    Knobs that it leaves out have their defaults where it was stored (no `largest_allocation`), or
    model and cluster are not readable.
    """
    model, cluster = values.get("model"), values.get("cluster")
    described = space_knobs(given["space"])
    if "job" in described:
        described["job"] = within("job", partial(read_searched, values=values), described["job"])
    # A field that could not be read is still the plain value of the document.
    if not isinstance(cluster, Cluster):
        return resolve_space(described)
    if largest_allocation is not None and isinstance(model, ModelShape):
        constraints = values.get("constraints")
        headroom = constraints if isinstance(constraints, Constraints) else Constraints()
        objectives = given.get("objective", list(DEFAULT_OBJECTIVES))
        described = DefaultSpace(
            model=model,
            cluster=cluster,
            memory_bytes=headroom.allowed_memory_bytes(cluster.device_memory_bytes),
            states_nodes=isinstance(given["cluster"], Mapping)
            and given["cluster"].get("num_nodes") is not None,
            objectives=tuple(objectives) if isinstance(objectives, list) else (objectives,),
            largest_allocation=largest_allocation,
        ).filled(described)
    return resolve_space(described, precision=cluster.default_precision)


def scopes_for(trainer: str) -> frozenset[Scope]:
    """Scopes of the rules for what a trainer runs: the limits of the embedded one are its own."""
    return ALL_SCOPES if trainer == EMBEDDED_TRAINER else OTHER_TRAINER_SCOPES


def _read_baseline(described: Any, values: Mapping[str, Any]) -> Layout | None:
    """The baseline; None where a wrong field keeps it from being checked."""
    stated = read_stated_knobs(described)
    if (parts := read_parts(values)) is None:
        return None
    space, model, cluster = parts
    probe = values.get("probe")
    scopes = scopes_for(probe.trainer) if isinstance(probe, ProbeSettings) else ALL_SCOPES
    settings = stated.pop("job", None)
    layout = complete_baseline(stated, space=space, model=model, cluster=cluster, scopes=scopes)
    if settings is None:
        return layout
    return with_settings(layout, settings, values)


def _unknown_trainer(trainer: str) -> str | None:
    """A warning about a trainer that no adapter is named after."""
    if trainer in ADAPTERS:
        return None
    return (
        f"{UNKNOWN_TRAINER}{', '.join(ADAPTERS)}: its trials wait for a worker whose file of trainers "
        f"lists {trainer!r}; correct probe.trainer if that is not meant"
    )


def _read_warnings(value: object) -> tuple[str, ...]:
    if (
        not isinstance(value, (list, tuple))
        or len(value) > MAX_WARNINGS
        or not all(is_line(warning) for warning in value)
    ):
        raise CampaignInvalidError(
            f"{shown(value)} is not a list of at most {MAX_WARNINGS} strings, each a line of "
            f"printable text of at most {MAX_TEXT_LENGTH} characters",
            field="warnings",
        )
    return tuple(value)
