"""The measurement of a probe and its environment: the part of an outcome that is compared.

Plain dataclasses of JSON values that refuse, at construction, figures that cannot be. Reading one
back (`from_mapping`) raises OutcomeInvalidError where a field is missing, unknown or of the wrong
type.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, astuple, dataclass, field, fields
from functools import cache
from typing import Any, Final, Generic, Literal, Never, Self, TypeVar, get_args

from layout_tuner.documents.dataclass_documents import (
    read_fields,
    read_list,
    read_plain,
    refuse_figures,
    refuse_unusable_texts,
    within,
)
from layout_tuner.documents.limits import visible_line
from layout_tuner.documents.reading import (
    MAX_COUNT,
    MAX_WIDTH,
    read_choice,
    shown,
    whole_number_problem,
)
from layout_tuner.errors import OutcomeInvalidError
from layout_tuner.predictions.statistics.disturbance import is_disturbed
from layout_tuner.predictions.statistics.step_times import quartiles
from layout_tuner.trainers.embedded import EMBEDDED_TRAINER
from layout_tuner.units import memory

IterationKind = Literal["warmup", "timed"]

ITERATION_KINDS: Final[tuple[IterationKind, ...]] = get_args(IterationKind)

MAX_ITERATIONS: Final = 10_000
"""Most timed iterations that a campaign's probes are asked for, and most untimed ones."""
MAX_MEASURED_ITERATIONS: Final = 2 * MAX_ITERATIONS + 100
"""Most iterations of a measurement: a probe runs a few more untimed ones until times settle."""
MAX_STAGES: Final = 1 << 16
"""Most pipeline stages of a measurement; each is a row of the database."""

MAX_BYTES: Final = 1 << 50
MAX_TOKENS: Final = MAX_COUNT * MAX_WIDTH
"""Most tokens of one step: the largest global batch of the longest sequences."""

IMPORTED_TRAINER: Final = "imported"
"""Stands for the trainer of measurements that were imported: any."""
TokenSource = Literal["counted", "assumed"]
"""counted: the trainer counted the tokens that it consumed. assumed: they are those of the layout,
which nothing has confirmed."""
TOKEN_SOURCES: Final[tuple[TokenSource, ...]] = get_args(TokenSource)

FIGURE_TOLERANCE: Final = 1e-6
"""Relative tolerance between figures that follow from each other, for rounding."""


OVER_ZERO: Final[Mapping[str, Any]] = {"over_zero": True}
"""Marks a figure that every probe measures: 0 is refused, and None unless it is the default."""
FROM_ZERO: Final[Mapping[str, Any]] = {"from_zero": True}
"""Marks a figure that may be 0."""
METRIC: Final[Mapping[str, Any]] = {"metric": True}
"""Marks a field that trials are filtered and sorted by (`protocol.metrics`)."""
LATER: Final[Mapping[str, Any]] = {"later": True}
"""Marks a field that the answers of earlier services lack."""
LONGEST: Final = "longest"
"""Key of the most characters of a text."""
MOST: Final = "most"
"""Key of the largest value of a count; the least is 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Iteration:
    """One iteration of a probe."""

    index: int
    """Position in the probe, from 0, warm-up included."""
    kind: IterationKind
    """timed: it counts. warmup: it comes before those, or is a step of another trainer that fp16
    skipped."""
    step_time_s: float
    """Seconds from barrier to barrier, of the slowest rank."""
    loss: float | None
    """Mean loss over the global batch before the step, in nats a token; None: not reported."""
    grad_norm: float | None
    """Norm of the whole model's gradient before any clipping; None where it overflowed in fp16, so
    that the step was skipped, and where it is not reported."""

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        values = read_plain(cls, read_fields(cls, mapping, "an iteration"))
        read_choice(values["kind"], ITERATION_KINDS, OutcomeInvalidError, field="kind")
        return cls(**values)


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What a probe ran on: enough to tell why two measurements differ."""

    host: str = field(metadata={LONGEST: 255})
    """Name of the node of rank 0."""
    device: str = field(metadata={LONGEST: 255})
    """Name of the device."""
    backend: str = field(metadata={LONGEST: 40})
    """Communication library: gloo, nccl or rccl."""
    python_version: str = field(metadata={LONGEST: 80})
    torch_version: str = field(metadata={LONGEST: 80})
    numpy_version: str = field(metadata={LONGEST: 80})
    git_revision: str = field(metadata={LONGEST: 80})
    """Revision of this project that ran, or "unknown"."""

    def __post_init__(self) -> None:
        refuse_unusable_texts(self, **_stated(LONGEST, Environment))

    @classmethod
    def described(cls, **texts: str) -> Self:
        """From texts of the system, of which each is made one visible line and cut.

        Drivers, /proc/cpuinfo, builds of torch and host names may say anything, which is no reason
        to refuse an outcome.
        """
        longest = _stated(LONGEST, Environment)
        return cls(**{name: visible_line(text, longest[name]) for name, text in texts.items()})

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        return cls(**read_plain(cls, read_fields(cls, mapping, "an environment")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Breakdown:
    """Where the seconds of an iteration go, each part the mean over the ranks.

    Raises:
        OutcomeInvalidError: at construction, when a part is not finite, or is negative.
    """

    compute_s: float
    """Forward and backward, communication left out."""
    tp_s: float
    """Communication over the tensor-parallel axis, as far as compute does not hide it."""
    cp_s: float = 0.0
    """Communication over the context-parallel axis, as far as compute does not hide it."""
    ep_s: float = 0.0
    """Communication between ranks that divide experts, as far as compute does not hide it."""
    pp_s: float
    """The pipeline: its bubble and its transfers."""
    dp_s: float
    """Communication over the data-parallel axis, as far as compute does not hide it."""
    optimizer_s: float
    """The optimizer's step, its communication left out."""
    unexplained_s: float
    """The rest of the iteration; under 0 where the measured parts add up to more than the whole."""

    def __post_init__(self) -> None:
        refuse_figures(self, over_zero=(), from_zero=_EXPLAINED)
        if not math.isfinite(self.unexplained_s):
            raise OutcomeInvalidError(
                f"{shown(self.unexplained_s)} is not a finite number", field="unexplained_s"
            )

    @property
    def total_s(self) -> float:
        return math.fsum(astuple(self))

    @property
    def shares(self) -> dict[str, float]:
        """Each part by name without the unit, as a share of the whole; cp and ep if above 0."""
        total_s = self.total_s
        return {
            f.name.removesuffix("_s"): getattr(self, f.name) / total_s
            for f in fields(self)
            if f.name not in SELDOM_PARTS or getattr(self, f.name)
        }

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        return cls(**read_plain(cls, read_fields(cls, mapping, "a breakdown")))


SELDOM_PARTS: Final = ("cp_s", "ep_s")
"""Parts of an iteration that are left out where they are 0."""
_EXPLAINED: Final = ("compute_s", "tp_s", *SELDOM_PARTS, "pp_s", "dp_s", "optimizer_s")
"""Parts of an iteration that were measured."""

_T = TypeVar("_T")
Lacking = TypeVar("Lacking")
"""What a figure is where an imported table lacks it: None in a record; a probe measures it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredFigures(Generic[Lacking]):
    """The fields that a measurement, its record and its row in the database have in common.

    A class takes them with `with_figures`. The row has a column of each plain one.
    """

    step_time_s: float = field(metadata={**OVER_ZERO, **METRIC})
    """Median of the timed iterations."""
    step_time_q25_s: float | Lacking = field(metadata=OVER_ZERO)
    """First quartile of the timed iterations."""
    step_time_q75_s: float | Lacking = field(metadata=OVER_ZERO)
    """Third quartile of the timed iterations."""
    tokens_per_step: int = field(metadata={MOST: MAX_TOKENS})
    """Tokens that the ranks consumed in one iteration, all replicas together."""
    tokens_per_s: float = field(metadata={**OVER_ZERO, **METRIC})
    """tokens_per_step over step_time_s."""
    tokens_per_s_per_device: float = field(metadata={**OVER_ZERO, **METRIC})
    model_tflops_per_device: float = field(metadata={**OVER_ZERO, **METRIC})
    """Work of the model, recomputation excluded."""
    hardware_tflops_per_device: float = field(metadata={**OVER_ZERO, **METRIC})
    """Work that was executed, recomputation included."""
    peak_tflops_per_device: float | Lacking = field(metadata=OVER_ZERO)
    """The denominator of mfu and hfu."""
    peak_source: str | Lacking = field(metadata={LONGEST: 200})
    """Source of the denominator, as "measured matmul (fp32)" or "table (MI250X GCD, bf16)"."""
    mfu: float | Lacking = field(metadata={**FROM_ZERO, **METRIC})
    """model_tflops_per_device over the peak."""
    hfu: float | Lacking = field(metadata={**FROM_ZERO, **METRIC})
    """hardware_tflops_per_device over the peak; over 1 is refused."""
    peak_memory_bytes: int | Lacking = field(metadata={MOST: MAX_BYTES, **METRIC})
    """The largest peak of any rank."""
    peak_memory_bytes_by_stage: tuple[int, ...]
    """The largest peak of any rank of each pipeline stage, first stage first; empty: not known by
    stage."""
    memory_kind: str | Lacking = field(metadata={LONGEST: 40})
    """"logical" (live tensors, CPU), "allocated" (the device's allocator), "reported" (another
    trainer's own figure) or "sampled" (memory in use, looked at now and then)."""
    oversubscribed: bool
    """Whether ranks shared devices; such a measurement is never ranked."""
    breakdown: Breakdown | None = None
    """The parts of step_time_s; None: another trainer, which does not tell them."""
    peak_reserved_bytes_by_stage: tuple[int, ...] = ()
    """The largest reservation of the allocator of any rank of each stage; empty on the CPU."""
    warmup_settled: bool | Lacking
    """Whether step times had settled when timing began."""
    skipped_steps: int | None = 0
    """fp16 steps, warm-up included, that the loss scaler skipped since a gradient overflowed. None:
    another trainer, whose log does not say it."""
    shortened: bool = False
    """Whether the probe was stopped early, since it was slower than the best; never the winner."""
    iterations_asked: int | Lacking
    """Timed iterations that were requested."""
    trainer: str = field(default=EMBEDDED_TRAINER, metadata={LONGEST: 64})
    """What trained; "imported" where a table was measured elsewhere."""
    trainer_version: str = field(default="", metadata={LONGEST: 64})
    """Version of another trainer than the embedded one."""
    tokens: str = "counted"
    """counted: by the trainer. assumed: from the layout; not ranked beside counted ones."""
    losses_comparable: bool = True
    """Whether every layout reads the same data in the same order, so that losses must be equal."""
    others_share: float | None = field(default=None, metadata=FROM_ZERO)
    """Share, from 0 to 1, of the time of its devices that others took during the timed iterations;
    of the device on which it is largest. None: not known."""
    throttled: bool | None = None
    """Whether heat or power held the clock of a device down during the timed iterations. None: not
    known."""
    balanced_routing: bool | None = field(default=None, metadata=LATER)
    """Whether experts got equally many tokens, in place of what the router chose. None: the model
    has no experts, or another trainer ran it."""
    expert_load: float | None = field(default=None, metadata={**OVER_ZERO, **LATER})
    """Tokens of the fullest expert over the mean of all, of a layer and micro-batch of the timed
    iterations on average. None: as of balanced_routing."""
    own_share: float | None = field(default=None, metadata={**FROM_ZERO, **LATER})
    """The part of others_share that the product's own processes took beside the ranks, at most.
    None: not known."""

    @property
    def is_disturbed(self) -> bool:
        """Whether others took so much of its devices that its times say little."""
        return is_disturbed(self.others_share, self.throttled)


def with_figures(*, lacking: str) -> Callable[[type[_T]], type[_T]]:
    """Gives a class the fields of `MeasuredFigures` as its own, before `dataclass` reads it.

    mypy reads the base class. `read_plain` and pydantic read annotations, where `lacking` is
    written in place of ` | Lacking`. Whoever makes a record knows all fields, so that only those of
    `LATER` have a default in one.
    """

    def decorate(cls: type[_T]) -> type[_T]:
        for f in fields(MeasuredFigures):
            default = MISSING if lacking and not LATER.items() <= f.metadata.items() else f.default
            setattr(cls, f.name, field(default=default, metadata=f.metadata))
            cls.__annotations__[f.name] = str(f.type).replace(" | Lacking", lacking)
        return cls

    return decorate


@dataclass(frozen=True, kw_only=True, slots=True)
@with_figures(lacking="")
class Measurement(MeasuredFigures[Never]):
    """What a completed probe measured.

    Raises:
        OutcomeInvalidError: at construction, when a figure is not finite, is negative, or is 0
            where a probe measures more; when no iteration was timed; when the throughput exceeds
            the device's peak; or when two figures contradict each other.
    """

    iterations: tuple[Iteration, ...]
    """Every iteration, warm-up included, in order."""

    def __post_init__(self) -> None:
        refuse_unusable_texts(self, **_stated(LONGEST, Measurement))
        refuse_figures(self, over_zero=self._known(_OVER_ZERO), from_zero=self._known(_FROM_ZERO))
        if (self.others_share or 0.0) > 1:
            raise OutcomeInvalidError(
                f"{shown(self.others_share)} is more than 1, all of a device's time",
                field="others_share",
            )
        if (self.own_share or 0.0) > (self.others_share or 0.0):
            raise OutcomeInvalidError(
                f"{shown(self.own_share)} is more than others_share, of which it is a part",
                field="own_share",
            )
        read_choice(self.tokens, TOKEN_SOURCES, OutcomeInvalidError, field="tokens")
        if (self.balanced_routing is None) != (self.expert_load is None):
            raise OutcomeInvalidError(
                "balanced_routing and expert_load go together: state both, or neither",
                field="expert_load",
            )
        if self.expert_load is not None and self.expert_load < 1 - FIGURE_TOLERANCE:
            raise OutcomeInvalidError(
                f"{shown(self.expert_load)} is less than 1: the fullest expert has the mean at least",
                field="expert_load",
            )
        self._refuse_impossible_counts()
        for place, iteration in enumerate(self.iterations):
            within(f"iterations.{place}", self._refuse_impossible_iteration, iteration)
            if iteration.index != place:
                raise OutcomeInvalidError(
                    f"iteration {iteration.index} is at position {place} of the measurement",
                    field="iterations",
                )
        self._refuse_another_length()
        self._refuse_beyond_peak()
        self._refuse_unequal_figures()

    def _known(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Some fields, without those that may be None and are."""
        return tuple(n for n in names if n not in _MAY_BE_NONE or getattr(self, n) is not None)

    def _refuse_impossible_counts(self) -> None:
        stages, reserved = self.peak_memory_bytes_by_stage, self.peak_reserved_bytes_by_stage
        steps = len(self.iterations)
        for name, value, low, high in (
            *(
                (name, getattr(self, name), 1, most)
                for name, most in _stated(MOST, Measurement).items()
            ),
            *(
                (f"{by_stage}.{stage}", peak, 1, MAX_BYTES)
                for by_stage in _BY_STAGE
                for stage, peak in enumerate(getattr(self, by_stage))
            ),
            ("skipped_steps", self.skipped_steps, 0, steps),
        ):
            if name == "skipped_steps" and value is None and self.trainer != EMBEDDED_TRAINER:
                continue
            if problem := whole_number_problem(value, low=low, high=high):
                raise OutcomeInvalidError(problem, field=name)
        if reserved and len(reserved) != len(stages):
            raise OutcomeInvalidError(
                f"there are figures of {len(reserved)} stages, in peak_memory_bytes_by_stage of "
                f"{len(stages)}",
                field="peak_reserved_bytes_by_stage",
            )
        for stage, (peak, held) in enumerate(zip(stages, reserved, strict=False)):
            if held < peak:
                raise OutcomeInvalidError(
                    f"{memory(peak - held)} less was reserved than the {memory(peak)} that was in use",
                    field=f"peak_reserved_bytes_by_stage.{stage}",
                )

    def _refuse_impossible_iteration(self, iteration: Iteration) -> None:
        needed = ("loss",) if self.trainer == EMBEDDED_TRAINER else ()
        known = tuple(n for n in ("loss", "grad_norm") if getattr(iteration, n) is not None)
        refuse_figures(
            iteration, over_zero=("step_time_s",), from_zero=tuple(dict.fromkeys(needed + known))
        )

    def _refuse_beyond_peak(self) -> None:
        for name in ("hfu", "mfu"):
            share = getattr(self, name)
            if share > 1:
                raise OutcomeInvalidError(
                    f"{share:.4g} of the peak ({self.peak_tflops_per_device:.4g} TFLOP/s, "
                    f"{self.peak_source}) is more than the device can do: the clock, the counted "
                    "work or the peak is wrong",
                    field=name,
                )

    @property
    def num_warmup(self) -> int:
        return sum(iteration.kind == "warmup" for iteration in self.iterations)

    def _refuse_another_length(self) -> None:
        num_timed, asked = len(self.iterations) - self.num_warmup, self.iterations_asked
        if not num_timed:
            raise OutcomeInvalidError("there is no timed iteration", field="iterations")
        problem = whole_number_problem(asked, low=num_timed + self.shortened, high=MAX_WIDTH)
        if problem is None and not self.shortened and asked != num_timed:
            problem = (
                f"{asked} iterations were asked for and {num_timed} timed, yet it is not shortened"
            )
        if problem:
            raise OutcomeInvalidError(problem, field="iterations_asked")

    def _refuse_unequal_figures(self) -> None:
        """Refuses figures that are not what others of the measurement make them."""
        timed_s = [each.step_time_s for each in self.iterations if each.kind == "timed"]
        q25_s, q50_s, q75_s = quartiles(timed_s)
        of_timed, peak = f"of the {len(timed_s)} timed iterations", self.peak_tflops_per_device
        refuse_unequal(
            self,
            step_time_s=(q50_s, f"the median {of_timed}"),
            step_time_q25_s=(q25_s, f"the first quartile {of_timed}"),
            step_time_q75_s=(q75_s, f"the third quartile {of_timed}"),
            tokens_per_s=(
                self.tokens_per_step / self.step_time_s,
                f"tokens_per_step={self.tokens_per_step} over step_time_s={self.step_time_s}",
            ),
            mfu=(self.model_tflops_per_device / peak, f"model_tflops_per_device over {peak}"),
            hfu=(self.hardware_tflops_per_device / peak, f"hardware_tflops_per_device over {peak}"),
            peak_memory_bytes=(
                max(self.peak_memory_bytes_by_stage, default=self.peak_memory_bytes),
                "the largest peak of a stage",
            ),
        )
        if self.trainer == EMBEDDED_TRAINER:
            skipped = sum(each.grad_norm is None for each in self.iterations)
            refuse_unequal(
                self, skipped_steps=(skipped, "the number of iterations without grad_norm")
            )
        total_s = self.step_time_s if self.breakdown is None else self.breakdown.total_s
        if not math.isclose(total_s, self.step_time_s, rel_tol=FIGURE_TOLERANCE):
            raise OutcomeInvalidError(
                f"the parts add up to {total_s} s, not to step_time_s={self.step_time_s}",
                field="breakdown",
            )

    def to_mapping(self) -> dict[str, Any]:
        """The document as plain JSON values; figures of experts only where there are experts."""
        values: dict[str, Any] = asdict(self)
        if self.balanced_routing is None:
            del values["balanced_routing"], values["expert_load"]
        return values

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        values = read_plain(cls, read_fields(cls, mapping, "a measurement"))
        for name in _BY_STAGE:
            if name in values:
                values[name] = tuple(read_list(values[name], name, MAX_STAGES))
        iterations = read_list(values["iterations"], "iterations", MAX_MEASURED_ITERATIONS)
        values["iterations"] = tuple(
            within(f"iterations.{place}", Iteration.from_mapping, iteration)
            for place, iteration in enumerate(iterations)
        )
        if values.get("breakdown") is not None:
            values["breakdown"] = within("breakdown", Breakdown.from_mapping, values["breakdown"])
        return cls(**values)


def routing_words(balanced_routing: bool | None, expert_load: float | None) -> str:
    """How a probe routed, for people; empty: the model has no experts."""
    if expert_load is None:
        return ""
    how = "balanced by force, not by the router" if balanced_routing else "by the router"
    return f"{how}; the fullest expert has {expert_load:.2f} times the mean"


def skipped_words(skipped_steps: int | None) -> str:
    """How many steps fp16 skipped, for people; empty: none."""
    if skipped_steps is None:
        return "not known: the trainer's log does not say whether steps were skipped"
    if skipped_steps == 1:
        return "1 step was skipped: its gradients overflowed"
    return f"{skipped_steps} steps were skipped: their gradients overflowed" * (skipped_steps > 0)


def refuse_unequal(measured: Measurement, **expected: tuple[float, str]) -> None:
    """Raises OutcomeInvalidError for a figure that differs from the value that it follows from."""
    for name, (value, what) in expected.items():
        if not math.isclose(getattr(measured, name), value, rel_tol=FIGURE_TOLERANCE):
            raise OutcomeInvalidError(
                f"{getattr(measured, name)} is not {what}, which is {value}", field=name
            )


def _marked(mark: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(f.name for f in fields(Measurement) if mark.items() <= f.metadata.items())


@cache
def _stated(key: str, kind: Any) -> Mapping[str, Any]:
    return {f.name: f.metadata[key] for f in fields(kind) if key in f.metadata}


_BY_STAGE: Final = ("peak_memory_bytes_by_stage", "peak_reserved_bytes_by_stage")
_MAY_BE_NONE: Final = tuple(f.name for f in fields(Measurement) if f.default is None)
_OVER_ZERO: Final = _marked(OVER_ZERO)
_FROM_ZERO: Final = _marked(FROM_ZERO)
