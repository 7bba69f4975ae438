"""The request of a probe and its outcome: documents of the worker protocol.

They are plain dataclasses so that the trainer, the worker, the API and the database share one
definition without sharing a library. Every field is a JSON value or another document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, Self, get_args

from layout_tuner.documents.dataclass_documents import (
    read_fields,
    read_plain,
    refuse_figures,
    refuse_unusable_texts,
    within,
)
from layout_tuner.documents.duration import MAX_DURATION_S
from layout_tuner.documents.reading import (
    MAX_WIDTH,
    is_positive_number,
    read_choice,
    shown,
    switch_problem,
    url_name_problem,
    whole_number_problem,
)
from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.predictions.statistics.step_times import MIN_WARMUP
from layout_tuner.protocol.measurement import MAX_BYTES, Environment, Measurement
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.probe_defaults import (
    DEFAULT_DEADLINE_S,
    DEFAULT_ITERATIONS,
    DEFAULT_WARMUP,
)
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.trainers.parameters import read_parameters

OutcomeState = Literal["completed", "infeasible", "failed", "cancelled"]
"""infeasible: out of memory, the layout cannot work here. failed: anything else that went wrong."""

FailureReason = Literal[
    "out_of_memory",
    "host_resource",
    "crashed",
    "timeout",
    "diverged",
    "implausible",
    "unsupported",
    "node_lost",
    "cancelled",
]
"""Why an outcome is not a measurement. host_resource: the host ran out of something else than a
device's memory: locked memory, open files or, on GPUs, memory of its own. diverged: the loss is not
finite, or off the campaign's. implausible: its figures contradict each other, the layout or the
device."""

NOT_OF_THE_LAYOUT: Final[tuple[FailureReason, ...]] = ("node_lost", "host_resource")
"""Reasons of failed trials that say nothing about their layouts: searches learn nothing of them."""

OUTCOME_STATES: Final[tuple[OutcomeState, ...]] = get_args(OutcomeState)
FAILURE_REASONS: Final[tuple[FailureReason, ...]] = get_args(FailureReason)

MAX_MESSAGE_LENGTH: Final = 10_000
MAX_NODE_LENGTH: Final = 255
MAX_LOG_LENGTH: Final = 1 << 18
"""Most characters of an outcome's texts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest:
    """One probe to run: everything that the ranks need to know."""

    model: ModelShape
    """The model to train."""
    layout: Layout
    """The layout to run."""
    seed: int = 0
    """Determines the initial weights and the tokens, which are the same under every layout."""
    warmup: int = DEFAULT_WARMUP
    """Least untimed iterations before the timed ones; more are run until step times settle."""
    iterations: int = DEFAULT_ITERATIONS
    """Timed iterations."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """Seconds from the start of the ranks until the probe is ended as a timeout."""
    memory_limit_bytes: int | None = None
    """Memory of one device; on the CPU it is enforced on each rank. None: no limit."""
    compile: bool = False
    """Whether the operations between the matrix products are compiled with torch.compile."""
    stop_above_step_time_s: float | None = None
    """Step time at which the layout would only be as good as the campaign's best: a probe that is
    slower with 95 % confidence ends early. None: it runs to its end."""
    trainer: str = EMBEDDED_TRAINER
    """What trains: the embedded trainer, or one of the worker's by its name."""
    parameters: Mapping[str, int | float | bool | str] = field(default_factory=dict)
    """Values of the trainer's parameters, which the worker checks."""
    balanced_routing: bool = True
    """Whether experts get equally many tokens, in place of what the router chooses."""
    simulation_seed: int | None = None
    """Seed of what a simulated worker draws; None: the probe is measured."""

    def __post_init__(self) -> None:
        for name, low in (("seed", 0), ("warmup", MIN_WARMUP), ("iterations", 1)):
            if problem := whole_number_problem(getattr(self, name), low=low, high=MAX_WIDTH):
                raise OutcomeInvalidError(problem, field=name)
        seed = self.simulation_seed
        if seed is not None and (problem := whole_number_problem(seed, low=0, high=MAX_WIDTH)):
            raise OutcomeInvalidError(problem, field="simulation_seed")
        if not is_positive_number(self.deadline_s) or self.deadline_s > MAX_DURATION_S:
            raise OutcomeInvalidError(
                f"{shown(self.deadline_s)} is not a number over 0, at most {MAX_DURATION_S:.0f}",
                field="deadline_s",
            )
        limit = self.memory_limit_bytes
        if limit is not None and (problem := whole_number_problem(limit, high=MAX_BYTES)):
            raise OutcomeInvalidError(problem, field="memory_limit_bytes")
        if problem := switch_problem(self.compile):
            raise OutcomeInvalidError(problem, field="compile")
        if problem := self.model.routing_problem(self.balanced_routing):
            raise OutcomeInvalidError(problem, field="balanced_routing")
        if problem := url_name_problem(self.trainer):
            raise OutcomeInvalidError(problem, field="trainer")
        within("parameters", read_parameters, self.parameters)
        above_s = self.stop_above_step_time_s
        if above_s is not None and not is_positive_number(above_s):
            raise OutcomeInvalidError(
                f"{shown(above_s)} is not a number over 0", field="stop_above_step_time_s"
            )

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        values = asdict(self) | {
            "layout": self.layout.to_mapping(),
            "model": self.model.to_mapping(),
        }
        if self.balanced_routing:
            del values["balanced_routing"]
        if self.simulation_seed is None:
            del values["simulation_seed"]
        return values

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back; SearchSpaceError if a field is missing, unknown or wrong."""
        values = read_fields(cls, mapping, "a probe request")
        values["model"] = within("model", ModelShape.from_mapping, values["model"])
        values["layout"] = within("layout", Layout.from_mapping, values["layout"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a probe ended.

    Raises:
        OutcomeInvalidError: at construction, when the parts contradict each other, or the duration
            is out of range.
    """

    state: OutcomeState
    reason: FailureReason | None = None
    """None if and only if completed."""
    message: str = ""
    """One sentence for people, on one line: what went wrong, on which rank."""
    node: str = ""
    """Node where it went wrong first."""
    log_tail: str = ""
    """Last lines that the ranks printed, whatever the outcome."""
    duration_s: float = 0.0
    """Seconds that the probe held its devices, start and end included."""
    measurement: Measurement | None = None
    """There if and only if completed."""
    environment: Environment | None = None
    """Known once the ranks are up."""

    def __post_init__(self) -> None:
        read_choice(self.state, OUTCOME_STATES, OutcomeInvalidError, field="state")
        if self.reason is not None:
            read_choice(self.reason, FAILURE_REASONS, OutcomeInvalidError, field="reason")
        refuse_unusable_texts(
            self,
            logs=("log_tail",),
            message=MAX_MESSAGE_LENGTH,
            node=MAX_NODE_LENGTH,
            log_tail=MAX_LOG_LENGTH,
        )
        refuse_figures(self, over_zero=(), from_zero=("duration_s",))
        if self.duration_s > MAX_DURATION_S:
            raise OutcomeInvalidError(
                f"{shown(self.duration_s)} s are more than {MAX_DURATION_S:.0f}, the longest that "
                "is accepted",
                field="duration_s",
            )
        completed = self.state == "completed"
        if completed != (self.measurement is not None) or completed != (self.reason is None):
            raise OutcomeInvalidError(
                f"an outcome in state {self.state!r} has reason={self.reason!r} and "
                f"{'a' if self.measurement else 'no'} measurement; a completed one has a "
                "measurement and no reason, any other a reason and no measurement"
            )
        self._refuse_shorter_than_its_iterations()
        for state, reason in _REASON_OF.items():
            if (self.state == state) != (self.reason == reason):
                raise OutcomeInvalidError(
                    f"state={self.state!r} does not go with reason={self.reason!r}: {state} is "
                    f"{reason} and nothing else"
                )

    def _refuse_shorter_than_its_iterations(self) -> None:
        iterations = () if self.measurement is None else self.measurement.iterations
        iterations_s = sum(iteration.step_time_s for iteration in iterations)
        if iterations_s > _LONGEST_SHARE * self.duration_s:
            raise OutcomeInvalidError(
                f"{shown(self.duration_s)} s are too few for {len(iterations)} iterations of "
                f"{iterations_s:.6g} s in all",
                field="duration_s",
            )

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        values = asdict(self)
        if self.measurement is not None:
            values["measurement"] = self.measurement.to_mapping()
        return values

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back; OutcomeInvalidError if a field is missing, unknown or wrong."""
        values = read_plain(cls, read_fields(cls, mapping, "an outcome"))
        for name, kind in (("measurement", Measurement), ("environment", Environment)):
            if values.get(name) is not None:
                values[name] = within(name, kind.from_mapping, values[name])
        return cls(**values)


_LONGEST_SHARE: Final = 1.5
"""Largest share of a probe's duration that its iterations may add up to: programs time their steps
themselves, and a fifth more than has passed is accepted of them."""

_REASON_OF: Final[Mapping[OutcomeState, FailureReason]] = {
    "infeasible": "out_of_memory",
    "cancelled": "cancelled",
}
"""States that have a reason of their own, which no other state has; failed has all the others."""
