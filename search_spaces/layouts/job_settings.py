"""Settings of a job beside its layout: values of the trainer's own knobs.

A setting that equals the trainer's default is left out, so that a job without settings and its
layout have the same key, and measurements from before a knob was searched are those of its default.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, NoReturn, Self

from layout_tuner.documents.reading import MAX_WIDTH, read_mapping, shown, word_of
from layout_tuner.errors import LayoutInvalidError

JobValue = bool | int | str
"""A value of a job knob: a switch, a whole number from 0, or a word."""

JOB_PREFIX: Final = "job."
"""Begins the names of job knobs in filters, sort keys, plots and columns, such as `job.compile`."""
MAX_JOB_KNOBS: Final = 16
"""Most knobs of one job."""
MAX_KEY_LENGTH: Final = 400
"""Longest key of settings."""

_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,40}")
_WORD: Final = re.compile(r"(?!(?:true|false)$)[A-Za-z][A-Za-z0-9_+-]{0,40}")
_IN_KEY: Final = re.compile(r"~([a-z][a-z0-9_]*)\.([A-Za-z0-9_+-]+)", re.ASCII)


def job_name_problem(name: object) -> str | None:
    """Why `name` cannot be the name of a job knob, or None."""
    if isinstance(name, str) and _NAME.fullmatch(name):
        return None
    return f"{shown(name)} is not a name of small letters, digits and _"


def job_value_problem(value: object) -> str | None:
    """Why `value` cannot be the value of a job knob, or None."""
    if isinstance(value, bool) or (isinstance(value, int) and 0 <= value <= MAX_WIDTH):
        return None
    if isinstance(value, str) and _WORD.fullmatch(value):
        return None
    return (
        f"{shown(value)} is not true, false, a whole number from 0 to {MAX_WIDTH}, or a word of "
        "letters, digits, _, + and - (quote words like on, off and null)"
    )


class JobSettings(dict[str, JobValue]):
    """Values of job knobs by name, in alphabetical order: immutable, and hashable.

    It is a dict so that documents and `dataclasses.asdict` have it as plain JSON.

    Raises:
        LayoutInvalidError: at construction, for a name or a value that no knob can have, or too
            many.
    """

    __slots__ = ()

    def __init__(
        self, settings: Mapping[str, JobValue] | Iterable[tuple[str, JobValue]] = ()
    ) -> None:
        given = dict(settings)
        if len(given) > MAX_JOB_KNOBS:
            raise LayoutInvalidError(
                f"{len(given)} job knobs are more than {MAX_JOB_KNOBS}, the most of one job"
            )
        for name, value in given.items():
            if problem := job_name_problem(name):
                raise LayoutInvalidError(problem, field="job")
            if problem := job_value_problem(value):
                raise LayoutInvalidError(problem, field=f"job.{name}")
        super().__init__(sorted(given.items()))
        if len(self.key) > MAX_KEY_LENGTH:
            raise LayoutInvalidError(
                f"the names and values are {len(self.key)} characters, more than {MAX_KEY_LENGTH}",
                field="job",
            )

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError("the settings of a job cannot be changed")

    __setitem__ = __delitem__ = update = pop = popitem = setdefault = clear = _refuse
    __ior__ = _refuse

    @classmethod
    def read(cls, value: object) -> Self:
        """The settings of a document; LayoutInvalidError if it is no mapping of such values."""
        if isinstance(value, cls):
            return value
        return cls(read_mapping(value, LayoutInvalidError, "the job's knobs"))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.typed())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, JobSettings):
            return self.typed() == other.typed()
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def typed(self) -> tuple[tuple[str, type, JobValue], ...]:
        """The items with their types: True is not 1."""
        return tuple((name, type(value), value) for name, value in self.items())

    def __repr__(self) -> str:
        return f"JobSettings({dict(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    @property
    def key(self) -> str:
        """What a layout's key has of it: `~name.value` for each knob; empty without settings."""
        return "".join(f"~{name}.{word_of(value)}" for name, value in self.items())

    @classmethod
    def of_key(cls, key: str) -> Self:
        """The settings of such a part of a key; LayoutInvalidError if it is none."""
        found = _IN_KEY.findall(key)
        settings = cls({name: value_of_word(word) for name, word in found})
        if settings.key != key:
            raise LayoutInvalidError(
                f"{shown(key)} is not the key of job knobs, such as ~compile.true"
            )
        return settings

    @property
    def words(self) -> str:
        """The settings in a line of text, such as "attention math, compile"; empty: none."""
        return ", ".join(
            name if value is True else f"{name} {word_of(value)}" for name, value in self.items()
        )

    def to_mapping(self) -> dict[str, JobValue]:
        return dict(self)

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: Any, _handler: Any) -> dict[str, Any]:
        """How documents of the API have it (`documents.pydantic_hooks`)."""
        values = [{"type": "bool"}, {"type": "int"}, {"type": "str"}]
        mapping = {
            "type": "dict",
            "keys_schema": {"type": "str"},
            "values_schema": {"type": "union", "choices": values},
        }
        return {
            "type": "function-plain",
            "function": {"type": "no-info", "function": cls.read},
            "json_schema_input_schema": mapping,
            "serialization": {
                "type": "function-plain",
                "function": cls.to_mapping,
                "return_schema": mapping,
            },
        }


def value_of_word(word: str) -> JobValue:
    """The value of its `word_of`; a text that is no value's stays as it is."""
    if word in ("true", "false"):
        return word == "true"
    return int(word) if word.isdigit() and len(word) < 20 else word


NO_SETTINGS: Final = JobSettings()
