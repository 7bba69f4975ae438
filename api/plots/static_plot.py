"""Plot data drawn as SVG: the same data that the pages give to plotly, without a script.

It knows the part of plotly's format that `api.plot_data` uses. Colours are the style
sheet's variables, so that a plot follows the reader's theme.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import unescape
from itertools import pairwise
from typing import Any, Final

from markupsafe import Markup

from layout_tuner.api.formatting import figure, percent
from layout_tuner.api.plot_data.plot_data import PlottedData, Trace, round_ticks
from layout_tuner.api.plots.svg import WIDTH, Plot, hatching, join, number, svg_tag, tag

MAX_TOLD: Final = 1_000
"""Most points of a kind with a tooltip; more points are drawn as one path."""

_RIGHT: Final = 24.0
_BOTTOM: Final = 46.0
_LEGEND_ROW: Final = 18.0
_CHARACTER: Final = 6.4
"""Width of a character."""
_ROUNDING: Final = 0.01
"""Places that differ by less are one place: the values of plot data are rounded."""

_SHAPES: Final = {
    "square": "M-1-1H1V1H-1z",
    "triangle-down": "M-1.1-.8H1.1L0 1.1z",
    "diamond": "M0-1L1 0L0 1L-1 0z",
    "star": "M0-1L.25-.34L.95-.31L.4.13L.59.81L0 .42L-.59.81L-.4.13L-.95-.31L-.25-.34z",
    "x": "M-1-1L1 1M-1 1L1-1",
    "line-ns": "M0-1V1",
}
"""Outlines of plotly's symbols with a radius of 1; all others are circles."""
_DASHES: Final = {"dash": "7 4", "dot": "2 3"}


def static_plot(data: PlottedData, says: str, *, width: float = WIDTH) -> Plot:
    """A plot of some data, with its caption; `says` is its text for screen readers."""
    if not data.traces:
        return Plot(svg=Markup(""), notes=tuple(data.says))
    layout = data.layout
    legend, top = _legend(data, width)
    top += 22.0 if layout["xaxis"].get("side") == "top" else 14.0
    y = _Axis(given=layout["yaxis"], start=0.0, end=top)
    left = max([62.0, *(24.0 + _CHARACTER * len(words) for _, words in y.ticks)])
    body = 280.0 if width >= WIDTH else 190.0
    if "barmode" in layout or "categoryarray" in y.given:
        low, high = y.given["range"]
        body = abs(high - low) * (26.0 if "barmode" in layout else 40.0)
    y = replace(y, start=top + body)
    x = _Axis(given=layout["xaxis"], start=left, end=width - _RIGHT)
    height = top + body + _BOTTOM
    svg = svg_tag(
        width,
        height,
        legend,
        _grid(x, y),
        *(_trace(trace, x, y) for trace in data.traces),
        *(_note(note, x, y) for note in layout.get("annotations", ())),
        says=says,
    )
    return Plot(svg=svg, notes=tuple(data.says))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Axis:
    """Maps values of one axis to positions in the plot."""

    given: Mapping[str, Any]
    """Plotly's description."""
    start: float
    end: float

    def at(self, value: Any) -> float:
        """The position of a value, which may lie beyond the axis; of a category, its middle."""
        low, high = self.given["range"]
        if isinstance(value, str):
            value = self.given["categoryarray"].index(value)
        elif self.given.get("type") == "log":
            value = math.log10(value)
        place = float(self.start + (value - low) / (high - low) * (self.end - self.start))
        ends = (end for end in (self.start, self.end) if abs(place - end) < _ROUNDING)
        return next(ends, place)

    @property
    def bounds(self) -> tuple[float, float]:
        """The places between which values are drawn."""
        return min(self.start, self.end), max(self.start, self.end)

    def holds(self, value: Any) -> bool:
        low, high = self.bounds
        return low <= self.at(value) <= high

    @property
    def ticks(self) -> list[tuple[Any, str]]:
        """Values with their texts."""
        if names := self.given.get("categoryarray"):
            return [(name, name) for name in names]
        if "tickvals" in self.given:
            return list(zip(self.given["tickvals"], self.given["ticktext"], strict=True))
        words = percent if self.given.get("tickformat") else figure
        return [(tick, words(tick)) for tick in round_ticks(*self.given["range"])]


def _grid(x: _Axis, y: _Axis) -> Markup:
    """Grid lines, the texts at them, and the titles of the axes."""
    drawn = []
    on_top = x.given.get("side") == "top"
    place = y.end - 8.0 if on_top else y.start + 16.0
    for value, words in x.ticks:
        at = x.at(value)
        if x.given.get("showgrid", True):
            drawn.append(tag("line", x1=at, x2=at, y1=y.start, y2=y.end, class_="grid"))
        drawn.append(tag("text", words, x=at, y=place, class_="middle"))
    for value, words in y.ticks if y.given.get("visible", True) else ():
        at = y.at(value)
        if y.given.get("showgrid", True):
            drawn.append(tag("line", x1=x.start, x2=x.end, y1=at, y2=at, class_="grid"))
        drawn.append(tag("text", words, x=x.start - 6.0, y=at + 4.0, class_="end"))
    across, up = (axis.given.get("title", {}).get("text", "") for axis in (x, y))
    return join(
        *drawn,
        tag("text", across, x=(x.start + x.end) / 2, y=y.start + 36.0, class_="middle label"),
        tag("text", up, x=4.0, y=y.end - 8.0, class_="label"),
    )


def _trace(trace: Trace, x: _Axis, y: _Axis) -> Markup:
    if trace["type"] == "heatmap":
        return join(*_cells(trace, x, y))
    if trace["type"] == "bar":
        return join(*_bars(trace, x, y))
    if trace["mode"] == "lines":
        return _line(trace, x, y)
    return _markers(trace, x, y)


_Point = tuple[float, float]


def _line(trace: Trace, x: _Axis, y: _Axis) -> Markup:
    """A line as one path. What lies beyond an axis is not drawn, and is not drawn at its end."""
    style = trace["line"]
    box = [axis.bounds for axis in (x, y)]
    path, last = "", None
    for begin, end in pairwise(_corners(trace, x, y)):
        part = None if begin is None or end is None else _within(begin, end, box)
        if part is None:
            last = None
            continue
        for place, form in zip(part, ("M{} {}", "L{} {}"), strict=True):
            if place != last:
                path += form.format(*map(number, place))
        last = part[1]
    return tag(
        "path",
        d=path,
        fill=_colour(trace.get("fillcolor", "none")),
        stroke=_colour(style["color"]) if style.get("width") else None,
        stroke_width=style.get("width"),
        stroke_dasharray=_DASHES.get(style.get("dash", "")),
        stroke_opacity=trace.get("opacity"),
    )


def _corners(trace: Trace, x: _Axis, y: _Axis) -> Iterator[_Point | None]:
    """The ends and the steps of a line; None is a gap."""
    shape, last = trace["line"].get("shape"), None
    for a, b in zip(trace["x"], trace["y"], strict=True):
        at = None if a is None else (x.at(a), y.at(b))
        if at and last and shape in ("hv", "vh"):
            yield (at[0], last[1]) if shape == "hv" else (last[0], at[1])
        yield at
        last = at


def _within(
    begin: _Point, end: _Point, box: Sequence[tuple[float, float]]
) -> tuple[_Point, _Point] | None:
    """The part of a straight line in a box (Liang and Barsky, ACM TOG 3, 1984); None: no part."""
    first, last = 0.0, 1.0
    for a, b, (low, high) in zip(begin, end, box, strict=True):
        if a == b:
            if not low <= a <= high:
                return None
            continue
        enters, leaves = sorted(((low - a) / (b - a), (high - a) / (b - a)))
        first, last = max(first, enters), min(last, leaves)
    if first > last:
        return None
    (x0, y0), (x1, y1) = begin, end
    cuts = [(x0 + part * (x1 - x0), y0 + part * (y1 - y0)) for part in (first, last)]
    return cuts[0] if first > 0 else begin, cuts[1] if last < 1 else end


def _markers(trace: Trace, x: _Axis, y: _Axis) -> Markup:
    marker = trace["marker"]
    colours = marker.get("color")
    spots = [
        (x.at(a), y.at(b), words, colours if isinstance(colours, str | None) else colours[place])
        for place, (a, b, words) in enumerate(
            zip(trace["x"], trace["y"], trace["text"], strict=True)
        )
        if x.holds(a) and y.holds(b)
    ]
    if len(spots) > MAX_TOLD:
        # Lines of length 0 with round ends take a tenth of the bytes.
        by_colour: dict[str | None, list[str]] = {}
        for left, top, _, colour in spots:
            by_colour.setdefault(colour, []).append(f"M{left:.1f} {top:.1f}h0")
        return join(
            *(
                tag("path", d="".join(places), class_="many", stroke=_colour(colour))
                for colour, places in by_colour.items()
            )
        )
    return join(
        *(
            _marker(marker, left, top, colour, tag("title", _plain(words)))
            for left, top, words, colour in spots
        )
    )


def _marker(
    marker: Mapping[str, Any], left: float, top: float, colour: str | None, title: Markup
) -> Markup:
    symbol, is_open, _ = marker.get("symbol", "circle").partition("-open")
    outline = _SHAPES.get(symbol)
    edge = marker.get("line", {})
    is_line = symbol in ("x", "line-ns")
    style = {
        "fill": "none" if is_open or is_line else _colour(colour),
        "stroke": _colour(edge.get("color") or colour),
        "stroke_width": 2.0 if is_line else edge.get("width", 1.2),
        "fill_opacity": marker.get("opacity"),
    }
    radius = marker["size"] / 2
    if outline is None:
        return tag("circle", title, cx=left, cy=top, r=radius, **style)
    move = f"translate({number(left)},{number(top)}) scale({number(radius)})"
    style["vector_effect"] = "non-scaling-stroke"
    return tag("path", title, d=outline, transform=move, **style)


def _bars(trace: Trace, x: _Axis, y: _Axis) -> Iterator[Markup]:
    marker = trace["marker"]
    edge = marker.get("line", {}).get("color")
    columns = (trace[name] for name in ("y", "base", "x", "width", "hovertext", "text"))
    for row, base, length, thickness, words, label in zip(*columns, strict=True):
        left, right = sorted((x.at(base), x.at(base + length)))
        height = thickness * abs(y.at(1) - y.at(0))
        top = y.at(row) - height / 2
        yield tag(
            "rect",
            tag("title", _plain(words)),
            x=left,
            y=top,
            width=right - left,
            height=height,
            fill=_colour(marker["color"]),
            stroke=_colour(edge or "--ground"),
        )
        if "pattern" in marker:
            yield hatching(left, top, right - left, height)
        if label and _CHARACTER * len(label) + 8.0 < right - left:
            ink = _colour("--ink" if edge else "--on-pass")
            yield tag("text", label, x=left + 4.0, y=y.at(row) + 4.0, fill=ink)


def _cells(trace: Trace, x: _Axis, y: _Axis) -> Iterator[Markup]:
    """The cells of a map that have a value, in the nearest colour of its scale."""
    values = [value for row in trace["z"] for value in row if value is not None]
    low, high = min(values), max(values)
    scale = [colour for _, colour in trace["colorscale"]]
    width = (x.end - x.start) / len(trace["x"])
    height = (y.start - y.end) / len(trace["y"])
    for name, row, texts in zip(trace["y"], trace["z"], trace["text"], strict=True):
        for column, value, words in zip(trace["x"], row, texts, strict=True):
            if value is None:
                continue
            part = (value - low) / (high - low) if high > low else 1.0
            colour = scale[round(part * (len(scale) - 1))]
            yield tag(
                "rect",
                tag("title", words),
                x=x.at(column) - width / 2 + 1.0,
                y=y.at(name) - height / 2 + 1.0,
                width=width - 2.0,
                height=height - 2.0,
                fill=_colour(colour),
            )
            if "texttemplate" in trace:
                place = {"x": x.at(column), "y": y.at(name) + 4.0}
                ink = f"var(--on-{colour.removeprefix('--')})"
                yield tag("text", words, class_="middle", fill=ink, **place)


def _note(note: Mapping[str, Any], x: _Axis, y: _Axis) -> Markup:
    anchor = {"left": "note", "right": "note end"}.get(note.get("xanchor", ""), "note middle")
    return tag(
        "text",
        note["text"],
        x=x.at(note["x"]) + note.get("xshift", 0),
        y=y.at(note["y"]) - note.get("yshift", 0) + 4.0,
        class_=anchor,
        fill=_colour(note["font"].get("color")),
    )


def _legend(data: PlottedData, width: float) -> tuple[Markup, float]:
    """The names of the traces in rows, and the height of the rows."""
    left, top = 8.0, 12.0
    drawn = []
    shown = data.layout.get("showlegend", True)
    for trace in data.traces:
        if not (shown and trace.get("showlegend", True) and trace.get("name")):
            continue
        name = trace["name"]
        length = 34.0 + _CHARACTER * len(name)
        if left + length > width:
            left, top = 8.0, top + _LEGEND_ROW
        drawn += [_key(trace, left, top), tag("text", name, x=left + 20.0, y=top + 4.0)]
        left += length
    return join(*drawn), top + 16.0 if drawn else 20.0


def _key(trace: Trace, left: float, top: float) -> Markup:
    if "marker" not in trace:
        line = _Axis(given={"range": (0, 1)}, start=left, end=left + 14.0)
        flat = _Axis(given={"range": (0, 1)}, start=top, end=top)
        width = max(trace["line"].get("width", 0), 1.5) if "fillcolor" not in trace else 8
        colour = trace.get("fillcolor", trace["line"].get("color"))
        style = {**trace["line"], "width": width, "color": colour, "shape": None}
        return _line({"x": (0, 1), "y": (0, 0), "line": style}, line, flat)
    if trace["type"] == "bar":
        colour = _colour(trace["marker"]["color"])
        return tag("rect", x=left, y=top - 6.0, width=12.0, height=12.0, fill=colour)
    marker = {**trace["marker"], "size": min(trace["marker"]["size"], 12)}
    return _marker(marker, left + 7.0, top, marker.get("color"), Markup(""))


def _colour(name: str | None) -> str | None:
    """A colour for an attribute: a name of the style sheet's variable, or a word such as none."""
    return f"var({name})" if name and name.startswith("--") else name


def _plain(words: str) -> str:
    """A text of plotly, which has entities and line ends as markup."""
    return unescape(words.replace("<br>", "\n"))
