"""A job knob: what a campaign needs to know of a setting of a trainer to search it.

How a value is written for the trainer is the adapter's (`trainers.knobs`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypeVar, get_args

from layout_tuner.documents.reading import (
    MAX_WIDTH,
    Problems,
    is_line,
    read_choice,
    read_fields_of,
    read_mapping,
    shown,
    whole_number_problem,
    word_of,
)
from layout_tuner.errors import SpaceInvalidError
from layout_tuner.search_spaces.jobs.condition import Condition
from layout_tuner.search_spaces.layouts.job_settings import (
    JobValue,
    job_name_problem,
    job_value_problem,
)
from layout_tuner.search_spaces.layouts.knobs import Knob
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS

_T = TypeVar("_T")

KnobKind = Literal["switch", "word", "count"]
KNOB_KINDS: Final[tuple[KnobKind, ...]] = get_args(KnobKind)

Touched = Literal["tp", "cp", "ep", "dp", "pp", "host", "compute", "optimizer"]
"""Named groups of terms of a step: communication over an axis, work of the host, products and other
kernels, and the optimizer (`predictions.belief.job_knobs.knob_step_time`)."""
TOUCHED: Final[tuple[Touched, ...]] = get_args(Touched)

MemoryPart = Literal["weights", "gradients", "optimizer", "activations", "all"]
MEMORY_PARTS: Final[tuple[MemoryPart, ...]] = get_args(MemoryPart)

Losses = Literal["same", "rounding", "other"]
"""What a knob does to a run's losses: nothing but the order of sums; other roundings of the same
mathematics; other numbers, so that it is compared as a precision is."""
LOSSES: Final[tuple[Losses, ...]] = get_args(Losses)

NO_EFFECT_LOG_SD: Final = math.log(1.15)
"""Spread of the effect of a value of which nothing is published: "no effect, 15 %"."""

_OF_80_PERCENT: Final = 1.2816
"""Standard deviations of a normal distribution on either side of its middle 80 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KnobEffect:
    """What one value of a knob is expected to do, compared with the default."""

    touches: tuple[Touched, ...] = ()
    """The terms of the step that it scales, as far as they are exposed; empty: the knob's."""
    factor: float = 1.0
    """Expected factor on these terms."""
    log_sd: float = NO_EFFECT_LOG_SD
    """Standard deviation of its logarithm."""
    memory_bytes: float = 0.0
    """Bytes that are added to the peak of a device; negative: they are saved."""
    memory_of: MemoryPart = "all"
    """The part of the peak that `memory_factor` scales."""
    memory_factor: float = 1.0
    memory_log_sd: float = 0.0
    """Standard deviation of the change of memory, as a share of that part."""
    source: str = ""
    """Where the effect was published or measured; empty: nothing is known."""

    def __post_init__(self) -> None:
        problems = Problems(SpaceInvalidError)
        for each in self.touches:
            with problems.collecting():
                read_choice(each, TOUCHED, SpaceInvalidError, field="touches")
        with problems.collecting():
            read_choice(self.memory_of, MEMORY_PARTS, SpaceInvalidError, field="memory_of")
        ranges = {
            "factor": (0.01, 100.0),
            "log_sd": (0.0, 5.0),
            "memory_bytes": (-1e15, 1e15),
            "memory_factor": (0.01, 100.0),
            "memory_log_sd": (0.0, 5.0),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                problems.note(f"{shown(value)} is not a number", field=name)
            elif not low <= value <= high:
                problems.note(f"{shown(value)} is not from {low:g} to {high:g}", field=name)
        if self.source and not is_line(self.source):
            problems.note(f"{shown(self.source)} is not a line of text", field="source")
        problems.refuse()

    @property
    def interval(self) -> tuple[float, float]:
        """The factors between which the true one is with 80 %."""
        width = math.exp(_OF_80_PERCENT * self.log_sd)
        return self.factor / width, self.factor * width

    @classmethod
    def from_mapping(cls, mapping: object) -> Self:
        values = read_mapping(mapping, SpaceInvalidError, "the effect")
        values["touches"] = _words(values.get("touches", ()), "touches")
        known = [each.name for each in fields(cls)]
        return read_fields_of(cls, values, known, SpaceInvalidError, "field of an effect")

    def to_mapping(self) -> dict[str, Any]:
        """The fields that are not at their defaults."""
        return {
            each.name: list(value) if isinstance(value, tuple) else value
            for each in fields(self)
            if (value := getattr(self, each.name)) != each.default
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class JobKnob:
    """A knob of a trainer.

    Raises:
        SpaceInvalidError: at construction, when the declaration contradicts itself.
    """

    name: str
    kind: KnobKind
    values: tuple[JobValue, ...]
    """Its values; of a count, those that are worth trying. A switch has false and true."""
    default: JobValue | None = None
    """The trainer's own value, which no job states; None: it is unknown, as where a table's column
    was declared a knob, and a job that states no value has none."""
    minimum: int = 0
    """Least value of a count."""
    maximum: int = MAX_WIDTH
    """Largest value of a count."""
    when: Condition | None = None
    """When the trainer has it; where it does not hold the knob has its default. None: always."""
    needs: tuple[tuple[JobValue, Condition], ...] = ()
    """When the trainer has some of the values, besides `when`; where it does not hold the knob has
    its default."""
    touches: tuple[Touched, ...] = ()
    """The terms of the step that a value without an effect of its own may change; empty: nothing
    is known of them, and it may change the whole step."""
    effects: Mapping[JobValue, KnobEffect] | tuple[tuple[JobValue, KnobEffect], ...] = ()
    """What values are expected to do; kept as pairs, so that the knob can be hashed."""
    losses: Losses = "same"
    help: str = ""

    def __post_init__(self) -> None:
        pairs = tuple(self.effects.items() if isinstance(self.effects, Mapping) else self.effects)
        object.__setattr__(self, "effects", pairs)
        problems = Problems(SpaceInvalidError)
        problems.note(job_name_problem(self.name), field="name")
        if self.name in LAYOUT_FIELDS:
            problem = f"{self.name} is a field of the layout: search it beside `job`, not below it"
            problems.note(problem, field="name")
        for name, known in (("kind", KNOB_KINDS), ("losses", LOSSES)):
            with problems.collecting():
                read_choice(getattr(self, name), known, SpaceInvalidError, field=name)
        for each in self.touches:
            with problems.collecting():
                read_choice(each, TOUCHED, SpaceInvalidError, field="touches")
        for name in ("minimum", "maximum"):
            problems.note(
                whole_number_problem(getattr(self, name), low=0, high=MAX_WIDTH), field=name
            )
        if self.help and not is_line(self.help):
            problems.note(f"{shown(self.help)} is not a line of text", field="help")
        problems.refuse()
        if not self.values:
            problems.note("there is no value", field="values")
        for value in self.values:
            problems.note(self._type_problem(value), field="values")
        if self.default is not None:
            problems.note(self._type_problem(self.default), field="default")
        for value, _ in pairs:
            problems.note(self._type_problem(value), field="effects")
        for value, _ in self.needs:
            problems.note(self._type_problem(value), field="needs")
        problems.refuse()

    def kind_problem(self, value: object) -> str | None:
        """Why no knob of its kind can have this value, or None."""
        if problem := job_value_problem(value):
            return problem
        kind: KnobKind = (
            "switch" if isinstance(value, bool) else "count" if isinstance(value, int) else "word"
        )
        if kind != self.kind:
            return f"{shown(value)} is not a {self.kind}, which {self.name} is"
        return None

    def _type_problem(self, value: object) -> str | None:
        if problem := self.kind_problem(value):
            return problem
        if (
            self.kind == "count"
            and isinstance(value, int)
            and not self.minimum <= value <= self.maximum
        ):
            return f"{value} is not from {self.minimum} to {self.maximum}"
        return None

    def problem(self, value: object) -> str | None:
        """Why a job cannot have this value, or None."""
        if problem := self._type_problem(value):
            return problem
        if self.kind != "count" and value not in self.every_value:
            words = [word_of(each) for each in self.every_value]
            only = ", the only value that its trainer allows" if len(words) == 1 else ""
            return f"{shown(value)} is not one of {', '.join(words)}{only}"
        return None

    def conditions(self, value: JobValue | None = None) -> list[Condition]:
        """All conditions of the knob, or those of one of its values."""
        of_values = [each for known, each in self.needs if value is None or _is_same(known, value)]
        return of_values if self.when is None else [self.when, *of_values]

    def effect(self, value: JobValue) -> KnobEffect | None:
        """What a value is expected to do; None: nothing is stated of it."""
        found = (each for known, each in self._pairs if _is_same(known, value))
        return next(found, None)

    @property
    def _pairs(self) -> tuple[tuple[JobValue, KnobEffect], ...]:
        assert isinstance(self.effects, tuple), "__post_init__ makes pairs of it"
        return self.effects

    @property
    def every_value(self) -> tuple[JobValue, ...]:
        """The default, and then the values."""
        first = () if self.default is None else (self.default,)
        return tuple(dict.fromkeys((*first, *self.values)))

    def value_of(self, settings: Mapping[str, JobValue]) -> JobValue | None:
        """The value that a job has; None: it states none, and the trainer's own is unknown."""
        return settings.get(self.name, self.default)

    def is_default(self, value: JobValue) -> bool:
        return self.default is not None and _is_same(value, self.default)

    @classmethod
    def from_mapping(cls, name: str, mapping: object) -> Self:
        """Reads a declaration; SpaceInvalidError if a field is unknown or wrong."""
        values = read_mapping(mapping, SpaceInvalidError, "the knob")
        values["name"] = name
        if "kind" in values:
            read_choice(values["kind"], KNOB_KINDS, SpaceInvalidError, field="kind")
        if "values" in values:
            values["values"] = _listed(values["values"])
        elif values.get("kind") == "switch":
            values["values"] = (False, True)
        values["touches"] = _words(values.get("touches", ()), "touches")
        if values.get("when") is not None:
            try:
                values["when"] = Condition.read(values["when"])
            except SpaceInvalidError as error:
                raise error.within("when") from error
        if "effects" in values:
            values["effects"] = _pairs(values["effects"], "effects", _effect)
        if "needs" in values:
            values["needs"] = _pairs(values["needs"], "needs", _need)
        for needed in ("kind", "values"):
            if needed not in values:
                raise SpaceInvalidError("the field is missing", field=needed)
        known = [each.name for each in fields(cls)]
        return read_fields_of(cls, values, known, SpaceInvalidError, "field of a knob")

    def to_mapping(self) -> dict[str, Any]:
        """The fields that are not at their defaults; `from_mapping` reads them back."""
        mapping: dict[str, Any] = {"kind": self.kind, "values": list(self.values)}
        if self.default is not None:
            mapping["default"] = self.default
        if self.kind == "count":
            mapping |= {"minimum": self.minimum, "maximum": self.maximum}
        if self.when is not None:
            mapping["when"] = self.when.text
        if self.needs:
            mapping["needs"] = [{"value": value, "when": each.text} for value, each in self.needs]
        if self.touches:
            mapping["touches"] = list(self.touches)
        if self._pairs:
            mapping["effects"] = [
                {"value": value, **effect.to_mapping()} for value, effect in self._pairs
            ]
        if self.losses != "same":
            mapping["losses"] = self.losses
        return mapping | ({"help": self.help} if self.help else {})


def as_layout_knob(name: str, knob: JobKnob) -> Knob:
    """The knob as columns, filters and plots have those of layouts, under a name of theirs."""
    return Knob(
        name=name,
        default=knob.every_value[0],
        choices=() if knob.kind == "count" else knob.every_value,
        label=knob.name,
        word=knob.name,
        heading=knob.name,
    )


def _is_same(one: JobValue, other: JobValue) -> bool:
    """Whether two values are the same: 1 is not true."""
    return type(one) is type(other) and one == other


def _listed(value: object) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _words(value: object, field: str) -> tuple[Any, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise SpaceInvalidError(f"{shown(value)} is not a list of words", field=field)
    return tuple(value)


def _pairs(
    value: object, field: str, read: Callable[[dict[str, Any]], tuple[JobValue, _T]]
) -> tuple[tuple[JobValue, _T], ...]:
    """What a list of mappings says of values; a wrong one is named by its place in `field`."""
    problems, pairs = Problems(SpaceInvalidError), []
    for place, each in enumerate(_listed(value)):
        with problems.collecting(f"{field}.{place}"):
            pairs.append(read(read_mapping(each, SpaceInvalidError, f"the {field[:-1]}")))
    problems.refuse()
    return tuple(pairs)


def _effect(given: dict[str, Any]) -> tuple[JobValue, KnobEffect]:
    if "value" not in given:
        raise SpaceInvalidError("the field is missing", field="value")
    return given.pop("value"), KnobEffect.from_mapping(given)


def _need(given: dict[str, Any]) -> tuple[JobValue, Condition]:
    if given.keys() != {"value", "when"}:
        raise SpaceInvalidError("it has the fields value and when")
    return given["value"], Condition.read(given["when"])
