"""What a worker is asked to run, and what it answers: the documents of the worker protocol.

They are plain dataclasses so that the trainer, the worker, the API and the database share one
definition without sharing a library. Every field is a JSON value or another document.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Final, Literal, Self, TypeVar, get_args

from search_spaces.errors import OutcomeInvalidError, SearchSpaceError
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape
from search_spaces.reading import (
    MAX_WIDTH,
    is_positive_number,
    read_choice,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)

_T = TypeVar("_T")

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
    """Untimed iterations before the timed ones."""
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
        if not is_positive_number(self.deadline_s):
            raise OutcomeInvalidError(
                f"{shown(self.deadline_s)} is not a number over 0", field="deadline_s"
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
        values = _read_names(cls, mapping, "a probe request")
        values["model"] = _within("model", ModelShape.from_mapping, values["model"])
        values["layout"] = _within("layout", Layout.from_mapping, values["layout"])
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
        values = _read_plain(cls, _read_names(cls, mapping, "an iteration"))
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

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing, unknown or of the wrong type.
        """
        return cls(**_read_plain(cls, _read_names(cls, mapping, "an environment")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """What a completed probe measured."""

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
    """model_tflops_per_device over the peak, 0 to 1."""
    hfu: float
    """hardware_tflops_per_device over the peak, 0 to 1."""
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

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing, unknown or of the wrong type.
        """
        values = _read_plain(cls, _read_names(cls, mapping, "a measurement"))
        name = "peak_memory_bytes_by_stage"
        stages = tuple(_read_list(values[name], name))
        for stage, peak in enumerate(stages):
            if type(peak) is not int:
                raise OutcomeInvalidError(
                    f"{shown(peak)} is not a whole number", field=f"{name}.{stage}"
                )
        iterations = _read_list(values["iterations"], "iterations")
        values[name] = stages
        values["iterations"] = tuple(
            _within(f"iterations.{place}", Iteration.from_mapping, iteration)
            for place, iteration in enumerate(iterations)
        )
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a probe ended."""

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
        completed = self.state == "completed"
        if completed != (self.measurement is not None) or completed != (self.reason is None):
            raise OutcomeInvalidError(
                f"an outcome in state {self.state!r} has reason={self.reason!r} and "
                f"{'a' if self.measurement else 'no'} measurement; a completed one has a "
                "measurement and no reason, any other a reason and no measurement"
            )
        if (self.state == "infeasible") != (self.reason == "out_of_memory"):
            raise OutcomeInvalidError(
                f"state={self.state!r} does not go with reason={self.reason!r}: infeasible is "
                "out_of_memory and nothing else"
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
        values = _read_plain(cls, _read_names(cls, mapping, "an outcome"))
        read_choice(values["state"], OUTCOME_STATES, OutcomeInvalidError, field="state")
        if values.get("reason") is not None:
            read_choice(values["reason"], FAILURE_REASONS, OutcomeInvalidError, field="reason")
        for name, kind in (("measurement", Measurement), ("environment", Environment)):
            if values.get(name) is not None:
                values[name] = _within(name, kind.from_mapping, values[name])
        return cls(**values)


def _read_names(cls: type, mapping: object, what: str) -> dict[str, Any]:
    """The fields of a document, once none is missing and none unknown."""
    values = read_mapping(mapping, OutcomeInvalidError, what)
    known = fields(cls)
    refuse_unknown(values, [f.name for f in known], OutcomeInvalidError, "field")
    for f in known:
        if f.name not in values and f.default is MISSING:
            raise OutcomeInvalidError(f"{what} lacks the field", field=f.name)
    return values


def _read_plain(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Refuses numbers, strings and switches of the wrong type; whole numbers become floats."""
    for f in fields(cls):
        if f.name not in values or f.type not in _PLAIN:
            continue
        value = values[f.name]
        what, accepted = _PLAIN[f.type]
        finite = not isinstance(value, float) or math.isfinite(value)
        if type(value) not in accepted or not finite:
            raise OutcomeInvalidError(f"{shown(value)} is not {what}", field=f.name)
        if f.type == "float":
            values[f.name] = _as_float(value, f.name)
    return values


def _as_float(value: float, name: str) -> float:
    try:
        return float(value)
    except OverflowError as error:
        raise OutcomeInvalidError(f"{shown(value)} is not a finite number", field=name) from error


_PLAIN: Final[Mapping[object, tuple[str, tuple[type, ...]]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a finite number", (int, float)),
    "str": ("a string", (str,)),
    "bool": ("true or false", (bool,)),
}
"""Annotations, as written above, that `_read_plain` checks."""


def _read_list(value: object, name: str) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise OutcomeInvalidError(f"{shown(value)} is not a list", field=name)
    return list(value)


def _within(name: str, read: Callable[[Any], _T], value: object) -> _T:
    """`read(value)`, whose errors name the field that `value` stands in."""
    try:
        return read(value)
    except SearchSpaceError as error:
        raise error.within(name) from error
