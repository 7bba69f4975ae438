"""Plots of time: when trials ran, and the parts of their steps."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from layout_tuner.api.plot_data.plot_data import PlottedData
from layout_tuner.api.plot_data.step_times import iterations, time_parts
from layout_tuner.api.plot_data.timeline import MOST_ROWS_DRAWN, timeline
from layout_tuner.protocol.measurement import Breakdown
from layout_tuner.results_db.campaigns.history_and_timeline import CampaignTimeline, TimelineAttempt
from tests.api.plot_data.layout_points import named
from tests.kit.store import START, make_breakdown, make_iterations


def make_attempt(
    number: int, begin: float, end: float | None, **changes: object
) -> TimelineAttempt:
    """An attempt between seconds after START."""
    attempt = TimelineAttempt(
        trial_id=100 + number,
        number=number,
        attempt=1,
        worker_id="a",
        worker_name="worker a",
        num_nodes=1,
        started_at=START + timedelta(seconds=begin),
        ended_at=None if end is None else START + timedelta(seconds=end),
        ending=None if end is None else "reported",
        state="RUNNING" if end is None else "COMPLETED",
        reason=None,
    )
    return attempt._replace(**changes)  # type: ignore[arg-type]


NOW = START + timedelta(seconds=100)


def draw(*attempts: TimelineAttempt, left_out: int = 0, **marks: str) -> PlottedData:
    """The timeline; `marks` are names by trials, such as trial_101="winner"."""
    found = CampaignTimeline(attempts=attempts, num_attempts=len(attempts) + left_out)
    return timeline(found, NOW, {int(name[6:]): mark for name, mark in marks.items()})


def kinds(plot: PlottedData) -> dict[str, Any]:
    return {trace["name"]: trace for trace in plot.traces if trace["type"] == "bar"}


def test_attempts_are_bars_from_their_start_to_their_end() -> None:
    plot = draw(make_attempt(1, 0, 50), make_attempt(2, 50, 100), trial_101="winner")
    bars = kinds(plot)["completed"]
    assert (bars["base"], bars["x"], bars["y"]) == ([0, 50], [50, 50], [0, 0])
    assert bars["text"] == ["1", "2"]
    assert bars["hovertext"][0].endswith("COMPLETED; 1 node")
    assert bars["customdata"] == plot.row_ids == [101, 102]
    assert plot.layout["xaxis"]["range"] == [0, 100]


def test_an_attempt_that_has_not_ended_is_a_bar_until_now_and_waits_or_runs() -> None:
    plot = draw(make_attempt(1, 0, 20), make_attempt(2, 20, None))
    running = kinds(plot)["running"]
    assert (running["base"], running["x"], plot.rows[1][3]) == ([20], [80], "RUNNING")
    plot = draw(make_attempt(1, 0, 20), make_attempt(2, 20, None, phase="waiting"))
    assert "running" not in kinds(plot)
    assert kinds(plot)["waiting"]["marker"]["color"] == "--ground"
    assert plot.rows[1][3] == "waiting for devices"


def test_the_winner_and_attempts_of_the_baseline_are_marked_at_the_middle_of_bars() -> None:
    plot = draw(make_attempt(1, 0, 50), make_attempt(2, 50, 100), trial_101="winner")
    assert named(plot.traces, "winner")["x"] == [25]
    assert plot.rows[0][-1] == "winner"
    attempts = [make_attempt(1, 0, 20, ending="lost"), make_attempt(1, 20, 60, attempt=2)]
    assert named(draw(*attempts, trial_101="baseline").traces, "baseline")["x"] == [10, 40]


@pytest.mark.parametrize(
    ("seconds", "unit", "length"),
    [(299, "seconds", 299), (600, "minutes", 10), (36000, "hours", 10)],
)
def test_the_unit_of_the_axis_suits_its_length(seconds: float, unit: str, length: int) -> None:
    axis = draw(make_attempt(1, 0, seconds)).layout["xaxis"]
    assert axis["range"] == [0, length]
    assert axis["title"]["text"].startswith(f"{unit} since 20")


def test_attempts_at_one_time_have_rows_of_their_own_up_to_a_number() -> None:
    attempts = [make_attempt(*each) for each in ((1, 0, 50), (2, 10, 60), (3, 55, 90))]
    plot = draw(*attempts, make_attempt(4, 0, 30, worker_id="b", worker_name="<b>"))
    axis = plot.layout["yaxis"]
    assert (axis["tickvals"], axis["ticktext"]) == ([0, 2], ["worker a", "&lt;b&gt;"])
    assert kinds(plot)["completed"]["y"] == [0, 1, 0, 2]
    attempts = [make_attempt(n, 0, 50, worker_id=f"w{n}") for n in range(MOST_ROWS_DRAWN + 5)]
    plot = draw(*attempts, left_out=7)
    assert len(kinds(plot)["completed"]["y"]) == MOST_ROWS_DRAWN
    assert "5 attempts beyond 60 rows are not drawn." in plot.says
    assert "7 older attempts are left out." in plot.says
    assert plot.hides


def test_no_kind_of_bar_has_a_colour_alone() -> None:
    states = ("COMPLETED", "FAILED", "INFEASIBLE", "CANCELLED")
    attempts = [make_attempt(n, n, n + 1, state=state) for n, state in enumerate(states)]
    found = kinds(draw(*attempts, make_attempt(9, 9, None), make_attempt(8, 8, 9, ending="lost")))
    markers = [bars["marker"] for bars in found.values()]
    looks = {
        (each.get("pattern", {}).get("shape"), each.get("line", {}).get("color"))
        for each in markers
    }
    assert len(looks) == 6


def make_step(step_time_s: float = 0.1, *, rank: int = 1, parts: Breakdown | None = None) -> Any:
    """A layout on the leaderboard, as far as the plot reads it; its trial is rank + 6."""
    breakdown = parts or make_breakdown(step_time_s)
    measured = SimpleNamespace(step_time_s=step_time_s, breakdown=breakdown)
    trial = SimpleNamespace(
        id=rank + 106, number=rank + 6, layout_key=f"key {rank}", measurement=measured
    )
    return SimpleNamespace(rank=rank, trial=trial)


def draw_parts(*steps: Any, **changes: Any) -> PlottedData:
    return time_parts(steps, **{"marks": {}, "estimated_s": {}} | changes)


def bars(plot: PlottedData) -> list[Any]:
    """The parts of the bars in their order."""
    return [trace for trace in plot.traces if trace["type"] == "bar"]


def test_the_parts_of_a_step_follow_each_other_and_fill_it() -> None:
    plot = draw_parts(make_step())
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


def test_parts_that_are_more_than_their_step_go_back_to_its_end_in_a_thinner_bar() -> None:
    others = dict.fromkeys(("pp_s", "dp_s", "optimizer_s"), 0.0)
    overlapping = Breakdown(compute_s=0.08, tp_s=0.04, **others, unexplained_s=-0.02)
    plot = draw_parts(make_step(parts=overlapping))
    last = bars(plot)[-1]
    assert last["name"] == "unexplained"
    assert last["base"][0] + last["x"][0] == pytest.approx(100.0)
    assert last["width"][0] < bars(plot)[0]["width"][0]
    assert plot.rows[0][-2] == "-20 ms"
    assert plot.layout["xaxis"]["range"][1] > 120


def test_bars_have_one_scale_with_estimates_and_marks_at_their_bars() -> None:
    steps = make_step(0.1), make_step(0.4, rank=2)
    plot = draw_parts(*steps)
    assert named(plot.traces, "compute")["x"] == pytest.approx([50.0, 200.0])
    assert plot.layout["xaxis"]["range"][1] > 400
    assert plot.layout["yaxis"]["ticktext"] == ["1. trial 7", "2. trial 8"]
    bottom, top = plot.layout["yaxis"]["range"]
    assert bottom > top
    plot = draw_parts(*steps, estimated_s={108: 0.05}, marks={107: "winner", 108: "baseline"})
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
