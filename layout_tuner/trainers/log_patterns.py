"""Regular expressions that read the progress of a trainer from the lines that it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from layout_tuner.documents.numbers import read_printed
from layout_tuner.documents.reading import shown

STEP_GROUPS: Final[Mapping[str, str]] = {
    "index": "number of the step",
    "step_time_s": "seconds of the step",
    "step_time_ms": "milliseconds of the step",
    "tokens": "tokens that all ranks together consumed in the step",
    "tokens_per_s_per_device": "tokens a second, divided by the number of devices",
    "loss": "mean loss, in nats a token",
    "peak_memory_bytes": "peak memory of the rank that prints, in bytes",
    "peak_memory_mib": "the same in MiB",
    "peak_memory_gib": "the same in GiB",
}
"""The named groups of a step's pattern, and their meaning."""

LONGEST_LINE: Final = 4096
"""Characters of a line that are searched: the cost of a line is bounded."""

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogPatterns:
    """How a trainer prints its steps; ValueError for a wrong pattern, or an unknown group."""

    step: str = ""
    """A line that is printed once a step matches it, with named groups of `STEP_GROUPS`; thousands
    separators in numbers are allowed. Empty: the trainer prints no such line."""

    def __post_init__(self) -> None:
        try:
            groups = set(re.compile(self.step).groupindex)
        except re.error as error:
            raise ValueError(f"{self.step!r} is not a regular expression: {error}") from error
        if unknown := sorted(groups - set(STEP_GROUPS)):
            raise ValueError(
                f"the group {unknown[0]!r} has no meaning; the groups are {', '.join(STEP_GROUPS)}"
            )

    def read(self, line: str) -> dict[str, float] | None:
        """The figures of a line that ends a step, by the names of the groups; None: another line.

        Colour codes are removed first. "nan" and "inf" are numbers.

        Raises:
            ValueError: a group matches a text that is no number.
        """
        if not self.step:
            return None
        found = re.search(self.step, _COLOUR.sub("", line[:LONGEST_LINE]))
        return None if found is None else dict(_figures(found))


def _figures(found: re.Match[str]) -> Iterator[tuple[str, float]]:
    for name, figure in found.groupdict().items():
        if figure is not None:
            try:
                yield name, read_printed(figure)
            except ValueError as error:
                raise ValueError(
                    f"{name}={shown(figure)} in the program's log is not a number as 1234.5, 1,234.5 "
                    f"or 1.2e3: change what it prints, or the pattern {shown(found.re.pattern)}"
                ) from error


NO_PATTERNS: Final = LogPatterns()
