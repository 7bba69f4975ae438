"""The optimizer steps of a rank: what the lines of its log, or its reports, stand for."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_MOST_STEPS: Final = 1 << 50
"""The largest number of a step that is taken for one."""
_LARGEST_COUNTS: Final = ("step_time_s", "skipped", "skipped_total", "peak_memory_bytes")
"""Figures of which the largest of all ranks counts."""
MEMORY_UNITS: Final = {
    "peak_memory_bytes": 1,
    "peak_memory_mib": 1 << 20,
    "peak_memory_gib": 1 << 30,
}
"""Figures of the peak memory, and the bytes of their units."""


def in_seconds_and_bytes(
    figures: Mapping[str, float], tokens_per_device: float
) -> dict[str, float]:
    """The figures of a line with one step time, in seconds, and one peak memory, in bytes.

    `tokens_per_device` are those of a step, for lines that state a rate in place of a time.
    """
    found = dict(figures)
    peaks = [found.pop(name) * unit for name, unit in MEMORY_UNITS.items() if name in found]
    if peaks:
        found["peak_memory_bytes"] = max(peaks)
    milliseconds = found.pop("step_time_ms", None)
    rate = found.pop("tokens_per_s_per_device", None)
    if milliseconds is not None:
        found.setdefault("step_time_s", milliseconds / 1e3)
    elif rate is not None:
        found.setdefault("step_time_s", tokens_per_device / rate)
    return found


class StepNumberError(Exception):
    """The number of a step cannot be one, or is smaller than the one before."""


@dataclass(kw_only=True, slots=True)
class StepLine:
    """A line of a log that ends a step, or a report."""

    since_start_s: float
    """Seconds from the start of the program."""
    figures: dict[str, float]
    """By the names of `STEP_GROUPS`, with times in seconds and memory in bytes; NaN and infinity
    are possible."""
    others: tuple[float, float] | None = None
    """Seconds that others took of a core, and that it was watched, so far; None: it is not."""
    repeats_first: bool = False
    """As of `StepPattern`."""
    num_steps: int = 1
    """Steps that it stands for."""

    @property
    def number(self) -> int | None:
        """The number of its last step; StepNumberError if it cannot be one."""
        if (number := self.figures.get("index")) is None:
            return None
        if not (0 <= number <= _MOST_STEPS and number == math.floor(number)):
            raise StepNumberError(
                f"the number of the step is {number:g}, not a whole number of at least 0"
            )
        return int(number)

    def take(self, again: StepLine) -> None:
        """Adds the figures of another line of the same step: those of the slowest rank count."""
        for name, value in again.figures.items():
            own = self.figures.setdefault(name, value)
            if name in _LARGEST_COUNTS:
                self.figures[name] = max(own, value)


class RankSteps:
    """The steps of a rank, in order; positions count from 0.

    A line that stands for several steps gives each of them its mean time. The first line stands for
    one step if its number is 0 or 1, and else for as many as the second line shows, as a program
    that goes on from a checkpoint begins with a large number.
    """

    def __init__(self, *, most: int, ranks_share_output: bool) -> None:
        """Makes a rank without steps.

        Args:
            most: steps of a line that are kept.
            ranks_share_output: whether a line may come after one of another rank's next step.
        """
        self.lines: list[StepLine] = []
        self.ends: list[int] = []
        """Steps up to the end of each line."""
        self._most = most
        self._ranks_share_output = ranks_share_output

    def __len__(self) -> int:
        return self.ends[-1] if self.ends else 0

    def add(self, line: StepLine) -> int:
        """Adds a line; returns the first step that is new or has changed.

        Raises:
            StepNumberError: the number of its step is smaller than the one before.
        """
        number, changed = line.number, len(self.lines)
        before = self.lines[-1].number if self.lines else None
        if number is not None and before is not None:
            if number <= before:
                return self._take_again(line, number, before)
            line.num_steps = number - before
        self.lines.append(line)
        if len(self.lines) == 2 and (before or 0) > 1 and not line.repeats_first:
            self.lines[0].num_steps = min(before or 1, line.num_steps)
            changed = 0
        del self.ends[changed:]
        for each in self.lines[changed:]:
            self.ends.append(len(self) + min(each.num_steps, self._most))
        return self.ends[changed - 1] if changed else 0

    def _take_again(self, line: StepLine, number: int, before: int) -> int:
        late = 2 if self._ranks_share_output else 1
        for place in range(len(self.lines) - 1, max(len(self.lines) - 1 - late, -1), -1):
            if self.lines[place].number == number:
                self.lines[place].take(line)
                return self.ends[place - 1] if place else 0
        raise StepNumberError(
            f"the number of the step went back from {before} to {number} in the log: the program "
            "began anew, or counts from the start again; let it print a number that grows through "
            "the whole run"
        )

    def lines_until(self, last: int) -> range:
        """The places of the lines that stand for some of the first steps."""
        return range(bisect_right(self.ends, last - 1) + 1)

    def line_of(self, step: int) -> StepLine:
        return self.lines[bisect_right(self.ends, step)]

    def seconds(self, step: int) -> float:
        """Seconds of a step as its line states them, or else by the times at which lines came."""
        place = bisect_right(self.ends, step)
        line = self.lines[place]
        mean_s = line.figures.get("step_time_s", 0.0)
        if place == 1 and line.repeats_first:
            with_first_s = mean_s * (line.num_steps + 1) - self.seconds(0)
            mean_s = with_first_s / line.num_steps
        return mean_s if mean_s > 0 else self.clock_s(step)

    def clock_s(self, step: int) -> float:
        """Seconds of a step between the lines; of the first line, since the program's start."""
        place = bisect_right(self.ends, step)
        before_s = self.lines[place - 1].since_start_s if place else 0.0
        line = self.lines[place]
        return max((line.since_start_s - before_s) / line.num_steps, 1e-9)

    def skipped(self, place: int) -> int | None:
        """Steps of a line that were skipped; None: it does not say."""
        line = self.lines[place]
        before = self.lines[place - 1] if place else None
        said = line.figures.get("skipped")
        if said is not None and place == 1 and line.repeats_first:
            said -= self.skipped(0) or 0
        if (total := line.figures.get("skipped_total")) is not None:
            earlier = before.figures.get("skipped_total", 0.0) if before else 0.0
            said = max(total - earlier, said or 0.0)
        return None if said is None else min(max(int(said), 0), line.num_steps)

    def is_skipped(self, step: int) -> bool:
        """Whether all steps of a step's line were skipped, so that none changed the weights."""
        place = bisect_right(self.ends, step)
        return (self.skipped(place) or 0) >= self.lines[place].num_steps

    def loss(self, step: int) -> float | None:
        """The loss of a line, as that of its last step; None: another step, or it was skipped."""
        place = bisect_right(self.ends, step)
        if step + 1 != self.ends[place] or self.is_skipped(step):
            return None
        return self.lines[place].figures.get("loss")
