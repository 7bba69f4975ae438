"""The steps of a program by its log and its reports, as events for the worker.

A line may stand for several steps, as trainers print every nth step: two lines with the numbers
j < i stand for i - j steps. Ranks that print into one output, and trainers that repeat a line,
print the same number again, which is no further step. `predictions.statistics.rank_steps` makes
steps of the events.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from layout_tuner.trainers.log_patterns import LogPatterns, NearestLines, says_skipped
from layout_tuner.workers.ranks.json_lines import Document

_MOST_PER_STEP: Final = 64
"""Lines of a step that are passed on: those of the ranks of a node, and repetitions."""


class StepLines:
    """Counts the steps of a program while it runs, by source ("log", "report") and rank."""

    def __init__(self, patterns: LogPatterns, *, most: int) -> None:
        """`most`: steps that the probe can use; further ones are dropped."""
        self._patterns = patterns
        self._most = most
        self._nearest = NearestLines(patterns.variants)
        self._counts: dict[tuple[str, int], int] = {}
        self._numbers: dict[tuple[str, int], float] = {}
        """The largest number of a step."""
        self._lines: dict[tuple[str, int], int] = {}
        self._skipped = 0
        """Steps that the log has called skipped since the last one that ended."""

    @property
    def furthest(self) -> int:
        """Steps that the rank that is furthest has ended."""
        return max(self._counts.values(), default=0)

    def read_line(self, text: str, rank: int) -> Document | None:
        """The event of a line of the log: "iteration" or "unmatched"; None: nothing is new.

        Raises:
            ValueError: a group of the pattern matches a text that is no number.
        """
        if not self._patterns.variants:  # a program may flood its output
            return None
        if (found := self._patterns.find(text)) is not None:
            event = self.take("log", rank, found[1])
            return None if event is None else {**event, "repeats_first": found[0].repeats_first}
        if says_skipped(text):
            self._skipped += 1
            return None
        nearest = self._nearest.take(text)
        return None if nearest is None else {"event": "unmatched", **nearest}

    def take(self, source: str, rank: int, figures: Mapping[str, float]) -> Document | None:
        """The event of a report or of a line's figures; None: the probe does not need it.

        NaN and infinity travel as texts, for strict readers.
        """
        key = source, rank
        count, lines = self._counts.get(key, 0), self._lines.get(key, 0)
        number, latest = figures.get("index", math.nan), self._numbers.get(key, math.nan)
        more = number - latest if math.isfinite(number - latest) else 1
        if (more > 0 and count >= self._most) or lines >= _MOST_PER_STEP * self._most:
            return None
        self._lines[key] = lines + 1
        if more > 0:
            self._counts[key] = count + int(min(more, self._most))
            self._numbers[key] = number
            if self._skipped:
                figures, self._skipped = {"skipped": self._skipped, **figures}, 0
        return {
            "event": "iteration",
            "index": count if more > 0 else max(count - 1, 0),
            "source": source,
            "reporter": rank,
            "figures": {
                name: value if math.isfinite(value) else str(value)
                for name, value in figures.items()
            },
        }
