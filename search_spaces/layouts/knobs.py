"""Knobs: the description of each field of a layout, and its choices in a search space.

`search_spaces.layouts.layout.KNOBS` is the table of knobs. Filters, sort keys, options, columns and
the checks of values are loops over it. The choices of a knob are a scalar, a list or a range.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import sha256
from typing import Any, Final, Literal

from layout_tuner.documents.not_covered import known_word
from layout_tuner.documents.reading import (
    MAX_COUNT,
    read_mapping,
    refuse_all,
    refuse_unknown,
    shown,
    switch_problem,
    whole_number_problem,
    word_of,
)
from layout_tuner.errors import SpaceInvalidError

TableColumn = Literal["stated", "may_be_empty", "if_not_default", "derived"]
"""How measurement tables contain a knob: every row states it; published tables leave it empty, and
the default is assumed; the column exists only if some row differs from the default; there is no
column, since the value follows from others."""

MAX_VALUES: Final = 4096
"""Most values that one knob may have."""

assert MAX_VALUES < MAX_COUNT, "a list of every count would be too long"

TEXT_BITS: Final = 48
"""Bits of the code of a free text; a float holds it exactly."""

_METADATA: Final = "knob"


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """A field of a layout."""

    name: str
    default: Any
    choices: tuple[Any, ...] = ()
    """Its values; empty: every whole number from 1. Of a knob of free text, its words."""
    parse: Callable[[object], str] | None = None
    """Returns the canonical text of a value, or raises a ValueError whose sentence begins with the
    value. With its default as the only choice it is a knob of free text."""
    help: str = ""
    """Help text of its command-line option."""
    label: str
    """Its name in a report."""
    word: str
    """Its name before its value in a line of text: "tp" in "tp 2"."""
    heading: str = ""
    """Heading of its column in tables of layouts. If empty, the knob has no column, and a row names
    it where it is not the default."""
    is_shown: bool = True
    """Whether texts show it by itself, as opposed to a part of another knob's value."""
    table_column: TableColumn = "if_not_default"
    is_new: bool = False
    """Whether documents leave it out at its default, and so are those of releases without it."""

    @property
    def is_count(self) -> bool:
        """Whether its values are whole numbers from 1."""
        return not self.choices

    @property
    def is_text(self) -> bool:
        """Whether its values are texts of a grammar, beside its words."""
        return self.parse is not None and len(self.choices) == 1

    @property
    def is_switch(self) -> bool:
        return isinstance(self.default, bool)

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers, as opposed to words and switches."""
        return type(self.default) is int

    @property
    def option(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def problem(self, value: object) -> str | None:
        """Why `value` is none of its values, or None."""
        if self.parse is not None:
            try:
                self.parse(value)
            except ValueError as error:
                return str(error)
            return None
        if not self.choices:
            return whole_number_problem(value)
        if self.is_switch:
            return switch_problem(value)
        # True is not accepted for 1.
        if type(value) is type(self.default) and value in self.choices:
            return None
        known = known_word(value if isinstance(value, str) else f"{self.name}={shown(value)}")
        return f"{shown(value)} is not one of {', '.join(map(str, self.choices))}{known}"

    def code(self, value: Any) -> int:
        """The number for a value in a column: for a word, its place among the choices.

        Words are in the order of the memory that they save, so that neighbours are alike. The code
        of a free text is a digest of `TEXT_BITS` bits.
        """
        if self.is_text and value not in self.choices:
            return 1 << TEXT_BITS | int.from_bytes(
                sha256(value.encode()).digest()[: TEXT_BITS // 8]
            )
        return int(value) if self.is_number or self.is_switch else self.choices.index(value)

    def is_left_out(self, value: Any) -> bool:
        """Whether documents leave out this value: readers without the knob assume the same."""
        return self.is_new and bool(value == self.default)

    def words(self, value: Any) -> str:
        """A value in a line of text."""
        return self.word if self.is_switch else f"{self.word} {value}"


def knob(default: Any, label: str, word: str, help: str = "", **stated: Any) -> Any:  # noqa: A002
    """A field of a layout; what is stated are the other fields of `Knob`."""
    described = {"label": label, "word": word, "help": help, **stated}
    return field(default=default, metadata={_METADATA: described})


def knobs_of(layout: type) -> Mapping[str, Knob]:
    """The knobs of a dataclass by name: its fields that are made by `knob`."""
    return {
        each.name: Knob(name=each.name, default=each.default, **each.metadata[_METADATA])
        for each in fields(layout)
        if _METADATA in each.metadata
    }


def read_choices(knob: Knob, value: object) -> tuple[Any, ...]:
    """The choices of a knob that a search space states, in the order given.

    Raises:
        SpaceInvalidError: a value is of the wrong type or out of range, there is none, or one is
            there twice.
    """
    listed = _listed(knob, value)
    if not listed:
        raise SpaceInvalidError(
            "the list is empty; leave the knob out for its default", field=knob.name
        )
    if len(listed) > MAX_VALUES:
        raise SpaceInvalidError(
            f"{len(listed)} values are more than {MAX_VALUES}, the most a knob may have",
            field=knob.name,
        )
    for choice in listed:
        if problem := knob.problem(choice):
            raise SpaceInvalidError(problem, field=knob.name)
    choices = tuple(map(knob.parse, listed)) if knob.parse else tuple(listed)
    if len(set(choices)) < len(choices):
        twice = next(choice for choice in choices if choices.count(choice) > 1)
        raise SpaceInvalidError(f"{shown(twice)} is listed more than once", field=knob.name)
    return choices


def _listed(knob: Knob, value: object) -> Sequence[object]:
    if isinstance(value, Mapping):
        if not knob.is_count:
            raise SpaceInvalidError(
                f"{shown(value)} is not a value or a list of values", field=knob.name
            )
        return _read_range(knob.name, value)
    if isinstance(value, (list, tuple, range)):
        return value
    return [value]


def _read_range(name: str, value: Mapping[Any, Any]) -> Sequence[int]:
    """The numbers of `{from: 4, to: 20, step: 2}` or `{from: 1, to: 64, times: 2}`, both ends in.

    A step of 1 if neither is given.
    """
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
    refuse_all(
        SpaceInvalidError(problem, field=f"{name}.{part}")
        for part, number in given.items()
        if (problem := whole_number_problem(number, low=2 if part == "times" else 1))
    )
    first, last = given["from"], given["to"]
    if first > last:
        raise SpaceInvalidError(f"the range runs from {first} down to {last}", field=name)
    if "times" not in given:
        return range(first, last + 1, given.get("step", 1))
    numbers = [first]
    while numbers[-1] * given["times"] <= last:
        numbers.append(numbers[-1] * given["times"])
    return numbers


def auto_choices(space: Mapping[str, Any]) -> dict[str, Any]:
    """Of the document of a stored space: the knobs whose choices the service made."""
    return {name: space[name] for name in space.get("auto", ()) if name in space}


def choices_words(choices: Mapping[str, Any]) -> str:
    """Choices by knob in a line of text, such as "tp 1, 2, 4; precision bf16"."""
    listed = {
        name: values if isinstance(values, (list, tuple)) else [values]
        for name, values in choices.items()
    }
    return "; ".join(
        f"{name} {', '.join(word_of(each) for each in values)}" for name, values in listed.items()
    )


def auto_words(space: Mapping[str, Any]) -> str:
    """The choices that the service made for a stored space, in a line; empty: it made none."""
    return choices_words(auto_choices(space))


def searched_words(space: Mapping[str, Any]) -> str:
    """The job knobs of a stored space with their values, in a line; empty: there are none."""
    described = space.get("job")
    if not isinstance(described, Mapping):
        return ""
    declared = {name: each for name, each in described.items() if isinstance(each, Mapping)}
    searched = {name: each.get("search", ()) for name, each in declared.items()}
    # A condition may ask about a knob that has its default alone.
    return choices_words({k: v for k, v in searched.items() if v != [declared[k].get("default")]})
