"""Figures of the objectives: the history of the best, and the Pareto front of two objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from api.dashboard.figures.figure import (
    MOST_ROWS,
    PlotFigure,
    Trace,
    axis_range,
    hidden_words,
    left_out_words,
    marked,
    objective_axis,
    objective_words,
    points,
    rounded,
    safe,
)
from api.dashboard.figures.points import LayoutPoint, PlotFacts, PointKind
from api.service.formatting import objective_figure, state_words, unit
from results_db.campaigns.charts import BestSoFar, HistoryPoint

MARKERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "measured": {"symbol": "circle", "color": "--mark"},
    "stopped early": {"symbol": "triangle-down-open", "color": "--soft"},
    "not ranked": {"symbol": "square-open", "color": "--warn"},
    "no result": {"symbol": "x", "color": "--bad"},
}
"""The marker of each kind of trial."""


def history(facts: PlotFacts, found: BestSoFar, *, show_all: bool = False) -> PlotFigure:
    """The objective of every trial in the order in which they ended, with the best so far."""
    if not found.points:
        return PlotFigure(says=["No trial has ended yet."])
    values = [each.value for each in found.points if _is_measured(each)]
    best = [each for each in found.points if each.is_improvement]
    ends = axis_range(
        values,  # type: ignore[arg-type]  # measured ones have a value
        always=[*facts.marked_values, *(each.best for each in best[-1:] if each.best)],
        show_all=show_all,
    )
    bottom = ends.low - 0.06 * (ends.high - ends.low)
    kinds = {point.trial_id: point.kind for point in facts.points}
    by_kind: dict[str, list[HistoryPoint]] = {name: [] for name in MARKERS}
    for each in found.points:
        kind = kinds.get(each.trial_id, "measured") if _is_measured(each) else "no result"
        by_kind[kind].append(each)
    keys = {point.trial_id: point.layout_key for point in facts.points}
    traces = _best_line(found, best)
    for name, of_kind in by_kind.items():
        traces += _trials(of_kind, name, facts.objective, keys, bottom)
    for name, point in facts.marks.items():
        traces += _mark(name, point, found, facts.objective, bottom)
    axis = {**objective_axis(facts.objective), "range": [rounded(bottom), rounded(ends.high)]}
    return PlotFigure(
        traces=traces,
        layout={
            "xaxis": {"title": {"text": "trials that ended, in order"}, "rangemode": "tozero"},
            "yaxis": axis,
        },
        says=[
            *_history_words(found, best, facts.objective),
            *hidden_words(ends, facts.objective),
            *left_out_words(found.num_left_out, "trials", "those that set a new best"),
        ],
        headings=(">trial", ">ended as number", f">{unit(facts.objective)}", "layout"),
        rows=[
            (
                str(each.number),
                f"{each.ended_seq:,}",
                objective_figure(facts.objective, each.value),
                keys.get(each.trial_id, ""),
            )
            for each in best[::-1][:MOST_ROWS]
        ],
        hides=bool(ends.hidden),
    )


def _is_measured(each: HistoryPoint) -> bool:
    # The measurement of a trial with wrong losses is kept, but does not count.
    return each.value is not None and each.state == "COMPLETED"


def _best_line(found: BestSoFar, best: Sequence[HistoryPoint]) -> list[Trace]:
    if not best:
        return []
    values = [rounded(each.best or 0.0) for each in best]
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "name": "best so far",
            "x": [*(each.ended_seq for each in best), found.points[-1].ended_seq],
            "y": [*values, values[-1]],
            "line": {"shape": "hv", "color": "--good", "width": 2},
            "hoverinfo": "skip",
        }
    ]


def _trials(
    found: Sequence[HistoryPoint],
    name: str,
    objective: str,
    keys: Mapping[int, str],
    bottom: float,
) -> list[Trace]:
    """Trials of one kind; those without a result lie on the horizontal axis."""
    failed = name == "no result"
    texts = []
    for each in found:
        words = (
            state_words(each.state, each.reason)
            if failed
            else objective_words(objective, each.value)
        )
        key = keys.get(each.trial_id, "")
        texts.append(f"trial {each.number}: {safe(words)}<br>{safe(key)}")
    traces = points(
        name,
        [each.ended_seq for each in found],
        [rounded(bottom if failed else each.value or 0.0) for each in found],
        texts,
        [each.trial_id for each in found],
        **MARKERS[name],
    )
    return [{**trace, "cliponaxis": False} for trace in traces] if failed else traces


def _mark(
    name: str, point: LayoutPoint, found: BestSoFar, objective: str, bottom: float
) -> list[Trace]:
    for each in found.points:
        if each.trial_id == point.trial_id:
            value = each.value if _is_measured(each) and each.value is not None else bottom
            words = [point.words(objective)]
            return marked(name, [each.ended_seq], [rounded(value)], words, [point.trial_id])
    return []


def _history_words(found: BestSoFar, best: Sequence[HistoryPoint], objective: str) -> list[str]:
    words = [f"{counted(found.num_ended, 'trial has', 'trials have')} ended."]
    if best:
        last = best[-1]
        since = found.points[-1].ended_seq - last.ended_seq
        words.append(
            f"The best so far is trial {last.number} with "
            f"{objective_words(objective, last.value)}; "
            f"{counted(since, 'trial has', 'trials have')} ended since."
        )
    else:
        words.append("None of them was measured in full, so there is no best yet.")
    reasons = Counter(
        state_words(each.state, each.reason) for each in found.points if not _is_measured(each)
    )
    if reasons:
        listed = ", ".join(f"{count:,} {each}" for each, count in reasons.most_common())
        words.append(f"Without a result, shown on the axis: {listed}.")
    return words


def counted(number: int, one: str, many: str) -> str:
    """A number with its noun."""
    return f"{number:,} {one if number == 1 else many}"


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanePoint:
    """A layout in the plane of two objectives."""

    point: LayoutPoint
    x: float
    y: float


def pareto(facts: PlotFacts, across: str, up: str, *, show_all: bool = False) -> PlotFigure:
    """Layouts in the plane of two objectives, with those that no other beats in both."""
    placed = [
        PlanePoint(point=point, x=x, y=y)
        for point in facts.ranked
        if (x := facts.value(point, across)) is not None
        and (y := facts.value(point, up)) is not None
    ]
    if not placed:
        return PlotFigure(says=[_why_no_plane(facts, across, up)])
    # A layout that was stopped early is on the front only while none was measured in full.
    front = front_of([each for each in placed if not each.point.shortened] or placed)
    marks = {
        name: PlanePoint(point=point, x=x, y=y)
        for name, point in facts.marks.items()
        if (x := facts.value(point, across)) is not None
        and (y := facts.value(point, up)) is not None
    }
    always = [*front, *marks.values()]
    x_ends = axis_range([p.x for p in placed], always=[p.x for p in always], show_all=show_all)
    y_ends = axis_range([p.y for p in placed], always=[p.y for p in always], show_all=show_all)
    traces: list[Trace] = [_front_line(front)]
    ahead = {each.point.trial_id for each in front}
    behind = [each for each in placed if each.point.trial_id not in ahead]
    kinds: tuple[PointKind, ...] = ("measured", "stopped early")
    for kind in kinds:
        of_kind = [each for each in behind if each.point.kind == kind]
        traces += _placed(of_kind, kind, facts.objective, across, MARKERS[kind])
    on_front = {"symbol": "circle", "color": "--part4", "size": 9}
    traces += _placed(front, "on the front", facts.objective, across, on_front)
    for name, each in marks.items():
        words = [_both_words(each, facts.objective, across)]
        traces += marked(name, [rounded(each.x)], [rounded(each.y)], words, [each.point.trial_id])
    return PlotFigure(
        traces=traces,
        layout={"xaxis": objective_axis(across, x_ends), "yaxis": objective_axis(up, y_ends)},
        says=[
            f"{len(front):,} of {counted(len(placed), 'layout is', 'layouts are')} on the Pareto "
            f"front of {unit(across)} and {unit(up)}: no other layout is at least as good in both "
            "and better in one. More is better on both axes.",
            *hidden_words(x_ends, across),
            *hidden_words(y_ends, up),
            *left_out_words(facts.num_left_out, "layouts", "the best"),
        ],
        headings=(">trial", f">{unit(across)}", f">{unit(up)}", "layout"),
        rows=[
            (
                str(each.point.number),
                objective_figure(across, each.x),
                objective_figure(up, each.y),
                each.point.layout_key,
            )
            for each in front[:MOST_ROWS]
        ],
        hides=bool(x_ends.hidden or y_ends.hidden),
    )


def front_of(placed: Sequence[PlanePoint]) -> list[PlanePoint]:
    """The points that no other beats in both directions, from left to right.

    Equal points are all on the front.
    """
    front: list[PlanePoint] = []
    for each in sorted(placed, key=lambda p: (-p.x, -p.y)):
        last = front[-1] if front else None
        if last is None or each.y > last.y or (each.x, each.y) == (last.x, last.y):
            front.append(each)
    return front[::-1]


def _front_line(front: Sequence[PlanePoint]) -> Trace:
    """The edge of the area that the front dominates."""
    return {
        "type": "scatter",
        "mode": "lines",
        "name": "Pareto front",
        "x": [rounded(each.x) for each in front],
        "y": [rounded(each.y) for each in front],
        "line": {"shape": "vh", "color": "--part4", "width": 2},
        "hoverinfo": "skip",
    }


def _placed(
    found: Sequence[PlanePoint],
    name: str,
    objective: str,
    across: str,
    marker: Mapping[str, Any],
) -> list[Trace]:
    return points(
        name,
        [rounded(each.x) for each in found],
        [rounded(each.y) for each in found],
        [_both_words(each, objective, across) for each in found],
        [each.point.trial_id for each in found],
        **marker,
    )


def _both_words(each: PlanePoint, objective: str, across: str) -> str:
    return f"{each.point.words(objective)}<br>{objective_words(across, each.x)}"


def _why_no_plane(facts: PlotFacts, across: str, up: str) -> str:
    if not facts.ranked:
        return "No layout has been measured yet."
    missing = [
        unit(name)
        for name in (across, up)
        if all(facts.value(point, name) is None for point in facts.ranked)
    ]
    return (
        f"No layout has a value of {' or of '.join(missing) or 'both objectives'}. Memory headroom "
        "needs measured peaks, and the memory of a device in the description of the cluster."
    )
