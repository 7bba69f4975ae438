from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from api.plot_data.plot_data import PlottedData
from api.plot_data.step_times import iterations, time_parts
from search_spaces.protocol.measurement import Breakdown
from tests.api.plot_data.layout_points import named
from tests.kit.store import make_breakdown, make_iterations


def make_step(step_time_s: float = 0.1, *, rank: int = 1, parts: Breakdown | None = None) -> Any:
    """A layout on the leaderboard, as far as the plot reads it; its trial is rank + 6."""
    breakdown = parts or make_breakdown(step_time_s)
    measured = SimpleNamespace(step_time_s=step_time_s, breakdown=breakdown)
    trial = SimpleNamespace(
        id=rank + 106, number=rank + 6, layout_key=f"key {rank}", measurement=measured
    )
    return SimpleNamespace(rank=rank, trial=trial)


def draw(*steps: Any, **changes: Any) -> PlottedData:
    return time_parts(steps, **{"marks": {}, "estimated_s": {}} | changes)


def bars(plot: PlottedData) -> list[Any]:
    """The parts of the bars in their order."""
    return [trace for trace in plot.traces if trace["type"] == "bar"]


def test_the_parts_of_a_step_follow_each_other_and_fill_it() -> None:
    plot = draw(make_step())
    parts = bars(plot)
    colours = [part["marker"]["color"] for part in parts]
    assert colours == [f"--part{place}" for place in range(1, 7)]
    end = 0.0
    for part in parts:
        assert part["base"] == pytest.approx([end])
        end += part["x"][0]
    assert end == pytest.approx(100.0)
    assert named(plot.traces, "measured step")["x"] == [100.0]
    assert parts[0]["hovertext"] == ["compute: 50 ms (50.0%)"]
    assert plot.rows[0][:3] == ("1. trial 7", "100 ms", "50.0%")
    others = dict.fromkeys(("pp_s", "dp_s", "optimizer_s"), 0.0)
    overlapping = Breakdown(compute_s=0.08, tp_s=0.04, **others, unexplained_s=-0.02)
    plot = draw(make_step(parts=overlapping))
    last = bars(plot)[-1]
    assert last["name"] == "unexplained"
    assert last["base"][0] + last["x"][0] == pytest.approx(100.0)
    assert last["width"][0] < bars(plot)[0]["width"][0]
    assert plot.rows[0][-2] == "-20 ms"
    assert plot.layout["xaxis"]["range"][1] > 120


def test_bars_have_one_scale_with_estimates_and_marks_at_their_bars() -> None:
    steps = make_step(0.1), make_step(0.4, rank=2)
    plot = draw(*steps)
    assert named(plot.traces, "compute")["x"] == pytest.approx([50.0, 200.0])
    assert plot.layout["xaxis"]["range"][1] > 400
    assert plot.layout["yaxis"]["ticktext"] == ["1. trial 7", "2. trial 8"]
    bottom, top = plot.layout["yaxis"]["range"]
    assert bottom > top
    plot = draw(*steps, estimated_s={108: 0.05}, marks={107: "winner", 108: "baseline"})
    estimate = named(plot.traces, "estimated step")
    assert (estimate["x"], estimate["y"]) == ([50.0], [1])
    labels = ["1. trial 7 ★ winner", "2. trial 8 ◆ baseline"]
    assert plot.layout["yaxis"]["ticktext"] == [row[0] for row in plot.rows] == labels
    assert estimate["customdata"] == [108]


def test_iterations_are_in_order_with_their_median() -> None:
    first, *later = make_iterations(0.5, warmup=1, timed=2)
    found = [replace(first, step_time_s=0.9), *later]
    plot = iterations(found, 0.5)
    assert named(plot.traces, "timed")["x"] == [1, 2]
    assert named(plot.traces, "warm-up, not counted")["y"] == [0.9]
    assert named(plot.traces, "median")["y"] == [0.5, 0.5]
    low, high = plot.layout["yaxis"]["range"]
    assert low < 0.5 < 0.9 < high
    (only,) = iterations(found[:1], None).traces
    assert only["name"] == "warm-up, not counted"
