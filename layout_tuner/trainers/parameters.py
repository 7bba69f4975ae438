"""Parameters of a worker's trainer: what a campaign may set, with types and ranges.

The worker's owner declares them. A value reaches the program as a part of one argument, or of one
environment variable; no shell reads it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import PurePosixPath
from typing import Any, Final, Literal, Self, get_args

from layout_tuner.documents.reading import (
    Problems,
    is_line,
    is_name,
    read_choice,
    read_fields_of,
    read_mapping,
    shown,
    unknown_names,
    word_of,
)
from layout_tuner.errors import SearchSpaceError

ParameterType = Literal["int", "float", "bool", "choice", "text", "path"]
PARAMETER_TYPES: Final[tuple[ParameterType, ...]] = get_args(ParameterType)

MAX_PARAMETERS: Final = 32
MAX_VALUE_LENGTH: Final = 200

ParameterValue = int | float | bool | str

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,40}")
_ANY_LINE: Final = ".*"
_CLASS_OR_ESCAPE: Final = re.compile(r"\\.|\[(?:\\.|[^\]])*\]", re.DOTALL)
_MOST_QUANTIFIERS: Final = 2
"""A pattern without groups and with two quantifiers takes steps in the order of the square of the
value's length, and of more quantifiers or of nested ones far more."""


class ParameterInvalidError(SearchSpaceError):
    """A parameter is declared wrongly, or a campaign gives it a value that is not allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """A declared parameter; ParameterInvalidError if the declaration contradicts itself."""

    type: ParameterType
    minimum: float | None = None
    """Smallest value of an int or a float."""
    maximum: float | None = None
    """Largest value of an int or a float."""
    choices: tuple[str, ...] = ()
    """The words of a choice."""
    pattern: str = ""
    """The regular expression that a text must match as a whole."""
    below: str = ""
    """The directory that a path must lie in; the value is relative to it."""
    default: ParameterValue | None = None
    """The value where a campaign gives none; None: a campaign must give one."""

    def __post_init__(self) -> None:
        read_choice(self.type, PARAMETER_TYPES, ParameterInvalidError, field="type")
        needs = {"choice": "choices", "text": "pattern", "path": "below"}
        for kind, field in needs.items():
            if (self.type == kind) != bool(getattr(self, field)):
                verb = "needs" if self.type == kind else "cannot have"
                raise ParameterInvalidError(f"a parameter of type {self.type} {verb} {field}")
        if self.type not in ("int", "float"):
            for field in ("minimum", "maximum"):
                if getattr(self, field) is not None:
                    raise ParameterInvalidError(
                        f"a parameter of type {self.type} cannot have {field}"
                    )
        if self.minimum is not None and self.maximum is not None and self.minimum > self.maximum:
            raise ParameterInvalidError(
                f"no number is from minimum={self.minimum:g} to maximum={self.maximum:g}"
            )
        if self.below and not (is_line(self.below) and self.below.startswith("/")):
            raise ParameterInvalidError(
                f"{shown(self.below)} is not an absolute path", field="below"
            )
        try:
            re.compile(self.pattern)
        except (re.error, OverflowError, RecursionError) as error:
            raise ParameterInvalidError(
                f"{shown(self.pattern)} is not a regular expression: {error}", field="pattern"
            ) from error
        if self.default is not None and (problem := self.problem(self.default)):
            raise ParameterInvalidError(problem, field="default")

    @classmethod
    def from_mapping(cls, mapping: object) -> Self:
        """Reads a declaration. Raises ParameterInvalidError if a field is unknown or wrong."""
        values = read_mapping(mapping, ParameterInvalidError, "a parameter")
        known = [f.name for f in fields(cls)]
        if "type" not in values:
            raise ParameterInvalidError(
                f"the field is missing; it is one of {', '.join(PARAMETER_TYPES)}", field="type"
            )
        if "choices" in values:
            values["choices"] = _words(values["choices"])
        for name in ("pattern", "below"):
            if not isinstance(values.get(name, ""), str):
                raise ParameterInvalidError(f"{shown(values[name])} is not a text", field=name)
        for name in ("minimum", "maximum"):
            if values.get(name) is not None and not _is_number(values[name]):
                raise ParameterInvalidError(f"{shown(values[name])} is not a number", field=name)
        return read_fields_of(cls, values, known, ParameterInvalidError, "field of a parameter")

    def for_service(self) -> dict[str, Any]:
        """The declaration as a worker sends it, for `from_mapping`.

        The service would match a pattern while others wait: one that is not quick is left to the
        worker, and replaced by one for any line.
        """
        return {**asdict(self), "pattern": self.pattern if self.is_quick else _ANY_LINE}

    @property
    def is_quick(self) -> bool:
        """Whether its pattern is one line that cannot take long to match, whatever the value."""
        bare = _CLASS_OR_ESCAPE.sub("x", self.pattern)
        return (
            is_line(self.pattern)
            and "(" not in bare
            and sum(map(bare.count, "*+?{")) <= _MOST_QUANTIFIERS
        )

    def problem(self, value: object) -> str | None:
        """Why a value is not allowed; None: it is."""
        match self.type:
            case "bool":
                return None if isinstance(value, bool) else f"{shown(value)} is not true or false"
            case "int" | "float":
                return self._number_problem(value)
            case "choice":
                words = ", ".join(self.choices)
                return None if value in self.choices else f"{shown(value)} is not one of {words}"
            case _:
                return self._text_problem(value)

    def text(self, value: ParameterValue) -> str:
        """An allowed value as the program gets it."""
        if self.type == "path":
            return str(PurePosixPath(self.below) / str(value))
        return word_of(value)

    def _number_problem(self, value: object) -> str | None:
        if not _is_number(value) or (self.type == "int" and not isinstance(value, int)):
            return f"{shown(value)} is not {'a whole' if self.type == 'int' else 'a finite'} number"
        assert isinstance(value, (int, float))
        low, high = self.minimum, self.maximum
        if (low is not None and value < low) or (high is not None and value > high):
            return f"{shown(value)} is not from {_end(low)} to {_end(high)}"
        return None

    def _text_problem(self, value: object) -> str | None:
        """Of a text or a path: neither can pass for an option of the program."""
        if not isinstance(value, str) or not is_line(value) or len(value) > MAX_VALUE_LENGTH:
            return (
                f"{shown(value)} is not one line of text of at most {MAX_VALUE_LENGTH} characters"
            )
        if value.startswith("-"):
            return f"{shown(value)} begins with a dash, like an option"
        if self.type == "text":
            matches = re.fullmatch(self.pattern, value) is not None
            return None if matches else f"{shown(value)} does not match {self.pattern}"
        path = PurePosixPath(value)
        if not value or path.is_absolute() or ".." in path.parts:
            return f"{shown(value)} is not a path below {self.below}, without .."
        return None


def _words(value: object) -> tuple[str, ...]:
    if isinstance(value, (list, tuple)) and all(
        isinstance(each, str) and is_line(each) for each in value
    ):
        return tuple(value)
    raise ParameterInvalidError(
        f"{shown(value)} is not a list of texts (quote words like yes, no and 1)", field="choices"
    )


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return abs(value) < 1e300 if isinstance(value, int) else math.isfinite(value)


def _end(bound: float | None) -> str:
    return "any" if bound is None else f"{bound:g}"


def read_declarations(value: object) -> dict[str, Parameter]:
    """A trainer's declared parameters by name, or ParameterInvalidError with all that is wrong."""
    given = read_mapping(value, ParameterInvalidError, "the parameters")
    if len(given) > MAX_PARAMETERS:
        raise ParameterInvalidError(f"{len(given)} are more than {MAX_PARAMETERS}")
    problems = Problems(ParameterInvalidError)
    declared = {}
    for name, each in given.items():
        with problems.collecting(name if _NAME.fullmatch(name) else ""):
            if not _NAME.fullmatch(name):
                problem = f"{shown(name)} is not a name of small letters, digits and _"
                raise ParameterInvalidError(problem)
            declared[name] = Parameter.from_mapping(each)
    problems.refuse()
    return declared


def parameter_texts(
    declared: Mapping[str, Parameter], given: Mapping[str, ParameterValue]
) -> dict[str, str]:
    """A probe's parameters as the program gets them; ParameterInvalidError with all wrong ones."""
    problems = Problems(ParameterInvalidError)
    problems.add(*unknown_names(given, declared, ParameterInvalidError, "parameter"))
    texts = {}
    for name, parameter in declared.items():
        value = given.get(name, parameter.default)
        if value is None:
            problems.note("the parameter has no default, and is missing", field=name)
        elif problem := parameter.problem(value):
            problems.note(problem, field=name)
        else:
            texts[name] = parameter.text(value)
    problems.refuse()
    return texts


def parameters_of(texts: Iterable[str]) -> dict[str, ParameterValue]:
    """Parameters of options NAME=VALUE, with values as in JSON; else ParameterInvalidError."""
    given: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ParameterInvalidError(f"--parameter={text} is not NAME=VALUE")
        try:
            given[name] = json.loads(value)
        except ValueError:
            given[name] = value
    return read_parameters(given)


def read_parameters(value: object) -> dict[str, ParameterValue]:
    """A probe's parameters by name; ParameterInvalidError for too many, or none of plain value."""
    given = read_mapping(value, ParameterInvalidError, "the parameters")
    if len(given) > MAX_PARAMETERS:
        raise ParameterInvalidError(
            f"{len(given)} parameters are more than {MAX_PARAMETERS}, the most that are accepted"
        )
    for name, each in given.items():
        if not is_name(name):
            raise ParameterInvalidError("no parameter has such a name", field=shown(name))
        plain = isinstance(each, bool) or _is_number(each)
        if not plain and not (is_line(each) and len(each) <= MAX_VALUE_LENGTH):
            raise ParameterInvalidError(
                f"{shown(each)} is not a number, a switch, or one line of text of at most "
                f"{MAX_VALUE_LENGTH} characters",
                field=name if name.isidentifier() else shown(name),
            )
    return given
