"""What a worker is asked to run, and what it answers: the documents of the worker protocol.

They are plain dataclasses so that the trainer, the worker, the API and the database share one
definition without sharing a library. Every field is a JSON value or another document.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, Self

from search_spaces.errors import OutcomeInvalidError
from search_spaces.layout import Layout
from search_spaces.model_shape import ModelShape

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
        if self.warmup < MIN_WARMUP or self.iterations < 1:
            raise OutcomeInvalidError(
                f"warmup={self.warmup} and iterations={self.iterations} must be at least "
                f"{MIN_WARMUP} and 1"
            )
        if not self.deadline_s > 0:
            raise OutcomeInvalidError(f"deadline_s={self.deadline_s} is not over 0")

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values."""
        return asdict(self)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Reads the document back.

        Raises:
            OutcomeInvalidError: a field is missing or unknown.
        """
        values = dict(mapping)
        try:
            values["model"] = ModelShape.from_mapping(values["model"])
            values["layout"] = Layout.from_mapping(values["layout"])
            return cls(**values)
        except (KeyError, TypeError) as error:
            raise OutcomeInvalidError(f"a probe request is malformed: {error}") from error


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
