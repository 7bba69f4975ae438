"""Plots of the knobs: parallel coordinates, slices, and two knobs against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Final

from layout_tuner.api.formatting import objective_figure, unit
from layout_tuner.api.plot_data.layout_points import PlotFacts, in_order, knob_text, mark_traces
from layout_tuner.api.plot_data.plot_data import (
    MARKERS,
    MARKS,
    MOST_ROWS,
    AxisRange,
    PlottedData,
    Spot,
    Trace,
    axis_range,
    hidden_words,
    left_out_words,
    line,
    marked,
    objective_axis,
    points,
    round_ticks,
    rounded,
)
from layout_tuner.results_db.leaderboard.leaderboard_records import KnobCell
from layout_tuner.results_db.leaderboard.plot_points import PlotPoint
from layout_tuner.search_spaces.layouts.knobs import Knob

NUM_COLOURS: Final = 8
"""Colours of a value: `--scale1` is the lowest, `--scale8` the highest."""

_SPREAD: Final = 0.05
"""How far lines at one value of a knob are apart at most, as a part of the axis: equal lines would
hide each other."""
_BEYOND: Final = -0.1
"""Place of layouts whose value lies beyond the objective's axis, below this axis."""
_NOT_RANKED: Final = -0.2
"""Place of layouts that are not ranked, below these."""
_MOST_TICKS: Final = 10
_MOST_COLUMNS_WITH_NUMBERS: Final = 10
_MOST_CELLS_WITH_NUMBERS: Final = 80


def parallel(facts: PlotFacts, *, show_all: bool = False) -> PlottedData:
    """A line for each layout over the knobs that vary, coloured by the objective."""
    if not facts.varying:
        return PlottedData(says=[_why_no_knobs(facts)])
    objective = facts.objective
    ends = axis_range(facts.values, always=facts.marked_values, show_all=show_all)
    shown = [facts.knobs[name] for name in facts.varying]
    best = sorted(facts.ranked, key=lambda point: -(point.value or 0.0))[:MOST_ROWS]
    return PlottedData(
        traces=_parallel_traces(facts, ends),
        layout=_parallel_layout(facts, ends),
        says=[
            f"Each line is a layout: its knobs, and at the right end its {unit(objective)}, which "
            "also colours the line. Dotted lines are layouts that are not ranked.",
            *_constant_words(facts),
            *facts.cheap_words,
            *hidden_words(ends, objective),
            *left_out_words(facts.num_left_out, "layouts", "the best"),
        ],
        row_ids=[point.trial_id for point in best],
        headings=(
            ">trial",
            f">{unit(objective)}",
            *(f">{knob.word}" if knob.is_number else knob.word for knob in shown),
        ),
        rows=[
            (
                str(point.number),
                objective_figure(objective, point.value),
                *(knob_text(facts.value_of(name, point)) for name in facts.varying),
            )
            for point in best
        ],
        hides=bool(ends.hidden),
    )


def _parallel_traces(facts: PlotFacts, ends: AxisRange) -> list[Trace]:
    """All lines: those that are not ranked first, then the lowest values, the marks last."""
    # Many lines would hide each other.
    opacity = min(0.75, max(0.15, 150 / (len(facts.ranked) or 1)))
    unranked = [point for point in facts.points if point.value is None]
    dotted = {"color": "--soft", "width": 1, "dash": "dot"}
    traces = _lines(facts, ends, "not ranked", unranked, 0.5 * opacity, dotted)
    for colour in range(NUM_COLOURS):
        found = [point for point in facts.ranked if _colour(ends, point) == colour]
        style = {"color": f"--scale{colour + 1}", "width": 1.4}
        traces += _lines(facts, ends, "measured", found, opacity, style)

    def spot(point: PlotPoint) -> Spot:
        return facts.spot(point, len(facts.varying), _part(ends, point))

    colours = [f"--scale{_colour(ends, point) + 1}" for point in facts.ranked]
    right = points("measured", [spot(point) for point in facts.ranked], color=colours)
    traces += [{**trace, "showlegend": False} for trace in right]
    for name, point in facts.marks.items():
        dash = "solid" if name == "winner" else "dash"
        style = {"color": MARKS[name][2], "width": 3.5, "dash": dash}
        traces += [*_lines(facts, ends, name, [point], 1.0, style), *marked(name, spot(point))]
    return traces


def _part(ends: AxisRange, point: PlotPoint) -> float:
    """Where a layout is on the axis of the objective, or below it."""
    if point.value is None:
        return _NOT_RANKED
    return ends.part(point.value) if ends.holds(point.value) else _BEYOND


def _colour(ends: AxisRange, point: PlotPoint) -> int:
    return min(int(ends.part(point.value or 0.0) * NUM_COLOURS), NUM_COLOURS - 1)


def _lines(
    facts: PlotFacts,
    ends: AxisRange,
    name: str,
    found: Sequence[PlotPoint],
    opacity: float,
    style: Mapping[str, Any],
) -> list[Trace]:
    """Lines of one kind as one trace, with gaps between them."""
    if not found:
        return []
    xs: list[int | None] = []
    ys: list[float | None] = []
    for point in found:
        part = _part(ends, point)
        for axis, (knob, values) in enumerate(facts.varying.items()):
            place = values.index(facts.value_of(knob, point)) / (len(values) - 1)
            room = min(_SPREAD, 0.3 / len(values))
            xs.append(axis)
            ys.append(round(place + room * (max(part, 0.0) - 0.5), 4))
        xs += [len(facts.varying), None]
        ys += [round(part, 4), None]
    drawn = line(name, xs[:-1], ys[:-1], legend=name == "not ranked", **style)
    return [{**drawn, "opacity": opacity}]


def _parallel_layout(facts: PlotFacts, ends: AxisRange) -> dict[str, Any]:
    """The axes with the values of the knobs, and of the objective at the right."""
    last = len(facts.varying)
    notes = [
        _tick(axis, index / (len(values) - 1), knob_text(values[index]), "right")
        for axis, values in enumerate(facts.varying.values())
        for index in range(0, len(values), -(-len(values) // _MOST_TICKS))
    ]
    notes += [
        _tick(last, ends.part(value), objective_figure(facts.objective, value), "left")
        for value in (round_ticks(ends.low, ends.high) if facts.ranked else ())
    ]
    places = {_part(ends, point) for point in (*facts.points, *facts.marks.values())}
    for place, words in ((_BEYOND, "beyond the axis"), (_NOT_RANKED, "not ranked")):
        if place in places:
            notes.append(_tick(last, place, words, "left"))
    return {
        "xaxis": {
            "tickmode": "array",
            "tickvals": list(range(last + 1)),
            "ticktext": [
                *(facts.knobs[name].word for name in facts.varying),
                unit(facts.objective),
            ],
            "tickangle": 0,
            "range": [-0.5, last + 0.9],
            "side": "top",
            "gridcolor": "--soft",
        },
        "yaxis": {"visible": False, "range": [min(0.0, *places) - 0.06, 1.06]},
        "annotations": notes,
        # Above the names of the axes.
        "legend": {"y": 1.1},
        "margin": {"t": 70, "b": 10},
        "meta": {"min_width": 110 * (last + 1)},
    }


def _tick(x: int, y: float, text: str, anchor: str) -> dict[str, Any]:
    """A value at an axis of the parallel coordinates."""
    shift = {"xanchor": anchor, "xshift": -6 if anchor == "right" else 10}
    return _note(x, y, text, size=11) | shift


def _note(x: int, y: float, text: str, **font: Any) -> dict[str, Any]:
    return {"x": x, "y": y, "text": text, "showarrow": False, "bgcolor": "--ground", "font": font}


def slice_of(
    facts: PlotFacts, knob: str, cells: Sequence[KnobCell], *, show_all: bool = False
) -> PlottedData:
    """One knob against the objective.

    `cells` are all ranked layouts by the knob's value, including those that the sample leaves out.
    """
    if not facts.ranked or knob not in facts.varying:
        return PlottedData(says=[_why_no_knobs(facts)])
    # The line goes through the best of each value, however far it is from the others.
    always = [*facts.marked_values, *(cell.best for cell in cells)]
    ends = axis_range(facts.values, always=always, show_all=show_all)

    def spot(point: PlotPoint) -> Spot:
        return facts.spot(point, knob_text(facts.value_of(knob, point)), point.value)

    traces: list[Trace] = []
    for kind in ("measured", "stopped early"):
        of_kind = [spot(point) for point in facts.ranked if point.kind == kind]
        traces += points(kind, of_kind, **MARKERS[kind], opacity=0.6)
    by_value = {cell.values[0]: cell for cell in cells}
    values = in_order(facts.knobs[knob], [*facts.varying[knob], *by_value])
    measured = [value for value in values if value in by_value]
    best = [by_value[value].best for value in measured]
    traces.append(line("best", map(knob_text, measured), best, color="--good", width=1.5))
    marks = {name: spot(each) for name, each in facts.marks.items() if each.value is not None}
    return PlottedData(
        traces=traces + mark_traces(marks),
        layout={
            "xaxis": _category_axis(facts.knobs[knob], values),
            "yaxis": objective_axis(facts.objective, ends),
            "showlegend": False,
        },
        says=hidden_words(ends, facts.objective),
        headings=(facts.knobs[knob].label, ">layouts", ">median shown", ">best"),
        rows=[_slice_row(facts, knob, value, by_value.get(value)) for value in values],
        hides=bool(ends.hidden),
    )


def _slice_row(
    facts: PlotFacts, knob: str, value: Any, cell: KnobCell | None
) -> tuple[str, str, str, str]:
    found = [
        p.value for p in facts.ranked if facts.value_of(knob, p) == value and p.value is not None
    ]
    return (
        knob_text(value),
        f"{cell.num_layouts:,}" if cell else "0",
        objective_figure(facts.objective, median(found) if found else None),
        objective_figure(facts.objective, cell.best if cell else None),
    )


_Cells = Mapping[tuple[Any, ...], KnobCell]
"""Measured cells by the values of two knobs."""


def two_knobs(facts: PlotFacts, across: str, up: str, cells: Sequence[KnobCell]) -> PlottedData:
    """The best value of each tried combination of two knobs; nothing is interpolated.

    `cells` are all ranked layouts by the values of the two knobs, in this order.
    """
    if across not in facts.varying or up not in facts.varying or across == up:
        return PlottedData(says=[_why_no_pair(facts, across, up)])
    measured: _Cells = {cell.values: cell for cell in cells}
    columns = in_order(
        facts.knobs[across], [*facts.varying[across], *(cell[0] for cell in measured)]
    )
    rows = in_order(facts.knobs[up], [*facts.varying[up], *(cell[1] for cell in measured)])
    tried = {(facts.value_of(across, point), facts.value_of(up, point)) for point in facts.points}
    has_numbers = (
        len(columns) <= _MOST_COLUMNS_WITH_NUMBERS
        and len(columns) * len(rows) <= _MOST_CELLS_WITH_NUMBERS
    )
    traces: list[Trace] = []
    if measured:
        cells_drawn = _heat(facts.objective, columns, rows, measured)
        traces = [cells_drawn | {"texttemplate": "%{text}"} if has_numbers else cells_drawn]
    words = "tried, none ranked"
    crossed = [
        Spot(knob_text(x), knob_text(y), words, 0)
        for x, y in sorted(tried - measured.keys(), key=str)
    ]
    traces += points(words, crossed, **{**MARKERS["failed"], "size": 9})
    notes = []
    for name, point in facts.marks.items():
        x, y = facts.value_of(across, point), facts.value_of(up, point)
        if has_numbers:
            # Positions, since names that are numbers would be taken for positions.
            notes.append(_cell_mark(name, columns.index(x), rows.index(y)))
        else:
            traces += marked(name, facts.spot(point, knob_text(x), knob_text(y)))

    def text(cell: tuple[Any, Any]) -> str:
        if cell in measured:
            return objective_figure(facts.objective, measured[cell].best)
        return "none ranked" if cell in tried else ""

    return PlottedData(
        traces=traces,
        layout={
            "xaxis": _category_axis(facts.knobs[across], columns),
            "yaxis": _category_axis(facts.knobs[up], rows),
            "annotations": notes,
        },
        says=[
            f"Each cell has the best {unit(facts.objective)} of the layouts with these two values, "
            "whatever their other knobs. Empty cells were not tried. A cross marks cells where "
            "layouts were tried and none is ranked."
        ],
        headings=(
            facts.knobs[up].label,
            *(f">{facts.knobs[across].word} {knob_text(v)}" for v in columns),
        ),
        rows=[(knob_text(row), *(text((column, row)) for column in columns)) for row in rows],
    )


def _heat(
    objective: str, columns: Sequence[Any], rows: Sequence[Any], measured: _Cells
) -> dict[str, Any]:
    """The measured cells; null leaves a cell empty."""
    cells = [[measured.get((column, row)) for column in columns] for row in rows]
    return {
        "type": "heatmap",
        "x": [knob_text(value) for value in columns],
        "y": [knob_text(value) for value in rows],
        "z": [[cell and rounded(cell.best) for cell in line] for line in cells],
        "text": [
            [objective_figure(objective, cell.best) if cell else "" for cell in line]
            for line in cells
        ],
        "customdata": [[cell.num_layouts if cell else 0 for cell in line] for line in cells],
        "hovertemplate": "%{text}, the best of %{customdata} layouts<extra></extra>",
        "hoverongaps": False,
        "xgap": 2,
        "ygap": 2,
        "colorscale": [
            [index / (NUM_COLOURS - 1), f"--scale{index + 1}"] for index in range(NUM_COLOURS)
        ],
        "colorbar": {
            "title": {"text": unit(objective), "side": "right", "font": {"size": 12}},
            "thickness": 12,
        },
    }


def _cell_mark(name: str, x: int, y: int) -> dict[str, Any]:
    """The word winner or baseline above or below the number of a cell, given by its position."""
    character, _symbol, colour = MARKS[name]
    shift = {"yshift": 14 if name == "winner" else -14, "borderpad": 1}
    return _note(x, y, f"{character} {name}", color=colour, size=11) | shift


def _category_axis(knob: Knob, values: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [knob_text(value) for value in values],
        "range": [-0.5, len(values) - 0.5],
        "title": {"text": knob.label},
        "showgrid": False,
    }


def _constant_words(facts: PlotFacts) -> list[str]:
    same = [
        f"{knob.word} {knob_text(facts.value_of(name, facts.points[0]))}"
        for name, knob in facts.knobs.items()
        if name not in facts.varying and knob.is_shown
    ]
    return [f"All layouts have {', '.join(same)}."] if same else []


def _why_no_knobs(facts: PlotFacts) -> str:
    if not facts.points:
        return "No layout has been tried yet."
    if not facts.varying:
        return "All layouts so far have the same knobs."
    return "No layout is ranked yet."


def _why_no_pair(facts: PlotFacts, across: str, up: str) -> str:
    if len(facts.varying) < 2:
        return "Fewer than two knobs differ between the layouts so far."
    if across == up:
        return "Choose two different knobs."
    constant = " and ".join(facts.knobs[n].label for n in (across, up) if n not in facts.varying)
    return f"All layouts so far have the same {constant}; choose other knobs."
