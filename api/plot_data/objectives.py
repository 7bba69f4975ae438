"""Plots of the objectives: the history of the best, and the Pareto front of two objectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from layout_tuner.api.formatting import objective_figure, state_words, unit
from layout_tuner.api.plot_data.layout_points import PlotFacts, mark_traces
from layout_tuner.api.plot_data.plot_data import (
    MARKERS,
    MOST_ROWS,
    PlottedData,
    Spot,
    Trace,
    axis_range,
    hidden_words,
    left_out_words,
    line,
    objective_axis,
    objective_words,
    points,
)
from layout_tuner.results_db.campaigns.history_and_timeline import BestSoFar, HistoryPoint
from layout_tuner.results_db.leaderboard.plot_points import PlotPoint
from layout_tuner.search_spaces.objectives import pareto_front


def history(facts: PlotFacts, found: BestSoFar, *, show_all: bool = False) -> PlottedData:
    """The objective of every trial in the order in which they ended, with the best so far.

    Points are single runs. The best is the leaderboard's: a layout has the median of its runs.
    """
    if not found.points:
        of_whole = " of a whole layout" if facts.num_cheap else ""
        return PlottedData(says=[f"No trial{of_whole} has ended yet.", *facts.cheap_words])
    best = found.leaders
    ends = axis_range(
        [value for each in found.points if (value := _counted_value(each)) is not None],
        always=[*facts.marked_values, *(each.value for each in best[-1:])],
        show_all=show_all,
    )
    # Trials without a result lie on the horizontal axis.
    bottom = ends.low - 0.06 * (ends.high - ends.low)
    of_trial = {point.trial_id: point for point in facts.points}
    spots: dict[int, Spot] = {}
    of_kind: dict[str, list[Spot]] = {kind: [] for kind in MARKERS}
    for each in found.points:
        point = of_trial.get(each.trial_id)
        spots[each.trial_id] = _history_spot(each, _key(point), facts.objective, bottom)
        of_kind[_kind(each, point)].append(spots[each.trial_id])
    last = found.points[-1].ended_seq
    traces: list[Trace] = []
    if best:
        values, places = [each.value for each in best], [each.ended_seq for each in best]
        xs, ys = [*places, last], [*values, values[-1]]
        traces.append(line("best so far", xs, ys, shape="hv", color="--good", width=2))
    for kind, shown in of_kind.items():
        traces += [{**each, "cliponaxis": False} for each in points(kind, shown, **MARKERS[kind])]
    marks = {
        name: facts.spot(point, spots[point.trial_id].x, point.value)
        for name, point in facts.marks.items()
        if point.trial_id in spots and point.value is not None
    }
    return PlottedData(
        traces=traces + mark_traces(marks),
        layout={
            "xaxis": {
                "title": {"text": "trials that ended, in order"},
                "range": [0, last + max(1.0, 0.02 * last)],
            },
            "yaxis": objective_axis(facts.objective, replace(ends, low=bottom)),
        },
        says=[
            *_history_words(found, facts.objective),
            *facts.cheap_words,
            *hidden_words(ends, facts.objective),
            *left_out_words(found.num_left_out, "trials", "those that set a new best"),
        ],
        row_ids=[each.layout.trial_id for each in best[::-1][:MOST_ROWS]],
        headings=(">best trial", ">since end", f">{unit(facts.objective)}", "layout"),
        rows=[
            (
                str(each.layout.first.number),
                f"{each.ended_seq:,}",
                objective_figure(facts.objective, each.value),
                each.layout.first.layout_key,
            )
            for each in best[::-1][:MOST_ROWS]
        ],
        hides=bool(ends.hidden),
    )


def _counted_value(each: HistoryPoint) -> float | None:
    # The measurement of a trial with wrong losses is kept, but does not count.
    return each.value if each.state == "COMPLETED" else None


def _kind(each: HistoryPoint, point: PlotPoint | None) -> str:
    if _counted_value(each) is None:
        return each.state.lower() if each.state.lower() in MARKERS else "failed"
    if point is None:
        return "measured again" if each.is_repeat else "measured"
    return point.kind


def _history_spot(each: HistoryPoint, key: str, objective: str, bottom: float) -> Spot:
    value = _counted_value(each)
    if value is None:
        value, words = bottom, state_words(each.state, each.reason)
    else:
        words = objective_words(objective, value)
    return Spot(each.ended_seq, value, f"trial {each.number}: {words}\n{key}", each.trial_id)


def _key(point: PlotPoint | None) -> str:
    return "" if point is None else point.layout_key


def _history_words(found: BestSoFar, objective: str) -> Iterator[str]:
    yield f"{_have_ended(found.num_ended)}."
    if found.leaders:
        last = found.leaders[-1]
        since = _have_ended(found.points[-1].ended_seq - last.ended_seq)
        value, num_runs = objective_words(objective, last.value), len(last.layout.runs)
        runs = f", the median of its {num_runs} runs" if num_runs > 1 else ""
        yield f"The best so far is trial {last.layout.first.number} with {value}{runs}; {since} since."
    else:
        yield "None of them was measured in full, so there is no best yet."
    reasons = Counter(
        state_words(each.state, each.reason)
        for each in found.points
        if _counted_value(each) is None
    )
    if reasons:
        listed = ", ".join(f"{count:,} {each}" for each, count in reasons.most_common())
        shown = " among those shown" if found.num_left_out else ""
        yield f"Without a result{shown}, on the axis: {listed}."


def _have_ended(number: int) -> str:
    return f"{number:,} {'trial has' if number == 1 else 'trials have'} ended"


class _Placed(NamedTuple):
    """A layout in the plane of two objectives."""

    point: PlotPoint
    x: float
    y: float


def pareto(facts: PlotFacts, across: str, up: str, *, show_all: bool = False) -> PlottedData:
    """Layouts in the plane of two objectives, with those that no other beats in both."""
    placed = _in_plane(facts, facts.ranked, across, up)
    if not placed:
        return PlottedData(says=[_why_no_plane(facts, across, up)])
    front = _front(placed)
    marks = {
        name: each
        for name, point in facts.marks.items()
        for each in _in_plane(facts, [point], across, up)
    }
    always = [*front, *marks.values()]
    x_ends = axis_range([p.x for p in placed], always=[p.x for p in always], show_all=show_all)
    y_ends = axis_range([p.y for p in placed], always=[p.y for p in always], show_all=show_all)

    def spot(each: _Placed) -> Spot:
        return facts.spot(each.point, each.x, each.y, objective_words(across, each.x))

    xs, ys = [each.x for each in front], [each.y for each in front]
    traces = [line("Pareto front", xs, ys, shape="vh", color="--part4", width=2)]
    ahead = {each.point.trial_id for each in front}
    behind = [each for each in placed if each.point.trial_id not in ahead]
    for kind in ("measured", "stopped early"):
        traces += points(kind, [spot(p) for p in behind if p.point.kind == kind], **MARKERS[kind])
    traces += points("on the front", [spot(p) for p in front], color="--part4", size=9)
    traces += mark_traces({name: spot(each) for name, each in marks.items()})
    are = "layout is" if len(placed) == 1 else "layouts are"
    return PlottedData(
        traces=traces,
        layout={"xaxis": objective_axis(across, x_ends), "yaxis": objective_axis(up, y_ends)},
        says=[
            f"{len(front):,} of {len(placed):,} {are} on the Pareto "
            f"front of {unit(across)} and {unit(up)}: no other layout is at least as good in both "
            "and better in one. More is better on both axes.",
            *hidden_words(x_ends, across),
            *hidden_words(y_ends, up),
            *left_out_words(facts.num_left_out, "layouts", "the best"),
        ],
        row_ids=[each.point.trial_id for each in front[:MOST_ROWS]],
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


def _in_plane(facts: PlotFacts, found: Sequence[PlotPoint], across: str, up: str) -> list[_Placed]:
    return [
        _Placed(point, x, y)
        for point in found
        if (x := facts.value(point, across)) is not None
        and (y := facts.value(point, up)) is not None
    ]


def _front(placed: Sequence[_Placed]) -> list[_Placed]:
    """The layouts that no other beats in both objectives, from left to right."""
    # A layout that was stopped early is on the front only while none was measured in full.
    whole = [each for each in placed if not each.point.shortened] or placed
    is_front = pareto_front(np.array([(each.x, each.y) for each in whole]))
    front = [each for each, is_on in zip(whole, is_front, strict=True) if is_on]
    return sorted(front, key=lambda each: each.x)


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
