from __future__ import annotations

import math

import pytest

from api.plot_data import estimates
from api.plot_data.estimates import estimated_memory, estimated_time, memory_by_stage
from results_db.records import PredictedTrial
from search_spaces.estimates.prediction import Prediction
from tests.api.plot_data.layout_points import make_facts, make_point, named

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


def test_estimated_and_measured_step_times_stand_on_equal_axes_with_their_spread_in_words() -> None:
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
    band = named(plot.traces, "95 % of estimates")
    factor = pytest.approx(math.exp(1.96 * 0.1), rel=1e-5)  # figures have 6 digits
    assert [band["y"][0] / band["x"][0], band["x"][3] / band["y"][3]] == [factor, factor]
    says = " ".join(plot.says)
    assert "Over 3 trials, the estimated step time is 1.10 times the measured one" in says
    # 1.1 and 1.0 are within exp(1.96 * 0.1) = 1.217 of their measurements, 2.0 is not.
    assert "66.7% of the measured step times are within the 95 % interval" in says
    assert plot.rows[0] == ("3", "50 ms", "100 ms", "2.00", "layout-3")
    narrow = estimates._EqualAxes(low=20.5, high=24.7, num_beyond=0).axis("s")
    assert narrow["tickvals"] == [21.0, 22.0, 23.0, 24.0], "round, although no power of ten is near"


def test_memory_has_the_capacity_and_what_ran_out_of_it() -> None:
    trials = [*TRIALS, make_predicted(5, None, 0.1, state="INFEASIBLE")]
    plot = estimated_memory(FACTS, trials)
    measured = named(plot.traces, "measured")
    assert (measured["x"], measured["y"]) == ([4.0] * 3, [5.0] * 3)
    assert named(plot.traces, "out of memory")["x"] == [16.0]
    assert "are the memory of a device, 16 GiB" in " ".join(plot.says)
    assert len(plot.rows) == 3
    facts = make_facts([], marks={"baseline": make_point(5)})
    assert named(estimated_memory(facts, trials).traces, "baseline")["x"] == [16.0]


def test_memory_of_stages_stands_beside_the_estimate_and_many_stages_are_folded() -> None:
    plot = memory_by_stage([6 * GIB, 4 * GIB], [5 * GIB, 4 * GIB], capacity_bytes=8 * GIB)
    for name, gib in (("measured", [6, 4]), ("estimated", [5, 4]), ("capacity 8 GiB", [8, 8])):
        assert named(plot.traces, name)["x"] == gib
    axis = plot.layout["yaxis"]
    assert axis["ticktext"][0] == "stage 0: 6 GiB measured, 5 GiB estimated"
    assert axis["range"][0] > axis["range"][1], "the first stage is at the top"
    plot = memory_by_stage([GIB] * 100, [], capacity_bytes=None)
    assert len(named(plot.traces, "measured")["x"]) == 32
    assert plot.layout["yaxis"]["ticktext"][16].startswith("stage 84:")
    assert "Drawn are the first and the last 16 of 100 stages." in plot.says
