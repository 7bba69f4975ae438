from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from api.plot_data.objectives import history, pareto
from api.plot_data.plot_data import PlottedData
from results_db.campaigns.history_and_timeline import BestSoFar, HistoryPoint
from tests.api.plot_data.layout_points import OBJECTIVE, make_facts, make_model, make_point, named


def make_history(*values: float | None, left_out: int = 0) -> BestSoFar:
    """Trials with these values in the order of their ends; None: it crashed."""
    points, best = [], None
    for place, value in enumerate(values, 1):
        improves = value is not None and (best is None or value > best)
        best = value if improves else best
        failed = value is None
        points.append(
            HistoryPoint(
                ended_seq=place,
                trial_id=100 + place,
                number=place,
                value=value,
                state="FAILED" if failed else "COMPLETED",
                reason="crashed" if failed else None,
                best=best,
                is_improvement=improves,
            )
        )
    return BestSoFar(points=points, num_ended=len(points) + left_out)


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


def test_the_front_has_the_layouts_that_no_other_beats() -> None:
    def front_of(*layouts: tuple[float, int | None], **of_last: Any) -> PlottedData:
        """Of layouts with these rates and GiB."""
        points = [
            make_point(n, rate, tp=n, **({"peak_memory_bytes": gib << 30} if gib else {}))
            for n, (rate, gib) in enumerate(layouts, 1)
        ]
        if points:
            points[-1] = replace(points[-1], **of_last)
        return pareto(make_facts(points), "memory_headroom", OBJECTIVE)

    plot = front_of((100.0, 8), (80.0, 4), (70.0, 8), (60.0, 2))
    front = named(plot.traces, "on the front")
    assert front["customdata"] == [101, 102, 104], "the third is beaten in its rate alone"
    assert front["x"] == pytest.approx([0.5, 0.75, 0.875])
    assert named(plot.traces, "measured")["customdata"] == [103]
    assert named(plot.traces, "Pareto front")["y"] == [100, 80, 60]
    assert "3 of 4 layouts are on the Pareto front" in plot.says[0]
    equal = named(front_of((10.0, 8), (10.0, 8)).traces, "on the front")
    assert sorted(equal["customdata"]) == [101, 102]
    stopped = front_of((10.0, 8), (50.0, 4), shortened=True)
    assert named(stopped.traces, "on the front")["customdata"] == [101]
    plot = front_of((10.0, None))
    assert plot.traces == ()
    assert "No layout has a value of memory headroom." in plot.says[0]
    assert front_of().says == ["No layout has been measured yet."]


def test_other_objectives_follow_from_the_one_that_ranks() -> None:
    point = make_point(1, 100.0, tp=2, tp_columns=2, dp=2, num_nodes=2, recompute="full")
    model = make_model()
    facts = make_facts([point], model=model)
    for objective, value in (
        ("tokens_per_s", 800.0),
        ("tokens_per_node_hour", 800.0 * 3600 / 2),
        ("model_tflops_per_device", 100.0 * model.model_flops_per_token / 1e12),
        ("hardware_tflops_per_device", 100.0 * model.hardware_flops_per_token("full") / 1e12),
    ):
        assert facts.value(point, objective) == pytest.approx(value), objective
    assert make_facts([point]).value(point, "model_tflops_per_device") is None
    shared = make_point(2, 100.0, tp=2, cp=2, dp=4)
    assert make_facts([shared], model=model).value(shared, "tokens_per_s") == 1600.0
