"""The job knobs that a campaign searches, and the settings that each layout may have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Final, Self

import numpy as np

from layout_tuner.array_types import Ints
from layout_tuner.documents.reading import (
    Problems,
    nearest,
    read_named,
    shown,
    word_of,
)
from layout_tuner.errors import SpaceInvalidError
from layout_tuner.search_spaces.clusters.cluster import Cluster
from layout_tuner.search_spaces.jobs.condition import MODEL_NAMES, Comparison, Facts, joined_text
from layout_tuner.search_spaces.jobs.job_knob import JobKnob
from layout_tuner.search_spaces.layouts.job_settings import (
    MAX_JOB_KNOBS,
    NO_SETTINGS,
    JobSettings,
    JobValue,
)
from layout_tuner.search_spaces.layouts.layout import LAYOUT_FIELDS, Layout
from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns
from layout_tuner.search_spaces.models.model_shape import ModelShape

MAX_JOB_COMBINATIONS: Final = 1024
"""Most combinations of the knobs of a job."""
_MAX_COMPARISONS: Final = 16
"""Most comparisons of conditions with fields of the layout: they are the bits of a number."""
SEARCHED: Final = "search"
"""The field of a stored declaration that has the searched values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchedKnob:
    """A knob and the values that a campaign tries."""

    knob: JobKnob
    values: tuple[JobValue, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise SpaceInvalidError("the list is empty; leave the knob out for its default")
        for value in self.values:
            if problem := self.knob.problem(value):
                raise SpaceInvalidError(problem)
        typed = [(type(value), value) for value in self.values]
        if twice := [value for at, (_, value) in enumerate(typed) if typed[at] in typed[:at]]:
            raise SpaceInvalidError(f"{shown(twice[0])} is listed more than once")


@dataclass(frozen=True)
class JobChoices:
    """The searched knobs of a space.

    Raises:
        SpaceInvalidError: at construction, for too many knobs or combinations, or a condition that
            names something unknown.
    """

    searched: tuple[SearchedKnob, ...] = ()

    def __post_init__(self) -> None:
        problems = Problems(SpaceInvalidError)
        if len(self.searched) > MAX_JOB_KNOBS:
            problems.note(f"{len(self.searched)} knobs are more than {MAX_JOB_KNOBS}", field="")
        if self.num_combinations > MAX_JOB_COMBINATIONS:
            problems.note(
                f"the knobs have {self.num_combinations} combinations, more than "
                f"{MAX_JOB_COMBINATIONS}; give some knob fewer values",
                field="",
            )
        for name, knob in self.knobs.items():
            for condition in knob.conditions():
                problems.note(condition.unknown_name(self.knobs), field=name)
                for each in condition.comparisons:
                    problems.note(self._comparison_problem(each), field=name)
        if len(self._comparisons) > _MAX_COMPARISONS:
            problems.note(
                f"the conditions compare fields of the layout in {len(self._comparisons)} ways, more "
                f"than {_MAX_COMPARISONS}",
                field="",
            )
        problems.refuse()

    def __bool__(self) -> bool:
        return bool(self.searched)

    @cached_property
    def knobs(self) -> dict[str, JobKnob]:
        """The searched knobs by name."""
        return {each.knob.name: each.knob for each in self.searched}

    def _comparison_problem(self, comparison: Comparison) -> str | None:
        """Why no value of a knob makes a comparison true or false, or None.

        Words are not looked for among the knob's values, which the owner of a worker may narrow.
        """
        knob = self.knobs.get(comparison.name)
        if knob is None:
            return None
        if comparison.operator not in ("==", "!=") and knob.kind != "count":
            return f"{knob.name} {comparison.operator}: {knob.name} is a {knob.kind}, not a number"
        return knob.kind_problem(comparison.value)

    @property
    def num_combinations(self) -> int:
        """Combinations of all values, of which a layout may have fewer."""
        return math.prod(len(each.values) for each in self.searched)

    @classmethod
    def of(cls, described: object, catalogue: Mapping[str, JobKnob], trainer: str) -> Self:
        """The choices of a document: values by name, of knobs that the trainer's catalogue has.

        A stored document has the declarations beside the values (`to_mapping`).

        Raises:
            SpaceInvalidError: a knob is unknown, or a value is none of its values.
        """
        read = partial(_read_searched, catalogue=catalogue, trainer=trainer)
        searched = [*read_named(described, read, SpaceInvalidError, "the value").values()]
        return cls((*searched, *_named_by(searched, catalogue)))

    def to_mapping(self) -> dict[str, Any]:
        """By name the declaration of each knob, with the searched values as `search`."""
        return {
            each.knob.name: {SEARCHED: list(each.values), **each.knob.to_mapping()}
            for each in self.searched
        }

    def values(self, name: str) -> tuple[JobValue, ...]:
        """The searched values of a knob; empty: it is not searched."""
        return next((each.values for each in self.searched if each.knob.name == name), ())

    def groups(
        self, columns: LayoutColumns, model: ModelShape, cluster: Cluster
    ) -> tuple[Ints, list[tuple[JobSettings, ...]]]:
        """The group of each layout, and the settings that the layouts of each group may have.

        Layouts of one group answer alike to all comparisons of conditions. The settings of a group
        are distinct, and those at the trainer's defaults come first where they are among them.
        """
        codes = self.codes(columns, model, cluster)
        found, group_of = np.unique(codes, return_inverse=True)
        settings = [tuple(self.settings_of(int(code), columns, model, cluster)) for code in found]
        return group_of.reshape(-1), settings

    def codes(self, columns: LayoutColumns, model: ModelShape, cluster: Cluster) -> Ints:
        """The answers of each layout to all comparisons of conditions, as the bits of a number."""
        codes = np.zeros(columns.shape, dtype=np.int64)
        for bit, comparison in enumerate(self._comparisons):
            answers = Facts(columns, model, cluster, {}).compared(comparison)
            codes |= np.broadcast_to(np.asarray(answers, dtype=np.int64), codes.shape) << bit
        return codes

    def impossible(self, possible: Collection[JobSettings]) -> list[str]:
        """The searched values that no settings of some layouts have, each with its conditions.

        Raises:
            SpaceInvalidError: a knob has its default alone in all of the settings.
        """
        found = {item for each in possible for item in each.typed()}
        problems, sentences = Problems(SpaceInvalidError), []
        for each in self.searched:
            knob = each.knob
            others = [value for value in each.values if not knob.is_default(value)]
            missing = [value for value in others if (knob.name, type(value), value) not in found]
            for value in missing:
                where = joined_text(knob.conditions(value))
                if len(missing) < len(others):
                    sentences.append(f"{knob.name} {word_of(value)} (only where {where})")
                    continue
                problems.note(
                    f"no legal layout can have {word_of(value)}, which the trainer has only where "
                    f"{where}; leave it out, or let the space have such layouts"
                    f"{self._what_to_add(knob, value)}",
                    field=knob.name,
                )
        problems.refuse()
        return sentences

    def _what_to_add(self, knob: JobKnob, value: JobValue) -> str:
        """Values of knobs that have their default alone, and that the conditions ask about."""
        asked = {name for when in knob.conditions(value) for name in when.names}
        added = []
        for each in self.searched:
            others = [
                word_of(other) for other in each.knob.values if not each.knob.is_default(other)
            ]
            if each.knob.name in asked and others and all(map(each.knob.is_default, each.values)):
                added.append(f"{each.knob.name}: [{', '.join(others)}]")
        return f", or add {', '.join(added)} to job" if added else ""

    def holds(self, layout: Layout, model: ModelShape, cluster: Cluster) -> bool:
        """Whether the settings of a layout are among those that it may have."""
        columns = LayoutColumns.of_each([layout])
        (code,) = self.codes(columns, model, cluster).tolist()
        return layout.job in self.settings_of(code, columns, model, cluster)

    def settings_of(
        self, code: int, columns: LayoutColumns, model: ModelShape, cluster: Cluster
    ) -> Collection[JobSettings]:
        """The settings of layouts with these answers, of which `columns` has some."""
        key = (code, cluster.device, *(getattr(model, name) for name in MODEL_NAMES))
        if key not in self._found:
            known = {each: bool(code >> bit & 1) for bit, each in enumerate(self._comparisons)}
            distinct: dict[JobSettings, None] = {}
            facts = Facts(columns, model, cluster, {}, known)
            for values in itertools.product(*(self._tried(each, facts) for each in self.searched)):
                job = dict(zip(self.knobs, values, strict=True))
                distinct[self._settled(job, Facts(columns, model, cluster, job, known))] = None
            if NO_SETTINGS in distinct:
                distinct = dict.fromkeys(sorted(distinct, key=len))
            self._found[key] = distinct
        return self._found[key]

    @cached_property
    def _found(self) -> dict[tuple[object, ...], dict[JobSettings, None]]:
        """What `settings_of` found before, by all that conditions ask about."""
        return {}

    def _tried(self, each: SearchedKnob, facts: Facts) -> list[JobValue]:
        """The values of a knob; its default where conditions that name no other knob fail."""
        knob, values = each.knob, dict[tuple[type, JobValue], JobValue]()
        for value in each.values:
            apart = (when for when in knob.conditions(value) if not when.names & self.knobs.keys())
            if knob.default is not None and not all(when.holds(facts) for when in apart):
                value = knob.default
            values[type(value), value] = value
        return list(values.values())

    @cached_property
    def _of_knobs(self) -> Mapping[str, JobKnob]:
        """The knobs that have conditions on other knobs."""
        return {
            name: knob
            for name, knob in self.knobs.items()
            if any(when.names & self.knobs.keys() for when in knob.conditions())
        }

    def _settled(self, job: dict[str, JobValue], facts: Facts) -> JobSettings:
        """The settings of some values: a knob whose condition on others fails has its default.

        Each knob that changes may end the condition of another. `facts.job` is `job`.
        """
        for _ in self._of_knobs:
            failed = [
                name
                for name, knob in self._of_knobs.items()
                if not all(each.holds(facts) for each in knob.conditions(job[name]))
            ]
            changed = False
            for name in failed:
                default = self.knobs[name].default
                if default is not None and job[name] != default:
                    job[name], changed = default, True
            if not changed:
                break
        return JobSettings(
            {name: value for name, value in job.items() if not self.knobs[name].is_default(value)}
        )

    @cached_property
    def _comparisons(self) -> tuple[Comparison, ...]:
        """All comparisons with fields of the layout, in a fixed order."""
        conditions = (when for each in self.knobs.values() for when in each.conditions())
        every = {comparison for when in conditions for comparison in when.of_layouts}
        return tuple(sorted(every, key=repr))


def _named_by(
    searched: Sequence[SearchedKnob], catalogue: Mapping[str, JobKnob]
) -> list[SearchedKnob]:
    """Knobs that conditions ask about and that are not searched: each has its default alone."""
    known, named = {each.knob.name for each in searched}, []
    waiting = [each.knob for each in searched]
    while waiting:
        names = {name for when in waiting.pop().conditions() for name in when.names}
        for name in sorted(names & catalogue.keys() - known):
            knob = catalogue[name]
            if knob.default is not None:
                known.add(name)
                waiting.append(knob)
                named.append(SearchedKnob(knob=knob, values=(knob.default,)))
    return named


def _read_searched(
    name: str, value: object, catalogue: Mapping[str, JobKnob], trainer: str
) -> SearchedKnob:
    if isinstance(value, Mapping):
        declared = dict(value)
        if SEARCHED not in declared:
            raise SpaceInvalidError(f"{shown(value)} is not a value or a list of values")
        values = declared.pop(SEARCHED)
        knob = JobKnob.from_mapping(name, declared)
    else:
        if name in LAYOUT_FIELDS:
            raise SpaceInvalidError("it is a field of the layout: search it beside `job`")
        if name not in catalogue:
            known = f"; it has {', '.join(catalogue)}" if catalogue else "; it has none"
            raise SpaceInvalidError(
                f"the trainer {trainer} has no such knob{nearest(name, catalogue) or known}"
                if trainer
                else "a space without a campaign has no trainer, whose knob it could be"
            )
        values, knob = value, catalogue[name]
    listed = tuple(values) if isinstance(values, (list, tuple)) else (values,)
    if knob.kind == "count":
        more = [each for each in listed if knob.problem(each) is None and each not in knob.values]
        knob = replace(knob, values=(*knob.values, *dict.fromkeys(more)))
    return SearchedKnob(knob=knob, values=listed)


def stated_settings(
    described: object,
    layout: Layout,
    catalogue: Mapping[str, JobKnob],
    trainer: str,
    *,
    model: ModelShape,
    cluster: Cluster,
) -> JobSettings:
    """The settings of one job from values by name; those at their defaults are left out.

    Raises:
        SpaceInvalidError: a knob or value is unknown, or the trainer has no such knob in this
            layout.
    """
    choices = JobChoices.of(described, catalogue, trainer)
    _, (settings, *_) = choices.groups(LayoutColumns.of_each([layout]), model, cluster)
    problems = Problems(SpaceInvalidError)
    for each in choices.searched:
        name, (value, *others) = each.knob.name, each.values
        if others:
            problems.note("a job has one value of it, not a list", field=name)
        elif name not in settings[0] and not each.knob.is_default(value):
            where = joined_text(each.knob.conditions(value))
            problems.note(
                f"{trainer} has it only where {where}, which does not hold of {layout.key}; leave it "
                "out",
                field=name,
            )
    problems.refuse()
    return settings[0]


NO_CHOICES: Final = JobChoices()
