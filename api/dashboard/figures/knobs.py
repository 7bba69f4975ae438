"""Figures of the knobs: parallel coordinates, slices, and two knobs against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

from api.dashboard.figures.figure import (
    MOST_ROWS,
    AxisRange,
    PlotFigure,
    Trace,
    axis_range,
    hidden_words,
    left_out_words,
    marked,
    objective_axis,
    points,
    round_ticks,
    rounded,
    safe,
)
from api.dashboard.figures.objectives import MARKERS
from api.dashboard.figures.points import LayoutPoint, PlotFacts, knob_text
from api.service.formatting import objective_figure, unit
from results_db.leaderboard.knob_cells import KnobCell
from search_spaces.spec.layout import KNOBS

NUM_COLOURS: Final = 8
"""Colours of a value: `--scale1` is the lowest, `--scale8` the highest."""

_SPREAD: Final = 0.05
"""How far lines at one value of a knob are apart at most, as a part of the axis: equal lines would
hide each other."""
_NOT_RANKED: Final = -0.1
"""Place of layouts that are not ranked, on the objective's axis."""
_MOST_TICKS: Final = 10
_MOST_CELLS_WITH_NUMBERS: Final = 80


def parallel(facts: PlotFacts, *, show_all: bool = False) -> PlotFigure:
    """A line for each layout over the knobs that vary, coloured by the objective."""
    if not facts.varying:
        return PlotFigure(says=[_why_no_knobs(facts)])
    objective = facts.objective
    values = [point.value for point in facts.ranked if point.value is not None]
    ends = axis_range(values, always=facts.marked_values, show_all=show_all)
    lines = _Lines(facts=facts, ends=ends)
    best = sorted(facts.ranked, key=lambda point: -(point.value or 0.0))[:MOST_ROWS]
    return PlotFigure(
        traces=lines.traces(),
        layout=lines.layout(),
        says=[
            f"Each line is a layout: its knobs, and at the right end its {unit(objective)}, which "
            "also colours the line. Dotted lines are layouts that are not ranked.",
            *_constant_words(facts),
            *hidden_words(ends, objective),
            *left_out_words(facts.num_left_out, "layouts", "the best"),
        ],
        headings=(
            ">trial",
            f">{unit(objective)}",
            *(f">{knob.word}" if knob.is_number else knob.word for knob in lines.knobs),
        ),
        rows=[
            (
                str(point.number),
                objective_figure(objective, point.value),
                *(knob_text(point.knobs[name]) for name in facts.varying),
            )
            for point in best
        ],
        hides=bool(ends.hidden),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Lines:
    """Layouts as lines over the axes of the knobs; the objective is the last axis."""

    facts: PlotFacts
    ends: AxisRange

    @property
    def knobs(self) -> list[Any]:
        """The knobs of the axes."""
        return [KNOBS[name] for name in self.facts.varying]

    def traces(self) -> list[Trace]:
        """All lines: the lowest values first, the winner last."""
        facts = self.facts
        unranked = [point for point in facts.points if point.value is None]
        opacity = 0.35 if len(facts.ranked) > 200 else 0.75
        style = {"color": "--soft", "width": 1, "dash": "dot"}
        traces = self._line(unranked, "not ranked", 0.5 * opacity, style)
        for colour in range(NUM_COLOURS):
            found = [point for point in facts.ranked if self._colour(point) == colour]
            style = {"color": f"--scale{colour + 1}", "width": 1.4}
            traces += self._line(found, "measured", opacity, style)
        last = len(facts.varying)
        ends = points(
            "measured",
            [last] * len(facts.ranked),
            [round(self._part(point), 4) for point in facts.ranked],
            [point.words(facts.objective) for point in facts.ranked],
            [point.trial_id for point in facts.ranked],
            color=[f"--scale{self._colour(point) + 1}" for point in facts.ranked],
        )
        traces += [{**trace, "showlegend": False} for trace in ends]
        for name, point in facts.marks.items():
            winner = name == "winner"
            style = {
                "color": "--good" if winner else "--warn",
                "width": 3.5,
                "dash": "solid" if winner else "dash",
            }
            traces += self._line([point], name, 1.0, style)
            words = [point.words(facts.objective)]
            traces += marked(name, [last], [round(self._part(point), 4)], words, [point.trial_id])
        return traces

    def _part(self, point: LayoutPoint) -> float:
        return _NOT_RANKED if point.value is None else self.ends.part(point.value)

    def _colour(self, point: LayoutPoint) -> int:
        return min(int(self._part(point) * NUM_COLOURS), NUM_COLOURS - 1)

    def _line(
        self, found: Sequence[LayoutPoint], name: str, opacity: float, style: Mapping[str, Any]
    ) -> list[Trace]:
        """Lines of one kind as one trace, with gaps between them."""
        if not found:
            return []
        xs: list[int | None] = []
        ys: list[float | None] = []
        for point in found:
            heights = self._heights(point)
            xs += [*range(len(heights)), None]
            ys += [*heights, None]
        return [
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "x": xs[:-1],
                "y": ys[:-1],
                "hoverinfo": "skip",
                "showlegend": name == "not ranked",
                "opacity": opacity,
                "line": dict(style),
            }
        ]

    def _heights(self, point: LayoutPoint) -> list[float]:
        """The line's places on the axes."""
        part = self._part(point)
        found = []
        for name, values in self.facts.varying.items():
            place = values.index(point.knobs[name]) / (len(values) - 1)
            room = min(_SPREAD, 0.3 / len(values))
            found.append(round(place + room * (max(part, 0.0) - 0.5), 4))
        return [*found, round(part, 4)]

    def layout(self) -> dict[str, Any]:
        """The axes with the values of the knobs."""
        objective = self.facts.objective
        last = len(self.facts.varying)
        notes = []
        for place, values in enumerate(self.facts.varying.values()):
            step = -(-len(values) // _MOST_TICKS)
            for index in range(0, len(values), step):
                text = safe(knob_text(values[index]))
                notes.append(_tick(place, index / (len(values) - 1), text, "right"))
        for value in round_ticks(self.ends.low, self.ends.high) if self.facts.ranked else ():
            text = objective_figure(objective, value)
            notes.append(_tick(last, self.ends.part(value), text, "left"))
        if len(self.facts.ranked) < len(self.facts.points):
            notes.append(_tick(last, _NOT_RANKED, "not ranked", "left"))
        return {
            "xaxis": {
                "tickmode": "array",
                "tickvals": list(range(last + 1)),
                "ticktext": [*(safe(knob.word) for knob in self.knobs), unit(objective)],
                "tickangle": 0,
                "range": [-0.5, last + 0.9],
                "side": "top",
                "gridcolor": "--soft",
            },
            "yaxis": {"visible": False, "range": [_NOT_RANKED - 0.06, 1.06]},
            "annotations": notes,
            # Above the names of the axes.
            "legend": {"y": 1.1},
            "margin": {"t": 70, "b": 10},
            "meta": {"min_width": 110 * (last + 1)},
        }


def _tick(x: int, y: float, text: str, anchor: str) -> dict[str, Any]:
    """A value at an axis of the parallel coordinates."""
    return {
        "x": x,
        "y": y,
        "text": text,
        "showarrow": False,
        "xanchor": anchor,
        "xshift": -6 if anchor == "right" else 10,
        "bgcolor": "--ground",
        "font": {"size": 11},
    }


def slice_of(
    facts: PlotFacts, knob: str, cells: Sequence[KnobCell], *, show_all: bool = False
) -> PlotFigure:
    """One knob against the objective.

    Args:
        facts: the layouts.
        knob: its name.
        cells: by its value, all ranked layouts, including those that the sample leaves out.
        show_all: whether values that are far out are shown, too.
    """
    if not facts.ranked or knob not in facts.varying:
        return PlotFigure(says=[_why_no_knobs(facts)])
    objective = facts.objective
    found = [p.value for p in facts.ranked if p.value is not None]
    ends = axis_range(found, always=facts.marked_values, show_all=show_all)
    traces: list[Trace] = []
    for kind in ("measured", "stopped early"):
        of_kind = [point for point in facts.ranked if point.kind == kind]
        traces += points(
            kind,
            [safe(knob_text(point.knobs[knob])) for point in of_kind],
            [rounded(point.value or 0.0) for point in of_kind],
            [point.words(objective) for point in of_kind],
            [point.trial_id for point in of_kind],
            **MARKERS[kind],
            opacity=0.6,
        )
    by_value = {cell.values[0]: cell for cell in cells}
    values = _in_order(knob, [*facts.varying[knob], *by_value])
    traces.append(
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best",
            "x": [safe(knob_text(value)) for value in values if value in by_value],
            "y": [rounded(by_value[value].best) for value in values if value in by_value],
            "line": {"color": "--good", "width": 1.5},
            "hoverinfo": "skip",
        }
    )
    for name, point in facts.marks.items():
        if point.value is not None:
            place = [safe(knob_text(point.knobs[knob]))]
            words = [point.words(objective)]
            traces += marked(name, place, [rounded(point.value)], words, [point.trial_id])
    axis = _category_axis(knob, values)
    return PlotFigure(
        traces=traces,
        layout={"xaxis": axis, "yaxis": objective_axis(objective, ends), "showlegend": False},
        says=hidden_words(ends, objective),
        headings=(KNOBS[knob].label, ">layouts", ">median shown", ">best"),
        rows=[_slice_row(facts, knob, value, by_value.get(value)) for value in values],
        hides=bool(ends.hidden),
    )


def _slice_row(
    facts: PlotFacts, knob: str, value: Any, cell: KnobCell | None
) -> tuple[str, str, str, str]:
    found = [p.value for p in facts.ranked if p.knobs[knob] == value and p.value is not None]
    return (
        knob_text(value),
        f"{cell.num_layouts:,}" if cell else "0",
        objective_figure(facts.objective, median(found) if found else None),
        objective_figure(facts.objective, cell.best if cell else None),
    )


def two_knobs(facts: PlotFacts, across: str, up: str, cells: Sequence[KnobCell]) -> PlotFigure:
    """The best value of each tried combination of two knobs; nothing is interpolated.

    Args:
        facts: the layouts.
        across: the knob of the horizontal axis.
        up: of the vertical axis.
        cells: all ranked layouts by the values of the two, in this order.
    """
    if across not in facts.varying or up not in facts.varying or across == up:
        return PlotFigure(says=[_why_no_pair(facts, across, up)])
    measured: dict[tuple[Any, ...], KnobCell] = {cell.values: cell for cell in cells}
    columns = _in_order(across, [*facts.varying[across], *(cell[0] for cell in measured)])
    rows = _in_order(up, [*facts.varying[up], *(cell[1] for cell in measured)])
    tried = {(point.knobs[across], point.knobs[up]) for point in facts.points}
    failed = sorted(tried - measured.keys(), key=str)
    with_numbers = len(columns) <= 10 and len(columns) * len(rows) <= _MOST_CELLS_WITH_NUMBERS
    traces = [_heat(facts.objective, columns, rows, measured)] if measured else []
    if with_numbers:
        traces += _numbers(facts.objective, measured)
    traces += points(
        "tried, none ranked",
        [safe(knob_text(column)) for column, _ in failed],
        [safe(knob_text(row)) for _, row in failed],
        ["tried, none ranked"] * len(failed),
        [0] * len(failed),
        **{**MARKERS["no result"], "size": 9},
    )
    notes = []
    for name, point in facts.marks.items():
        x, y = safe(knob_text(point.knobs[across])), safe(knob_text(point.knobs[up]))
        if with_numbers:
            place = columns.index(point.knobs[across]), rows.index(point.knobs[up])
            notes.append(_cell_mark(name, *place))
        else:
            traces += marked(name, [x], [y], [point.words(facts.objective)], [point.trial_id])

    def words(cell: tuple[Any, Any]) -> str:
        if cell in measured:
            return objective_figure(facts.objective, measured[cell].best)
        return "none ranked" if cell in tried else ""

    return PlotFigure(
        traces=traces,
        layout={
            "xaxis": _category_axis(across, columns),
            "yaxis": _category_axis(up, rows),
            "annotations": notes,
        },
        says=[
            f"Each cell has the best {unit(facts.objective)} of the layouts with these two values, "
            "whatever their other knobs. Empty cells were not tried. A cross marks cells where "
            "layouts were tried and none is ranked.",
        ],
        headings=(KNOBS[up].label, *(f">{KNOBS[across].word} {knob_text(v)}" for v in columns)),
        rows=[(knob_text(row), *(words((column, row)) for column in columns)) for row in rows],
    )


def _heat(
    objective: str,
    columns: Sequence[Any],
    rows: Sequence[Any],
    measured: Mapping[tuple[Any, ...], KnobCell],
) -> Trace:
    """The measured cells; null leaves a cell empty."""
    cells = [[measured.get((column, row)) for column in columns] for row in rows]
    return {
        "type": "heatmap",
        "x": [safe(knob_text(value)) for value in columns],
        "y": [safe(knob_text(value)) for value in rows],
        "z": [[None if cell is None else rounded(cell.best) for cell in line] for line in cells],
        "text": [
            ["" if cell is None else objective_figure(objective, cell.best) for cell in line]
            for line in cells
        ],
        "customdata": [
            [0 if cell is None else cell.num_layouts for cell in line] for line in cells
        ],
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


def _numbers(objective: str, measured: Mapping[tuple[Any, ...], KnobCell]) -> list[Trace]:
    """The values in the cells, in colours that can be read on them."""
    if not measured:
        return []
    values = [cell.best for cell in measured.values()]
    low, high = min(values), max(values)
    colours = [
        1 + round((value - low) / (high - low) * (NUM_COLOURS - 1)) if high > low else NUM_COLOURS
        for value in values
    ]
    return [
        {
            "type": "scatter",
            "mode": "text",
            "x": [safe(knob_text(column)) for column, _ in measured],
            "y": [safe(knob_text(row)) for _, row in measured],
            "text": [objective_figure(objective, value) for value in values],
            "textfont": {"color": [f"--on-scale{colour}" for colour in colours], "size": 13},
            "hoverinfo": "skip",
            "showlegend": False,
        }
    ]


def _cell_mark(name: str, x: int, y: int) -> dict[str, Any]:
    """The word winner or baseline above or below the number of a cell, given by its position."""
    is_winner = name == "winner"
    return {
        "x": x,
        "y": y,
        "text": "★ winner" if is_winner else "◆ baseline",
        "showarrow": False,
        "yshift": 17 if is_winner else -17,
        "bgcolor": "--ground",
        "borderpad": 1,
        "font": {"color": "--good" if is_winner else "--warn", "size": 11},
    }


def _in_order(knob: str, values: Sequence[Any]) -> list[Any]:
    return sorted(set(values), key=KNOBS[knob].code)


def _category_axis(knob: str, values: Sequence[Any]) -> dict[str, Any]:
    return {
        "type": "category",
        "categoryorder": "array",
        "categoryarray": [safe(knob_text(value)) for value in values],
        "range": [-0.5, len(values) - 0.5],
        "title": {"text": safe(KNOBS[knob].label)},
        "showgrid": False,
    }


def _constant_words(facts: PlotFacts) -> list[str]:
    knobs = facts.points[0].knobs
    same = [
        f"{knob.word} {knob_text(knobs[name])}"
        for name, knob in KNOBS.items()
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
    constant = " and ".join(KNOBS[n].label for n in (across, up) if n not in facts.varying)
    return f"All layouts so far have the same {constant}; choose other knobs."
