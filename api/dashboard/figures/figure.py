"""What a figure is, and what figures share: axes, marks, samples and texts.

A figure is plain JSON in plotly's form. Colours are names of the style sheet's variables, such as
`--part1`: the script of the pages replaces them by the colours of the reader's theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from statistics import quantiles
from typing import Any, Final

from api.service.formatting import objective_figure, unit
from search_spaces.spec.objectives import MEMORY_HEADROOM
from search_spaces.terminal.console import escaped

MOST_ROWS: Final = 50
"""Most rows of a figure's table."""

_FENCE: Final = 3.0
"""A value is far out beyond this many interquartile ranges from the quartiles (Tukey, Exploratory
Data Analysis, 1977)."""

Trace = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlotFigure:
    """A plot with its caption and its table."""

    traces: Sequence[Trace] = ()
    """Empty: there is nothing to draw yet."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Plotly's layout: the axes."""
    says: Sequence[str] = ()
    """The sentences of the caption."""
    headings: Sequence[str] = ()
    """Of the table, which says the same as the plot; numbers have a leading ">"."""
    rows: Sequence[Sequence[str]] = ()
    hides: bool = False
    """Whether trials lie beyond the ends of the axes; the page links to the plot with all."""

    def document(self) -> dict[str, Any]:
        """The JSON that the script draws."""
        return {"data": list(self.traces), "layout": dict(self.layout)}


@dataclass(frozen=True, kw_only=True, slots=True)
class AxisRange:
    """The ends of an axis, and the values beyond them."""

    low: float
    high: float
    hidden: Sequence[float] = ()
    """In ascending order."""

    def part(self, value: float) -> float:
        """The place of a value: 0 is the low end, 1 the high end; values beyond are at the end."""
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


def axis_range(
    values: Sequence[float], *, always: Iterable[float] = (), show_all: bool = False
) -> AxisRange:
    """An axis over the values, without those that are so far out that they would flatten the rest.

    Args:
        values: finite numbers.
        always: values that are never hidden, for example the winner's.
        show_all: whether the axis includes every value.
    """
    if not values:
        return AxisRange(low=0.0, high=1.0)
    low, high = min(values), max(values)
    if not show_all and len(values) >= 4:
        first, _, third = quantiles(values, n=4, method="inclusive")
        reach = _FENCE * (third - first)
        if reach > 0:
            inside = [value for value in values if first - reach <= value <= third + reach]
            shown = [*inside, *always]
            low, high = min(shown), max(shown)
    # A single value, or equal ones, need an axis that is longer than 0.
    air = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    hidden = sorted(value for value in values if not low <= value <= high)
    return AxisRange(low=low - air, high=high + air, hidden=hidden)


def hidden_words(ends: AxisRange, objective: str) -> list[str]:
    """The sentence on trials beyond an axis; none if there are none."""
    hidden = ends.hidden
    if not hidden:
        return []
    highest = objective_words(objective, hidden[-1])
    if len(hidden) == 1:
        return [f"One trial, with {highest}, lies beyond the axis."]
    lowest = objective_figure(objective, hidden[0])
    return [f"{len(hidden):,} trials, with {lowest} to {highest}, lie beyond the axis."]


def left_out_words(left_out: int, things: str, kept: str) -> list[str]:
    """The sentence on a sample; none if everything is shown."""
    if left_out <= 0:
        return []
    return [
        f"{left_out:,} {things} are left out: the plot has {kept} and an even sample of the others."
    ]


def objective_axis(objective: str, ends: AxisRange | None = None) -> dict[str, Any]:
    """Plotly's axis of an objective."""
    axis: dict[str, Any] = {"title": {"text": unit(objective)}}
    if objective == MEMORY_HEADROOM:
        axis["tickformat"] = ".0%"
    if ends is not None:
        axis["range"] = [rounded(ends.low), rounded(ends.high)]
    return axis


def objective_words(objective: str, value: float | None) -> str:
    """A value with its unit."""
    return f"{objective_figure(objective, value)} {unit(objective)}"


def marked(
    name: str, xs: Sequence[Any], ys: Sequence[Any], texts: Sequence[str], links: Sequence[int]
) -> list[Trace]:
    """The winner or the baseline, on top of the other points; none without a place."""
    if not xs:
        return []
    is_winner = name == "winner"
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": list(xs),
            "y": list(ys),
            "text": list(texts),
            "customdata": list(links),
            "hovertemplate": f"{name}: %{{text}}<extra></extra>",
            "marker": {
                "symbol": "star" if is_winner else "diamond",
                "size": 16 if is_winner else 13,
                "color": "--good" if is_winner else "--warn",
                "line": {"width": 1.5, "color": "--ground"},
            },
        }
    ]


def points(
    name: str,
    xs: Sequence[Any],
    ys: Sequence[Any],
    texts: Sequence[str],
    links: Sequence[int],
    **marker: Any,
) -> list[Trace]:
    """Points of one kind; none if there are none.

    Args:
        name: in the legend.
        xs: values of the horizontal axis.
        ys: of the vertical axis.
        texts: shown at each point.
        links: ids of the trials, whose pages open on a click.
        marker: plotly's properties of the markers.
    """
    if not xs:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": list(xs),
            "y": list(ys),
            "text": list(texts),
            "customdata": list(links),
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 7, **marker},
        }
    ]


def safe(text: str) -> str:
    """A text for a plot: plotly would read markup in it, and it may come from outside."""
    return escape(escaped(text), quote=False)


def rounded(value: float) -> float:
    """A number with 6 digits: more cannot be seen in a plot, and take space."""
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0


def round_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Round numbers between two, at most `most` of them."""
    step = 10.0 ** math.floor(math.log10((high - low) / most))
    step *= next(each for each in (1.0, 2.0, 2.5, 5.0, 10.0) if (high - low) / (each * step) < most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # 3 * 0.1 is not exactly 0.3.
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]
