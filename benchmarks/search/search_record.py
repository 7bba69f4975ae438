"""The section "Search" of the results: promises first, then a part for each benchmark.

A run of some benchmarks replaces their parts and their promises, and keeps the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from benchmarks.results_file import RESULTS, record, table

TITLE: Final = "Search"
PROMISES: Final = ("what", "asked", "measured", "reached")


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """A number that was asked for, and what was measured."""

    what: str
    asked: str
    measured: float | None
    most: float
    """The measured number may be this at most."""
    least: float = float("-inf")
    """And this at least."""
    shown: str = "{:.3g}"

    def row(self) -> tuple[str, ...]:
        """A row of the table of promises."""
        if self.measured is None:
            return self.what, self.asked, "-", "not run"
        reached = "yes" if self.least <= self.measured <= self.most else "**no**"
        return self.what, self.asked, self.shown.format(self.measured), reached


def promises_table(promises: Sequence[Promise]) -> str:
    """What was asked beside what was measured."""
    return table(PROMISES, [promise.row() for promise in promises])


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The results of one part of the benchmark."""

    title: str
    text: str
    """What is recorded."""
    details: str = ""
    """What is printed beside it: tables by cell."""
    promises: tuple[Promise, ...] = ()


@dataclass(kw_only=True, slots=True)
class SearchRecord:
    """The section as it stands in the file."""

    intro: str = ""
    promises: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rows by what was asked for."""
    parts: dict[str, str] = field(default_factory=dict)
    """Texts by title."""

    @classmethod
    def read(cls, path: Path = RESULTS) -> Self:
        """The recorded section; an empty one if there is none."""
        sections = path.read_text().split("\n## ")
        own = next((text for text in sections if text.startswith(f"{TITLE}\n")), "")
        head, *parts = own.removeprefix(TITLE).strip().split("\n### ")
        lines = [line for line in head.splitlines() if line.startswith("|")]
        rows = [tuple(line.strip("| ").split(" | ")) for line in lines[2:]]
        return cls(
            intro=head.partition("\n|")[0].strip(),
            promises={row[0]: row for row in rows},
            parts={title: text.strip() for title, _, text in (p.partition("\n") for p in parts)},
        )

    def add(self, part: Part) -> None:
        """Replaces what the section says of one benchmark."""
        self.parts[part.title] = part.text
        self.promises.update({promise.what: promise.row() for promise in part.promises})

    def write(self, path: Path = RESULTS) -> None:
        """Puts the section into the file."""
        parts = [f"### {title}\n\n{text}" for title, text in self.parts.items()]
        rows = table(PROMISES, list(self.promises.values()))
        record(TITLE, "\n\n".join([self.intro, rows, *parts]), path)
