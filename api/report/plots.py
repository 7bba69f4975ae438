"""The plots of a report: what was measured in which order, the Pareto front, intervals and shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from api.report.axes import Frame, Scale, drawing, scale
from api.report.markup import Markup, join, tag

WIDTH: Final = 860
MAX_TOLD: Final = 1_000
"""Points of a plot that tell their trial when pointed at; beyond, they are drawn as one path."""
MAX_NAMED: Final = 12
"""Points of a front that carry their trial's number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A place in a plot."""

    x: float
    y: float
    kind: str
    """What it looks like: a class of the style sheet."""
    says: str
    """What is told when it is pointed at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A part of a whole."""

    name: str
    size: float
    says: str
    """Its size in words."""


def history(
    measured: Sequence[Point],
    best: Sequence[tuple[float, float]],
    failed: Sequence[Point],
    legend: Sequence[tuple[str, str]],
    *,
    y_label: str,
) -> Markup:
    """What was measured, in the order in which trials ended; the best so far; failures below.

    Args:
        measured: in the units of the objective.
        best: where the best so far changes, and at the end.
        failed: trials without a measurement that counts; their `y` is not looked at.
        legend: kinds of points and what they are.
        y_label: what the objective counts.
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
    """Layouts by two objectives, more of each is better, with their front.

    Args:
        points: in the units of the objectives.
        front: its layouts from left to right, each with its name.
        legend: kinds of points and what they are.
        x_label: what the first number of a point counts.
        y_label: what the second one counts.
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
        says="95 % interval",
    )


def bar(share: float, *, width: int = 220) -> Markup:
    """A share of a whole as a bar."""
    length = max(min(share, 1.0), 0.0) * width
    return drawing(
        width, 12, tag("rect", x=0.0, y=1.0, width=length, height=10.0, class_="part1"), says=""
    )


def swing(effect: float, largest: float, *, width: int = 160) -> Markup:
    """A change for better (to the right) or worse (to the left), beside the largest of its table."""
    middle = width / 2
    length = min(abs(effect) / largest, 1.0) * middle if largest else 0.0
    left = middle if effect >= 0 else middle - length
    kind = "better" if effect >= 0 else "worse"
    return drawing(
        width,
        12,
        tag("rect", x=left, y=1.0, width=length, height=10.0, class_=kind),
        tag("line", x1=middle, x2=middle, y1=0.0, y2=12.0, class_="axis"),
        says="",
    )


def stacked(parts: Sequence[Part]) -> Markup:
    """The parts of a whole beside each other, and what each is below."""
    whole = sum(part.size for part in parts) or 1.0
    left = 0.0
    drawn = []
    for number, part in enumerate(parts, 1):
        length = part.size / whole * WIDTH
        drawn.append(
            tag(
                "rect",
                tag("title", f"{part.name}: {part.says}"),
                x=left,
                y=0.0,
                width=length,
                height=26.0,
                class_=f"part{number}",
            )
        )
        left += length
    keys = [
        tag("span", tag("i", class_=f"key part{number}"), f"{part.name} {part.says}")
        for number, part in enumerate(parts, 1)
    ]
    names = ", ".join(f"{part.name} {part.says}" for part in parts)
    whole_bar = tag("div", drawing(WIDTH, 26, *drawn, says=names), class_="stacked")
    return join(whole_bar, tag("p", *keys, class_="keys"))


def _placed(point: Point, x: Scale, y: Scale) -> Point:
    return Point(x=x(point.x), y=y(point.y), kind=point.kind, says=point.says)


def _points(points: Sequence[Point]) -> Markup:
    """Points at their places in the drawing."""
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
    """Many points as one element: lines of no length, whose round ends are the points."""
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
