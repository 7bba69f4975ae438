from __future__ import annotations

from typing import Any

import pytest

from api.plot_data.objectives import history, pareto
from results_db.campaigns.charts import BestSoFar, HistoryPoint
from tests.api.figures.layout_points import OBJECTIVE, make_facts, make_model, make_point, named


def make_history(*values: float | None, left_out: int = 0, **changes: Any) -> BestSoFar:
    """Trials with these values in the order of their ends; None: it crashed."""
    points, best = [], None
    for place, value in enumerate(values, 1):
        improves = value is not None and (best is None or value > best)
        best = value if improves else best
        points.append(
            HistoryPoint(
                ended_seq=place,
                trial_id=100 + place,
                number=place,
                value=value,
                state="FAILED" if value is None else "COMPLETED",
                reason="crashed" if value is None else None,
                best=best,
                is_improvement=improves,
            )._replace(**changes)
        )
    return BestSoFar(points=points, num_ended=len(points) + left_out)


def test_the_history_has_every_trial_and_the_best_so_far() -> None:
    points = [make_point(number, value) for number, value in enumerate((10, 30, 20, 40), 1)]
    figure = history(make_facts(points), make_history(10, 30, 20, 40))
    measured = named(figure.traces, "measured")
    assert (measured["x"], measured["y"]) == ([1, 2, 3, 4], [10, 30, 20, 40])
    best = named(figure.traces, "best so far")
    assert (best["x"], best["y"]) == ([1, 2, 4, 4], [10, 30, 40, 40])
    assert best["line"]["shape"] == "hv"
    winner = named(figure.traces, "winner")
    assert (winner["x"], winner["y"]) == ([4], [40])
    assert figure.says[0] == "4 trials have ended."
    assert "The best so far is trial 4 with 40 tokens/s/device; 0 trials" in figure.says[1]
    assert ["/".join(row[:3]) for row in figure.rows] == ["4/4/40", "2/2/30", "1/1/10"]


def test_trials_without_a_result_or_a_rank_have_markers_of_their_own_and_are_counted() -> None:
    figure = history(make_facts([make_point(2, 30)]), make_history(None, 30, None))
    failed = named(figure.traces, "failed")
    assert failed["x"] == [1, 3]
    assert failed["y"] == [figure.layout["yaxis"]["range"][0]] * 2
    assert "Without a result, on the axis: 2 FAILED (crashed)." in figure.says
    points = [
        make_point(1, 30),
        make_point(2, 20, shortened=True, tp=2),
        make_point(3, state="COMPLETED"),
    ]
    figure = history(make_facts(points), make_history(30, 20, 25))
    assert named(figure.traces, "stopped early")["y"] == [20]
    assert named(figure.traces, "not ranked")["y"] == [25]
    figure = history(make_facts([make_point(1, 10)]), make_history(10, left_out=98_000))
    assert any("98,000 trials are left out" in sentence for sentence in figure.says)


PEAKS = [(1, 100.0, 8), (2, 80.0, 4), (3, 70.0, 8), (4, 60.0, 2)]
"""Numbers, values and GiB; the third is worse than the first in nothing but the value."""


def test_the_front_has_the_layouts_that_no_other_beats() -> None:
    points = [
        make_point(number, value, tp=number, peak_memory_bytes=gib << 30)
        for number, value, gib in PEAKS
    ]
    figure = pareto(make_facts(points), "memory_headroom", OBJECTIVE)
    front = named(figure.traces, "on the front")
    assert front["customdata"] == [101, 102, 104]
    assert front["x"] == pytest.approx([0.5, 0.75, 0.875])
    assert named(figure.traces, "measured")["customdata"] == [103]
    assert named(figure.traces, "Pareto front")["y"] == [100, 80, 60]
    assert "3 of 4 layouts are on the Pareto front" in figure.says[0]
    points = [make_point(n, 10.0, tp=n, peak_memory_bytes=8 << 30) for n in (1, 2)]
    figure = pareto(make_facts(points), "memory_headroom", OBJECTIVE)
    assert sorted(named(figure.traces, "on the front")["customdata"]) == [101, 102]
    points = [
        make_point(1, 10.0, peak_memory_bytes=8 << 30),
        make_point(2, 50.0, tp=2, peak_memory_bytes=4 << 30, shortened=True),
    ]
    figure = pareto(make_facts(points), "memory_headroom", OBJECTIVE)
    assert named(figure.traces, "on the front")["customdata"] == [101]
    figure = pareto(make_facts([make_point(1, 10.0)]), "memory_headroom", OBJECTIVE)
    assert figure.traces == ()
    assert "No layout has a value of memory headroom." in figure.says[0]
    (said,) = pareto(make_facts([]), "memory_headroom", OBJECTIVE).says
    assert said == "No layout has been measured yet."


def test_other_objectives_follow_from_the_one_that_ranks() -> None:
    point = make_point(1, 100.0, tp=2, tp_columns=2, dp=2, num_nodes=2, recompute="full")
    model = make_model()
    facts = make_facts([point], model=model)
    assert facts.value(point, "tokens_per_s") == 800.0
    assert facts.value(point, "tokens_per_node_hour") == 800.0 * 3600 / 2
    tflops = facts.value(point, "model_tflops_per_device")
    assert tflops == pytest.approx(100.0 * model.model_flops_per_token / 1e12)
    hardware = facts.value(point, "hardware_tflops_per_device")
    assert hardware == pytest.approx(100.0 * model.hardware_flops_per_token("full") / 1e12)
    assert make_facts([point]).value(point, "model_tflops_per_device") is None
    shared = make_point(2, 100.0, tp=2, cp=2, dp=4)
    assert make_facts([shared], model=model).value(shared, "tokens_per_s") == 1600.0
