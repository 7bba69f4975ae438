"""What a worker is asked to run, and what it answers: the documents of the worker protocol.

They are plain dataclasses so that the trainer, the worker, the API and the database share one
definition without sharing a library. Every field is a JSON value or another document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self, get_args

from search_spaces.duration import MAX_DURATION_S
from search_spaces.errors import OutcomeInvalidError
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.plain_documents import (
    read_fields,
    read_list,
    read_plain,
    refuse_figures,
    refuse_lone_surrogates,
    within,
)
from search_spaces.reading import (
    MAX_COUNT,
    MAX_WIDTH,
    is_positive_number,
    read_choice,
    shown,
    whole_number_problem,
)

OutcomeState = Literal["completed", "infeasible", "failed", "cancelled"]
"""infeasible: out of memory, the layout cannot work here. failed: anything else that went wrong."""

FailureReason = Literal[
    "out_of_memory",
    "crashed",
    "timeout",
    "diverged",
    "unsupported",
    "node_lost",
    "cancelled",
]
"""Why an outcome is not a measurement."""

IterationKind = Literal["warmup", "timed"]

OUTCOME_STATES: Final[tuple[OutcomeState, ...]] = get_args(OutcomeState)
FAILURE_REASONS: Final[tuple[FailureReason, ...]] = get_args(FailureReason)
ITERATION_KINDS: Final[tuple[IterationKind, ...]] = get_args(IterationKind)

MAX_BYTES: Final = 1 << 50
MAX_TOKENS: Final = MAX_COUNT * MAX_WIDTH
"""Most tokens of one step: the largest global batch of the longest sequences."""
MIN_WARMUP: Final = 0
DEFAULT_WARMUP: Final = 2
DEFAULT_ITERATIONS: Final = 10
DEFAULT_DEADLINE_S: Final = 300.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ProbeRequest:
    """One probe to run: everything that the ranks need to know."""

    model: ModelShape
    """What is trained."""
    layout: Layout
    """How it is laid out."""
    seed: int = 0
    """Initial weights and tokens follow from it, the same under every layout."""
    warmup: int = DEFAULT_WARMUP
    """Untimed iterations at least before the timed ones: two in any case, more until they settle."""
    iterations: int = DEFAULT_ITERATIONS
    """Timed iterations."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """Seconds from the start of the ranks until the probe is ended as a timeout."""
    memory_limit_bytes: int | None = None
    """Memory of one device; on the CPU it is enforced on each rank. None: no limit."""

    def __post_init__(self) -> None:
        for name, low in (("seed", 0), ("warmup", MIN_WARMUP), ("iterations", 1)):
            problem = whole_number_problem(getattr(self, name), low=low, high=MAX_WIDTH)
            if problem:
                raise OutcomeInvalidError(problem, field=name)
        if not is_positive_number(self.deadline_s) or self.deadline_s > MAX_DURATION_S:
            raise OutcomeInvalidError(
                f"{shown(self.deadline_s)} is not a number over 0, at most {MAX_DURATION_S:.0f}",
                field="deadline_s",
            )
        if self.memory_limit_bytes is not None:
            problem = whole_number_problem(self.memory_limit_bytes, high=MAX_BYTES)
            if problem:
                raise OutcomeInvalidError(problem, field="memory_limit_bytes")

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            SearchSpaceError: a field is missing, unknown or of the wrong type.
        """
        values = read_fields(cls, mapping, "a probe request")
        values["model"] = within("model", ModelShape.from_mapping, values["model"])
        values["layout"] = within("layout", Layout.from_mapping, values["layout"])
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One iteration of a probe."""

    index: int
    """Position in the probe, from 0, warm-up included."""
    kind: IterationKind
    """Whether it counts."""
    step_time_s: float
    """Seconds from barrier to barrier, of the slowest rank."""
    loss: float
    """Mean loss over the global batch before the step, in nats a token."""
    grad_norm: float
    """Norm of the whole model's gradient before any clipping."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing, unknown or of the wrong type.
        """
        values = read_plain(cls, read_fields(cls, mapping, "an iteration"))
        read_choice(values["kind"], ITERATION_KINDS, OutcomeInvalidError, field="kind")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What a probe ran on: enough to tell why two measurements differ."""

    host: str
    """Name of the node of rank 0."""
    device: str
    """Name of the device."""
    backend: str
    """Communication library: gloo, nccl (also RCCL)."""
    python_version: str
    torch_version: str
    numpy_version: str
    git_revision: str
    """Revision of this project that ran, or "unknown"."""

    def __post_init__(self) -> None:
        refuse_lone_surrogates(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing, unknown or of the wrong type.
        """
        return cls(**read_plain(cls, read_fields(cls, mapping, "an environment")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a completed probe measured.

    Raises:
        OutcomeInvalidError: at construction, when a figure is not finite, is negative, or is 0 where
            nothing would have been measured, or when no iteration was timed.
    """

    step_time_s: float
    """Median of the timed iterations."""
    step_time_q25_s: float
    """First quartile of the timed iterations."""
    step_time_q75_s: float
    """Third quartile of the timed iterations."""
    tokens_per_step: int
    """Tokens that the ranks consumed in one iteration, all replicas together."""
    tokens_per_s: float
    """tokens_per_step over step_time_s."""
    tokens_per_s_per_device: float
    model_tflops_per_device: float
    """Work of the model, recomputation excluded."""
    hardware_tflops_per_device: float
    """Work that was executed, recomputation included."""
    peak_tflops_per_device: float
    """The denominator of mfu and hfu."""
    peak_source: str
    """Where the denominator comes from, as "measured matmul (fp32)" or "table (MI250X GCD, bf16)"."""
    mfu: float
    """model_tflops_per_device over the peak; over 1 where a noisy CPU measured too low a peak."""
    hfu: float
    """hardware_tflops_per_device over the peak."""
    peak_memory_bytes: int
    """The largest peak of any rank."""
    peak_memory_bytes_by_stage: tuple[int, ...]
    """The largest peak of any rank of each pipeline stage, first stage first."""
    memory_kind: str
    """"logical" (live tensors, CPU) or "allocated" (the device's allocator)."""
    oversubscribed: bool
    """Whether ranks shared devices; such a measurement is never ranked."""
    iterations: tuple[Iteration, ...]
    """Every iteration, warm-up included, in order."""

    def __post_init__(self) -> None:
        refuse_lone_surrogates(self)
        refuse_figures(self, over_zero=_OVER_ZERO, from_zero=("mfu", "hfu"))
        peaks = enumerate(self.peak_memory_bytes_by_stage)
        for name, value, high in (
            ("tokens_per_step", self.tokens_per_step, MAX_TOKENS),
            ("peak_memory_bytes", self.peak_memory_bytes, MAX_BYTES),
            *((f"peak_memory_bytes_by_stage.{stage}", peak, MAX_BYTES) for stage, peak in peaks),
        ):
            problem = whole_number_problem(value, high=high)
            if problem:
                raise OutcomeInvalidError(problem, field=name)
        for place, iteration in enumerate(self.iterations):
            within(f"iterations.{place}", _refuse_impossible_iteration, iteration)
        if not any(iteration.kind == "timed" for iteration in self.iterations):
            raise OutcomeInvalidError("there is no timed iteration", field="iterations")

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing, unknown or of the wrong type.
        """
        values = read_plain(cls, read_fields(cls, mapping, "a measurement"))
        name = "peak_memory_bytes_by_stage"
        stages = tuple(read_list(values[name], name))
        for stage, peak in enumerate(stages):
            if type(peak) is not int:
                raise OutcomeInvalidError(
                    f"{shown(peak)} is not a whole number", field=f"{name}.{stage}"
                )
        iterations = read_list(values["iterations"], "iterations")
        values[name] = stages
        values["iterations"] = tuple(
            within(f"iterations.{place}", Iteration.from_mapping, iteration)
            for place, iteration in enumerate(iterations)
        )
        return cls(**values)


_OVER_ZERO: Final = (
    "step_time_s",
    "step_time_q25_s",
    "step_time_q75_s",
    "tokens_per_s",
    "tokens_per_s_per_device",
    "model_tflops_per_device",
    "hardware_tflops_per_device",
    "peak_tflops_per_device",
)
"""Figures of a measurement without which nothing was measured."""


def _refuse_impossible_iteration(iteration: Iteration) -> None:
    refuse_figures(iteration, over_zero=("step_time_s",), from_zero=("loss", "grad_norm"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a probe ended.

    Raises:
        OutcomeInvalidError: at construction, when the parts contradict each other, or the duration is
            out of range.
    """

    state: OutcomeState
    reason: FailureReason | None = None
    """None if and only if completed."""
    message: str = ""
    """One sentence for people: what went wrong, on which rank."""
    node: str = ""
    """Node where it went wrong first."""
    log_tail: str = ""
    """Last lines that the ranks printed."""
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
        refuse_lone_surrogates(self)
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
        for state, reason in _REASON_OF.items():
            if (self.state == state) != (self.reason == reason):
                raise OutcomeInvalidError(
                    f"state={self.state!r} does not go with reason={self.reason!r}: {state} is "
                    f"{reason} and nothing else"
                )

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing, unknown or of the wrong type, or the parts
                contradict each other.
        """
        values = read_plain(cls, read_fields(cls, mapping, "an outcome"))
        for name, kind in (("measurement", Measurement), ("environment", Environment)):
            if values.get(name) is not None:
                values[name] = within(name, kind.from_mapping, values[name])
        return cls(**values)


_REASON_OF: Final[Mapping[OutcomeState, FailureReason]] = {
    "infeasible": "out_of_memory",
    "cancelled": "cancelled",
}
"""States that have a reason of their own, which no other state has; failed has all the others."""
