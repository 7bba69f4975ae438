"""Plots of layouts: their history and front, their knobs, their estimates, and all their axes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layout_tuner.api.plot_data import estimates
from layout_tuner.api.plot_data.estimates import estimated_memory, estimated_time, memory_by_stage
from layout_tuner.api.plot_data.knobs import NUM_COLOURS, parallel, slice_of, two_knobs
from layout_tuner.api.plot_data.objectives import history, pareto
from layout_tuner.api.plot_data.plot_data import (
    PlottedData,
    axis_range,
    hidden_words,
    left_out_words,
    round_ticks,
    safe,
)
from layout_tuner.predictions.estimates.peak_memory import StageMemory
from layout_tuner.predictions.estimates.prediction import Prediction
from layout_tuner.results_db.campaigns.history_and_timeline import BestSoFar, HistoryPoint
from layout_tuner.results_db.leaderboard.leaderboard_records import KnobCell
from layout_tuner.results_db.leaderboard.rank_layouts import Leader, MeasuredLayout
from layout_tuner.results_db.records import PredictedTrial
from tests.api.plot_data.layout_points import OBJECTIVE, make_facts, make_point, named
from tests.kit.store import TINY


def make_history(*values: float | None, left_out: int = 0) -> BestSoFar:
    """Trials with these values in the order of their ends; None: it crashed."""
    points, led = [], list[Leader]()
    for place, value in enumerate(values, 1):
        if value is not None and (not led or value > led[-1].value):
            run = SimpleNamespace(id=100 + place, number=place, layout_key=f"layout-{place}")
            led.append(Leader(place, MeasuredLayout([run], 1.0, value), value))
        points.append(
            HistoryPoint(
                ended_seq=place,
                trial_id=100 + place,
                number=place,
                value=value,
                state="FAILED" if value is None else "COMPLETED",
                reason="crashed" if value is None else None,
            )
        )
    return BestSoFar(points=points, leaders=led, num_ended=len(points) + left_out)


def xy(plot: PlottedData, name: str) -> tuple[Any, Any]:
    trace = named(plot.traces, name)
    return trace["x"], trace["y"]


def test_the_history_has_every_trial_and_the_best_so_far() -> None:
    points = [make_point(number, value) for number, value in enumerate((10, 30, 20, 40), 1)]
    plot = history(make_facts(points), make_history(10, 30, 20, 40))
    assert xy(plot, "measured") == ([1, 2, 3, 4], [10, 30, 20, 40])
    assert xy(plot, "best so far") == ([1, 2, 4, 4], [10, 30, 40, 40])
    assert named(plot.traces, "best so far")["line"]["shape"] == "hv"
    assert xy(plot, "winner") == ([4], [40])
    assert plot.says[0] == "4 trials have ended."
    assert "The best so far is trial 4 with 40 tokens/s/device; 0 trials" in plot.says[1]
    assert ["/".join(row[:3]) for row in plot.rows] == ["4/4/40", "2/2/30", "1/1/10"]


def test_trials_without_a_result_or_a_rank_have_markers_of_their_own_and_are_counted() -> None:
    plot = history(make_facts([make_point(2, 30)]), make_history(None, 30, None))
    assert xy(plot, "failed") == ([1, 3], [plot.layout["yaxis"]["range"][0]] * 2)
    assert "Without a result, on the axis: 2 FAILED (crashed)." in plot.says
    short, unranked = make_point(2, 20, shortened=True, tp=2), make_point(3, state="COMPLETED")
    plot = history(make_facts([make_point(1, 30), short, unranked]), make_history(30, 20, 25))
    assert xy(plot, "stopped early")[1] == [20]
    assert xy(plot, "not ranked")[1] == [25]
    plot = history(make_facts([make_point(1, 10)]), make_history(10, left_out=98_000))
    assert any("98,000 trials are left out" in sentence for sentence in plot.says)


def front_of(*layouts: tuple[float, int | None], **of_last: Any) -> PlottedData:
    """The front of layouts with these rates and GiB."""
    points = [
        make_point(n, rate, tp=n, **({"peak_memory_bytes": gib << 30} if gib else {}))
        for n, (rate, gib) in enumerate(layouts, 1)
    ]
    if points:
        points[-1] = replace(points[-1], **of_last)
    return pareto(make_facts(points), "memory_headroom", OBJECTIVE)


def test_the_front_has_the_layouts_that_no_other_beats() -> None:
    plot = front_of((100.0, 8), (80.0, 4), (70.0, 8), (60.0, 2))
    front = named(plot.traces, "on the front")
    assert front["customdata"] == [101, 102, 104], "the third is beaten in its rate alone"
    assert front["x"] == pytest.approx([0.5, 0.75, 0.875])
    assert named(plot.traces, "measured")["customdata"] == [103]
    assert named(plot.traces, "Pareto front")["y"] == [100, 80, 60]
    assert "3 of 4 layouts are on the Pareto front" in plot.says[0]


def test_layouts_that_are_equal_are_both_on_the_front() -> None:
    equal = named(front_of((10.0, 8), (10.0, 8)).traces, "on the front")
    assert sorted(equal["customdata"]) == [101, 102]


def test_a_layout_whose_probe_was_stopped_early_is_not_on_the_front() -> None:
    stopped = front_of((10.0, 8), (50.0, 4), shortened=True)
    assert named(stopped.traces, "on the front")["customdata"] == [101]


def test_a_front_without_values_says_what_there_is_none_of() -> None:
    plot = front_of((10.0, None))
    assert plot.traces == ()
    assert "No layout has a value of memory headroom." in plot.says[0]
    assert front_of().says == ["No layout has been measured yet."]


def test_other_objectives_follow_from_the_one_that_ranks() -> None:
    point = make_point(1, 100.0, tp=2, tp_columns=2, dp=2, num_nodes=2, recompute="full")
    facts = make_facts([point], model=TINY)
    for objective, value in (
        ("tokens_per_s", 800.0),
        ("tokens_per_node_hour", 800.0 * 3600 / 2),
        ("model_tflops_per_device", 100.0 * TINY.model_flops_per_token / 1e12),
        ("hardware_tflops_per_device", 100.0 * TINY.hardware_flops_per_token("full") / 1e12),
    ):
        assert facts.value(point, objective) == pytest.approx(value), objective
    assert make_facts([point]).value(point, "model_tflops_per_device") is None
    shared = make_point(2, 100.0, tp=2, cp=2, dp=4)
    assert make_facts([shared], model=TINY).value(shared, "tokens_per_s") == 1600.0


POINTS = [
    make_point(1, 10.0, tp=1, recompute="full"),
    make_point(2, 20.0, tp=2, recompute="none"),
    make_point(3, 40.0, tp=4, recompute="selective"),
    make_point(4, tp=4, recompute="none"),
]


def test_parallel_coordinates_have_the_knobs_that_vary() -> None:
    plot = parallel(make_facts(POINTS))
    assert plot.layout["xaxis"]["ticktext"] == ["tp", "recompute", "tokens/s/device"]
    assert "pp 1" in plot.says[1]
    assert "tp" not in plot.says[1].split()
    ticks = {note["text"]: note["y"] for note in plot.layout["annotations"] if note["x"] == 1}
    assert ticks == {"none": 0.0, "selective": 0.5, "full": 1.0}, "in their legal order"


def test_parallel_coordinates_have_a_line_for_every_layout() -> None:
    plot = parallel(make_facts(POINTS))
    lines = [t for t in plot.traces if t["name"] == "measured" and t["mode"] == "lines"]
    colours = [line["line"]["color"] for line in lines]
    assert (colours[0], colours[-1]) == ("--scale1", f"--scale{NUM_COLOURS}"), "of its value"
    assert sum(line["x"].count(0) for line in lines) == 3
    (lowest,) = [line for line in lines if line["line"]["color"] == "--scale1"]
    # The first layout: tp 1 is at the bottom, full recomputation at the top.
    assert lowest["y"] == pytest.approx([0.0, 1.0, 0.0], abs=0.06)
    failed = named(plot.traces, "not ranked")
    assert failed["x"] == [0, 1, 2]
    assert failed["y"][-1] < 0
    winner = [t for t in plot.traces if t["name"] == "winner" and t["mode"] == "lines"]
    assert winner[0]["y"][0] == pytest.approx(1.0, abs=0.06)


def test_parallel_coordinates_draw_no_layout_at_a_value_that_it_does_not_have() -> None:
    values = (6600.0, 6700.0, 6800.0, 6900.0, 7000.0, 5000.0)
    plot = parallel(make_facts([make_point(n, v, tp=n) for n, v in enumerate(values, 1)]))
    (mark,) = [note for note in plot.layout["annotations"] if note["text"] == "beyond the axis"]
    assert mark["y"] < 0, "below the objective's axis"
    ends = [end for trace in plot.traces for end in trace["y"] if end == mark["y"]]
    assert len(ends) == 2, "its line and its point"
    assert "One trial, with 5,000 tokens/s/device, lies beyond the axis." in plot.says
    assert plot.layout["yaxis"]["range"][0] < mark["y"]


def test_a_slice_shows_the_best_of_a_value_that_is_far_from_the_others() -> None:
    values = [6600.0 + 50.0 * number for number in range(9)]
    near = [make_point(n, v, tp=1, num_microbatches=n) for n, v in enumerate(values, 1)]
    facts = make_facts([*near, make_point(10, 5000.0, tp=2), make_point(11, 4000.0, tp=2)])
    plot = slice_of(facts, "tp", [KnobCell((1,), 9, 7000.0), KnobCell((2,), 2, 5000.0)])
    low, _high = plot.layout["yaxis"]["range"]
    assert 4000 < low < 5000
    assert "One trial, with 4,000 tokens/s/device, lies beyond the axis." in plot.says


CELLS = [KnobCell((1,), 7, 12.0), KnobCell((2,), 1, 20.0), KnobCell((4,), 5, 40.0)]


def test_a_slice_has_every_layout_and_the_best_of_each_value() -> None:
    plot = slice_of(make_facts(POINTS), "tp", CELLS)
    measured = named(plot.traces, "measured")
    assert list(zip(measured["x"], measured["y"], strict=True)) == [("1", 10), ("2", 20), ("4", 40)]
    best = named(plot.traces, "best")
    # The best of tp 1 is in a layout that the sample leaves out.
    assert list(zip(best["x"], best["y"], strict=True)) == [("1", 12), ("2", 20), ("4", 40)]
    assert plot.rows[0] == ("1", "7", "10", "12")
    assert plot.layout["xaxis"]["categoryarray"] == ["1", "2", "4"]
    winner = named(plot.traces, "winner")
    assert (winner["x"], winner["y"]) == (["4"], [40])
    (said,) = slice_of(make_facts([make_point(1, 1.0)]), "pp", []).says
    assert said == "All layouts so far have the same knobs."


PAIRS = [
    KnobCell((1, "full"), 3, 10.0),
    KnobCell((2, "none"), 1, 20.0),
    KnobCell((4, "selective"), 2, 40.0),
]


def test_two_knobs_leave_untried_cells_empty_cross_unranked_ones_and_mark_the_winner() -> None:
    plot = two_knobs(make_facts(POINTS), "tp", "recompute", PAIRS)
    heat = plot.traces[0]
    assert heat["x"] == ["1", "2", "4"]
    assert heat["y"] == ["none", "selective", "full"]
    assert heat["z"] == [[None, 20.0, None], [None, None, 40.0], [10.0, None, None]]
    assert heat["hoverongaps"] is False
    assert "zsmooth" not in heat
    crossed = named(plot.traces, "tried, none ranked")
    assert (crossed["x"], crossed["y"]) == (["4"], ["none"])
    assert plot.rows[0] == ("none", "", "20", "none ranked")
    (note,) = plot.layout["annotations"]
    # Positions of the categories: names that are numbers would be taken for positions.
    assert (note["x"], note["y"], note["text"]) == (2, 1, "★ winner")


def test_a_pair_that_cannot_be_drawn_is_explained() -> None:
    assert two_knobs(make_facts(POINTS), "tp", "tp", []).says == ["Choose two different knobs."]
    (said,) = two_knobs(make_facts(POINTS), "tp", "pp", []).says
    assert said == "All layouts so far have the same pipeline parallel, pp; choose other knobs."


GIB = 1 << 30


def make_predicted(
    number: int, measured_s: float | None, estimated_s: float, state: str = "COMPLETED"
) -> PredictedTrial:
    """A trial with a prediction; its peak was 4 GiB, and 5 were predicted."""
    prediction = Prediction(
        step_time_s=estimated_s,
        log_step_time_sd=0.1,
        peak_memory_bytes=5 * GIB,
        fit_probability=1.0,
        source="calibrated",
    )
    return PredictedTrial(
        trial_id=100 + number,
        number=number,
        layout_key=f"layout-{number}",
        state=state,  # type: ignore[arg-type]
        is_baseline=False,
        prediction=prediction,
        step_time_s=measured_s,
        peak_memory_bytes=None if measured_s is None else 4 * GIB,
    )


MEASURED = [(1, 0.100, 0.110), (2, 0.200, 0.200), (3, 0.050, 0.100), (4, None, 0.300)]
TRIALS = [make_predicted(*each) for each in MEASURED]
FACTS = make_facts([make_point(1, 5.0), make_point(2, 9.0)])


def test_estimated_and_measured_step_times_stand_on_equal_axes() -> None:
    plot = estimated_time(FACTS, TRIALS)
    points = named(plot.traces, "measured")
    assert points["x"] == pytest.approx([100, 200, 50])
    assert points["y"] == pytest.approx([110, 200, 100])
    x, y = plot.layout["xaxis"], plot.layout["yaxis"]
    assert x["range"] == y["range"]
    assert x["ticktext"] == ["50", "60", "80", "100", "150", "200"]
    line = named(plot.traces, "estimate = measurement")
    assert line["x"] == line["y"]
    assert named(plot.traces, "winner")["x"] == pytest.approx([200])
    assert plot.rows[0] == ("3", "50 ms", "100 ms", "2.00", "layout-3")


def test_the_spread_of_estimated_step_times_is_drawn_and_told_in_words() -> None:
    plot = estimated_time(FACTS, TRIALS)
    band = named(plot.traces, "95 % of estimates")
    factor = pytest.approx(math.exp(1.96 * 0.1), rel=1e-5)  # figures have 6 digits
    assert [band["y"][0] / band["x"][0], band["x"][3] / band["y"][3]] == [factor, factor]
    says = " ".join(plot.says)
    assert "Over 3 trials, the estimated step time is 1.10 times the measured one" in says
    # 1.1 and 1.0 are within exp(1.96 * 0.1) = 1.217 of their measurements, 2.0 is not.
    assert "66.7% of the measured step times are within the 95 % interval" in says


def test_ticks_of_a_narrow_axis_are_round_although_no_power_of_ten_is_near() -> None:
    narrow = estimates._EqualAxes(low=20.5, high=24.7, num_beyond=0).axis("s")
    assert narrow["tickvals"] == [21.0, 22.0, 23.0, 24.0]


def test_memory_has_the_capacity_and_what_ran_out_of_it() -> None:
    trials = [*TRIALS, make_predicted(5, None, 0.1, state="INFEASIBLE")]
    plot = estimated_memory(FACTS, trials)
    measured = named(plot.traces, "measured")
    assert (measured["x"], measured["y"]) == ([4.0] * 3, [5.0] * 3)
    assert named(plot.traces, "out of memory")["x"] == [16.0]
    level, upright = (trace for trace in plot.traces if trace["name"] == "capacity of a device")
    assert level["y"] == upright["x"] == [16.0, 16.0]
    assert "are the memory of a device, 16 GiB" in " ".join(plot.says)
    assert len(plot.rows) == 3
    facts = make_facts([], marks={"baseline": make_point(5)})
    assert named(estimated_memory(facts, trials).traces, "baseline")["x"] == [16.0]


def stage_of(gib: float, mtp_gib: float = 0.0) -> StageMemory:
    """A stage of weights alone."""
    none = ("gradients", "optimizer", "activations", "backward", "head", "workspace")
    return StageMemory(
        stage=0,
        weights_bytes=gib * GIB,
        mtp_bytes=mtp_gib * GIB,
        **dict.fromkeys((f"{name}_bytes" for name in none), 0.0),
    )


def test_memory_of_multi_token_prediction_is_a_line_up_to_the_estimate() -> None:
    plot = memory_by_stage([], [stage_of(5), stage_of(9, mtp_gib=3)], capacity_bytes=None)
    depth = named(plot.traces, "multi-token prediction (MTP)")
    assert (depth["x"], depth["y"]) == ([6, 9], [1, 1])
    assert plot.layout["yaxis"]["ticktext"] == [
        "stage 0: 5 GiB estimated",
        "stage 1: 9 GiB estimated",
    ]
    assert plot.says[-1].endswith("what multi-token prediction (MTP) adds to it: 3 GiB.")


def test_memory_of_stages_stands_beside_the_estimate_and_many_stages_are_folded() -> None:
    estimated = [stage_of(5), stage_of(4)]
    plot = memory_by_stage([6 * GIB, 4 * GIB], estimated, capacity_bytes=8 * GIB)
    for name, gib in (("measured", [6, 4]), ("estimated", [5, 4]), ("capacity 8 GiB", [8, 8])):
        assert named(plot.traces, name)["x"] == gib
    axis = plot.layout["yaxis"]
    assert axis["ticktext"][0] == "stage 0: 6 GiB measured, 5 GiB estimated"
    assert axis["range"][0] > axis["range"][1], "the first stage is at the top"
    plot = memory_by_stage([GIB] * 100, [], capacity_bytes=None)
    assert len(named(plot.traces, "measured")["x"]) == 32
    assert plot.layout["yaxis"]["ticktext"][16].startswith("stage 84:")
    assert "Drawn are the first and the last 16 of 100 stages." in plot.says


NEAR = [90.0, 95.0, 100.0, 105.0, 110.0]


def test_an_axis_leaves_out_values_that_would_flatten_the_others_except_the_winner() -> None:
    ends = axis_range([*NEAR, 5000.0])
    assert ends.hidden == [5000.0]
    assert ends.low < 90
    assert 110 < ends.high < 120
    ends = axis_range([*NEAR, 5000.0], show_all=True)
    assert ends.hidden == []
    assert ends.high > 5000
    ends = axis_range([*NEAR, -4000.0, 5000.0], always=[5000.0])
    assert ends.hidden == [-4000.0]
    assert ends.high > 5000


def test_hidden_and_left_out_values_are_told_with_their_number_and_range() -> None:
    assert hidden_words(axis_range(NEAR), "tokens_per_s") == []
    (sentence,) = hidden_words(axis_range([*NEAR, 5000.0]), "tokens_per_s")
    assert sentence == "One trial, with 5,000 tokens/s, lies beyond the axis."
    (sentence,) = hidden_words(axis_range([*NEAR, *NEAR, 5000.0, 7000.0]), "tokens_per_s")
    assert sentence == "2 trials, with 5,000 to 7,000 tokens/s, lie beyond the axis."
    assert list(left_out_words(0, "trials", "the best")) == []
    (sentence,) = left_out_words(98_000, "layouts", "the best")
    assert sentence.startswith("98,000 layouts are left out: the plot has the best and an even sam")


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 70.0, [0, 10, 20, 30, 40, 50, 60, 70]),
        (0.0, 0.35, [0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35]),
        (380.6, 1219.0, [400, 600, 800, 1000, 1200]),
        (-3.0, 3.0, [-3, -2, -1, 0, 1, 2, 3]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, ticks: list[float]) -> None:
    assert round_ticks(low, high) == ticks


def test_names_from_outside_cannot_contain_markup_of_plots() -> None:
    assert safe("<a href='x'>n</a>\x1b[0m") == "&lt;a href='x'&gt;n&lt;/a&gt;\\u001b[0m"


@given(st.floats(min_value=-1e12, max_value=1e12), st.floats(min_value=1e-6, max_value=1e12))
def test_any_axis_has_ticks_within_it(low: float, length: float) -> None:
    ends = axis_range([low, low + length])
    ticks = round_ticks(ends.low, ends.high)
    assert 1 <= len(ticks) <= 9
    rounding = (ends.high - ends.low) * 1e-6 + abs(low) * 1e-9
    assert all(ends.low - rounding <= tick <= ends.high + rounding for tick in ticks)
