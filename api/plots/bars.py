"""Bars: changes, and the parts of a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from layout_tuner.api.plot_data.step_times import PARTS
from layout_tuner.api.plots.svg import WIDTH, hatching, svg_tag, tag
from layout_tuner.protocol.measurement import Breakdown

_BAR_HEIGHT: Final = 26.0
_SWING_WIDTH: Final = 160


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotPart:
    """A part of a whole."""

    name: str
    size: float
    says: str
    """Its size in words."""
    kind: str
    """A class of the style sheet: part1 to part8."""


def swing(effect: float, largest: float) -> Markup:
    """A bar of a change, to the right if it is better, relative to the largest of its table."""
    middle = _SWING_WIDTH / 2
    length = min(abs(effect) / largest, 1.0) * middle if largest else 0.0
    left = middle if effect >= 0 else middle - length
    kind = "better" if effect >= 0 else "worse"
    return svg_tag(
        _SWING_WIDTH,
        12,
        tag("rect", x=left, y=1.0, width=length, height=10.0, class_=kind),
        tag("line", x1=middle, x2=middle, y1=0.0, y2=12.0, class_="axis"),
        says="",
    )


def step_parts(breakdown: Breakdown, step_time_s: float) -> list[PlotPart]:
    """The parts of a step in their fixed order, each as a share of the step."""
    named = [(name, getattr(breakdown, part)) for part, name in PARTS.items()]
    return [
        PlotPart(name=name, size=seconds, says=f"{seconds / step_time_s:.1%}", kind=f"part{place}")
        for place, (name, seconds) in enumerate(named, 1)
        if seconds
    ]


def stacked(parts: Sequence[PlotPart], *, whole: float | None = None) -> Markup:
    """The parts of a whole in one bar; parts below 0 are in the legend alone.

    Bars on one scale have the same `whole`; by default the parts fill the width.
    """
    whole = whole or sum(max(part.size, 0.0) for part in parts) or 1.0
    left = 0.0
    drawn = []
    for part in parts:
        length = max(part.size, 0.0) / whole * WIDTH
        title = tag("title", f"{part.name}: {part.says}")
        drawn.append(
            tag(
                "rect",
                title,
                x=left,
                y=0.0,
                width=length,
                height=_BAR_HEIGHT,
                class_=f"part {part.kind}",
            )
        )
        if part.name == "unexplained":
            drawn.append(hatching(left, 0.0, length, _BAR_HEIGHT))
        left += length
    names = ", ".join(f"{part.name} {part.says}" for part in parts)
    return tag("div", svg_tag(WIDTH, _BAR_HEIGHT, *drawn, says=names), class_="stacked")


def keys(parts: Sequence[PlotPart]) -> Markup:
    """The legend of a bar, with the sizes of its parts."""
    return tag(
        "p",
        *(
            tag("span", tag("i", class_=f"key {part.kind}"), f"{part.name} {part.says}")
            for part in parts
        ),
        class_="keys",
    )
