"""Changes of a text at some places, and words of shell scripts with the spans that they have."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from layout_tuner.trainers.found_jobs.program_command import (
    Option,
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
