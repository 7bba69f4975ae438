"""Bars: shares, changes, the parts of a step, memory by pipeline stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from markupsafe import Markup

from api.dashboard.drawings.svg import WIDTH, Drawn, drawing, hatching, join, tag
from api.dashboard.figures.step_times import PARTS
from api.service.formatting import memory
from search_spaces.protocol.measurement import Breakdown

MAX_STAGES: Final = 32
"""Pipeline stages whose memory is drawn; of more, the first and the last."""
_BAR_HEIGHT: Final = 26.0


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotPart:
    """A part of a whole."""

    name: str
    size: float
    says: str
    """Its size in words."""
    kind: str
    """A class of the style sheet: part1 to part6."""


def swing(effect: float, largest: float, *, width: int = 160) -> Markup:
    """A bar of a change, to the right if it is better, relative to the largest of its table."""
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

    Args:
        parts: from left to right.
        whole: the size that fills the width, for several bars on one scale; None: the parts do.
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
    return tag("div", drawing(WIDTH, _BAR_HEIGHT, *drawn, says=names), class_="stacked")


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


def memory_by_stage(
    measured: Sequence[int],
    estimated: Sequence[float],
    *,
    capacity_bytes: int | None,
    top_bytes: float | None = None,
) -> Drawn:
    """Peak memory of each pipeline stage, measured and estimated, with a line at the capacity.

    Args:
        measured: bytes by stage; empty: not measured.
        estimated: bytes by stage; empty: there is no estimate.
        capacity_bytes: memory of a device; None: not known.
        top_bytes: the end of the scale, for several drawings on one; None: the largest number.
    """
    num_stages = max(len(measured), len(estimated))
    stages = list(range(num_stages))
    if num_stages > MAX_STAGES:
        stages = stages[: MAX_STAGES // 2] + stages[-MAX_STAGES // 2 :]
    largest = top_bytes or max(*measured, *estimated, capacity_bytes or 0, 1)
    left, length = 74.0, WIDTH - 74.0 - 230.0
    height = len(stages) * 28.0 + 26.0
    rows = [
        _stage_row(
            stage,
            24.0 + row * 28.0,
            measured[stage] if stage < len(measured) else None,
            estimated[stage] if stage < len(estimated) else None,
            left=left,
            per_byte=length / largest,
        )
        for row, stage in enumerate(stages)
    ]
    line = Markup("")
    if capacity_bytes:
        x = left + capacity_bytes / largest * length
        line = join(
            tag("line", x1=x, x2=x, y1=18.0, y2=height - 2.0, class_="capacity"),
            tag("text", f"capacity {memory(capacity_bytes)}", x=x, y=12.0, class_="end"),
        )
    notes = ["The thick bar is the measured peak, the thin one the uncalibrated estimate."]
    if not measured:
        notes = ["Nothing was measured: the bars are the uncalibrated estimate."]
    elif not estimated:
        notes = ["The bars are the measured peaks; the embedded estimate does not apply."]
    if num_stages > MAX_STAGES:
        notes.append(f"Drawn are the first and the last {MAX_STAGES // 2} of {num_stages} stages.")
    return Drawn(
        svg=drawing(WIDTH, height, *rows, line, says="Peak memory by pipeline stage"),
        notes=tuple(notes),
    )


def _stage_row(
    stage: int,
    y: float,
    measured: int | None,
    estimated: float | None,
    *,
    left: float,
    per_byte: float,
) -> Markup:
    words = []
    drawn = [tag("text", f"stage {stage}", x=left - 8.0, y=y + 13.0, class_="end")]
    for value, name, height, kind in (
        (measured, "measured", 10.0, "part1"),
        (estimated, "estimated", 6.0, "estimate"),
    ):
        if value is not None:
            length = value * per_byte
            top = y + 2.0 if kind == "part1" else y + 14.0
            drawn.append(tag("rect", x=left, y=top, width=length, height=height, class_=kind))
            words.append(f"{memory(int(value))} {name}")
    drawn.append(tag("text", ", ".join(words), x=WIDTH - 222.0, y=y + 13.0, class_="value"))
    return join(*drawn)
