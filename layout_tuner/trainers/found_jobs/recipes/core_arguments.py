"""Arguments of Megatron-LM as configurations state them: those of Primus and Megatron-Bridge."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from layout_tuner.documents.reading import word_of
from layout_tuner.trainers.found_jobs.found_job import AssumedValue, FoundJob
from layout_tuner.trainers.found_jobs.knob_settings import Stated
from layout_tuner.trainers.found_jobs.positioned_node import Positioned
from layout_tuner.trainers.found_jobs.program_command import Option, Word

PRESETS: Final = ("Primus' ", "Megatron-Bridge's ")
"""How the words begin for values that no file of the user's states."""


def presets(values: Mapping[str, Any], source: str) -> dict[str, Stated]:
    """Values of a source that the user's file only names; `source` begins as in `PRESETS`."""
    return {
        name: Stated(value=value, said=f"{source}, {name}: {word_of(value)}")
        for name, value in values.items()
    }


def stated_of(node: Positioned) -> Stated:
    """The value of a node of a file; one with a variable in it is not known."""
    is_variable = isinstance(node.value, str) and "${" in node.value
    why = "its variable has a value only where the job runs" if is_variable else node.why
    return Stated(
        value=None if why else node.value,
        said=node.said,
        place=node.place,
        line=node.line,
        unknown=why,
    )


def is_preset(stated: Stated) -> bool:
    return stated.said.startswith(PRESETS)


def is_set(values: Mapping[str, Stated], name: str) -> bool:
    """Whether a value is there that is not null, false or 0, or that is not known."""
    found = values.get(name)
    return found is not None and bool(found.value or found.unknown)


def options_of_values(values: Mapping[str, Stated], off: tuple[str, ...] = ()) -> Iterator[Option]:
    """Arguments as options of the command line: true is a switch, false and null are absent.

    Args:
        values: by names with underscores.
        off: arguments of which 0 is false and 1 is true.
    """
    for key, each in values.items():
        value = bool(each.value) if key in off and each.value in (0, 1) else each.value
        if not each.unknown and (value is None or value is False or value == []):
            continue
        name, line = "--" + key.replace("_", "-"), each.line or 1
        if value is True and not each.unknown:
            yield Option(name=name, word=Word(text=name, said=each.said, line=line))
            continue
        begin, colon, literal = each.said.partition(": ")
        if not colon and "=" not in each.said and " " in each.said:
            begin, _, literal = each.said.rpartition(" ")  # an option: `-tp 4`
        words = value if isinstance(value, list) else [value]
        yield Option(
            name=name,
            word=Word(text=name, said=f"{begin}{colon.strip()}", line=line),
            values=tuple(
                Word(
                    text=None if each.unknown else str(word),
                    said=literal if index == 0 else "",
                    line=line,
                    place=each.place if len(words) == 1 else None,
                    why=each.unknown,
                )
                for index, word in enumerate(words)
            ),
        )


def completed_lists(job: FoundJob, values: Mapping[str, Stated]) -> FoundJob:
    """The job with the places of switches, and what presets alone say among what is assumed."""
    places = {each.said: each.place for each in values.values() if each.place is not None}
    read = [
        each if each.place or each.said not in places else replace(each, place=places[each.said])
        for each in job.read
    ]
    # An option of the user's beside that of a preset counts as read.
    of_presets = [
        each
        for each in read
        if each.said.startswith(PRESETS) and not any(said in each.said for said in places)
    ]
    return replace(
        job,
        read=tuple(each for each in read if each not in of_presets),
        assumed=(
            *job.assumed,
            *(
                AssumedValue(field=each.field, value=each.value, why=each.said)
                for each in of_presets
            ),
        ),
    )
