"""Columns of a measurement table that are job knobs, and the settings that its rows state.

A column `job.NAME` is the knob NAME, as the project writes it. Another column is one where whoever
reads the table declares it. The declaration of a knob is the reader's own, else that of the trainer
which the row's source names, else it follows from the values of the column.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self

from layout_tuner.documents.reading import Problems, nearest, read_mapping, read_named, shown
from layout_tuner.errors import SpaceInvalidError, TableInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.job_choices import NO_CHOICES, JobChoices
from layout_tuner.search_spaces.jobs.job_knob import JobKnob, KnobKind
from layout_tuner.search_spaces.layouts.job_settings import (
    JOB_PREFIX,
    NO_SETTINGS,
    JobSettings,
    JobValue,
    job_name_problem,
    job_value_problem,
)
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.search_spaces.tables.columns import (
    COLUMNS,
    EXTRA_COLUMNS,
    RESULT_COLUMNS,
)
from layout_tuner.search_spaces.tables.fields import Fields
from layout_tuner.search_spaces.tables.table import software_of_source
from layout_tuner.trainers.registry import knobs_of_software

_NOT_IN_WORDS: Final = re.compile(r"[^A-Za-z0-9_+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class TableKnobs:
    """The columns of a table that its reader declares job knobs."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """The name of the knob by column."""
    declared: Mapping[str, JobKnob] = field(default_factory=dict)
    """Declarations by the name of the knob; columns of these names are knobs, too."""
    words: Mapping[str, Mapping[str, JobValue]] = field(default_factory=dict)
    """By the name of the knob, the values that texts of its column stand for."""

    @classmethod
    def read(cls, columns: Iterable[str] = (), declared: object = None) -> Self:
        """Reads `COLUMN[=NAME][,...]` texts, and a mapping of declarations by name.

        A declaration has the fields of `JobKnob`, and may have `words`: values by the text that
        stands for them in the table.

        Raises:
            SpaceInvalidError: a column is declared twice, or a declaration is wrong.
        """
        named: dict[str, str] = {}
        for part in (part.strip() for text in columns for part in text.split(",")):
            column, _, name = (each.strip() for each in part.partition("="))
            if not column or column in named:
                why = "is declared twice" if column else "names no column"
                raise SpaceInvalidError(f"{shown(part)} {why}; write COLUMN or COLUMN=KNOB")
            named[column] = name or column.removeprefix(JOB_PREFIX)
        given = {} if declared is None else declared
        found = read_named(given, _read_declared, SpaceInvalidError, "the knobs")
        return cls(
            columns=named,
            declared={name: knob for name, (knob, _) in found.items()},
            words={name: words for name, (_, words) in found.items()},
        )

    def of_header(self, header: Sequence[str]) -> dict[str, str]:
        """The knob of each column of a header that is one.

        Raises:
            TableInvalidError: a declared column is missing or one of the format, or a name is none.
        """
        found = {name: name.removeprefix(JOB_PREFIX) for name in header if _is_own(name)}
        found |= {name: name for name in self.declared if name in header} | {**self.columns}
        for column, name in found.items():
            if column not in header:
                raise TableInvalidError(
                    f"there is no column {shown(column)}, which is declared a job knob"
                    f"{nearest(column, [each for each in header if each not in _NO_KNOBS])}"
                )
            if column in _NO_KNOBS:
                raise TableInvalidError(
                    f"the column {column} is one of the format, and no job knob"
                )
            if problem := job_name_problem(name):
                raise TableInvalidError(
                    f"the column {shown(column)} cannot be a job knob of that name: {problem}; declare "
                    "it as COLUMN=KNOB"
                )
        twice = [name for name in found.values() if list(found.values()).count(name) > 1]
        if twice:
            raise TableInvalidError(f"several columns are the job knob {twice[0]}")
        return found


NO_TABLE_KNOBS: Final = TableKnobs()

_NO_KNOBS: Final = frozenset((*COLUMNS, *EXTRA_COLUMNS, *RESULT_COLUMNS, "device"))


@dataclass(kw_only=True, slots=True)
class KnobReader:
    """Reads the settings of the rows of one table."""

    knobs: TableKnobs
    columns: Mapping[str, str]
    """The knob of each column that is one."""
    inferred: Mapping[str, JobKnob]
    """Knobs as the values of their columns have them."""
    _catalogues: dict[str, dict[str, JobKnob]] = field(default_factory=dict)
    """Declarations by software."""
    _texts: dict[tuple[str, str], str] = field(default_factory=dict)
    """By column and word, the text that was read as the word."""

    @classmethod
    def of(
        cls, knobs: TableKnobs, header: Sequence[str], rows: Sequence[tuple[int, Sequence[str]]]
    ) -> Self:
        """The reader of a table's rows, each with the number of its line.

        Raises:
            TableInvalidError: a column, or a value without a declaration, cannot be a knob's.
        """
        columns = knobs.of_header(header)
        inferred = {}
        for column, name in columns.items():
            if name in knobs.declared:
                continue
            at = header.index(column)
            lines: dict[str, str] = {}
            for number, (line, fields) in enumerate(rows, 1):
                if len(fields) > at and fields[at].strip():
                    lines.setdefault(fields[at].strip(), f"row {number} (line {line})")
            values: dict[JobValue, None] = {}
            kind = _kind_of(column, tuple(lines))
            for text, row in lines.items():
                try:
                    values[_plain_value(kind, column, text)] = None
                except TableInvalidError as error:
                    raise TableInvalidError(f"{row}: {error}") from error
            if values:
                inferred[name] = JobKnob(name=name, kind=kind, values=tuple(values))
        return cls(knobs=knobs, columns=columns, inferred=inferred)

    def catalogue(self, source: str) -> Mapping[str, JobKnob]:
        """The declarations that hold for rows of a source."""
        software = software_of_source(source) if source else ""
        if software not in self._catalogues:
            known = knobs_of_software(software)
            self._catalogues[software] = {**self.inferred, **known, **self.knobs.declared}
        return self._catalogues[software]

    def settings(
        self, fields: Fields, source: str, layout: Layout, model: ModelShape, cluster: Cluster
    ) -> tuple[JobSettings, list[str]]:
        """The settings of a row, and notes about values that its trainer does not obey.

        A knob that is at its default, or whose condition does not hold, has no setting. An empty
        field states none.

        Raises:
            TableInvalidError: a value is none of the knob's.
        """
        catalogue, stated = self.catalogue(source), {}
        for column, name in self.columns.items():
            text = fields.text.get(column, "").strip()
            words = self.knobs.words.get(name, {})
            if text in words:
                stated[name] = words[text]
            elif text:
                stated[name] = self._value(column, text, catalogue[name])
        if not stated:
            return NO_SETTINGS, []
        choices = JobChoices.of(stated, catalogue, "of the table")
        _, ((settings,),) = choices.groups(LayoutColumns.of_each([layout]), model, cluster)
        notes = []
        for name, value in stated.items():
            if name not in settings and not catalogue[name].is_default(value):
                notes.append(f"{name}={value} is left out where its condition does not hold")
        return settings, notes

    def _value(self, column: str, text: str, knob: JobKnob) -> JobValue:
        value = _plain_value(knob.kind, column, text)
        if isinstance(value, str):
            known = self._texts.setdefault((column, value), text)
            if known != text:
                raise TableInvalidError(
                    f"{column}={shown(text)} and {shown(known)} of an earlier row would be one value, "
                    f"{value}; write them in one way, or declare `words` for them"
                )
        if problem := knob.problem(value):
            raise TableInvalidError(f"{column}={shown(text)}: {problem}")
        return value

    def choices(self, source: str, layouts: Sequence[Layout]) -> JobChoices:
        """The knobs that jobs of one source set, with the values that they have."""
        catalogue, described = self.catalogue(source), {}
        for name in dict.fromkeys(self.columns.values()):
            if any(name in layout.job for layout in layouts):
                values = (catalogue[name].value_of(layout.job) for layout in layouts)
                known = {(type(each), each): each for each in values if each is not None}
                described[name] = list(known.values())
        return JobChoices.of(described, catalogue, "of the table") if described else NO_CHOICES


def _read_declared(name: str, described: object) -> tuple[JobKnob, dict[str, JobValue]]:
    """A declaration, and the values that texts of the column stand for."""
    values = read_mapping(described, SpaceInvalidError, "the knob")
    words = read_mapping(values.pop("words", {}), SpaceInvalidError, "the words")
    knob, problems = JobKnob.from_mapping(name, values), Problems(SpaceInvalidError)
    for text, value in words.items():
        problems.note(knob.problem(value), field=f"words.{shown(text)}")
    problems.refuse()
    return knob, words


def _is_own(column: str) -> bool:
    return column.startswith(JOB_PREFIX)


def _kind_of(column: str, texts: Sequence[str]) -> KnobKind:
    """The kind of a knob by all filled values of its column.

    In a column of ours a switch is true or false, so that 1 and 0 remain numbers.
    """
    truths = {"true", "false"} if _is_own(column) else {"true", "false", "1", "0"}
    if all(text.lower() in truths for text in texts):
        return "switch"
    return "count" if all(re.fullmatch(r"\d+(\.0)?", text) for text in texts) else "word"


def _plain_value(kind: KnobKind, column: str, text: str) -> JobValue:
    """A field as a value of a knob's kind; TableInvalidError where it cannot be one."""
    fields = Fields({column: text})
    if kind == "switch":
        return fields.truth(column)
    if kind == "count":
        value: Any = fields.whole(column, 0)
    else:
        value = _NOT_IN_WORDS.sub("_", text).strip("_")
    if job_value_problem(value):
        raise TableInvalidError(
            f"{column}={shown(text)} is no value of a job knob: true, false, a whole number, or up to "
            "41 letters, digits, _, + and - that begin with a letter, other characters being read as "
            "_; declare `words` for it"
        )
    return value  # type: ignore[no-any-return]
