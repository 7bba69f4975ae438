from __future__ import annotations

import math
from typing import Any

import pytest

from api.plot_data import estimates
from api.plot_data.estimates import estimated_memory, estimated_time, memory_by_stage
from results_db.records import PredictedTrial
from search_spaces.estimates.prediction import Prediction
from tests.api.figures.layout_points import make_facts, make_point, named


def make_predicted(
    number: int, measured_s: float | None, estimated_s: float, **changes: Any
) -> PredictedTrial:
    """A trial with a prediction; its peak was 4 GiB, and 5 were predicted."""
    values: dict[str, Any] = {
        "trial_id": 100 + number,
        "number": number,
        "layout_key": f"layout-{number}",
        "state": "COMPLETED",
        "is_baseline": False,
        "prediction": Prediction(
            step_time_s=estimated_s,
            log_step_time_sd=0.1,
            peak_memory_bytes=5 << 30,
            fit_probability=1.0,
            source="calibrated",
        ),
        "step_time_s": measured_s,
        "peak_memory_bytes": None if measured_s is None else 4 << 30,
    }
    return PredictedTrial(**values | changes)


TRIALS = [
    make_predicted(1, 0.100, 0.110),
    make_predicted(2, 0.200, 0.200),
    make_predicted(3, 0.050, 0.100),
    make_predicted(4, None, 0.300),
]
FACTS = make_facts([make_point(1, 5.0), make_point(2, 9.0)])


def test_estimated_and_measured_step_times_stand_on_equal_axes_with_their_spread_in_words() -> None:
    figure = estimated_time(FACTS, TRIALS)
    points = named(figure.traces, "measured")
    assert points["x"] == pytest.approx([100, 200, 50])
    assert points["y"] == pytest.approx([110, 200, 100])
    assert figure.layout["xaxis"]["range"] == figure.layout["yaxis"]["range"]
    assert figure.layout["xaxis"]["ticktext"] == ["50", "60", "80", "100", "150", "200"]
    line = named(figure.traces, "estimate = measurement")
    assert line["x"] == line["y"]
    assert named(figure.traces, "winner")["x"] == pytest.approx([200])
    band = named(figure.traces, "95 % of estimates")
    factor = pytest.approx(math.exp(1.96 * 0.1), rel=1e-5)  # figures have 6 digits
    assert band["y"][0] / band["x"][0] == factor
    assert band["x"][3] / band["y"][3] == factor
    says = " ".join(figure.says)
    assert "Over 3 trials, the estimated step time is 1.10 times the measured one" in says
    # 1.1 and 1.0 are within exp(1.96 * 0.1) = 1.217 of their measurements, 2.0 is not.
    assert "66.7% of the measured step times are within the 95 % interval" in says
    assert figure.rows[0] == ("3", "50 ms", "100 ms", "2.00", "layout-3")


def test_memory_has_the_capacity_and_what_ran_out_of_it() -> None:
    out = make_predicted(5, None, 0.1, state="INFEASIBLE")
    figure = estimated_memory(FACTS, [*TRIALS, out])
    assert named(figure.traces, "measured")["x"] == [4.0, 4.0, 4.0]
    assert named(figure.traces, "measured")["y"] == [5.0, 5.0, 5.0]
    assert named(figure.traces, "out of memory")["x"] == [16.0]
    assert "are the memory of a device, 16 GiB" in " ".join(figure.says)
    assert len(figure.rows) == 3
    facts = make_facts([], marks={"baseline": make_point(5)})
    assert named(estimated_memory(facts, [*TRIALS, out]).traces, "baseline")["x"] == [16.0]


GIB = 1 << 30


def test_memory_of_stages_stands_beside_the_estimate_and_many_stages_are_folded() -> None:
    figure = memory_by_stage([6 * GIB, 4 * GIB], [5 * GIB, 4 * GIB], capacity_bytes=8 * GIB)
    assert named(figure.traces, "measured")["x"] == [6, 4]
    assert named(figure.traces, "estimated")["x"] == [5, 4]
    assert named(figure.traces, "capacity 8 GiB")["x"] == [8, 8]
    axis = figure.layout["yaxis"]
    assert axis["ticktext"][0] == "stage 0: 6 GiB measured, 5 GiB estimated"
    bottom, top = axis["range"]
    assert bottom > top  # the first stage is at the top
    figure = memory_by_stage([GIB] * 100, [], capacity_bytes=None)
    assert len(named(figure.traces, "measured")["x"]) == 32
    assert figure.layout["yaxis"]["ticktext"][16].startswith("stage 84:")
    assert "Drawn are the first and the last 16 of 100 stages." in figure.says


def test_a_narrow_logarithmic_axis_has_round_numbers_too() -> None:
    axis = estimates._EqualAxes(low=20.5, high=24.7, num_beyond=0).axis("s")
    assert axis["tickvals"] == [21.0, 22.0, 23.0, 24.0]
