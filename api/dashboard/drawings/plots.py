"""Plots with scales and axes: the history, the Pareto front, iterations, intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from api.dashboard.drawings.svg import WIDTH, drawing, join, tag
from api.service.formatting import figure

MAX_TOLD: Final = 1_000
"""Most points with a tooltip; more points are drawn as one path."""
MAX_NAMED: Final = 12
"""Most points of a front that are labelled with their trial's number."""
_ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """Maps values to positions in the drawing, along one axis."""

    low: float
    high: float
    start: float
    """The position of the lowest value, in units of the drawing."""
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
    """A scale over the values, with a margin, or from 0."""
    found = [value for value in values if math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    if from_zero:
        low = min(low, 0.0)
    # A single value, or equal ones, need a scale that is longer than 0.
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


def _round_step(step: float) -> float:
    power = 10.0 ** math.floor(math.log10(step))
    return next(each * power for each in _ROUND if each * power >= step * 0.999)


def _number(value: float) -> str:
    # 3 * 0.1 is not exactly 0.3.
    rounded = float(f"{value:.10g}")
    return "0" if rounded == 0 else figure(rounded)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A point of a plot."""

    x: float
    y: float
    kind: str
    """A class of the style sheet."""
    says: str
    """Its tooltip."""


def history(
    measured: Sequence[Point],
    best: Sequence[tuple[float, float]],
    failed: Sequence[Point],
    legend: Sequence[tuple[str, str]],
    *,
    y_label: str,
) -> Markup:
    """The values of trials in the order in which they ended, with the best so far.

    Args:
        measured: in the units of the objective.
        best: the best so far where it changes, and at the end.
        failed: trials without a valid measurement, drawn below; their `y` is not used.
        legend: kinds of points with their names.
        y_label: the unit of the objective.
    """
    every = [point.x for point in (*measured, *failed)]
    x = Scale(low=0.0, high=max(every, default=1.0) + 1.0, start=70.0, end=WIDTH - 20.0)
    y = scale([point.y for point in measured], 250.0, 50.0, from_zero=True)
    frame = Frame(x=x, y=y, x_label="trials that ended, in order", y_label=y_label)
    below = [Point(x=x(point.x), y=300.0, kind=point.kind, says=point.says) for point in failed]
    return drawing(
        WIDTH,
        320,
        _legend(legend),
        frame.draw(),
        _steps(best, x, y),
        _points([_placed(point, x, y) for point in measured]),
        tag("text", "no result", x=64.0, y=304.0, class_="end") if failed else Markup(""),
        _points(below),
        says=f"{y_label} of each trial in the order in which they ended, with the best so far",
    )


def scatter(
    points: Sequence[Point],
    front: Sequence[tuple[float, float, str]],
    legend: Sequence[tuple[str, str]],
    *,
    x_label: str,
    y_label: str,
) -> Markup:
    """Layouts in the plane of two objectives to be maximized, with their front.

    Args:
        points: in the units of the objectives.
        front: its layouts from left to right, each with its name.
        legend: kinds of points with their names.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
    """
    x = scale([point.x for point in points], 70.0, WIDTH - 20.0)
    y = scale([point.y for point in points], 300.0, 50.0)
    frame = Frame(x=x, y=y, x_label=x_label, y_label=y_label)
    named = front if len(front) <= MAX_NAMED else ()
    return drawing(
        WIDTH,
        350,
        _legend(legend),
        frame.draw(),
        _front(front, x, y),
        _points([_placed(point, x, y) for point in points]),
        *(
            tag("text", name, x=x(right) + 7.0, y=y(up) - 6.0, class_="named")
            for right, up, name in named
        ),
        says=f"layouts by {x_label} and {y_label}, with their Pareto front",
    )


def steps_plot(
    measured: Sequence[Point], median_s: float | None, legend: Sequence[tuple[str, str]]
) -> Markup:
    """The step times of a probe's iterations in order; `median_s` is drawn as a line."""
    x = Scale(
        low=-0.5,
        high=max((point.x for point in measured), default=1.0) + 0.5,
        start=70.0,
        end=WIDTH - 20.0,
    )
    times = [point.y for point in measured] + ([] if median_s is None else [median_s])
    y = scale(times, 190.0, 50.0)
    line = Markup("")
    if median_s is not None:
        line = tag("line", x1=x.start, x2=x.end, y1=y(median_s), y2=y(median_s), class_="median")
    return drawing(
        WIDTH,
        240,
        _legend(legend),
        Frame(x=x, y=y, x_label="iteration", y_label="step time, s").draw(),
        line,
        _points([_placed(point, x, y) for point in measured]),
        says="step time of each iteration in order; the table below has the numbers",
    )


def interval(value: float, low: float, high: float, over: Scale, *, is_winner: bool) -> Markup:
    """A value and its 95 % interval, on the scale of its table."""
    kind = "winner" if is_winner else "full"
    return drawing(
        int(over.end + over.start),
        16,
        tag("line", x1=over(low), x2=over(high), y1=8.0, y2=8.0, class_="whisker"),
        tag("line", x1=over(low), x2=over(low), y1=4.0, y2=12.0, class_="whisker"),
        tag("line", x1=over(high), x2=over(high), y1=4.0, y2=12.0, class_="whisker"),
        tag("circle", cx=over(value), cy=8.0, r=3.5, class_=kind),
        says="",
    )


def _placed(point: Point, x: Scale, y: Scale) -> Point:
    return Point(x=x(point.x), y=y(point.y), kind=point.kind, says=point.says)


def _points(points: Sequence[Point]) -> Markup:
    """Points at positions in the drawing."""
    if len(points) <= MAX_TOLD:
        return join(
            *(
                tag("circle", tag("title", p.says), cx=p.x, cy=p.y, r=4.0, class_=p.kind)
                for p in points
            )
        )
    kinds = dict.fromkeys(point.kind for point in points)
    return join(*(_as_path([p for p in points if p.kind == kind], kind) for kind in kinds))


def _as_path(points: Iterable[Point], kind: str) -> Markup:
    """Many points as one element: lines of length 0 with round ends."""
    places = "".join(f"M{point.x:.1f} {point.y:.1f}h0" for point in points)
    return tag("path", d=places, class_=f"many {kind}")


def _steps(best: Sequence[tuple[float, float]], x: Scale, y: Scale) -> Markup:
    if not best:
        return Markup("")
    (first_x, first_y), *others = best
    path = f"M{x(first_x):.1f} {y(first_y):.1f}"
    path += "".join(f"H{x(right):.1f}V{y(up):.1f}" for right, up in others)
    return tag("path", d=path, class_="best")


def _front(front: Sequence[tuple[float, float, str]], x: Scale, y: Scale) -> Markup:
    if len(front) < 2:
        return Markup("")
    places = " ".join(f"{x(right):.1f},{y(up):.1f}" for right, up, _name in front)
    return tag("polyline", points=places, class_="front")


def _legend(entries: Sequence[tuple[str, str]]) -> Markup:
    left = 70.0
    drawn = []
    for kind, words in entries:
        drawn.append(tag("circle", cx=left, cy=12.0, r=4.0, class_=kind))
        drawn.append(tag("text", words, x=left + 10.0, y=16.0))
        left += 30.0 + 6.6 * len(words)
    return join(*drawn)
