"""TOML with the place of each value: `tomllib` reads the values, and `_Places` where they stand."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from typing import Any, Final

from layout_tuner.trainers.found_jobs.found_job import TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile
from layout_tuner.trainers.found_jobs.positioned_node import Limits, Positioned, number_problem

Keys = tuple[str | int, ...]
"""Keys and numbers of list items from the top of a document."""

_SPACE: Final = re.compile(r"(?:[\s]|#[^\n]*)*+")
_KEY_PART: Final = re.compile(
    r"""[ \t]*("(?:[^"\\\n]|\\.)*+"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*(\.?)"""
)
_SCALAR: Final = re.compile(
    r'''"""(?:[^\\]|\\.)*?"""(?:"{1,2}(?!"))?|\'\'\'.*?\'\'\'(?:'{1,2}(?!'))?'''
    r"""|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*'|[^\s,\]}#]+(?:[ ][0-9:.+Z-]+)?""",
    re.DOTALL,
)


def positioned_toml(file: JobFile) -> Positioned:
    """The document of a file; JobFileInvalidError where it is malformed or too large."""
    limits = Limits(file)
    try:
        document = tomllib.loads(file.text)
    except tomllib.TOMLDecodeError as error:
        limits.refuse(f"malformed TOML: {error}")
    except (RecursionError, ValueError):
        limits.refuse("malformed TOML: it is nested too deeply, or has a number of many digits")
    return _node(file, limits, document, (), _Places(file, limits).found)


def _node(
    file: JobFile, limits: Limits, value: Any, keys: Keys, places: Mapping[Keys, TextPlace]
) -> Positioned:
    limits.count(len(keys), 0)
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)
    about: dict[str, Any] = {"path": path.lstrip("."), "text": file.text, "place": places.get(keys)}
    if isinstance(value, dict):
        entries = {
            name: _node(file, limits, each, (*keys, name), places) for name, each in value.items()
        }
        return Positioned(**about, entries=entries)
    if isinstance(value, list):
        items = tuple(
            _node(file, limits, each, (*keys, index), places) for index, each in enumerate(value)
        )
        return Positioned(**about, items=items, why=next((i.why for i in items if i.why), ""))
    if why := number_problem(value):
        return Positioned(**about, why=why)
    is_plain = isinstance(value, (bool, int, float, str))
    return Positioned(**about, scalar=value if is_plain else str(value))  # dates and times


class _Places:
    """Finds the span of each value of a document that `tomllib` accepts, by its keys."""

    def __init__(self, file: JobFile, limits: Limits) -> None:
        self.found: dict[Keys, TextPlace] = {}
        self._limits, self._text, self._at = limits, file.text, 0
        tables: dict[Keys, int] = {}
        table: Keys = ()
        while self._skip_space() < len(self._text):
            if self._text[self._at] != "[":
                self._entry(table)
                continue
            is_item = self._text.startswith("[[", self._at)
            self._at += 1 + is_item
            table = _in_newest(self._keys(), tables)
            if is_item:
                tables[table] = tables.get(table, -1) + 1
                table = (*table, tables[table])
            self._at = self._text.index("]", self._at) + 1 + is_item

    def _keys(self) -> Keys:
        keys: list[str] = []
        while found := _KEY_PART.match(self._text, self._at):
            self._at = found.end()
            part = found[1]
            keys.append(tomllib.loads(f"x = {part}")["x"] if part[0] in "\"'" else part)
            if not found[2]:
                break
        return tuple(keys)

    def _entry(self, table: Keys) -> None:
        keys = (*table, *self._keys())
        self._at = self._text.index("=", self._at) + 1
        self._value(keys)

    def _value(self, keys: Keys) -> None:
        start = self._skip_space()
        if self._text[start] == "[":
            self._at += 1
            index = 0
            while self._more("]"):
                self._value((*keys, index))
                index += 1
        elif self._text[start] == "{":
            self._at += 1
            while self._more("}"):
                self._entry(keys)
        else:
            found = _SCALAR.match(self._text, start)
            assert found is not None, "tomllib has read the document"
            self._at = found.end()
        line = self._limits.line_of(start)
        self.found[keys] = TextPlace(line=line, start=start, end=self._at)

    def _more(self, closing: str) -> bool:
        """Whether another value follows; else the closing bracket is passed."""
        self._skip_space()
        if self._text[self._at] == ",":
            self._at += 1
            self._skip_space()
        is_closed = self._text[self._at] == closing
        self._at += is_closed
        return not is_closed

    def _skip_space(self) -> int:
        found = _SPACE.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._at


def _in_newest(keys: Keys, tables: Mapping[Keys, int]) -> Keys:
    """The keys of a table, with the number of the newest item behind each list of tables."""
    found: Keys = ()
    for index, key in enumerate(keys):
        found = (*found, key)
        if found in tables and index < len(keys) - 1:
            found = (*found, tables[found])
    return found
