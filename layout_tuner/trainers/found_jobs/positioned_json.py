"""JSON with the place of each value; comments, bare keys and commas too many are allowed."""

from __future__ import annotations

import json
import re
from typing import Any, Final, NoReturn

from layout_tuner.documents.reading import shown
from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned_node import Limits, Positioned, number_problem

_SPACE: Final = re.compile(r"(?:\s|//[^\n]*|#[^\n]*|/\*.*?\*/)*+", re.DOTALL)
_STRING: Final = re.compile(r'"(?:[^"\\\n]|\\.)*+"')
_WORD: Final = re.compile(r"[^\s,:\[\]{}\"]++")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}


def positioned_json(file: JobFile) -> Positioned:
    """The value of a file; JobFileInvalidError where it is malformed or too large."""
    reader = _Json(file)
    value = reader.value("", 0)
    reader.end()
    return value


class _Json:
    def __init__(self, file: JobFile) -> None:
        self._text = file.text
        self._limits = Limits(file)
        self._at = 0

    def value(self, path: str, depth: int) -> Positioned:
        """The value at this position, behind space and comments."""
        start = self._skip_space()
        self._limits.count(depth, start)
        first = self._text[start : start + 1]
        if first == "{":
            entries = self._entries(path, depth)
            return self._node(path, start, entries=entries)
        if first == "[":
            items = self._items(path, depth)
            why = next((each.why for each in items if each.why), "")
            return self._node(path, start, items=items, why=why)
        if first == '"':
            return self._node(path, start, scalar=self._string())
        if not (word := self._word()):
            self._refuse("a value")
        value, why = _word_value(word)
        return self._node(path, start, scalar=value, why=why)

    def end(self) -> None:
        """Refuses what follows the value."""
        if self._skip_space() < len(self._text):
            self._refuse("the end of the file")

    def _entries(self, path: str, depth: int) -> dict[str, Positioned]:
        entries: dict[str, Positioned] = {}
        self._at += 1
        while not self._closes("}"):
            start = self._at
            key = self._string() if self._text[start] == '"' else self._word()
            if self._at == start:
                self._refuse("a key")
            if key in entries:
                self._limits.duplicate(key, start)
            self._skip_space()
            if self._text[self._at : self._at + 1] != ":":
                self._refuse('":"')
            self._at += 1
            entries[key] = self.value(f"{path}.{key}" if path else key, depth + 1)
            self._comma("}")
        return entries

    def _items(self, path: str, depth: int) -> tuple[Positioned, ...]:
        items: list[Positioned] = []
        self._at += 1
        while not self._closes("]"):
            items.append(self.value(f"{path}[{len(items)}]", depth + 1))
            self._comma("]")
        return tuple(items)

    def _comma(self, closing: str) -> None:
        next_one = self._text[self._skip_space() : self._at + 1]
        if next_one == ",":
            self._at += 1
        elif next_one != closing:
            self._refuse(f'"," or "{closing}"')

    def _closes(self, closing: str) -> bool:
        if self._skip_space() >= len(self._text):
            self._refuse(f'"{closing}"')
        found = self._text[self._at] == closing
        self._at += found
        return found

    def _string(self) -> str:
        found = _STRING.match(self._text, self._at)
        if found is None:
            self._refuse("the end of the text in quotes")
        self._at = found.end()
        try:
            return str(json.loads(found[0], strict=False))
        except ValueError:
            self._limits.refuse(f"{shown(found[0])} is no text of JSON", found.start())

    def _word(self) -> str:
        found = _WORD.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return found[0] if found else ""

    def _skip_space(self) -> int:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at

    def _node(self, path: str, start: int, **content: Any) -> Positioned:
        place = TextPlace(line=self._limits.line_of(start), start=start, end=self._at)
        return Positioned(path=path, text=self._text, place=place, **content)

    def _refuse(self, expected: str) -> NoReturn:
        found = (
            shown(self._text[self._at : self._at + 20]) if self._at < len(self._text) else "none"
        )
        self._limits.refuse(f"malformed JSON: {expected} is expected, not {found}", self._at)


def _word_value(word: str) -> tuple[Any, str]:
    """The value of a word without quotes, and why it is not known."""
    if word in _WORDS:
        return _WORDS[word], ""
    found = _NUMBER.fullmatch(word)
    if found is None:
        return None, "it is no value of JSON"
    is_whole = found[1] is None and found[2] is None
    value = float(word) if not is_whole or len(word) > 400 else int(word)
    why = number_problem(value)
    return (None, why) if why else (value, "")
