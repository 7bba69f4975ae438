"""Changes of the options of a command in a launch script."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.into.layout_changes import GONE, Words
from layout_tuner.trainers.found_jobs.into.text_edits import (
    Edit,
    WrittenOption,
    insertion,
    removal,
    written_options,
)
from layout_tuner.trainers.found_jobs.program_command import ProgramCommand

_ASSIGNED: Final = (
    r"^[ \t]*(?P<export>export[ \t]+)?(?P<others>(?:\w+=[^\s;#]*[ \t]+)*)"
    r"(?P<own>{name}=(?P<value>[^\s;]*)[ \t]*)"
)
"""A variable of the environment where a script assigns it, also beside others."""
_STATEMENT_END: Final = re.compile(r";[ \t]*|(?:#[^\n]*)?(?:\r?\n|\Z)")
_CONTINUED: Final = re.compile(r"\\\r?\n")


def script_edits(
    text: str,
    command: ProgramCommand,
    *,
    changes: Mapping[str, Words | object],
    replaced: Collection[str],
    anchors: Sequence[Collection[str]],
    environment: Mapping[str, str | object],
    at_use: bool,
) -> Iterator[Edit]:
    """Gives options of a command other values.

    Args:
        text: that of the script.
        command: the command as it was read.
        changes: options by name, or keys of overrides `key=value`: their values, or `GONE`.
        replaced: options that say in another way what `changes` say: they go.
        anchors: groups of options: new ones are put behind the last of the first group that the
            command has.
        environment: variables by name: their values, or `GONE`.
        at_use: whether a value is written in place of a variable, and not where that is assigned.
    """
    options = list(written_options(text, command.words))
    gone = {name for name, words in changes.items() if words is GONE}
    gone |= {name for name in replaced if name not in changes}
    added: list[Words] = []
    taken: dict[TextPlace, str] = {}
    for option in options:
        if option.name in gone:
            yield removal(text, option)
    last = {each.name: each for each in options}
    for name, words in changes.items():
        if not isinstance(words, tuple):
            continue
        found = last.get(name)
        if found is None:
            added.append((name, *words) if name.startswith("--") else (f"{name}={words[0]}",))
        elif tuple(each.text for each in found.values) != words:
            yield _with_values(text, found, words, None if at_use else taken)
    if added and (anchor := _anchor([each for each in options if each.name not in gone], anchors)):
        yield insertion(text, anchor, added)
    yield from _variables(text, command, environment)


def _with_values(
    text: str, option: WrittenOption, words: Words, literals: dict[TextPlace, str] | None
) -> Edit:
    """An option with other values.

    Args:
        text: that of the script.
        option: where it stands.
        words: the new values.
        literals: literals that were given a value, to which this one is added; None: a value is
            written in place of a variable.
    """
    if len(words) == len(option.values) == 1:
        place = option.values[0].place
        is_literal = place is not None and text[place.start : place.end] == option.values[0].text
        # Another option may have given the variable another value.
        if (
            literals is not None
            and place is not None
            and is_literal
            and literals.setdefault(place, words[0]) == words[0]
        ):
            return Edit(start=place.start, end=place.end, text=words[0])
        return Edit(start=option.value_start, end=option.end, text=words[0])
    return Edit(start=option.start, end=option.end, text=" ".join((option.name, *words)))


def _anchor(
    options: Sequence[WrittenOption], groups: Sequence[Collection[str]]
) -> WrittenOption | None:
    """The last option of the first group of names that has one, else the last of all."""
    certain = [each for each in options if each.is_certain]
    for group in groups:
        if among := [each for each in certain if each.name in group]:
            return max(among, key=lambda each: each.start)
    return max(certain, key=lambda each: each.start, default=None)


def _variables(
    text: str, command: ProgramCommand, changes: Mapping[str, str | object]
) -> Iterator[Edit]:
    """Variables of the environment: where the script assigns them, or before the command."""
    lines = text.splitlines(keepends=True)
    start = sum(map(len, lines[: command.line - 1]))
    indent = re.match(r"[ \t]*", text[start:])
    for name, value in changes.items():
        found = [*re.finditer(_ASSIGNED.format(name=name), text, re.MULTILINE)]
        if value is GONE:
            for each in found:
                behind = _STATEMENT_END.match(text, each.end()) if not each["others"] else None
                if behind is None and not each["others"] and not each["export"]:
                    behind = _CONTINUED.match(text, each.end())
                start_of = each.start("own") if behind is None else each.start()
                yield Edit(start=start_of, end=(behind or each).end(), text="")
        elif found:
            yield Edit(start=found[-1].start("value"), end=found[-1].end("value"), text=str(value))
        else:
            line = f"{indent[0] if indent else ''}export {name}={value}\n"
            yield Edit(start=start, end=start, text=line)
