"""A value of a configuration with its place in the text, and the limits of such files."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from layout_tuner.documents.json_and_yaml import MAX_VALUES
from layout_tuner.documents.limits import MAX_DEPTH, MAX_INTEGER_BITS
from layout_tuner.trainers.found_jobs.found_job import JobFileInvalidError, Stated, TextPlace
from layout_tuner.trainers.found_jobs.job_file import JobFile

LONGEST_SAID: Final = 200
"""Most characters of a value that is shown: lists and texts can be long."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Positioned:
    """A mapping, a list or a scalar of a file."""

    path: str
    """Keys from the top, with dots: `parallelism.tp`; empty: the whole document."""
    text: str = field(repr=False)
    """That of the whole file."""
    place: TextPlace | None = None
    """Its literal; of an alias that which it stands for. None: a table of TOML, which has no span
    of its own."""
    scalar: Any = None
    """A number, switch, text or None; a mapping or a list has None."""
    why: str = ""
    """Why the value is not known, as of a tag; empty: it is known. A list with such a value in it
    has its reason."""
    entries: Mapping[str, Positioned] | None = None
    """Of a mapping; None: it is none."""
    items: tuple[Positioned, ...] | None = None
    """Of a list; None: it is none."""

    @property
    def value(self) -> Any:
        """As plain Python; None where it is null or not known."""
        if self.entries is not None:
            return {name: each.value for name, each in self.entries.items()}
        if self.items is not None:
            return [each.value for each in self.items]
        return self.scalar

    @property
    def written(self) -> str:
        """The literal as the file has it, on one line; empty: there is none."""
        if self.place is None:
            return ""
        return " ".join(self.text[self.place.start : self.place.end][:LONGEST_SAID].split())

    @property
    def said(self) -> str:
        """Path and literal: `parallelism.tp: 4`."""
        return f"{self.path}: {self.written}".strip()

    @property
    def line(self) -> int | None:
        return None if self.place is None else self.place.line

    @property
    def is_mapping(self) -> bool:
        return self.entries is not None

    def keys(self) -> tuple[str, ...]:
        """Those of a mapping; of anything else none."""
        return tuple(self.entries or ())

    def get(self, path: str) -> Positioned | None:
        """What stands at keys with dots between them; None: nothing, or no mapping is above it."""
        entries = self.entries or {}
        if path in entries:
            return entries[path]
        first, dot, rest = path.partition(".")
        return entries[first].get(rest) if dot and first in entries else None

    def stated(self, named: str = "") -> Stated:
        """The value as a statement; `named` is the file's, where the job is another file's.

        Then it has no place.
        """
        return Stated(
            value=self.value,
            said=f"{named}: {self.said}" if named else self.said,
            place=None if named else self.place,
            line=None if named else self.line,
            unknown=self.why,
        )

    def leaves(self) -> Iterator[Positioned]:
        """Scalars and lists at any depth of mappings; an empty mapping is one too."""
        if not self.entries:
            yield self
            return
        for each in self.entries.values():
            yield from each.leaves()


class Limits:
    """Counts what is read of a file, and refuses it where that is too much."""

    def __init__(self, file: JobFile) -> None:
        self._file = file
        self._num_values = 0
        self._line_ends = [found.start() for found in re.finditer("\n", file.text)]

    def line_of(self, position: int) -> int:
        """As `JobFile.line_of`, which counts anew each time."""
        return bisect_left(self._line_ends, position) + 1

    def refuse(self, problem: str, position: int | None = None) -> NoReturn:
        where = "" if position is None else f"line {self.line_of(position)}: "
        raise JobFileInvalidError(f"{self._file.name}: {where}{problem}")

    def count(self, depth: int, position: int, number: int = 1) -> None:
        """Counts values at a depth of nesting."""
        self._num_values += number
        if self._num_values > MAX_VALUES:
            self.refuse(f"it has more than {MAX_VALUES} keys and values")
        if depth > MAX_DEPTH:
            self.refuse(f"it is nested too deeply, more than {MAX_DEPTH} levels", position)

    def duplicate(self, key: str, position: int) -> NoReturn:
        self.refuse(f"the key {key[:80]!r} is there twice; leave one of them", position)


def number_problem(value: object) -> str:
    """Why a number of a file cannot be taken; empty: it can."""
    if isinstance(value, float) and not math.isfinite(value):
        return "it is not a finite number"
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        return "it is a number of hundreds of digits"
    return ""
