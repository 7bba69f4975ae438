"""Changes of a text at some places, and of the options of a command in a launch script."""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.into.layout_changes import GONE, Words
from layout_tuner.trainers.found_jobs.program_command import (
    Option,
    ProgramCommand,
    Word,
    options_of,
    value_of,
)

_SHELL_WORD: Final = re.compile(
    r"""\\?"[^"\n]*" | '[^'\n]*' |
    (?: \$\(\((?:[^()\n]|\([^()\n]*\))*\)\) | \$\{[^{}\n]*\} | \$\([^()\n]*\)
      | [^\s"'\\();&|] )+""",
    re.VERBOSE,
)
"""A word as scripts write values of options; with other quotes it is not found."""
_BETWEEN: Final = re.compile(r"(?:[ \t\r\n]|\\\r?\n)*")
_CONTINUED: Final = re.compile(r"[ \t]*\\\r?\n")
_LINE_END: Final = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\r?\n|\Z)")
_BEFORE: Final = re.compile(r"(?:[ \t]|\\\r?\n)*\Z")
_ASSIGNED: Final = (
    r"^[ \t]*(?P<export>export[ \t]+)?(?P<others>(?:\w+=[^\s;#]*[ \t]+)*)"
    r"(?P<own>{name}=(?P<value>[^\s;]*)[ \t]*)"
)
"""A variable of the environment where a script assigns it, also beside others."""
_STATEMENT_END: Final = re.compile(r";[ \t]*|(?:#[^\n]*)?(?:\r?\n|\Z)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Edit:
    """Characters `start` to `end` of a text become `text`."""

    start: int
    end: int
    text: str


class EditsOverlapError(ValueError):
    """Two changes of one place contradict each other."""


def edited(text: str, edits: Iterable[Edit]) -> str:
    """The text with all changes; EditsOverlapError where two contradict each other."""
    parts: list[str] = []
    done = 0
    for edit in sorted(dict.fromkeys(edits), key=lambda each: (each.start, each.end)):
        if edit.start < done:
            raise EditsOverlapError
        parts += (text[done : edit.start], edit.text)
        done = edit.end
    return "".join((*parts, text[done:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenOption:
    """An option, or an override `key=value`, where it stands in a script."""

    name: str
    values: tuple[Word, ...]
    start: int
    end: int
    """Behind its last value."""
    value_start: int
    """Where its first value stands; with no values, `end`."""
    is_certain: bool


def written_options(text: str, words: Sequence[Word]) -> Iterator[WrittenOption]:
    """Options and overrides of a command whose spans are found; others are left out."""
    for option in options_of(words):
        start = _start_of(text, option.word, option.name)
        if start is None:
            continue
        yield from _written(text, option, start)
    for word in words:
        key, equals, _ = (word.prefix if word.text is None else word.text).partition("=")
        if not equals or not key or key.startswith("-"):
            continue
        start = _start_of(text, word, f"{key}=")
        if start is not None and (value := _SHELL_WORD.match(text, start + len(key) + 1)):
            yield WrittenOption(
                name=key.lstrip("+"),
                values=(value_of(word, (word.text or "")[len(key) + 1 :]),),
                start=start,
                end=value.end(),
                value_start=value.start(),
                is_certain=word.is_certain,
            )


def _written(text: str, option: Option, start: int) -> Iterator[WrittenOption]:
    end = value_start = start + len(option.name)
    words = iter(option.values)
    if text.startswith("=", end) and next(words, None):
        found = _SHELL_WORD.match(text, end + 1)
        value_start, end = end + 1, (found.end() if found else end + 1)
    is_first = value_start == end
    for _ in words:
        found = _SHELL_WORD.match(text, _BETWEEN.match(text, end).end())  # type: ignore[union-attr]
        if found is None:
            return
        value_start = found.start() if is_first else value_start
        is_first, end = False, found.end()
    yield WrittenOption(
        name=option.name,
        values=option.values,
        start=start,
        end=end,
        value_start=end if is_first and not option.values else value_start,
        is_certain=option.word.is_certain,
    )


def _start_of(text: str, word: Word, name: str) -> int | None:
    """Where a word that begins with a name stands; None: it is not found, or more than once."""
    if word.place is not None and text.startswith(name, word.place.start):
        return word.place.start
    lines = text.split("\n")
    if not 0 < word.line <= len(lines):
        return None
    before = sum(len(each) + 1 for each in lines[: word.line - 1])
    bare = rf"(?<![\w.-]){re.escape(name)}" + ("" if name.endswith("=") else r"(?![\w.-])")
    found = [each.start() for each in re.finditer(bare, lines[word.line - 1])]
    return before + found[0] if len(found) == 1 else None


def removal(text: str, option: WrittenOption) -> Edit:
    """Takes an option out, with its values, and the rest of a line that it has for itself."""
    line_start = text.rfind("\n", 0, option.start) + 1
    is_first = not text[line_start : option.start].strip()
    if is_first and (continued := _CONTINUED.match(text, option.end)):
        return Edit(start=line_start, end=continued.end(), text="")
    before = _BEFORE.search(text, 0, option.start)
    assert before is not None  # it matches the empty text too
    is_continued = "\\" in before[0]
    if is_first and not is_continued and (rest := _LINE_END.match(text, option.end)):
        return Edit(start=line_start, end=rest.end(), text="")
    if before.start() == 0 or text[before.start() - 1] in "\"'(":
        behind = _BETWEEN.match(text, option.end)
        assert behind is not None
        return Edit(start=option.start, end=behind.end(), text="")
    return Edit(start=before.start(), end=option.end, text="")


def insertion(text: str, anchor: WrittenOption, groups: Sequence[Sequence[str]]) -> Edit:
    """Puts options behind another one, in its manner: on lines of their own, or on its line."""
    written = [" ".join(map(shlex.quote, words)) for words in groups]
    line_start = text.rfind("\n", 0, anchor.start) + 1
    indent = text[line_start : anchor.start]
    line_end = "\r\n" if "\r\n" in text else "\n"
    behind = anchor.end
    if indent.strip() == "":
        before = text[:line_start].rstrip("\r\n")
        if _CONTINUED.match(text, behind) or before.endswith("\\"):
            joint = f" \\{line_end}{indent}"
            return Edit(start=behind, end=behind, text="".join(joint + each for each in written))
        if rest := _LINE_END.match(text, behind):
            behind = len(text[: rest.end()].rstrip("\r\n"))
            joint = line_end + indent
            return Edit(start=behind, end=behind, text="".join(joint + each for each in written))
    return Edit(start=behind, end=behind, text="".join(f" {each}" for each in written))


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

    `literals` are those that were given a value, to which this one is added; None: a value is
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
