from __future__ import annotations

import pytest

from api.plot_data.knobs import NUM_COLOURS, parallel, slice_of, two_knobs
from results_db.leaderboard.leaderboard_records import KnobCell
from tests.api.plot_data.layout_points import make_facts, make_point, named

POINTS = [
    make_point(1, 10.0, tp=1, recompute="full"),
    make_point(2, 20.0, tp=2, recompute="none"),
    make_point(3, 40.0, tp=4, recompute="selective"),
    make_point(4, tp=4, recompute="none"),
]


def test_parallel_coordinates_have_the_knobs_that_vary_and_a_line_for_every_layout() -> None:
    plot = parallel(make_facts(POINTS))
    assert plot.layout["xaxis"]["ticktext"] == ["tp", "recompute", "tokens/s/device"]
    assert "pp 1" in plot.says[1]
    assert "tp" not in plot.says[1].split()
    ticks = {note["text"]: note["y"] for note in plot.layout["annotations"] if note["x"] == 1}
    assert ticks == {"none": 0.0, "selective": 0.5, "full": 1.0}, "in their legal order"

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
