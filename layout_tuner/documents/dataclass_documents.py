"""Strict reading of the documents of the worker protocol into dataclasses of JSON values.

Whole numbers become floats where a float is expected. Nothing else is converted: "3" for 3 is
refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, Field, fields
from functools import cache
from types import NoneType
from typing import Any, Final, TypeVar

from layout_tuner.documents.limits import text_problem, visible_text_problem
from layout_tuner.documents.reading import is_positive_number, read_mapping, refuse_unknown, shown
from layout_tuner.errors import OutcomeInvalidError, SearchSpaceError

_T = TypeVar("_T")


def read_fields(cls: type, mapping: object, what: str) -> dict[str, Any]:
    """The fields of a document; missing and unknown fields are refused."""
    values = read_mapping(mapping, OutcomeInvalidError, what)
    known = _fields(cls)
    refuse_unknown(values, [f.name for f in known], OutcomeInvalidError, "field")
    for f in known:
        if f.name not in values and f.default is MISSING:
            raise OutcomeInvalidError(f"{what} lacks the field", field=f.name)
    return values


def read_plain(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Refuses numbers, strings and switches of the wrong type; whole numbers become floats."""
    for f in _fields(cls):
        if f.name not in values or f.type not in _PLAIN:
            continue
        value = values[f.name]
        what, accepted = _PLAIN[f.type]
        finite = not isinstance(value, float) or math.isfinite(value)
        if type(value) not in accepted or not finite:
            raise OutcomeInvalidError(f"{shown(value)} is not {what}", field=f.name)
        if f.type in _FLOATS and value is not None:
            try:
                values[f.name] = float(value)
            except OverflowError as error:
                problem = f"{shown(value)} is not a finite number"
                raise OutcomeInvalidError(problem, field=f.name) from error
    return values


@cache
def _fields(cls: Any) -> tuple[Field[Any], ...]:
    """The fields of a dataclass, cached: a document reads the same class many times."""
    return fields(cls)


_PLAIN: Final[Mapping[object, tuple[str, tuple[type, ...]]]] = {
    "int": ("a whole number", (int,)),
    "float": ("a finite number", (int, float)),
    "str": ("a string", (str,)),
    "bool": ("true or false", (bool,)),
    "int | None": ("a whole number or null", (int, NoneType)),
    "float | None": ("a finite number or null", (int, float, NoneType)),
    "bool | None": ("true, false or null", (bool, NoneType)),
}
"""The annotations that `read_plain` checks: their name in messages, and the accepted types."""

_FLOATS: Final = ("float", "float | None")


def refuse_unusable_texts(document: Any, *, logs: Collection[str] = (), **longest: int) -> None:
    """Refuses text that cannot be stored, is too long, or is not one visible line.

    Texts among the `logs` may have several lines.
    """
    for name, most in longest.items():
        value = getattr(document, name)
        problem = text_problem(value) or (name not in logs and visible_text_problem(value)) or None
        if problem is None and len(value) > most:
            problem = f"{len(value)} characters are more than {most}, the most that is accepted"
        if problem:
            raise OutcomeInvalidError(problem, field=name)


def refuse_figures(
    document: Any, *, over_zero: tuple[str, ...], from_zero: tuple[str, ...]
) -> None:
    """Refuses figures that are not finite, negative, or 0 where they must not be."""
    for name in over_zero:
        if not is_positive_number(getattr(document, name)):
            raise OutcomeInvalidError(
                f"{shown(getattr(document, name))} is not a finite number over 0", field=name
            )
    for name in from_zero:
        value = getattr(document, name)
        if value != 0 and not is_positive_number(value):
            raise OutcomeInvalidError(
                f"{shown(value)} is not a finite number of at least 0", field=name
            )


def read_list(value: object, name: str, most: int) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise OutcomeInvalidError(f"{shown(value)} is not a list", field=name)
    if len(value) > most:
        raise OutcomeInvalidError(
            f"{len(value)} entries are more than {most}, the most that is accepted", field=name
        )
    return list(value)


def within(name: str, read: Callable[[Any], _T], value: object) -> _T:
    """`read(value)`, whose errors name the field that `value` stands in."""
    try:
        return read(value)
    except SearchSpaceError as error:
        raise error.within(name) from error
