"""Regular expressions that read the progress of a trainer from the lines that it prints."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from layout_tuner.documents.numbers import read_printed
from layout_tuner.documents.reading import shown

STEP_GROUPS: Final[Mapping[str, str]] = {
    "index": "number of the step; it grows through the whole run",
    "step_time_s": "seconds of the step; the mean where the line stands for several",
    "step_time_ms": "milliseconds of the step; the mean where the line stands for several",
    "tokens": "tokens that all ranks together consumed in the step",
    "tokens_per_s_per_device": "tokens a second, divided by the number of devices",
    "loss": "mean loss, in nats a token",
    "loss_scale": "loss scale of fp16",
    "skipped": "steps of the line that were skipped since a gradient overflowed in fp16",
    "skipped_total": "the same, of all steps since the start",
    "peak_memory_bytes": "peak memory of the rank that prints, in bytes",
    "peak_memory_mib": "the same in MiB",
    "peak_memory_gib": "the same in GiB",
}
"""The named groups of a step's pattern, and their meaning."""

LONGEST_LINE: Final = 4096
"""Characters of a line that are searched: the cost of a line is bounded."""
_LONGEST_SHOWN: Final = 400
"""Characters of a line that a message shows."""
_NEAREST: Final = 3
"""Lines that a message shows."""

_SKIPPED: Final = re.compile(
    r"\bOVERFLOW!.*Skipping step|Grad overflow on iteration|Gradient overflow\. +Skipping step"
    r"|gradient overflow detected, ignoring gradient|overflow detected - reducing loss scale"
)
"""A line that says that the step which ends next was skipped: of DeepSpeed (from 0.17.6 on only at
the level INFO), Megatron-LM 1.0, apex, fairseq and AxoNN. Scripts that use them print own steps."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NO_WORDS: Final = re.compile(r"\(\?(?:P<\w+>|[:=!]|<[=!])|\\.|\[[^]]*\]|[^A-Za-z_ ]")
"""What is no word in a pattern: the beginning of a group, an escape, a class, an operator."""
_NUMBER: Final = re.compile(r"\d[\d.,]*")


@dataclass(frozen=True, kw_only=True)
class StepPattern:
    """How some versions of a trainer print a step; ValueError for a wrong pattern or group."""

    pattern: str
    """A regular expression with named groups of `STEP_GROUPS`; thousands separators in numbers are
    allowed."""
    source: str = ""
    """Trainer and versions that print such a line; empty: a user's own pattern."""
    repeats_first: bool = False
    """Whether the mean and the counts of the second line include the first line's step again."""

    def __post_init__(self) -> None:
        try:
            groups = set(re.compile(self.pattern).groupindex)
        except re.error as error:
            raise ValueError(f"{self.pattern!r} is not a regular expression: {error}") from error
        if unknown := sorted(groups - set(STEP_GROUPS)):
            raise ValueError(
                f"the group {unknown[0]!r} has no meaning; the groups are {', '.join(STEP_GROUPS)}"
            )

    @cached_property
    def compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    @cached_property
    def words(self) -> tuple[str, ...]:
        """Lower-case words of the lines that the pattern matches, as far as it shows them."""
        parts = (each.strip() for each in _NO_WORDS.sub("\n", self.pattern).lower().split("\n"))
        return tuple(dict.fromkeys(each for each in parts if len(each) > 2))


@dataclass(frozen=True, kw_only=True)
class LogPatterns:
    """How a trainer prints its steps."""

    variants: tuple[StepPattern, ...] = ()
    """The patterns by version; the first one that matches a line counts."""

    def find(self, line: str) -> tuple[StepPattern, dict[str, float]] | None:
        """The variant of a line that ends a step, and the line's figures; None: another line.

        The figures stand under the names of the groups. Colour codes are removed first. "nan" and
        "inf" are numbers, and so are those in quotes.

        Raises:
            ValueError: a group matches a text that is no number.
        """
        text = without_colour(line)
        for each in self.variants:
            if (found := each.compiled.search(text)) is not None:
                return each, dict(_figures(found))
        return None

    def read(self, line: str) -> dict[str, float] | None:
        """The figures of a line as `find` has them; None: it ends no step."""
        found = self.find(line)
        return None if found is None else found[1]


def says_skipped(line: str) -> bool:
    """Whether a line says that a step was skipped."""
    return _SKIPPED.search(without_colour(line)) is not None


def without_colour(line: str) -> str:
    """The part of a line that is searched, without colour codes."""
    cut = line[:LONGEST_LINE]
    return _COLOUR.sub("", cut) if "\x1b" in cut else cut


class NearestLines:
    """The lines that are most like a step's line and match no pattern."""

    def __init__(self, variants: Sequence[StepPattern]) -> None:
        self._variants = variants
        self._found: list[tuple[tuple[int, bool], StepPattern, str]] = []
        """Likeness, variant and line, the likest first; no two differ in their numbers alone."""

    def take(self, line: str) -> Mapping[str, Any] | None:
        """Considers a line that matches no pattern.

        Returns:
            "pattern", "source" and "likeness" of the likest line and all "lines" of now, if the
            line is one of them; else None.
        """
        text = without_colour(line)
        if not _NUMBER.search(text):
            return None
        lowered = text.lower()
        likeness, variant = max(
            (
                (sum(len(word) for word in each.words if word in lowered), each)
                for each in self._variants
            ),
            key=lambda one: one[0],
            default=(0, None),
        )
        least = self._found[-1][0] if len(self._found) == _NEAREST else (0, False)
        if variant is None or likeness < least[0]:
            return None
        key, shape = (likeness, len(_NUMBER.findall(text)) > 1), _NUMBER.sub("0", text)
        if key <= least or any(_NUMBER.sub("0", known) == shape for *_, known in self._found):
            return None
        self._found.append((key, variant, text))
        self._found.sort(key=lambda one: one[0], reverse=True)
        del self._found[_NEAREST:]
        (likeness, _), variant, _ = self._found[0]
        return {
            "likeness": likeness,
            "pattern": variant.pattern,
            "source": variant.source,
            "lines": [each[:_LONGEST_SHOWN] for *_, each in self._found],
        }


def _figures(found: re.Match[str]) -> Iterator[tuple[str, float]]:
    for name, figure in found.groupdict().items():
        if figure is not None:
            try:
                yield name, read_printed(figure.strip("'\""))
            except ValueError as error:
                raise ValueError(
                    f"{name}={shown(figure)} in the program's log is not a number as 1234.5, 1,234.5 "
                    f"or 1.2e3: change what it prints, or the pattern {shown(found.re.pattern)}"
                ) from error


NO_PATTERNS: Final = LogPatterns()
