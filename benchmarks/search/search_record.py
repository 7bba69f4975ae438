"""The section "Search" of the results: promises, a table of all strategies, and other parts.

A run of some parts replaces what the section says of them and their promises, and keeps the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from benchmarks.results_file import RESULTS, record, table

TITLE: Final = "Search"
PROMISES: Final = ("what", "asked", "measured", "reached")
STRATEGIES_TITLE: Final = "All strategies"
KEPT: Final = ("slow-probe", "frontier-175b")
"""Parts whose texts are recorded; of the others the promises alone, which name the figures."""
UNDATED: Final = "Parts without a date: "


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
    text: str = ""
    """What is printed, and recorded of parts that are in `KEPT`."""
    row: tuple[str, ...] = ()
    """What is recorded in place of a text: a row of the table of all strategies."""
    details: str = ""
    """What is printed beside it: tables by cell."""
    promises: tuple[Promise, ...] = ()


@dataclass(kw_only=True, slots=True)
class SearchRecord:
    """The section as it stands in the file."""

    intro: str
    header: tuple[str, ...]
    """Of the table of all strategies; its last column is of the date."""
    how: str = ""
    """How the parts without a date were measured: date, machine, versions, effort."""
    promises: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rows by what was asked for; the last cell has date and machine, where a part has its own."""
    rows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Rows of the table of all strategies, by what was searched."""
    parts: dict[str, str] = field(default_factory=dict)
    """Texts by title."""

    @classmethod
    def read(cls, intro: str, header: tuple[str, ...], path: Path = RESULTS) -> Self:
        """The recorded section; an empty one if there is none."""
        sections = path.read_text().split("\n## ")
        own = next((text for text in sections if text.startswith(f"{TITLE}\n")), "")
        head, *texts = own.removeprefix(TITLE).strip().split("\n### ")
        parts = {title: text.strip() for title, _, text in (p.partition("\n") for p in texts)}
        how = head.partition("\n|")[0].partition(UNDATED)[2].strip()
        return cls(
            intro=intro,
            header=header,
            how=how.removesuffix("."),
            promises=_rows(head),
            rows=_rows(parts.pop(STRATEGIES_TITLE, "")),
            parts=parts,
        )

    def add(self, part: Part, how: str) -> None:
        """Replaces what the section says of one part, which was measured as `how` says."""
        dated = "" if how == self.how else how
        when = "; ".join(dated.split("; ")[:2])
        if part.row:
            self.rows[part.title] = (*part.row, when)
        elif part.title in KEPT:
            self.parts[part.title] = f"{part.text}\n\n{dated}.".removesuffix("\n\n.")
        self.promises.update({promise.what: (*promise.row(), when) for promise in part.promises})

    def write(self, path: Path = RESULTS) -> None:
        """Puts the section into the file."""
        texts = {STRATEGIES_TITLE: table(self.header, list(self.rows.values())), **self.parts}
        parts = [f"### {title}\n\n{text}" for title, text in texts.items()]
        rows = table((*PROMISES, "when"), list(self.promises.values()))
        record(TITLE, "\n\n".join([f"{self.intro} {UNDATED}{self.how}.", rows, *parts]), path)


def _rows(text: str) -> dict[str, tuple[str, ...]]:
    """The rows of the table in a text, by their first cells."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:-1]) for line in lines[2:]]
    return {row[0]: row for row in rows}
