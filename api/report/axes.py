"""The frame of a plot: scales, ticks at round numbers, axes with what they count."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from api.figures import figure
from api.report.markup import Markup, join, tag

_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """From values to places in the drawing, along one axis."""

    low: float
    high: float
    start: float
    """Where the lowest value lies, in units of the drawing."""
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Four to seven round numbers on the scale."""
        step = _round_step((self.high - self.low) / 7)
        first = math.ceil(self.low / step - 1e-9)
        last = math.floor(self.high / step + 1e-9)
        return [number * step for number in range(first, last + 1)]


def scale(values: Iterable[float], start: float, end: float, *, from_zero: bool = False) -> Scale:
    """A scale that holds the values with some air, or begins at 0."""
    found = [value for value in values if math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    # A single value, or equal ones, still need a scale of some length.
    air = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return Scale(low=low if from_zero else low - air, high=high + air, start=start, end=end)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frame:
    """The rectangle of a plot and its two scales."""

    x: Scale
    y: Scale
    x_label: str
    y_label: str

    def draw(self) -> Markup:
        """Grid lines, numbers and labels."""
        left, right, bottom, top = self.x.start, self.x.end, self.y.start, self.y.end
        rows = [
            join(
                tag("line", x1=left, x2=right, y1=self.y(tick), y2=self.y(tick), class_="grid"),
                tag("text", _number(tick), x=left - 6, y=self.y(tick) + 4, class_="end"),
            )
            for tick in self.y.ticks
        ]
        columns = [
            join(
                tag(
                    "line",
                    x1=self.x(tick),
                    x2=self.x(tick),
                    y1=bottom,
                    y2=bottom + 4,
                    class_="axis",
                ),
                tag("text", _number(tick), x=self.x(tick), y=bottom + 17, class_="middle"),
            )
            for tick in self.x.ticks
        ]
        return join(
            *rows,
            tag("line", x1=left, x2=right, y1=bottom, y2=bottom, class_="axis"),
            *columns,
            tag("text", self.x_label, x=(left + right) / 2, y=bottom + 34, class_="middle label"),
            tag("text", self.y_label, x=left - 6, y=top - 10, class_="label"),
        )


def drawing(width: int, height: int, *content: Markup, says: str) -> Markup:
    """A drawing that grows and shrinks with the page; `says` is what it tells whoever cannot see it."""
    return tag(
        "svg",
        *content,
        viewBox=f"0 0 {width} {height}",
        width=str(width),
        height=str(height),
        role="img",
        aria_label=says,
    )


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(each * power for each in _ROUND if each * power >= step * 0.999)


def _number(value: float) -> str:
    # 3 * 0.1 is not 0.3, and nobody wants to read why.
    rounded = float(f"{value:.10g}")
    return "0" if rounded == 0 else figure(rounded)
