"""Job knobs as a file states them: the inverse of `trainer_knob.Writing`."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, cast

from layout_tuner.documents.reading import word_of
from layout_tuner.search_spaces.jobs.condition import DEVICE, Facts
from layout_tuner.search_spaces.layouts.job_settings import JobSettings, JobValue
from layout_tuner.search_spaces.layouts.layout import Layout
from layout_tuner.search_spaces.models.model_shape import ModelShape
from layout_tuner.terminal.plurals import listed
from layout_tuner.trainers.found_jobs.found_job import JOB, Findings, Stated
from layout_tuner.trainers.found_jobs.program_command import options_of_words
from layout_tuner.trainers.trainer_knob import VALUE, TrainerKnob, Writing

if TYPE_CHECKING:  # it stands above the trainers' floor
    from layout_tuner.search_spaces.clusters.cluster import Cluster

_ABSENT: Final = object()


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerDefaults:
    """What names that knobs are written with have where a file does not state them."""

    of_trainer: Mapping[str, Any] = field(default_factory=dict)
    """The trainer's own values; names that are not here are absent."""
    of_knobs: Mapping[str, Any] = field(default_factory=dict)
    """Those that the adapter writes for a knob's default, where they are not the trainer's own."""
    ignored: Collection[str] = ()
    """Names that go with a value and do not decide which."""


def note_settings(
    findings: Findings,
    knobs: Sequence[TrainerKnob],
    stated: Mapping[str, Stated],
    defaults: TrainerDefaults,
    *,
    trainer: str,
) -> set[str]:
    """Notes the value of each knob that a file states or the trainer has by default.

    A value that is the knob's default is not noted. Values whose condition the layout does not
    meet are noted, too: `completed_job` leaves them out once the layout is known.

    Args:
        findings: where they are noted.
        knobs: the trainer's catalogue.
        stated: options with their dashes, dotted keys and variables of the environment, by name.
        defaults: of the trainer, and of the adapter.
        trainer: the trainer's name, for people.

    Returns:
        The names that belong to knobs.
    """
    known: set[str] = set()
    named = [
        list(dict.fromkeys(n for each in knob.writings for n in _values(each))) for knob in knobs
    ]
    for knob, names in zip(knobs, named, strict=True):
        # What a knob of fewer names has, as one overlap of two, is for that knob to say.
        others = {name for each in named if len(each) < len(names) for name in each}
        deciding = [name for name in names if name not in defaults.ignored and name not in others]
        known.update(names)
        if not deciding:
            continue
        name = f"{JOB}{knob.knob.name}"
        given = [stated[each] for each in deciding if each in stated]
        said = " ".join(dict.fromkeys(each.said for each in given))
        if unknown := next((each for each in given if each.unknown), None):
            findings.miss(unknown.said, unknown.unknown, name=name, line=unknown.line)
            continue
        has = {
            each: stated[each].value if each in stated else defaults.of_trainer.get(each, _ABSENT)
            for each in deciding
        }
        values = list(dict.fromkeys(_fitting(knob, has)))
        usual = {**defaults.of_trainer, **defaults.of_knobs}
        if not values and all(_is_same(each, usual.get(n, _ABSENT)) for n, each in has.items()):
            continue  # as the adapter writes it, or the trainer has it, by default
        if len(values) == 1 and knob.knob.is_default(values[0]):
            continue
        if len(values) != 1:
            line = next((each.line for each in given), None)
            every = listed([word_of(each) for each in knob.knob.every_value], 8)
            why = f"{knob.knob.name} has the values {every} here, and this is none of them"
            findings.miss(said or f"no {deciding[0]}", why, name=name, line=line)
        elif given:
            place = given[0].place if len(given) == 1 else None
            findings.note(name, values[0], said, place)
        else:
            findings.assume(name, values[0], f"{trainer}'s default without {listed(deciding, 2)}")
    return known


def _fitting(knob: TrainerKnob, has: Mapping[str, Any]) -> Iterator[JobValue]:
    """The values that a writing of the knob states as the file does."""
    for writing in knob.writings:
        for value in _candidates(knob, writing, has):
            if knob.knob.problem(value) is not None:
                continue
            filled = replace(writing.filled(value), without=writing.without)
            wanted = {name: each for name, each in _values(filled).items() if name in has}
            if wanted and all(_is_same(has[name], each) for name, each in wanted.items()):
                yield value


def _candidates(knob: TrainerKnob, writing: Writing, has: Mapping[str, Any]) -> Iterator[JobValue]:
    """The values that a writing may stand for: its own, or one that is in place of `{value}`."""
    if writing.value is not None:
        yield writing.value
        return
    templates = _values(writing)
    if knob.knob.kind != "count":
        has_value = any(VALUE in _text(each) for each in templates.values())
        known = knob.knob.every_value
        yield from (each for each in known if has_value or not knob.knob.is_default(each))
        return
    for name, template in templates.items():
        text, found = _text(template), _text(has.get(name, _ABSENT))
        pattern = re.escape(text).replace(re.escape(VALUE), r"(\d{1,15})")
        if VALUE in text and (match := re.fullmatch(pattern, found)):
            yield int(match[1])


def _is_same(found: Any, wanted: Any) -> bool:
    """Whether a file states what a writing does: null and false are as an option that is absent."""
    unset = (None, False, _ABSENT)
    if any(found is each for each in unset) or any(wanted is each for each in unset):
        return any(found is each for each in unset) and any(wanted is each for each in unset)
    return _text(found) == _text(wanted)


def _text(value: Any) -> str:
    """A value to compare: words in any order, and 5e8 as 500000000."""
    if isinstance(value, (tuple, list)):
        return " ".join(sorted(map(_text, value)))
    whole = isinstance(value, float) and value.is_integer()
    return str(int(value) if whole else value)


def _values(writing: Writing) -> dict[str, Any]:
    """What a writing states by name; options that it leaves out are absent."""
    found: dict[str, Any] = dict.fromkeys(writing.without, _ABSENT)
    found |= options_of_words(writing.arguments) | dict(writing.keys)
    return found or dict(writing.environment)


def settings_in_effect(
    settings: Mapping[str, JobValue],
    knobs: Sequence[TrainerKnob],
    layout: Layout,
    model: ModelShape,
) -> JobSettings:
    """The settings of a job without those that the trainer has in no such layout.

    Conditions on the device are left to the campaign, which knows it. A setting that goes may end
    the condition of another.
    """
    from layout_tuner.search_spaces.layouts.layout_columns import LayoutColumns

    by_name = {each.knob.name: each.knob for each in knobs}
    defaults = {name: each.default for name, each in by_name.items() if each.default is not None}
    columns, kept = LayoutColumns.of_each([layout]), dict(settings)
    for _ in range(len(settings) + 1):
        facts = Facts(columns, model, cast("Cluster", None), {**defaults, **kept})
        lost = [
            name
            for name, value in kept.items()
            if name in by_name
            and not all(
                bool(each.holds(facts))
                for each in by_name[name].conditions(value)
                if DEVICE not in each.names
            )
        ]
        if not lost:
            break
        kept = {name: value for name, value in kept.items() if name not in lost}
    return JobSettings(kept)
