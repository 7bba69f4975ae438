"""What plot data is, and what plots share: axes, marks, samples and texts.

Plot data is plain JSON in plotly's form. The script of the pages draws it with plotly, and
`api.plots.static_plot` draws the same as SVG for the report. Colours are names of the
style sheet's variables, such as `--part1`, so that both follow the reader's theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from html import escape
from itertools import zip_longest
from statistics import quantiles
from typing import Any, Final, NamedTuple

from layout_tuner.api.formatting import objective_figure, unit
from layout_tuner.search_spaces.objectives import MEMORY_HEADROOM
from layout_tuner.terminal.console import escaped

MOST_ROWS: Final = 50
"""Most rows of a plot's table."""

MARKERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "measured": {"symbol": "circle", "color": "--mark"},
    "measured again": {"symbol": "circle-open", "color": "--mark"},
    "stopped early": {"symbol": "triangle-down-open", "color": "--soft"},
    "not ranked": {"symbol": "square-open", "color": "--warn"},
    "infeasible": {"symbol": "x", "color": "--part4"},
    "failed": {"symbol": "x", "color": "--bad"},
    "cancelled": {"symbol": "x", "color": "--soft"},
}
"""The marker of each kind of trial."""

MARKS: Final[Mapping[str, tuple[str, str, str]]] = {
    "baseline": ("◆", "diamond", "--warn"),
    "winner": ("★", "star", "--good"),
}
"""Layouts that stand out: a character, plotly's symbol, and the colour. The last is on top."""

_FENCE: Final = 3.0
"""A value is far out beyond this many interquartile ranges from the quartiles (Tukey, Exploratory
Data Analysis, 1977)."""

Trace = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class PlottedData:
    """The data of a plot, with its caption and its table."""

    traces: Sequence[Trace] = ()
    """Empty: there is nothing to draw yet."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Plotly's layout: the axes, each with its range."""
    says: Sequence[str] = ()
    """The sentences of the caption."""
    headings: Sequence[str] = ()
    """Of the table, which says the same as the plot; numbers have a leading ">"."""
    rows: Sequence[Sequence[str]] = ()
    row_ids: Sequence[int] = ()
    """Of the trials whose pages the rows link; empty: they link none."""
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

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high

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
    margin = 0.05 * (high - low) or 0.1 * abs(high) or 1.0
    low, high = low - margin, high + margin
    hidden = sorted(value for value in values if not low <= value <= high)
    return AxisRange(low=low, high=high, hidden=hidden)


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


def left_out_words(left_out: int, things: str, kept: str) -> Iterator[str]:
    """The sentence on a sample; none if everything is shown."""
    if left_out > 0:
        yield (
            f"{left_out:,} {things} are left out: the plot has {kept} and an even sample of the "
            "others."
        )


def objective_axis(objective: str, ends: AxisRange) -> dict[str, Any]:
    form = {"tickformat": ".0%"} if objective == MEMORY_HEADROOM else {}
    span = [rounded(ends.low), rounded(ends.high)]
    return {"title": {"text": unit(objective)}, "range": span, **form}


def objective_words(objective: str, value: float | None) -> str:
    return f"{objective_figure(objective, value)} {unit(objective)}"


class Spot(NamedTuple):
    """A trial at its place in a plot."""

    x: Any
    y: Any
    text: str
    """Shown at the point; it may have several lines."""
    trial_id: int
    """Its page opens on a click."""


def points(name: str, spots: Sequence[Spot], **marker: Any) -> list[Trace]:
    """Points of one kind with a name for the legend; none if there are none.

    `marker` has plotly's properties of the markers.
    """
    if not spots:
        return []
    return [
        {
            "type": "scatter",
            "mode": "markers",
            "name": name,
            "x": _seen(spot.x for spot in spots),
            "y": _seen(spot.y for spot in spots),
            "text": [safe(spot.text).replace("\n", "<br>") for spot in spots],
            "customdata": [spot.trial_id for spot in spots],
            "hovertemplate": "%{text}<extra></extra>",
            "marker": {"size": 7, **marker},
        }
    ]


def marked(name: str, *spots: Spot) -> list[Trace]:
    """The winner or the baseline, on top of the other points."""
    _character, symbol, colour = MARKS[name]
    return points(
        name,
        [spot._replace(text=f"{name}: {spot.text}") for spot in spots],
        symbol=symbol,
        size=16 if name == "winner" else 13,
        color=colour,
        line={"width": 1.5, "color": "--ground"},
    )


def mark_disturbed(data: PlottedData, disturbed: Set[int]) -> PlottedData:
    """Rings the points of disturbed trials, given by their ids, and marks their texts and rows."""
    traces: list[Trace] = []
    rings: dict[int, Spot] = {}
    for trace in data.traces:
        column = {"bar": "hovertext", "scatter": "text"}.get(trace["type"], "")
        if column in trace:
            ids = trace["customdata"]
            words = [
                text + "<br>its measurement is disturbed" * (id_ in disturbed)
                for text, id_ in zip(trace[column], ids, strict=True)
            ]
            trace = {**trace, column: words}
            if trace["type"] == "scatter":
                found = map(Spot, trace["x"], trace["y"], words, ids)
                # A measured point comes before the estimate and the mark of the same trial.
                rings = {s.trial_id: s for s in found if s.trial_id in disturbed} | rings
        traces.append(trace)
    drawn = points("disturbed", [*rings.values()], symbol="circle-open", size=13, color="--ink")
    # The texts are markup already.
    traces += [{**ring, "text": [spot.text for spot in rings.values()]} for ring in drawn]
    rows = [
        (f"{row[0]}, disturbed", *row[1:]) if id_ in disturbed else row
        for row, id_ in zip_longest(data.rows, data.row_ids)
    ]
    return replace(data, traces=traces, rows=rows)


class Bar(NamedTuple):
    """A horizontal bar of a trial."""

    row: Any
    start: float
    length: float
    """Below 0 it goes to the left; it is thin then, since it lies over other bars."""
    text: str
    """Shown at the bar."""
    trial_id: int
    label: str = ""
    """Shown in the bar, where it fits."""


def bars(name: str, found: Sequence[Bar], **marker: Any) -> list[Trace]:
    """Bars of one kind with a name for the legend; none if there are none.

    `marker` has plotly's properties of the bars.
    """
    if not found:
        return []
    if "pattern" in marker:
        pattern = {"fillmode": "overlay", "fgcolor": "--ground", "solidity": 0.2}
        marker = {**marker, "pattern": pattern | marker["pattern"]}
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": name,
            "y": [bar.row for bar in found],
            "base": _seen(bar.start for bar in found),
            "x": _seen(bar.length for bar in found),
            "width": [0.7 if bar.length >= 0 else 0.3 for bar in found],
            "text": [bar.label for bar in found],
            "textposition": "inside",
            "insidetextanchor": "start",
            "textangle": 0,
            "hovertext": [safe(bar.text) for bar in found],
            "customdata": [bar.trial_id for bar in found],
            "hovertemplate": "%{hovertext}<extra></extra>",
            "marker": marker,
        }
    ]


def rows_layout(title: str, high: float, names: Sequence[str]) -> dict[str, Any]:
    """Plotly's layout of bars in rows, the first at the top, over an axis from 0.

    A row without a name belongs to the one above it.
    """
    named = {row: safe(name[:60]) for row, name in enumerate(names) if name}
    return {
        "barmode": "overlay",
        "xaxis": {"title": {"text": title}, "range": [0, rounded(high)]},
        "yaxis": {
            "tickmode": "array",
            "tickvals": list(named),
            "ticktext": list(named.values()),
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
        },
        # Texts that do not fit into their bars are left out.
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "meta": {"min_width": 760, "height": 110 + 26 * len(names)},
    }


def line(
    name: str, xs: Iterable[Any], ys: Iterable[Any], *, legend: bool = True, **style: Any
) -> Trace:
    """A line through points; None makes a gap. `style` has plotly's properties of the line."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": _seen(xs),
        "y": _seen(ys),
        "line": style,
        "hoverinfo": "skip",
        "showlegend": legend,
    }


def _seen(values: Iterable[Any]) -> list[Any]:
    return [rounded(value) if isinstance(value, float) else value for value in values]


def safe(text: str) -> str:
    """A text for a plot: plotly would read markup in it, and it may come from outside."""
    return escape(escaped(text), quote=False)


def rounded(value: float) -> float:
    """A number with 6 digits: more cannot be seen in a plot, and take space."""
    return float(f"{value:.6g}") if math.isfinite(value) else 0.0


def round_ticks(low: float, high: float) -> list[float]:
    """Up to eight round numbers between two."""
    least = (high - low) / 8
    step = 10.0 ** math.floor(math.log10(least))
    step *= next(each for each in (1.0, 2.0, 2.5, 5.0, 10.0) if each * step > least)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # 3 * 0.1 is not exactly 0.3.
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def both_ends(number: int, most: int) -> list[int]:
    """The numbers below one, or so many of the first and the last of them."""
    every = list(range(number))
    return every if number <= most else every[: most // 2] + every[-most // 2 :]
