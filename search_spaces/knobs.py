"""The values of one knob: a scalar, a list, or a range, read into a tuple of choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from search_spaces.errors import SpaceInvalidError
from search_spaces.layout import PRECISIONS, RECOMPUTE_MODES, ZERO_STAGES
from search_spaces.reading import (
    MAX_COUNT,
    read_mapping,
    refuse_unknown,
    shown,
    whole_number_problem,
)

MAX_VALUES: Final = 4096
"""Most values that one knob may have."""

WholeNumbers = int | Sequence[int] | Mapping[str, int]
"""A whole number, several, or a range: `{from: 4, to: 20, step: 2}` or `{from: 1, to: 64, times: 2}`,
both ends included."""


def read_knob(name: str, value: object) -> tuple[Any, ...]:
    """The choices of the knob `name`, in the order given.

    Raises:
        SpaceInvalidError: a value is of the wrong type or out of range, there is none, or one is
            there twice.
    """
    problem_of = _PROBLEMS.get(name, whole_number_problem)
    listed = _listed(name, value)
    if not listed:
        raise SpaceInvalidError("the list is empty; leave the knob out for its default", field=name)
    if len(listed) > MAX_VALUES:
        raise SpaceInvalidError(
            f"{len(listed)} values are more than {MAX_VALUES}, the most a knob may have", field=name
        )
    for choice in listed:
        problem = problem_of(choice)
        if problem:
            raise SpaceInvalidError(problem, field=name)
    choices = tuple(listed)
    if len(set(choices)) < len(choices):
        twice = next(choice for choice in choices if choices.count(choice) > 1)
        raise SpaceInvalidError(f"{shown(twice)} is listed more than once", field=name)
    return choices


def _listed(name: str, value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        if name in _PROBLEMS:
            raise SpaceInvalidError(
                f"{shown(value)} is not a value or a list of values", field=name
            )
        return _read_range(name, value)
    if isinstance(value, (list, tuple, range)):
        return value
    return [value]


def _read_range(name: str, value: Mapping[Any, Any]) -> Sequence[int]:
    """The numbers of `{from:, to:, step:}` or `{from:, to:, times:}`; a step of 1 if neither."""
    try:
        given = read_mapping(value, SpaceInvalidError, "the range")
        refuse_unknown(given, ("from", "to", "step", "times"), SpaceInvalidError, "range field")
    except SpaceInvalidError as error:
        raise error.within(name) from error
    missing = [end for end in ("from", "to") if end not in given]
    if missing:
        raise SpaceInvalidError(f"the range {shown(given)} has no {missing[0]!r}", field=name)
    if "step" in given and "times" in given:
        raise SpaceInvalidError(f"the range {shown(given)} has both step and times", field=name)
    for part, number in given.items():
        problem = whole_number_problem(number, low=2 if part == "times" else 1)
        if problem:
            raise SpaceInvalidError(problem, field=f"{name}.{part}")
    first, last = given["from"], given["to"]
    if first > last:
        raise SpaceInvalidError(f"the range runs from {first} down to {last}", field=name)
    if "times" not in given:
        return range(first, last + 1, given.get("step", 1))
    numbers = [first]
    while numbers[-1] * given["times"] <= last:
        numbers.append(numbers[-1] * given["times"])
    return numbers


def _word_problem(words: Sequence[str]) -> Callable[[object], str | None]:
    def problem(value: object) -> str | None:
        if isinstance(value, str) and value in words:
            return None
        return f"{shown(value)} is not one of {', '.join(words)}"

    return problem


def _zero_stage_problem(value: object) -> str | None:
    if type(value) is int and value in ZERO_STAGES:
        return None
    return f"{shown(value)} is not one of {', '.join(map(str, ZERO_STAGES))}"


def _switch_problem(value: object) -> str | None:
    return None if isinstance(value, bool) else f"{shown(value)} is not true or false"


_PROBLEMS: Final[Mapping[str, Callable[[object], str | None]]] = {
    "zero_stage": _zero_stage_problem,
    "recompute": _word_problem(RECOMPUTE_MODES),
    "sequence_parallel": _switch_problem,
    "precision": _word_problem(PRECISIONS),
}
"""Knobs that are not counts: each says why a value is not one of theirs."""

assert MAX_VALUES < MAX_COUNT, "a list of every count would be too long"
