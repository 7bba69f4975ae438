"""A job knob as one trainer has it: the knob, its source, and how its values are written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from layout_tuner.documents.reading import shown, word_of
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import JobValue
from layout_tuner.trainers.log_patterns import LONGEST_LINE

VALUE: Final = "{value}"
"""What stands for the value in arguments, keys and variables."""
_NUMBER: Final = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?")
_VERSION: Final = re.compile(r"(?<![\d.])(\d+(?:\.\d+)+)")


def version_numbers(text: str) -> tuple[int, ...] | None:
    """The numbers of the first version in a text, such as (0, 16, 1); None: there is none."""
    found = _VERSION.search(text)
    return None if found is None else tuple(map(int, found[1].split(".")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Writing:
    """How a value of a knob is written for a trainer: `{value}` stands for it."""

    value: JobValue | None = None
    """The value that it is for; None: every value."""
    arguments: tuple[str, ...] = ()
    """Words of the command line. An option among them replaces the adapter's own of that name."""
    without: tuple[str, ...] = ()
    """Options of the adapter that are left out, with their values."""
    keys: Mapping[str, Any] | tuple[tuple[str, Any], ...] = ()
    """Values of the trainer's configuration by dotted path, such as `compile.enable`."""
    environment: Mapping[str, str] | tuple[tuple[str, str], ...] = ()
    since: str = ""
    """The first version of the trainer that has it; empty: the first."""
    before: str = ""
    """The first version that has it no more; empty: the adapter's `target_version` has it."""

    def __post_init__(self) -> None:
        for name in ("keys", "environment"):
            object.__setattr__(self, name, tuple(dict(getattr(self, name)).items()))

    def is_for(self, value: JobValue, version: tuple[int, ...] | None) -> bool:
        """Whether it writes a value for a version; None: the adapter's target."""
        if self.value is not None and (type(self.value), self.value) != (type(value), value):
            return False
        if version is None:
            return not self.before
        since, before = version_numbers(self.since), version_numbers(self.before)
        return (since is None or version >= since) and (before is None or version < before)

    def filled(self, value: JobValue) -> Writing:
        """The same with the value in place of `{value}`."""
        word = word_of(value)

        def key_value(given: Any) -> Any:
            if given == VALUE:
                return value
            if not isinstance(given, str) or VALUE not in given:
                return given
            text = given.replace(VALUE, word)
            return json.loads(text) if _NUMBER.fullmatch(text) else text

        return Writing(
            arguments=tuple(each.replace(VALUE, word) for each in self.arguments),
            without=self.without,
            keys={key: key_value(each) for key, each in dict(self.keys).items()},
            environment={
                name: each.replace(VALUE, word) for name, each in dict(self.environment).items()
            },
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerKnob:
    """A knob of a trainer's catalogue."""

    knob: JobKnob
    source: str
    """Where the trainer has it: the module, with the class or option."""
    writings: tuple[Writing, ...] = ()
    """How its values are written, the first that is for a value and a version counts; empty: the
    trainer reads them in the layout's document, or by placeholders."""
    ran: tuple[tuple[str, JobValue | None], ...] = ()
    """Regular expressions for lines of the trainer's log that say what ran, each with the value
    that such a line shows; None: the group `value` of the match. Empty: the log does not say."""

    def writing(self, value: JobValue, version: str = "") -> Writing | None:
        """How a value is written for a version; None: it has no such value.

        The default is not written: the trainer has it of its own, or the adapter writes it.
        """
        if self.knob.problem(value) is not None:
            return None
        if self.knob.is_default(value) or not self.writings:
            return Writing()
        numbers = version_numbers(version)
        found = (each for each in self.writings if each.is_for(value, numbers))
        return each.filled(value) if (each := next(found, None)) is not None else None


@dataclass(frozen=True, kw_only=True, slots=True)
class RanCheck:
    """Finds in a trainer's log that it ran with another value of a knob than it was asked for."""

    name: str
    asked: JobValue
    pattern: str
    """A regular expression for a line that says what ran."""
    ran: JobValue | None
    """The value that such a line shows; None: the group `value` of the match."""

    def dropped(self, line: str) -> str | None:
        """A sentence where the line says that something else ran, or None."""
        found = re.search(self.pattern, line[:LONGEST_LINE])
        if found is None:
            return None
        value = found["value"] if self.ran is None else word_of(self.ran)
        if value is None or value.lower() == word_of(self.asked).lower():
            return None
        return (
            f"the trainer dropped the knob {self.name}: {word_of(self.asked)} was asked for, and its "
            f"log says that it runs with {value} ({shown(found[0].strip())}); what it would measure "
            "does not count for the knob"
        )


def with_arguments(
    groups: Sequence[Sequence[str]], writings: Sequence[Writing]
) -> list[Sequence[str]]:
    """Groups of arguments with those of some settings, in place of the same options."""
    added = [each.arguments for each in writings if each.arguments]
    left_out = {word for each in writings for word in each.without}
    left_out |= {word for words in added for word in words if word.startswith("--")}
    if not left_out:
        return list(groups)
    kept = ([*_words_without(group, left_out)] for group in groups)
    return [*(group for group in kept if group), *added]


def _words_without(words: Sequence[str], options: set[str]) -> Iterator[str]:
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            is_left_out = word in options
        if not is_left_out:
            yield word


def with_keys(values: Mapping[str, Any], writings: Sequence[Writing]) -> Mapping[str, Any]:
    """A configuration with the values of some settings at their dotted paths."""
    if not any(each.keys for each in writings):
        return values
    merged = _copied(values)
    for path, value in (pair for each in writings for pair in dict(each.keys).items()):
        *sections, last = path.split(".")
        section = merged
        for name in sections:
            if section.get(name) is None:
                section[name] = {}
            section = section[name]
        section[last] = value
    return merged


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _copied(each) if isinstance(each, Mapping) else each for key, each in values.items()
    }
