"""The campaign as a user describes it: what to tune, where, over which layouts, for how long."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Final, Literal, Self, cast, get_args

from search_spaces.budget import Budget as Budget
from search_spaces.budget import changed_budget as changed_budget
from search_spaces.budget import refuse_unbounded
from search_spaces.cluster import GIB, Cluster
from search_spaces.constraints import Constraints
from search_spaces.duration import name_without_unit, read_duration_s
from search_spaces.errors import CampaignInvalidError, ModelTooLargeError, SearchSpaceError
from search_spaces.estimates.memory import peak_memory_bytes
from search_spaces.knowledge import KNOWLEDGE_SOURCES, KnowledgeSource, read_start_from
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.objectives import DEFAULT_OBJECTIVES, AnyObjective, read_objectives
from search_spaces.objectives import OBJECTIVES as OBJECTIVES
from search_spaces.objectives import Objective as Objective
from search_spaces.outcome import (
    DEFAULT_DEADLINE_S,
    DEFAULT_ITERATIONS,
    DEFAULT_WARMUP,
    MIN_WARMUP,
    ProbeRequest,
)
from search_spaces.presets.clusters import resolve_cluster
from search_spaces.presets.models import resolve_model
from search_spaces.presets.spaces import resolve_space
from search_spaces.reading import (
    MAX_TEXT_LENGTH,
    is_line,
    read_choice,
    read_mapping,
    refuse_unknown,
    shown,
    url_name_problem,
    whole_number_problem,
)
from search_spaces.space import LegalSet, SearchSpace, enumerate_legal
from search_spaces.stopping import StopSettings, unheard_warning

StrategyName = Literal["guided", "deephyper", "model-only", "random", "exhaustive"]
"""How layouts are proposed."""

STRATEGIES: Final[tuple[StrategyName, ...]] = get_args(StrategyName)

MAX_SEED: Final = (1 << 31) - 1
MAX_WARNINGS: Final = 16
MAX_ITERATIONS: Final = 10_000

ESTIMATE_MARGIN: Final = 0.2
"""How much less than its estimate a layout may really need before a campaign is refused: of 454
published runs none whose estimate was under 80 % of the memory ran out (arXiv:2411.06465), and a
refusal must err the other way."""

ROWS_AT_ONCE: Final = 1 << 14
"""Layouts whose memory is estimated together: a column of them is 128 KiB."""


@contextmanager
def _inside(name: str) -> Iterator[None]:
    """Errors of the block name the field of the campaign that they come from."""
    try:
        yield
    except SearchSpaceError as error:
        raise error.within(name) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings:
    """How long each probe trains.

    Raises:
        CampaignInvalidError: at construction, when a number is out of range.
    """

    warmup: int = DEFAULT_WARMUP
    """Untimed iterations before the timed ones."""
    iterations: int = DEFAULT_ITERATIONS
    """Timed iterations."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """Seconds after which a probe is ended as a timeout."""
    compile: bool = False
    """Whether what lies between the products goes through torch.compile."""

    def __post_init__(self) -> None:
        for name, low in (("warmup", MIN_WARMUP), ("iterations", 1)):
            problem = whole_number_problem(getattr(self, name), low=low, high=MAX_ITERATIONS)
            if problem:
                raise CampaignInvalidError(problem, field=name)
        if not isinstance(self.compile, bool):
            raise CampaignInvalidError(
                f"{shown(self.compile)} is not true or false", field="compile"
            )
        seconds = read_duration_s(self.deadline_s, field="deadline_s")
        object.__setattr__(self, "deadline_s", seconds)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the settings by name; the deadline also as `deadline: 60s`."""
        values = read_mapping(mapping, CampaignInvalidError, "the probe")
        name_without_unit(values, "deadline")
        refuse_unknown(values, [f.name for f in fields(cls)], CampaignInvalidError, "setting")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignSpec:
    """A campaign, fully resolved: nothing in it depends on a preset that may change later.

    Raises:
        CampaignInvalidError: at construction, when a field is out of range.
    """

    name: str
    """Unique within a service: 1 to 64 of letters, digits, dot, dash, underscore."""
    model: ModelShape
    """What is trained."""
    cluster: Cluster
    """Where it runs."""
    space: SearchSpace
    """The layouts to choose from."""
    objectives: tuple[AnyObjective, ...] = DEFAULT_OBJECTIVES
    """What completed trials are judged by; the first ranks, the Pareto front is over all. The document
    calls them `objective`, and a single one stands there without a list."""
    constraints: Constraints = field(default_factory=Constraints)
    """What a layout must keep to before it is ranked."""
    strategy: StrategyName = "guided"
    """How layouts are proposed."""
    seed: int = 0
    """Of the strategy, and of each probe's weights and tokens."""
    budget: Budget = field(default_factory=Budget)
    """When to end; only an exhaustive campaign may go without."""
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    """How long each probe trains."""
    stop: StopSettings = field(default_factory=StopSettings)
    """When probes and the campaign end by themselves, and what is measured again before they do."""
    knowledge: KnowledgeSource = "auto"
    """Whether earlier measurements of the same cluster and software calibrate the search."""
    start_from: tuple[str, ...] = ()
    """Campaigns whose measurements calibrate the search whatever they ran on."""
    warnings: tuple[str, ...] = ()
    """What the user should know: constants that had to be guessed."""

    def __post_init__(self) -> None:
        problem = url_name_problem(self.name)
        if problem:
            raise CampaignInvalidError(problem, field="name")
        with _inside("objective"):
            object.__setattr__(self, "objectives", read_objectives(self.objectives))
        read_choice(self.strategy, STRATEGIES, CampaignInvalidError, field="strategy")
        read_choice(self.knowledge, KNOWLEDGE_SOURCES, CampaignInvalidError, field="knowledge")
        with _inside("start_from"):
            object.__setattr__(self, "start_from", read_start_from(self.start_from))
        problem = whole_number_problem(self.seed, low=0, high=MAX_SEED)
        if problem:
            raise CampaignInvalidError(problem, field="seed")
        refuse_unbounded(self.budget, self.strategy)
        object.__setattr__(self, "warnings", _read_warnings(self.warnings))

    @property
    def objective(self) -> Objective:
        """What ranks completed trials: the first of the objectives."""
        return cast("Objective", self.objectives[0])

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads a campaign as users write it, or as `to_mapping` wrote it.

        `model`, `cluster` and `space` may be presets' names, or mappings (which may start from a
        preset).

        Raises:
            SearchSpaceError: something is unknown, missing or impossible; the message begins with
                the field.
        """
        given = read_mapping(mapping, CampaignInvalidError, "the campaign")
        refuse_unknown(given, _DOCUMENT_FIELDS, CampaignInvalidError, "campaign field")
        for name in ("name", "model", "cluster", "space"):
            if given.get(name) is None:
                raise CampaignInvalidError("the field is missing", field=name)
        values = dict(given)
        if "objective" in given:
            values["objectives"] = values.pop("objective")
        with _inside("model"):
            values["model"] = resolve_model(given["model"])
        with _inside("cluster"):
            values["cluster"], warning = resolve_cluster(given["cluster"])
        with _inside("space"):
            values["space"] = resolve_space(given["space"])
        with _inside("budget"):
            values["budget"] = Budget.from_mapping(given.get("budget", {}))
        with _inside("probe"):
            values["probe"] = ProbeSettings.from_mapping(given.get("probe", {}))
        with _inside("constraints"):
            values["constraints"] = Constraints.from_mapping(given.get("constraints", {}))
        with _inside("stop"):
            values["stop"] = StopSettings.from_mapping(given.get("stop", {}))
        spec = cls(**{**values, "warnings": given.get("warnings", ())})
        found = (warning, unheard_warning(spec.stop, spec.strategy, len(spec.objectives)))
        more = [each for each in found if each and each not in spec.warnings]
        return replace(spec, warnings=(*spec.warnings, *more)) if more else spec

    def to_mapping(self) -> dict[str, Any]:
        """Everything as plain JSON values, presets written out; `from_mapping` reads it back."""
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
            "probe": asdict(self.probe),
            "stop": asdict(self.stop),
            "knowledge": self.knowledge,
            "start_from": list(self.start_from),
            "warnings": list(self.warnings),
        }

    def legal_set(self) -> LegalSet:
        """Every legal layout.

        Raises:
            NoLegalLayoutError: there is none; the message says which rule excluded how many.
        """
        legal = enumerate_legal(self.space, self.model, self.cluster)
        legal.refuse_if_empty()
        return legal

    def refuse_if_too_large(self, legal: LegalSet | None = None) -> None:
        """Refuses a campaign in which every layout would run out of memory, beyond doubt.

        Args:
            legal: the legal set, if the caller has it already.

        Raises:
            ModelTooLargeError: even the smallest estimate, less a margin, is more than a device has.
        """
        legal = legal or self.legal_set()
        memory = self.constraints.allowed_memory_bytes(self.cluster.device_memory_bytes)
        smallest, position = math.inf, 0
        for rows in _spread_rows(len(legal)):
            estimates = peak_memory_bytes(legal.columns(rows), self.model)
            row = int(estimates.argmin())
            smallest, position = min(
                (smallest, position), (float(estimates[row]), rows.start + row * rows.step)
            )
            if smallest * (1 - ESTIMATE_MARGIN) <= memory:
                return
        raise ModelTooLargeError(
            f"{self.model.name} is too large for every one of the {len(legal)} legal layouts: the "
            f"smallest estimate is {smallest / GIB:.2f} GiB a device "
            f"({legal.layout(position).key}), and a device of {self.cluster.name} has "
            f"{memory / GIB:.2f} GiB{self._besides_headroom()}; allow more tp, pp or nodes, zero_stage 1, or recompute full"
        )

    def _besides_headroom(self) -> str:
        headroom = self.constraints.memory_headroom
        return f" beside the headroom of {headroom:.0%} that was asked for" if headroom else ""

    def probe_request(
        self, layout: Layout, *, stop_above_step_time_s: float | None = None
    ) -> ProbeRequest:
        """What a worker is asked to run for `layout`."""
        return ProbeRequest(
            model=self.model,
            layout=layout,
            seed=self.seed,
            warmup=self.probe.warmup,
            iterations=self.probe.iterations,
            deadline_s=self.probe.deadline_s,
            memory_limit_bytes=self.cluster.device_memory_bytes,
            compile=self.probe.compile,
            stop_above_step_time_s=stop_above_step_time_s,
        )


_DOCUMENT_FIELDS: Final = tuple(
    "objective" if f.name == "objectives" else f.name for f in fields(CampaignSpec)
)
"""The fields of a campaign's document."""


def _spread_rows(length: int) -> Iterator[slice]:
    """All of `length` rows in parts that fit a cache, each spread evenly over the whole.

    Neighbours are alike: where some layouts fit at all, one of the first part very likely does.
    """
    num_parts = -(-length // ROWS_AT_ONCE)
    return (slice(first, None, num_parts) for first in range(num_parts))


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
