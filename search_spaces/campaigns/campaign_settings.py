"""The sections of a campaign's file: budget, probe, constraints, stop and start_from."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, Literal, Self, TypeVar, cast, get_args

from layout_tuner.documents.duration import name_without_unit, read_duration_s
from layout_tuner.documents.reading import (
    Problems,
    is_line,
    is_positive_number,
    read_choice,
    read_fields_of,
    read_mapping,
    shown,
    switch_problem,
    url_name_problem,
    whole_number_problem,
)
from layout_tuner.errors import CampaignInvalidError
from layout_tuner.predictions.statistics.step_times import MIN_WARMUP
from layout_tuner.protocol.measurement import MAX_ITERATIONS
from layout_tuner.search_spaces.physical_ranges import Range
from layout_tuner.search_spaces.probe_defaults import (
    DEFAULT_DEADLINE_S,
    DEFAULT_ITERATIONS,
    DEFAULT_WARMUP,
)
from layout_tuner.terminal.plurals import figure
from layout_tuner.trainers.embedded import EMBEDDED
from layout_tuner.trainers.parameters import ParameterValue, read_parameters
from layout_tuner.trainers.simulator import SIMULATOR_VERSION, is_simulator, simulator_trainer
from layout_tuner.units import SECONDS_PER_HOUR

NODE_HOURS: Final = Range(1e-6, 1e9, "node-hours")
"""A budget in node-hours; its seconds, and sums of them, are far below the limits of floats."""

MAX_REMEASURE: Final = 20
MAX_SEED: Final = (1 << 31) - 1

StrategyName = Literal[
    "guided", "deephyper", "deephyper+memory", "model-only", "communication", "random", "exhaustive"
]
"""How layouts are proposed."""

STRATEGIES: Final[tuple[StrategyName, ...]] = get_args(StrategyName)

BENCHMARK_STRATEGIES: Final[tuple[StrategyName, ...]] = (
    "deephyper+memory",
    "model-only",
    "communication",
)
"""Strategies that benchmarks compare with; the form does not offer them."""

FORECASTING_STRATEGIES: Final = ("guided",)
"""Strategies that predict how much the remaining layouts can improve the best."""

ProbeFidelity = Literal["auto", "full"]
"""auto: cheap probes where the budget counts node-hours. full: every probe runs its whole
layout."""

PROBE_FIDELITIES: Final[tuple[ProbeFidelity, ...]] = get_args(ProbeFidelity)

T = TypeVar("T")

KnowledgeSource = Literal["auto", "none"]
"""auto: all that earlier campaigns measured on the same cluster under the same software. none: only
the campaigns that `start_from` names."""

KNOWLEDGE_SOURCES: Final[tuple[KnowledgeSource, ...]] = get_args(KnowledgeSource)
MAX_START_FROM: Final = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Budget:
    """The bounds, of which the first ends a campaign; CampaignInvalidError if out of range."""

    trials: int | None = None
    """Trials that ended, whatever their outcome."""
    node_hours: float | None = None
    """Nodes times hours that probes held them."""
    wall_time_s: float | None = None
    """Seconds that the campaign was running."""

    def __post_init__(self) -> None:
        problems = Problems(CampaignInvalidError)
        if self.trials is not None:
            problems.note(whole_number_problem(self.trials), field="trials")
        if self.node_hours is not None:
            problems.note(NODE_HOURS.problem(self.node_hours), field="node_hours")
        if self.wall_time_s is not None:
            with problems.collecting():
                seconds = read_duration_s(self.wall_time_s, field="wall_time_s")
                object.__setattr__(self, "wall_time_s", seconds)
        problems.refuse()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the bounds by name; the wall time may be written as `wall_time: 10m`."""
        return _read_section(cls, mapping, "the budget", "bound", duration="wall_time")

    def used_words(self, node_seconds: float) -> str:
        """Node-hours that probes have held, of the bound; why they may be more than it allows."""
        assert self.node_hours is not None
        used = node_seconds / SECONDS_PER_HOUR
        words = f"{figure(used)} of {self.node_hours:g} node-hours"
        if used < self.node_hours:
            return f"{words}, {figure(self.node_hours - used)} left"
        return f"{words} spent, as probes that were running went on to their ends"


def changed_budget(
    budget: Mapping[str, Any],
    changes: Mapping[str, Any],
    *,
    strategy: str,
    is_simulated: bool = False,
) -> dict[str, Any]:
    """A budget with changed bounds (None: removed); CampaignInvalidError if wrong or unbounded."""
    try:
        named = read_mapping(changes, CampaignInvalidError, "the budget")
        if named.get("wall_time", ...) is None and "wall_time_s" not in named:
            named["wall_time_s"] = named.pop("wall_time")
        name_without_unit(named, "wall_time")
        after = Budget.from_mapping({**budget, **named})
    except CampaignInvalidError as error:
        raise error.within("budget") from error
    refuse_unbounded(after, strategy)
    if is_simulated:
        refuse_wall_time(after)
    return asdict(after)


def refuse_unbounded(budget: Budget, strategy: str) -> None:
    """Raises CampaignInvalidError where neither a bound nor the strategy ends the campaign."""
    if budget == Budget() and strategy != "exhaustive":
        raise CampaignInvalidError(
            f"strategy {strategy!r} needs at least one bound of "
            f"{', '.join(f.name for f in fields(Budget))}",
            field="budget",
        )


def refuse_wall_time(budget: Budget) -> None:
    """Raises CampaignInvalidError for a budget of wall time, of a simulated campaign."""
    if budget.wall_time_s is not None:
        raise CampaignInvalidError(
            "the probes of a simulated campaign take simulated time, which a budget of wall time "
            "cannot bound; give trials or node_hours",
            field="budget.wall_time_s",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulationSettings:
    """That a campaign is simulated, and by what.

    Raises:
        CampaignInvalidError: at construction, when a number is out of range.
    """

    seed: int = 0
    """Seed of the noise, the stragglers and the failures of its probes. The nodes of a worker have
    a seed of their own."""
    version: int = SIMULATOR_VERSION
    """Version of the simulator; workers with another one get none of its trials."""

    def __post_init__(self) -> None:
        problems = Problems(CampaignInvalidError)
        for name, low in (("seed", 0), ("version", 1)):
            problem = whole_number_problem(getattr(self, name), low=low, high=MAX_SEED)
            problems.note(problem, field=name)
        problems.refuse()

    @property
    def trainer(self) -> str:
        """The simulator's name as a trainer."""
        return simulator_trainer(self.version)

    @property
    def words(self) -> str:
        """The mark of everything that comes of it, for people."""
        return f"simulated, not measured (simulator {self.version}, seed {self.seed})"

    @classmethod
    def read(cls, described: object) -> Self | None:
        """Reads a section; true is one of defaults, null and false are none."""
        if described is None or described is False:
            return None
        given = {} if described is True else described
        return _read_section(cls, cast("Any", given), "simulated", "setting")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeSettings:
    """How long each probe trains; CampaignInvalidError for a number out of range."""

    warmup: int = DEFAULT_WARMUP
    """Warm-up iterations, untimed, before the timed ones."""
    iterations: int = DEFAULT_ITERATIONS
    """Timed iterations."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """Deadline: seconds after which a probe, hung or slow, is ended as a timeout."""
    compile: bool = False
    """Whether torch.compile compiles the code between the matrix products."""
    trainer: str = EMBEDDED.name
    """What trains: the embedded trainer, or one of those that the workers' owners have listed."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    """Values of parameters that the trainer's owner has declared."""
    fidelity: ProbeFidelity = "auto"
    """Whether the search may use cheap probes (`search_spaces.campaigns.fidelity`); the layouts
    that may be the best are measured in full in any case."""
    balanced_routing: bool = True
    """Whether each expert gets the same number of tokens, in place of what a router with random
    weights chooses; false is for models with experts alone."""

    def __post_init__(self) -> None:
        problems = Problems(CampaignInvalidError)
        for name, low in (("warmup", MIN_WARMUP), ("iterations", 1)):
            number = getattr(self, name)
            problems.note(whole_number_problem(number, low=low, high=MAX_ITERATIONS), field=name)
        problems.note(switch_problem(self.compile), field="compile")
        problems.note(switch_problem(self.balanced_routing), field="balanced_routing")
        with problems.collecting():
            read_choice(self.fidelity, PROBE_FIDELITIES, CampaignInvalidError, field="fidelity")
        problem = url_name_problem(self.trainer)
        if problem is None and is_simulator(self.trainer):
            problem = (
                f"{self.trainer!r} is the simulator: leave the trainer as it is, and add "
                "`simulated: true` to the campaign"
            )
        problems.note(problem, field="trainer")
        with problems.collecting("parameters"):
            object.__setattr__(self, "parameters", read_parameters(self.parameters))
            if self.parameters and self.trainer == EMBEDDED.name:
                raise CampaignInvalidError("the embedded trainer has no parameters")
        with problems.collecting():
            seconds = read_duration_s(self.deadline_s, field="deadline_s")
            object.__setattr__(self, "deadline_s", seconds)
        problems.refuse()

    def compile_problem(self, searched: Collection[object]) -> str | None:
        """Why these values of the job knob `compile` contradict the switch, or None."""
        if self.compile and any(value is not True for value in searched):
            return "probe.compile=true compiles every job; leave it out, or search the value true alone"
        return None

    def to_mapping(self) -> dict[str, Any]:
        """The settings by name; balanced_routing only where it is not the default."""
        values = asdict(self)
        if self.balanced_routing:
            del values["balanced_routing"]
        return values

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the settings by name; the deadline may be written as `deadline: 60s`."""
        given = read_mapping(mapping, CampaignInvalidError, "the probe")
        for name in ("command", "environment", "container", "working_directory"):
            if name in given:
                raise CampaignInvalidError(
                    "a campaign names a trainer and cannot bring a program: the owner of a worker "
                    "lists programs in the file of `layout-tuner worker --trainers`",
                    field=name,
                )
        return _read_section(cls, given, "the probe", "setting", duration="deadline")


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """Bounds on measurements. A trial that breaks one is stored and shown, but not ranked.

    Raises:
        CampaignInvalidError: at construction, when a bound is out of range.
    """

    memory_headroom: float = 0.0
    """Share of a device's memory that must stay free at the peak; 0: all of it may be used."""

    def __post_init__(self) -> None:
        share = self.memory_headroom
        is_none = not isinstance(share, bool) and share == 0
        if not is_none and not (is_positive_number(share) and share < 1):
            raise CampaignInvalidError(
                f"{shown(share)} is not a share of the memory from 0 to under 1, such as 0.1",
                field="memory_headroom",
            )

    def allowed_memory_bytes(self, device_memory_bytes: int) -> float:
        """The largest peak of a device at which a layout is ranked."""
        return device_memory_bytes * (1.0 - self.memory_headroom)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        return _read_section(cls, mapping, "constraints", "constraint")


@dataclass(frozen=True, kw_only=True, slots=True)
class StopSettings:
    """When probes and the campaign stop, and how many layouts are measured again at the end.

    Raises:
        CampaignInvalidError: at construction, when a field is out of range.
    """

    early: bool = True
    """Whether a probe stops early once it is slower than the best with 95 % confidence."""
    converged_within: float | None = None
    """The campaign ends when the remaining layouts gain more than this share over the best with a
    probability under 10 %; with several objectives, of the hypervolume of the front. None: it uses
    up its budget."""
    remeasure: int = 3
    """How many of the best layouts, at most, are measured again before the winner is named. Layouts
    that differ significantly from the best one are not measured again. 0: none."""

    def __post_init__(self) -> None:
        problems = Problems(CampaignInvalidError)
        problems.note(switch_problem(self.early), field="early")
        share = self.converged_within
        if share is not None and not (is_positive_number(share) and share < 1):
            problems.note(
                f"{shown(share)} is not a share between 0 and 1, such as 0.02",
                field="converged_within",
            )
        problems.note(
            whole_number_problem(self.remeasure, low=0, high=MAX_REMEASURE), field="remeasure"
        )
        problems.refuse()

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        return _read_section(cls, mapping, "stop", "setting")


def no_effect_warning(stop: StopSettings, strategy: str) -> str | None:
    """A warning where `converged_within` has no effect with this strategy."""
    if stop.converged_within is None or strategy in FORECASTING_STRATEGIES:
        return None
    return (
        f"stop.converged_within has no effect with strategy {strategy}: the gain that is left is not "
        "predicted; the campaign uses up its budget"
    )


def read_start_from(value: object) -> tuple[str, ...]:
    """The campaigns that one starts from; CampaignInvalidError unless a list of distinct names."""
    if not isinstance(value, (list, tuple)) or not all(is_line(name) for name in value):
        raise CampaignInvalidError(
            f"{shown(value)} is not a list of campaigns' names, such as [first, second]"
        )
    if len(value) > MAX_START_FROM:
        raise CampaignInvalidError(
            f"{len(value)} campaigns are more than {MAX_START_FROM}, the most to start from"
        )
    for place, name in enumerate(value):
        if name in value[:place]:
            raise CampaignInvalidError(f"{shown(name)} is listed more than once")
    return tuple(value)


def _read_section(
    cls: type[T], mapping: Mapping[str, Any], section: str, what: str, *, duration: str = ""
) -> T:
    """Reads a section from its fields by name; all that is wrong with it is raised together.

    `duration` is a field in seconds that may also be written without the unit in its name.
    """
    values = read_mapping(mapping, CampaignInvalidError, section)
    problems = Problems(CampaignInvalidError)
    if duration:
        with problems.collecting():
            name_without_unit(values, duration)
        values.pop(duration, None)
    known = [f.name for f in fields(cast("Any", cls))]
    with problems.collecting():
        read = read_fields_of(cls, values, known, CampaignInvalidError, what)
    problems.refuse()
    return read
