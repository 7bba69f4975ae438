"""Job knobs in a worker's file of trainers: those that it adds, and those that it narrows."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from layout_tuner.documents.reading import (
    Problems,
    nearest,
    read_mapping,
    read_named,
    refuse_unknown,
    shown,
    word_of,
)
from layout_tuner.errors import SpaceInvalidError
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.trainers.trainer_knob import VALUE, TrainerKnob, Writing, version_numbers

MAX_DECLARED_KNOBS: Final = 32
CODE_FOLLOWS: Final = ("-c", "-e", "-lc", "-ec", "--eval")
"""Options by which shells and interpreters take code."""

_VARIABLE_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OURS: Final = "LAYOUT_TUNER_"
"""Prefix of environment variables that the worker sets."""
_IN_WRITING: Final = ("value", "arguments", "keys", "environment", "since", "before")


def variable_name_problem(name: object) -> str | None:
    """Why a program cannot get a variable of this name, or None."""
    if isinstance(name, str) and _VARIABLE_NAME.fullmatch(name) and not name.startswith(_OURS):
        return None
    return f"{shown(name)} is not the name of a variable, or begins with {_OURS}, which the worker sets"


def read_knobs(value: object, known: Mapping[str, TrainerKnob]) -> dict[str, TrainerKnob]:
    """The knobs of an entry by name; `known` are those of its adapter, which it may narrow.

    Raises:
        SpaceInvalidError: a declaration is wrong, with all that is.
    """
    given = read_mapping(value, SpaceInvalidError, "the knobs")

    def read(name: str, described: object) -> TrainerKnob:
        is_known, problems = name in known, Problems(SpaceInvalidError)
        knob = _narrowed(known[name], described) if is_known else _declared(name, described)
        for condition in knob.knob.conditions():
            problems.note(condition.unknown_name({**known, **given}), field="when")
        problems.refuse()
        return knob

    return read_named(given, read, SpaceInvalidError, "the knobs", most=MAX_DECLARED_KNOBS)


def with_values(knob: JobKnob, allowed: Sequence[JobValue]) -> JobKnob:
    """The knob with some of its values, besides its default."""
    assert knob.default is not None, "knobs of trainers have defaults"
    values = tuple(dict.fromkeys((knob.default, *allowed)))
    more: dict[str, Any] = {}
    if knob.kind == "count":
        counts = [value for value in values if isinstance(value, int)]
        more = {"minimum": min(counts), "maximum": max(counts)}
    return replace(
        knob,
        values=values,
        effects={value: each for value in values if (each := knob.effect(value)) is not None},
        needs=tuple(each for each in knob.needs if each[0] in values),
        **more,
    )


def _narrowed(known: TrainerKnob, mapping: object) -> TrainerKnob:
    given, problems = (
        read_mapping(mapping, SpaceInvalidError, "the knob"),
        Problems(SpaceInvalidError),
    )
    knob = known.knob
    if knob.kind == "count":
        of = "field of a count of the adapter"
        refuse_unknown(given, ("minimum", "maximum"), SpaceInvalidError, of)
        for name, value in given.items():
            problems.note(knob.problem(value), field=name)
        problems.refuse()
        ends: dict[str, Any] = {"minimum": knob.minimum, "maximum": knob.maximum, **given}
        inside = [each for each in knob.values if ends["minimum"] <= each <= ends["maximum"]]
        return replace(known, knob=replace(with_values(knob, inside), **ends))
    refuse_unknown(given, ("values",), SpaceInvalidError, "field of a knob of the adapter")
    values = given.get("values")
    if not isinstance(values, list) or not values:
        raise SpaceInvalidError("it is not a list of values that are allowed", field="values")
    for value in values:
        problems.note(knob.problem(value), field="values")
    problems.refuse()
    return replace(known, knob=with_values(knob, values))


def _declared(name: str, mapping: object) -> TrainerKnob:
    given = read_mapping(mapping, SpaceInvalidError, "the knob")
    own = {each: given.pop(each) for each in _IN_WRITING[1:] if each in given}
    listed = given.pop("writings", [])
    ran = given.pop("ran", [])
    knob = JobKnob.from_mapping(name, given)
    if knob.default is None:
        raise SpaceInvalidError("the field is missing", field="default")
    if not isinstance(listed, list):
        raise SpaceInvalidError(f"{shown(listed)} is not a list", field="writings")
    problems, writings = Problems(SpaceInvalidError), list[Writing]()
    for place, each in enumerate(listed):
        with problems.collecting(f"writings.{place}"):
            writings.append(_writing(each, knob))
    if own:
        with problems.collecting():
            writings.append(_writing(own, knob))
    patterns = tuple((each, None) for each in (ran if isinstance(ran, list) else [ran]))
    with problems.collecting("ran"):
        for pattern, _ in patterns:
            _check_pattern(pattern)
    problems.refuse()
    return TrainerKnob(
        knob=knob, source="the worker's file of trainers", writings=tuple(writings), ran=patterns
    )


def _writing(mapping: object, knob: JobKnob) -> Writing:
    given = read_mapping(mapping, SpaceInvalidError, "the writing")
    refuse_unknown(given, _IN_WRITING, SpaceInvalidError, "field of a writing")
    problems = Problems(SpaceInvalidError)
    if "value" in given:
        problems.note(knob.problem(given["value"]), field="value")
    words = given.get("arguments", [])
    if not isinstance(words, list) or not all(_is_text(word) for word in words):
        problems.note(f"{shown(words)} is not a list of texts", field="arguments")
    else:
        problems.note(code_problem(words, {VALUE: "the value"}), field="arguments")
    for field in ("keys", "environment"):
        with problems.collecting(field):
            pairs = read_mapping(given.get(field, {}), SpaceInvalidError, "it")
            for name, value in pairs.items():
                if not (_is_text(value) or isinstance(value, (bool, int, float))):
                    raise SpaceInvalidError(
                        f"{shown(value)} is not a text, a number or a switch", field=shown(name)
                    )
                if field == "environment" and (problem := variable_name_problem(name)):
                    raise SpaceInvalidError(problem)
            given[field] = pairs if field == "keys" else {k: word_of(v) for k, v in pairs.items()}
    for field in ("since", "before"):
        if field in given and not (_is_text(given[field]) and version_numbers(given[field])):
            problems.note(f"{shown(given[field])} is not a version such as '0.16'", field=field)
    if not (words or given["keys"] or given["environment"]):
        problems.note("it has neither arguments nor keys nor environment", field="")
    problems.refuse()
    return Writing(**{**given, "arguments": tuple(words)})


def code_problem(words: Sequence[str], named: Mapping[str, str]) -> str | None:
    """Why a value in place of a name such as `{value}` would be read as a program, or None."""
    for before, word in zip(("", *words), words, strict=False):
        found = next((each for each in named if each in word), None)
        if found is not None and before in CODE_FOLLOWS:
            return (
                f"{named[found]} would be read as code in the text after {before}; give it as an "
                "argument of its own"
            )
    return None


def offered(
    knobs: Collection[TrainerKnob],
    is_given: Callable[[TrainerKnob], bool],
    allowed: Collection[str] | None,
) -> tuple[TrainerKnob, ...]:
    """The knobs of a trainer; those that campaigns may not set have their default alone.

    They stay in the catalogue, since conditions of others may ask about them.
    """
    return tuple(
        each
        if is_given(each) and (allowed is None or each.knob.name in allowed)
        else replace(each, knob=with_values(each.knob, ()))
        for each in knobs
    )


def allowed_names(value: object, known: Collection[str]) -> tuple[str, ...]:
    """The names of knobs that campaigns may set; SpaceInvalidError for an unknown one."""
    if not isinstance(value, list):
        raise SpaceInvalidError(f"{shown(value)} is not a list of names of knobs")
    for name in value:
        if name not in known:
            raise SpaceInvalidError(f"there is no knob {shown(name)}{nearest(str(name), known)}")
    return tuple(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and "\0" not in value


def _check_pattern(pattern: object) -> None:
    try:
        if isinstance(pattern, str) and "value" in re.compile(pattern).groupindex:
            return
    except re.error as error:
        raise SpaceInvalidError(f"{shown(pattern)} is not a regular expression: {error}") from error
    raise SpaceInvalidError(f"{shown(pattern)} is not a regular expression with a group `value`")
